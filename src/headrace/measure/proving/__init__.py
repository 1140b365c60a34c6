"""Proofs on the data of a user: that stopping and resuming gives every row exactly once."""
