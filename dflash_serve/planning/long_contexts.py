"""Effects of long contexts on a drafter, in one sentence of a plan: its K/V, its windows, and its acceptance."""

from __future__ import annotations

from dflash_serve.adapter.registry import server_backend
from dflash_serve.checkpoint.config import context_bytes
from dflash_serve.deployment.gpus import GIB
from dflash_serve.planning.question import PlanQuestion

LONG = 16_384  # Tokens of a request from which a plan speaks of it; most published acceptance is at shorter ones
LENGTHS = {"64k": 65_536, "128k": 131_072}
WINDOW = "speculation.draft_window"
PUBLISHED = (
    "one without windows fell from \N{GREEK SMALL LETTER TAU} 4.53 on short to 2.09 on 32K prompts of gov_report, "
    "trained on long ones to 3.56 (arXiv 2602.06036, table 4)"
)


def long_context(question: PlanQuestion) -> str | None:
    """The sentence; None = the requests are short."""
    pair, tokens = question.pair, question.load.isl + question.load.osl
    if tokens < LONG:
        return None

    def kv(length: int) -> str:
        return f"{length * context_bytes(pair.drafter) / GIB:.2f}"

    beside = pair.layout.kv_bytes(pair.kv_bytes_each, tokens) / GIB
    at = ", ".join(f"{kv(length)} at {name}" for name, length in LENGTHS.items())
    told = (
        f"A request of {tokens:,} tokens has {kv(tokens)} GiB of the drafter's K/V beside {beside:.2f} of the target's "
        f"({at}), all counted as kept, whatever windows read"
    )
    windows = [kind.window for kind in pair.drafter.layers]
    given = question.deployment.speculation.draft_window
    if given is not None:
        told += f". The drafter reads {given} tokens ({WINDOW})"
    elif any(windows):
        sizes = ", ".join(sorted({f"{window:,}" for window in windows if window}))
        told += f". {sum(map(bool, windows))} of its {len(windows)} layers read windows of {sizes} tokens"
    else:
        refused = next((one for one in server_backend(question.backend).facts.refusals if one.key == WINDOW), None)
        do = f"{WINDOW} bounds it" if refused is None else refused.what
        told += f". None of its layers has a window ({do})"
    if any("contexts of" in each.source for each in question.acceptances):
        return f"{told}."
    return (
        f"{told}. Its acceptance here is not of such lengths: {PUBLISHED}. `evaluate` on prompts of yours measures it."
    )
