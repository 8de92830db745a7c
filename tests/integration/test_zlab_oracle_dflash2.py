"""Our DFlash2 against z-lab's own code (PyPI `dflash` 0.1.0, test-only): the same file, the same drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.models.drafter import propose
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.loader import load_drafter
from tests.integration.test_zlab_oracle_drafts import Ours, Theirs, steps
from tests.support.heads import CONVOLUTION, SELECTOR
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, tiny_drafter_config, write_tiny_drafter

zlab = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, dict[str, object]] = {
    "full": {},
    "sliding, not causal": {"layers": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)},
    "sliding and full": {"layers": (SLIDING, FULL)},
    "three taps, other groups": {"convolution": {"taps": 3, "group_size": 4}},
    "one tap": {"convolution": {"taps": 1, "group_size": 32}},
    "multiplier and soft-cap": {"output_multiplier": 0.5, "final_logit_softcap": 3.0},
}


class Theirs2(Theirs):
    """z-lab's DFlash2."""

    def __init__(self, folder: Path) -> None:
        self.model = zlab.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32)
        self.cache, self.length = zlab._make_cache(self.model.config), 0


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_drafts_equal_zlabs_over_a_growing_context(case: str, tmp_path: Path) -> None:
    fields = {"block_size": 6, "convolution": CONVOLUTION, "selector": SELECTOR, **CASES[case]}
    config = tiny_drafter_config(**fields)
    folder = write_tiny_drafter(tmp_path / "drafter", config, seed=3)
    ours, fused, theirs = Ours(load_drafter(folder)), Ours(FusedDrafter(load_drafter(folder))), Theirs2(folder)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    moved = 0
    for anchor, (features, noise) in enumerate(steps(config), start=11):
        reference = theirs.draft(features, noise)
        path, _, _ = theirs.model.propose(reference[None, 1:], torch.tensor([anchor]), head, 0.0)
        for mine in (ours, fused):
            hidden = mine.draft(features, noise)
            torch.testing.assert_close(hidden, reference, rtol=1e-5, atol=2e-5)
            assert propose(mine.drafter, head, hidden[1:], [anchor], [5], [None]) == path.tolist()
        moved += int((path[0] != theirs.model.compute_logits(reference[1:], head).argmax(-1)).sum())
    assert moved > 0  # the selector has a say here
