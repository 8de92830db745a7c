"""What we rely on of TensorRT-LLM, by commit; and, where the real one is installed, whether it still is so."""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from dflash_tensorrt_llm.upstream import CudaGraphConfig, DFlashDecodingConfig, KvCacheConfig, LlmArgs
from tests.support.tiny import random_tensors, tiny_drafter_config

READ = {
    "tensorrt_llm/_torch/speculative/dflash.py": "00679c6",
    "tensorrt_llm/_torch/models/modeling_dflash.py": "009d8fa",
    "tensorrt_llm/_torch/models/modeling_utils.py": "main after PR #18284",
    "tensorrt_llm/llmapi/llm_args.py": "0004396",
    "tensorrt_llm/commands/serve.py": "00209af",
    "reference pages of DFlashDecodingConfig": "1.3.0rc27, 1.4.0rc1",
}
"""The sources this adapter was written against, all of autumn 2026."""
ASKED_OF_A_DRAFT_MODEL = {
    "_build_fused_kv_buffers", "_get_attention_mask_args", "_head_dim", "_num_attn_layers", "_num_heads",
    "_num_kv_heads", "config", "dflash_attention_backend", "dflash_forward", "draft_model_full", "lm_head",
    "logits_processor", "model", "precompute_context_kv", "project_target_hidden", "mask_token_id",
}  # fmt: skip
"""`draft_model.<name>` in dflash.py @00679c6, with what getattr and hasattr ask for: block_size, fc, hidden_norm."""
ASKED_LATER = {"validate_block_attention_windows"}
"""By main's worker of autumn 2026, as the draft model in its own GPU tests has it; in no release that was read."""
GIVEN_TO_IT = {"_runtime_position_ceiling"}
real = pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed here")


def test_the_drafter_has_every_attribute_the_worker_asks_for() -> None:
    config = tiny_drafter_config()
    drafter = PlugInDrafter(config, attention=lambda **_: torch.empty(0), dtype=torch.float32)
    drafter.load_weights(random_tensors(config))
    drafter._build_fused_kv_buffers()
    for name in ASKED_OF_A_DRAFT_MODEL | ASKED_LATER | {"block_size", "fc", "hidden_norm"}:
        assert hasattr(drafter, name), name
    for name in GIVEN_TO_IT:
        setattr(drafter, name, 1)
    assert drafter.fc.weight.dtype == torch.float32  # the worker makes the arena of this type
    assert drafter.config.max_position_embeddings == config.max_position_embeddings


def test_the_loader_finds_what_it_calls() -> None:
    parameters = inspect.signature(PlugInDrafter.load_weights).parameters
    assert list(parameters)[:3] == ["self", "weights", "weight_mapper"]
    assert callable(PlugInDrafter.load_weights_from_target_model)


def test_every_source_has_its_commit() -> None:
    assert all(READ.values())


@real
def test_the_real_worker_asks_for_nothing_new() -> None:
    from tensorrt_llm._torch.speculative.dflash import DFlashWorker

    asked = set(re.findall(r"draft_model\.(\w+)", inspect.getsource(DFlashWorker)))
    assert asked - GIVEN_TO_IT <= ASKED_OF_A_DRAFT_MODEL | ASKED_LATER


@real
def test_the_real_configuration_has_every_key_we_write() -> None:
    from tensorrt_llm.llmapi import llm_args as upstream

    pairs: dict[Any, type[BaseModel]] = {
        upstream.DFlashDecodingConfig: DFlashDecodingConfig,
        upstream.KvCacheConfig: KvCacheConfig,
        upstream.CudaGraphConfig: CudaGraphConfig,
        upstream.TorchLlmArgs: LlmArgs,
    }
    for theirs, ours in pairs.items():
        later = {"context_recompute_tail", "skip_ctx_buffer_budget_check"}
        assert ours.model_fields.keys() - later <= theirs.model_fields.keys(), theirs


@real
def test_the_real_registry_takes_a_drafter_from_outside() -> None:
    from tensorrt_llm._torch.models import _arch_index, modeling_utils

    for name in ("register_draft_model", "register_auto_model", "export_external_model_modules"):
        assert hasattr(modeling_utils, name), name
    assert "Qwen3ForCausalLM" in _arch_index.MODEL_ARCH_TO_MODULE
