"""One file format a module; each offers the four functions of `Reader`."""
