"""Rows -> host batches: gather, buffers, prefetch, the Loader."""
