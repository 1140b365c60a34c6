"""What the bytes on disk mean; `docs/format.md` specifies them."""
