"""SmolLM2's drafter in the layouts that people publish, on a real server, beside the embedded engine.

The embedded engine dequantises the same drafter, so its acceptance is that of the numbers which the layout stores.
Both answer the same prompts greedily in float32, one after the other, and their steps are counted prompt by prompt.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp
from pathlib import Path

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.models.loader import load_tokenizer
from tests.support.counted_answers import Answering
from tests.support.draft_layouts import LAYOUTS, PUBLISHED, Layout, int8, write
from tests.support.prompts import word_problems

PROMPTS, TOKENS, STREAMS, BLOCK = 20, 40, 10, 8
WITHIN = 0.03
"""Largest distance of an engine's acceptance from that of the same numbers."""
WITHOUT_VNNI = "int8 up to 63"
"""INT8 with whole numbers whose sums of products fit CPUs without VNNI: there oneDNN adds two products in 16 bits."""
CASES: Mapping[str, Layout] = {**LAYOUTS, WITHOUT_VNNI: replace(LAYOUTS["int8"], store=partial(int8, largest=63))}
OWN: Mapping[str, tuple[str, ...]] = {"vllm": (WITHOUT_VNNI, "fp8 rows"), "sglang": ()}
"""Layouts that an engine's own kernels run on every CPU in float32; vLLM's run `int8` with VNNI."""
OF_GPUS: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "int8",
        "w4a16",
        "w8a16",
        "fp8 tensor",
        "nvfp4",
        "nvfp4 weights",
        "mxfp4",
        "modelopt fp8",
        "modelopt nvfp4",
        "hf fp8",
    ),
    "sglang": ("int8", "fp8 rows", "fp8 tensor", "nvfp4", "nvfp4 weights", "modelopt fp8", "modelopt nvfp4", "hf fp8"),
}
"""Layouts of which each product is a stand-in's. Others do not fit SmolLM2's drafter: FP8 blocks, SGLang's tiles."""
STAND_INS = {
    "DFLASH_SERVE_TEST_KERNELS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
}
"""Variables of a server whose quantised products are those of `*_kernels.py`."""
Tokens = list[list[int]]


@dataclass(frozen=True)
class Beside:
    """Steps with a draft for each prompt: an engine's, and the embedded engine's with the same numbers."""

    theirs: list[float]
    ours: list[float]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The engine's acceptance length by ours, and its 95 % interval: the tokens are the same, so steps decide.

        Delta method on the logarithm, prompt by prompt, as both answered the same prompts.
        """
        theirs, ours = sum(self.theirs), sum(self.ours)
        spread = sum((a / theirs - b / ours) ** 2 for a, b in zip(self.theirs, self.ours, strict=True)) ** 0.5
        return ours / theirs, ours / theirs * exp(-1.96 * spread), ours / theirs * exp(1.96 * spread)

    @property
    def agrees(self) -> bool:
        """The acceptance length is the embedded engine's to `WITHIN`, as far as the interval tells."""
        _, least, most = self.ratio
        return least <= 1 + WITHIN and most >= 1 - WITHIN

    def __str__(self) -> str:
        ratio, least, most = self.ratio
        lengths = f"{sum(self.theirs):.0f} verifications, the embedded engine {sum(self.ours):.0f}"
        return f"{lengths}: {ratio:.3f} of its acceptance, {least:.3f} to {most:.3f}"


def encoded_prompts() -> Tokens:
    """Word problems as SmolLM2's token ids."""
    tokenizer = load_tokenizer("smollm2")
    chats = word_problems(PROMPTS)
    applied = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True) for one in chats]
    return [list(one["input_ids"]) for one in applied]


def write_smollm2(folder: Path, name: str) -> Path:
    """The drafter that we ship, as a quantiser publishes it: a layout of `CASES`."""
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.config is not None
    write(folder, checkpoint.config, CASES[name], tensors=load_tensors(checkpoint))
    return folder / PUBLISHED


def drafted_as_ours(server: Answering, drafter: Path, prompts: Tokens, truth: Tokens) -> Beside:
    """Answers of a server must be `truth`; its steps and those of the embedded engine with the same drafter."""
    theirs = list[float]()
    for prompt, answer in zip(prompts, truth, strict=True):
        before = read_acceptance(server.url)
        assert server.tokens([prompt], TOKENS) == [answer]
        found = read_acceptance(server.url).since(before)
        assert found.verifications is not None
        assert found.widths == {BLOCK: found.verifications}
        theirs.append(found.verifications)
    return Beside(theirs, embedded_steps(drafter, prompts))


def embedded_steps(drafter: Path, prompts: Tokens) -> list[float]:
    """Steps of the embedded engine until an answer has its tokens, for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS + BLOCK, ignore_eos=True)
    llm = LLM("smollm2", str(drafter), width=BLOCK, dtype="float32", max_model_len=1024, max_batch_size=STREAMS)
    gained: dict[int, list[int]] = defaultdict(list)  # tokens of each step; the first is the prompt's own
    for chunk in llm.stream(prompts, params):
        gained[chunk.index].append(len(chunk.token_ids))
    return [float(sum(before < TOKENS for before in accumulate(gained[index]))) for index in range(len(prompts))]
