"""Where bytes live: local files, written so that a crash leaves either the old file or the new one."""
