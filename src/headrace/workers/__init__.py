"""Threads and processes that work for someone: starting, messages, deadlines, death, shared memory."""
