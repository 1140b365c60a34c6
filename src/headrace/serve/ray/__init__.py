"""Servers as actors of a Ray cluster, and how clients find them there."""
