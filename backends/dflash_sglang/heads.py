"""SGLang 0.5.23 and the heads of a drafter: the algorithm that serves them, and heads that it silently gets wrong.

`models/dflash.py` (plain, convolutions, DFlash2) and `models/dspark.py` (a Markov head of any kind, both slot
conventions). Neither knows a reduced vocabulary; DSPARK always builds a Markov head.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.config import Heads
from dflash_serve.errors import Problem

DFLASH, DSPARK = "DFLASH", "DSPARK"  # SGLang's names of its algorithms
WHERE = "drafter.model"
OTHER = "use --backend torch"


def algorithm_of(heads: Heads) -> str:
    """DSPARK with a Markov head, else DFLASH, which finds DFlash2 by its architecture."""
    return DFLASH if heads.markov is None else DSPARK


def dialect_of(heads: Heads) -> str:
    """Dialect of the draft folder: DSPARK reads `markov_rank` at top level only, as DeepSpec writes it."""
    return "zlab" if heads.markov is None else "deepspec"


def verifies_whole_blocks(heads: Heads) -> bool:
    """True where our worker's widths do not run: they replace SGLang's plain DFlash steps only."""
    return heads.markov is not None or heads.selector is not None


def head_problems(heads: Heads) -> Iterator[Problem]:
    """Heads that SGLang would refuse late, or silently leave out."""
    if heads.draft_vocabulary is not None:
        what = "a reduced draft vocabulary: SGLang would skip d2t and lm_head and draft through the target's head"
        do = f"convert it (`dflash-serve convert --full-vocabulary --target ...`), or {OTHER}"
        yield Problem(what, WHERE, do)
    if heads.slots == "anchor-first" and heads.markov is None:
        what = (
            "anchor-first slots without a Markov head: SGLang's DFLASH reads fill-in slots, its DSPARK needs the head"
        )
        do = f"convert it (`dflash-serve convert --to deepspec --markov-head zero`), or {OTHER}"
        yield Problem(what, WHERE, do)
    if heads.markov is not None and heads.convolution is not None:
        yield Problem("convolutions beside a Markov head, which no checkpoint of SGLang's has", WHERE, OTHER)
