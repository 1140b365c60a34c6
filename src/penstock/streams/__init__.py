"""Records straight from raw files, without building anything first: `penstock.stream`."""
