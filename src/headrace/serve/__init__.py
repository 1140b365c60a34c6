"""Rows that other machines make: servers that compute batches, and the Loader that fetches them."""
