"""One file format a module: the records of a block."""
