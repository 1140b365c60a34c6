"""One file a command: parse, call the library, show."""
