"""The best settings for a machine and a step, by a short guided search."""
