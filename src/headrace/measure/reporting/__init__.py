"""What a benchmark found: as figures, as text, and as a page with charts."""
