"""vLLM's DSpark head and its loop over the slots, on a CPU: `python -m tests.support.vllm_dspark TARGET DRAFT ROWS`.

ROWS is a safetensors file with `hidden` [n, slots, H], a drafter's output rows, and `anchors` int64 [n]. Prints the
drafted tokens of each block as JSON. vLLM runs DSpark on GPUs alone: its class and `_sample_sequential` are its own,
and the pass that makes the rows is left out.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.vllm_layouts import ENVIRONMENT, draft_class


def built(target: str, draft: str) -> Any:
    """The class of a draft in float32 with its weights, and with the target's embedding as its head."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, own = draft_class(target, draft, "float32")
    embedding = load_file(f"{target}/model.safetensors")["model.embed_tokens.weight"]
    model.lm_head.weight.data[: len(embedding)] = embedding
    process_weights_after_loading(model, own, torch.device("cpu"))
    return model


@torch.inference_mode()
def drafted(model: Any, hidden: Tensor, anchors: Tensor) -> list[list[int]]:
    """The tokens that vLLM's loop drafts greedily from a pass's rows."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    count, slots, _ = hidden.shape
    speculator = SimpleNamespace(
        model=model,
        num_speculative_steps=slots,
        sample_indices=torch.arange(count * slots),
        sample_idx_mapping=torch.zeros(count * slots, dtype=torch.int32),
        sample_pos=torch.zeros(count * slots, dtype=torch.int64),
        input_buffers=SimpleNamespace(input_ids=anchors),
        draft_tokens=torch.zeros(count, slots, dtype=torch.int64),
        draft_logits=None,
        use_confidence_head=False,
        _draft_topk=None,
        _anchor_idx=torch.arange(count),
        _step_cols=torch.arange(slots),
        _maybe_predict_acceptance=lambda *_: None,
    )
    speculator._sample_logits = partial(DSparkSpeculator._sample_logits, speculator)
    DSparkSpeculator._sample_sequential(speculator, count, hidden.flatten(0, 1))
    tokens: list[list[int]] = speculator.draft_tokens.tolist()
    return tokens


def main() -> None:
    """Prints the drafts of the rows in a file."""
    os.environ.update(ENVIRONMENT)
    target, draft, rows = sys.argv[1:]
    given = load_file(rows)
    print(json.dumps(drafted(built(target, draft), given["hidden"], given["anchors"])))


if __name__ == "__main__":
    main()
