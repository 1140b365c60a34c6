"""Rows that other machines make: servers that compute batches, and the Loader that fetches them."""

import os

# gRPC would write lines of its own about every connection that fails, and errors say the same.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
