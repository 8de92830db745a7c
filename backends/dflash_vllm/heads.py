"""vLLM 0.32 and 0.33 and the heads of a drafter: the method that serves them, its dialect, and heads that it lacks.

`models/qwen3_dflash.py` (plain, `d2t`), `qwen3_dflash2.py` (convolutions and selector), `qwen3_dspark.py` (a vanilla
Markov head, both slot conventions, `d2t`); the last two on the V2 model runner, which wants a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.config import Heads
from dflash_serve.errors import Problem

UNTRIED = ("DFlash2", "DSpark")  # families that were read and not run: they want a GPU
WHERE = "drafter.model"
OTHER = "use --backend torch or sglang"


def method_of(heads: Heads) -> str:
    """vLLM's name of the method; its `dflash` finds DFlash2 by the architecture."""
    return "dflash" if heads.markov is None else "dspark"


def dialect_of(heads: Heads) -> str:
    """Dialect of the draft folder: only speculators' has words for `d2t`; dspark reads DeepSpec's."""
    if heads.draft_vocabulary is not None:
        return "speculators"
    return "zlab" if heads.markov is None else "deepspec"


def verifies_whole_blocks(heads: Heads) -> bool:
    """True where our widths do not run: vLLM's schedules of widths were never tried with dspark and DFlash2."""
    return heads.family in UNTRIED


def head_problems(heads: Heads) -> Iterator[Problem]:
    """Heads that vLLM lacks."""
    if heads.markov is not None and heads.markov.kind != "vanilla":
        what = f"a {heads.markov.kind} Markov head: vLLM 0.32 and 0.33 have vanilla ones only"
        yield Problem(what, WHERE, OTHER)
    if heads.markov is not None and heads.convolution is not None:
        yield Problem("convolutions beside a Markov head, which no model of vLLM 0.32 and 0.33 has", WHERE,
                      "use --backend torch")  # fmt: skip
    elif (heads.convolution is None) != (heads.selector is None):
        have, other = ("convolutions", "a selector") if heads.convolution else ("a candidate selector", "convolutions")
        what = f"{have} without {other}: vLLM 0.32 and 0.33 build both or neither"
        yield Problem(what, WHERE, OTHER)
    if heads.markov is None and heads.slots == "anchor-first":
        what = "anchor-first slots without a Markov head: vLLM 0.32 and 0.33 read them in method dspark only"
        do = "convert it (`dflash-serve convert --to deepspec --markov-head zero`), or use --backend torch"
        yield Problem(what, WHERE, do)
    if heads.markov is None and heads.confidence is not None:
        what = "a confidence head without a Markov head: vLLM 0.32 and 0.33 have both or neither"
        yield Problem(what, WHERE, "use --backend torch")
