"""Our loop against z-lab's own `dflash_generate` (PyPI `dflash` 0.1.0): same weights, tokens and accepted lengths."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth, Step
from dflash_torch.scheduler import Scheduler
from dflash_torch.speculator import Speculator
from tests.support.prompts import word_problems

zlab = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
pytestmark = [pytest.mark.model, pytest.mark.thorough]
NEW_TOKENS = 48


@dataclass(frozen=True)
class Recorder(FixedWidth):
    """A fixed width that remembers what each step accepted."""

    lengths: list[int] = field(default_factory=list)

    def observe(self, step: Step) -> None:
        self.lengths.extend(accepted + 1 for accepted in step.accepted)


def variant(folder: Path, **changes: object) -> Path:
    """The bundled drafter with another attention: acceptance falls, but both must agree on how far."""
    shutil.copytree(drafter_folder("smollm2"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


SLIDING = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 48,
    "use_sliding_window": True,
}
VARIANTS: dict[str, dict[str, object]] = {
    "full attention": {},
    "sliding, causal in the block": SLIDING,
    "sliding, bidirectional": SLIDING | {"is_causal": False},
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' target, for z-lab's loop."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder("smollm2"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """Our target, for ours."""
    return load_target("smollm2")


@pytest.mark.parametrize(("name", "prompts"), [(name, 1 if changes else 2) for name, changes in VARIANTS.items()])
def test_same_tokens_and_accepted_lengths(
    reference: Any, target: TargetModel, name: str, prompts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant(tmp_path / "drafter", **VARIANTS[name])
    theirs = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)  # statistics without a GPU
    tokenizer = load_tokenizer("smollm2")
    drafter = load_drafter(folder, dtype=torch.float32)
    speculator = Speculator(drafter, target, block_size=8, max_batch_size=1, capacity=512)
    accepted = 0
    for messages in word_problems(prompts):
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
        expected = zlab.dflash_generate(
            theirs, reference, torch.tensor([ids]), NEW_TOKENS, stop_token_ids=[2], return_stats=True
        )
        policy = Recorder(8)
        scheduler = Scheduler(target, speculator, policy, max_batch_size=1, capacity=512)
        request = scheduler.join(ids, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        while scheduler.running:
            scheduler.step()
        assert request.token_ids == expected.output_ids[0].tolist()
        # The last blocks are left out: z-lab drafts a shorter block at the end of the budget, we a whole one.
        whole = len(policy.lengths) - 8
        assert policy.lengths[:whole] == expected.acceptance_lengths[:whole]
        accepted += sum(policy.lengths) - len(policy.lengths)
    assert accepted > 10  # a comparison of drafts that are all rejected would prove nothing
