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

from tests.support.vllm_layouts import ENVIRONMENT


def built(target: str, draft: str) -> Any:
    """The class of a draft in float32 with its weights, and with the target's embedding as its head."""
    from vllm.config import ModelConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.network_utils import get_open_port

    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    config = EngineArgs(target, dtype="float32", enforce_eager=True, **sizes).create_engine_config()
    own = ModelConfig(draft, dtype="float32", enforce_eager=True, max_model_len=256)
    settings = {"draft_load_config": None, "enable_adaptive_verification": False}
    config.speculative_config = SimpleNamespace(draft_model_config=own, **settings)  # V2 wants a GPU
    with set_current_vllm_config(config), torch.device("cpu"):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        (architecture,) = own.architectures
        model = ModelRegistry._try_load_model_cls(architecture)(vllm_config=config)
        model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(own, model))
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
