"""The modes, as far as needed."""

from enum import IntEnum, auto


class SpeculativeDecodingMode(IntEnum):
    NGRAM = auto()
    DFLASH = auto()
