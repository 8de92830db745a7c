"""The doctor and the shipped drafter: faults that are made on purpose, by other code than predicts them, are found.

Suspects are checkpoints broken on disk, drafters and loops broken in memory, and templates broken in the tokenizer;
they run through the real loop, some behind a real server. Predictions are replays of the core's own drafter.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.store import Store
from dflash_serve.doctor.diagnosis import HEALTHY, Hypothesis, SuspectReport, Verdict, diagnose
from dflash_serve.doctor.evidence import Observation, interview
from dflash_serve.doctor.examination import Examination, corrections
from dflash_serve.models.attention import Attend
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.loader import load_drafter
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.faults.replay import EmbeddedReference
from dflash_torch.faults.tensors import first_difference
from dflash_torch.request import Request
from dflash_torch.scheduler import Scheduler
from dflash_torch.speculator import Speculator
from tests.support.embedded import answers
from tests.support.prompts import word_problems
from tests.support.serving import running
from tests.support.tiny import edit_json

# Ten minutes on two cores; fewer and shorter answers than these do not tell the weaker faults apart.
wanted = os.environ.get("DFLASH_SERVE_TEST_DOCTOR") == "1"
pytestmark = [pytest.mark.model, pytest.mark.skipif(not wanted, reason="`make test-doctor` runs it")]
BLOCK, COUNT = 8, 12
PARAMS = SamplingParams(temperature=0, max_tokens=48)
PROMPTS = word_problems(COUNT)
Break = Callable[[Path], None]


@dataclass
class Known:
    """Everything that is predicted once and compared with every suspect."""

    reference: EmbeddedReference
    examination: Examination
    hypotheses: list[Hypothesis]

    @property
    def engine(self) -> EmbeddedEngine:
        return self.reference.engine

    def diagnose(self, observed: Observation, prompts: Sequence[int] = range(COUNT)) -> SuspectReport:
        chosen = [
            Hypothesis(one.fault, tuple(one.counts[n] for n in prompts), tuple((one.answers or ())[n] for n in prompts))
            for one in self.hypotheses
        ]
        return diagnose(observed, chosen)


@pytest.fixture(scope="module")
def shipped() -> Path:
    return drafter_folder("smollm2")


@pytest.fixture(scope="module")
def known(shipped: Path) -> Known:
    engine: Any = LLM("smollm2", "smollm2", width=BLOCK, max_batch_size=COUNT, max_model_len=512).engine
    reference = EmbeddedReference(engine, load_drafter(shipped, dtype=torch.float32), PROMPTS, PARAMS, BLOCK)
    examination = Examination(reference, Store(None, {}))
    return Known(reference, examination, examination.hypotheses())


def observe(engine: EmbeddedEngine) -> Observation:
    """Through the real loop."""
    outputs = answers(engine.fixed(BLOCK), PROMPTS, PARAMS)
    each = tuple(output.statistics for output in outputs)
    return Observation(total(each), each, tuple(output.text for output in outputs))


def with_speculator(engine: EmbeddedEngine, make: Callable[..., Speculator], drafter: Drafter) -> EmbeddedEngine:
    """The same target with another drafter or loop."""
    full = engine.scheduler
    speculator = make(drafter, full.target, block_size=BLOCK, max_batch_size=COUNT, capacity=full.capacity)
    scheduler = Scheduler(
        full.target, speculator, full.policy, max_batch_size=COUNT, capacity=full.capacity, reuse_prefixes=False
    )
    return EmbeddedEngine(scheduler, engine.tokenizer)


def edited(change: Mapping[str, object]) -> Break:
    return lambda folder: edit_json(folder / "config.json", change)


def without_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.1.{name}.weight"] = torch.zeros_like(tensors[f"layers.1.{name}.weight"])
    save_file(tensors, folder / "model.safetensors")


SLIDES = {"use_sliding_window": True, "is_causal": False}
CHECKPOINTS: dict[str, tuple[Break, str]] = {
    "layer ids": (edited({"dflash_config.target_layer_ids": [2, 9, 15, 21, 28]}), "layer ids +1"),
    "layer order": (edited({"dflash_config.target_layer_ids": [27, 20, 14, 8, 1]}), "target layers in reverse order"),
    "mask token": (edited({"dflash_config.mask_token_id": 0}), "mask token 0"),
    "RoPE theta": (edited({"rope_theta": 1e6}), "RoPE theta 1e+06"),
    "RoPE scaling": (edited({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}), "RoPE scaled (linear, 4x)"),
    "block attention": (edited({"is_causal": True}), "causal block attention"),
    "window": (
        edited({"layer_types": ["sliding_attention"] * 3, "sliding_window": 32, **SLIDES}),
        "window of 32 tokens",
    ),
    "embedding scale": (edited({"input_embedding_scale": 24.0}), "embedding scale 24"),
    "layer 1": (without_layer, "weights of drafter layer 1 missing"),
}  # fmt: skip


def broken(shipped: Path, folder: Path, fault: Break) -> Path:
    shutil.copytree(shipped, folder)
    fault(folder)
    return folder


@pytest.mark.parametrize("cause", CHECKPOINTS)
def test_a_broken_checkpoint_is_ranked_first(cause: str, known: Known, shipped: Path, tmp_path: Path) -> None:
    fault, name = CHECKPOINTS[cause]
    drafter = load_drafter(broken(shipped, tmp_path / "drafter", fault), dtype=torch.float32)
    found = known.diagnose(observe(with_speculator(known.engine, Speculator, drafter)))
    assert (found.verdict, found.named[0], found.explanations[0].name) == (Verdict.FAULT, cause, name)


class NoAnchor(Drafter):
    """Slot 0 is masked like the rest."""

    def noise(self, anchors: Tensor, embedding: Tensor, block_size: int | None = None) -> Tensor:
        return super().noise(torch.full_like(anchors, self.config.mask_token_id or 0), embedding, block_size)


class LateBlock(Drafter):
    """Positions that do not follow on the context's."""

    def __call__(self, noise: Tensor, positions: Tensor, attend: Attend, **more: Any) -> Tensor:
        hidden: Tensor = super().__call__(noise, positions + 1, attend, **more)
        return hidden


class Forgetful(Speculator):
    """Its store loses the rows of accepted tokens."""

    def inject(self, requests: Sequence[Request]) -> None:
        spans = [(s.entry, s.injected, s.verified) for s in requests if s.injected >= s.prompt_length]
        super().inject(requests)
        for slot, start, end in spans:
            self.cache.keys[:, slot, :, start + 1 : end] = 0
            self.cache.values[:, slot, :, start + 1 : end] = 0


class Unprepared(Speculator):
    """Its store knows nothing of the prompt, as behind a prefill server."""

    def inject(self, requests: Sequence[Request]) -> None:
        super().inject(requests)
        for request in requests:
            self.cache.keys[:, request.entry, :, : request.prompt_length] = 0
            self.cache.values[:, request.entry, :, : request.prompt_length] = 0


MEMORY: dict[str, tuple[type[Drafter], type[Speculator], str]] = {
    "anchor": (NoAnchor, Speculator, "anchor embedding missing in slot 0"),
    "positions": (LateBlock, Speculator, "block positions one late"),
    "stale context": (Drafter, Forgetful, "accepted tokens not injected"),
    "prompt context": (Drafter, Unprepared, "no drafter context of the prompt"),
}


def suspect_in_memory(cause: str, known: Known, shipped: Path) -> EmbeddedEngine:
    kind, loop, _ = MEMORY[cause]
    drafter = load_drafter(shipped, dtype=torch.float32)
    drafter.__class__ = kind
    return with_speculator(known.engine, loop, drafter)


@pytest.mark.parametrize("cause", MEMORY)
def test_a_broken_loop_is_ranked_first_and_its_tensor_named(cause: str, known: Known, shipped: Path) -> None:
    engine = suspect_in_memory(cause, known, shipped)
    found = known.diagnose(observe(engine))
    name = MEMORY[cause][2]
    assert (found.verdict, found.named[0], found.explanations[0].name) == (Verdict.FAULT, cause, name)
    difference = first_difference(engine, target_folder("smollm2"), shipped, PROMPTS[0])
    assert difference is not None
    expected = {"anchor": "block input", "positions": "block positions"}.get(cause, "context keys of drafter layer 0")
    assert difference.tensor == expected


def test_our_own_engine_differs_nowhere_from_transformers_and_its_replay_nowhere_from_it(
    known: Known, shipped: Path
) -> None:
    assert first_difference(known.engine, target_folder("smollm2"), shipped, PROMPTS[0]) is None
    assert known.reference.predict(None) == known.reference.loop()


@pytest.mark.parametrize("cause", ["healthy", "anchor", "chat template", "BOS"])
def test_a_server_is_diagnosed_from_outside(cause: str, known: Known, shipped: Path) -> None:
    engine = suspect_in_memory("anchor", known, shipped) if cause == "anchor" else copy.copy(known.engine)
    engine.tokenizer = copy.copy(engine.tokenizer)
    if cause == "chat template":
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    elif cause == "BOS":
        engine.tokenizer.chat_template = "<|im_start|>" + engine.tokenizer.chat_template
    with running(engine) as server:
        told = interview(Endpoint(server.url), PROMPTS, PARAMS, BLOCK)
    found = known.diagnose(told.observation)
    assert told.width == BLOCK
    assert (found.verdict, found.named[0]) == (Verdict.HEALTHY if cause == "healthy" else Verdict.FAULT, cause)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_healthy_runs_are_called_healthy(dtype: str, known: Known) -> None:
    """Other subsets of prompts; in bfloat16 target, drafter and some answers are others than predicted, too."""
    engine: Any = known.engine
    if dtype != "float32":
        engine = LLM("smollm2", "smollm2", width=BLOCK, max_batch_size=COUNT, max_model_len=512, dtype=dtype).engine
    observed, generator = observe(engine), random.Random(1)
    assert observed.each is not None
    assert observed.answers is not None
    for _ in range(20):
        chosen = generator.sample(range(COUNT), 6)
        each = tuple(observed.each[n] for n in chosen)
        texts = tuple(observed.answers[n] for n in chosen)
        for evidence in (Observation(total(each), each, texts), Observation(total(each))):
            assert known.diagnose(evidence, chosen).verdict == Verdict.HEALTHY


def test_a_figure_alone_names_what_fits_or_says_that_it_cannot_tell(known: Known) -> None:
    by_name = {one.fault.name: total(one.counts).acceptance_length or 0.0 for one in known.hypotheses}
    collapsed = known.diagnose(Observation.of_length(by_name["features shuffled"]))
    assert collapsed.verdict == Verdict.FAULT
    assert len(collapsed.named) > 1  # several faults ruin acceptance alike
    assert known.diagnose(Observation.of_length(by_name["layer ids +1"])).verdict == Verdict.HEALTHY
    assert "layer ids +1" in known.diagnose(Observation.of_length(by_name[HEALTHY])).cannot_be_told_from_healthy


def test_the_shipped_checkpoint_is_right_about_itself(known: Known) -> None:
    sound, *alternatives = known.examination.alternatives()
    assert corrections(sound.counts, alternatives) == []


@pytest.mark.parametrize(
    ("cause", "setting"),
    [
        ("mask token", "mask_token_id = 16"),
        ("RoPE scaling", "rope_scaling = null"),
        ("layer order", "target_layer_ids = [1, 8, 14, 20, 27]"),
    ],
)
def test_a_checkpoint_that_is_wrong_about_itself_is_corrected(
    cause: str, setting: str, known: Known, shipped: Path, tmp_path: Path
) -> None:
    drafter = load_drafter(broken(shipped, tmp_path / "drafter", CHECKPOINTS[cause][0]), dtype=torch.float32)
    engine = with_speculator(known.engine, Speculator, drafter)
    reference = EmbeddedReference(engine, drafter, PROMPTS, PARAMS, BLOCK)
    tried = [fault for fault in reference.settings() if fault.cause == cause]
    alternatives = [Hypothesis(fault, reference.predict(fault.name).counts) for fault in tried]
    found = corrections(reference.predict(None).counts, alternatives)
    best = total(known.hypotheses[0].counts).acceptance_length
    assert best is not None
    # Another setting may do a little better on these few prompts: mask token 1 does.
    assert setting in [correction.setting for correction in found if correction.after >= best - 0.02]
