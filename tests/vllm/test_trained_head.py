"""The Markov head that we ship, in vLLM's own class and loop: the drafts are ours.

vLLM runs DSpark on GPUs alone (`tests/support/vllm_dspark.py`). The backbone is a plain drafter's, whose acceptance on
the real server `test_server.py` measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dflash_serve.adapter.launch import DRAFT
from dflash_serve.checkpoint.source import WITH_HEAD
from dflash_serve.models.drafter import propose_blocks
from dflash_serve.models.loader import load_drafter
from dflash_vllm import VLLMBackend
from tests.support.vllm_server import smollm2

pytestmark = pytest.mark.model
BLOCKS, SLOTS, UNSURE = 64, 7, 0.05


@torch.inference_mode()
def test_vllms_loop_over_the_trained_head_drafts_what_ours_does(tmp_path: Path) -> None:
    deployment = smollm2(SLOTS + 1, drafter={"model": WITH_HEAD}, hardware={"gpu": "h100"})
    launch = VLLMBackend().launch(deployment)
    assert launch.problems == []
    launch.prepare(tmp_path)
    drafter, target = load_drafter(WITH_HEAD, dtype=torch.float32), Path(deployment.target.model)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    torch.manual_seed(0)
    # Small rows are unsure ones, which the head decides.
    hidden = UNSURE * torch.randn(BLOCKS, SLOTS, drafter.config.hidden_size) * drafter.norm.weight
    hot = torch.tensor(drafter.hot_tokens)
    anchors = hot[torch.randint(len(hot), (BLOCKS,))]
    save_file({"hidden": hidden, "anchors": anchors}, tmp_path / "rows.safetensors")
    command = [sys.executable, "-m", "tests.support.vllm_dspark", str(target), str(tmp_path / DRAFT)]
    done = subprocess.run([*command, str(tmp_path / "rows.safetensors")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    assert torch.equal(theirs, propose_blocks(drafter, lambda rows: F.linear(rows, embedding), hidden, anchors))
    drafter.markov_head = None
    alone = propose_blocks(drafter, lambda rows: F.linear(rows, embedding), hidden, anchors)
    assert (theirs != alone).float().mean() > 0.05, "the head decides"
