"""Shards -> records by number: the map-style dataset, and files of other systems, opened in place."""
