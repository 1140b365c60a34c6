"""Shards -> records by number: the map-style dataset, and neighbours' files opened in place."""
