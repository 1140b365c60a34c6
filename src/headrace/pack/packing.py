"""The ways in which documents become rows."""

from enum import StrEnum


class Packing(StrEnum):
    BEST_FIT = "best-fit"
    """Documents share rows, fitted so that hardly any padding is left."""
    WINDOWS = "windows"
    """All documents end to end, cut every `seq_len` tokens."""
    PAD = "pad"
    """One document per row."""
