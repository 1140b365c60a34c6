"""Records straight from raw files, without building anything first: `headrace.stream`."""
