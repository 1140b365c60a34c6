"""Where bytes live: the `Store` protocol, and the places that follow it."""
