"""What we rely on of TensorRT-LLM, by commit; and, where the real one is installed, whether it still is so."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError

from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from dflash_tensorrt_llm.upstream import (
    CudaGraphConfig,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    KvCacheConfig,
    LlmArgs,
    installed_release,
    installed_verdict,
)
from tests.support.fake_tensorrt_llm.worker import Worker
from tests.support.tiny import random_tensors, tiny_drafter_config

ASKED_OF_A_DRAFT_MODEL = {
    "_build_fused_kv_buffers", "_get_attention_mask_args", "_head_dim", "_num_attn_layers", "_num_heads",
    "_num_kv_heads", "config", "dflash_attention_backend", "dflash_forward", "draft_model_full", "lm_head",
    "logits_processor", "model", "precompute_context_kv", "project_target_hidden", "mask_token_id",
}  # fmt: skip
"""`draft_model.<name>` in dflash.py @00679c6, with what getattr and hasattr ask for: block_size, fc, hidden_norm."""
ASKED_LATER = {"validate_block_attention_windows"}
"""By main's worker of autumn 2026, as the draft model in its own GPU tests has it; in no release that was read."""
OPTIONAL = {
    "block_size", "fc", "hidden_norm", "_kv_factor", "_paged_ctx_cache", "mask_token_embedding",
    "_uses_worker_attention_backend",
}  # fmt: skip
"""By getattr with a default, or after hasattr: ours has the first three and needs none of the others."""
RECIPES = Path(__file__).parents[1] / "unit/tensorrt_llm/golden/recipes.txt"
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
    # The loader's calls.
    assert list(inspect.signature(PlugInDrafter.load_weights).parameters)[:3] == ["self", "weights", "weight_mapper"]
    assert callable(PlugInDrafter.load_weights_from_target_model)


def asked_of(source: str, name: str = "draft_model") -> set[str]:
    """What a worker's source asks of a variable: `x.a`, `self.x.a`, and `a` by getattr or hasattr; not what it sets."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is(node.value, name) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr") and _is(node.args[0], name):
            found.add(str(ast.literal_eval(node.args[1])))
    return found


def keywords_of(source: str, method: str) -> set[str]:
    """Keywords that any call of a method gives it."""
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and _called(n) == method]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


def _is(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def test_our_own_stand_in_asks_for_nothing_beyond_the_contract() -> None:
    source = inspect.getsource(Worker).replace("self.model", "draft_model")
    assert asked_of(source) <= ASKED_OF_A_DRAFT_MODEL | OPTIONAL
    taken = inspect.signature(PlugInDrafter.dflash_forward).parameters.keys()
    assert keywords_of(source, "dflash_forward") <= taken


@real
def test_the_real_workers_ask_for_nothing_new() -> None:
    """`DFlashWorker` and its subclasses, but those of other heads and of kernels for one target."""
    from tensorrt_llm._torch.speculative.dflash import DFlashWorker

    source = inspect.getsource(DFlashWorker)
    assert asked_of(source) - GIVEN_TO_IT <= ASKED_OF_A_DRAFT_MODEL | ASKED_LATER | OPTIONAL
    assert keywords_of(source, "dflash_forward") <= inspect.signature(PlugInDrafter.dflash_forward).parameters.keys()
    assert {worker.__name__ for worker in DFlashWorker.__subclasses__()} <= {"DSparkWorker", "KimiK3DFlashWorker"}


DRAFT = {"max_draft_len": 3, "speculative_model": "draft"}
DFLASH, DSPARK = {"decoding_type": "DFlash", **DRAFT}, {"decoding_type": "DSpark", "block_size": 3, **DRAFT}
DIFFERENCES: dict[str, tuple[dict[str, Any], bool]] = {
    "a type of K/V that dies as the model is loaded": ({"kv_cache_config": {"dtype": "bfloat16"}}, True),
    "beam search": ({"max_beam_width": 4, "speculative_config": DFLASH}, True),
    "a schedule for DSpark": ({"speculative_config": {**DSPARK, "draft_len_schedule": {8: 3}}}, True),
    "an unknown key": ({"kv_cache_config": {"pages": 4}}, False),
    "a DSpark block of another length": ({"speculative_config": {**DSPARK, "block_size": 4}}, False),
}
"""All of these our mirror refuses; whether upstream's LlmArgs takes them. Where it is installed, its answer counts."""


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_our_mirror_refuses_what_upstream_may_take(difference: str) -> None:
    with pytest.raises(ValidationError):
        LlmArgs.model_validate(DIFFERENCES[difference][0])


@real
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_upstream_takes_what_the_table_says(difference: str) -> None:
    fields, taken = DIFFERENCES[difference]
    assert (installed_verdict(installed_release(), {"model": "Qwen/Qwen3-8B", **fields}) == "") == taken


@real
@pytest.mark.parametrize("line", [line for line in RECIPES.read_text().splitlines() if " 1.4 | trtllm-serve" in line])
def test_upstream_takes_every_golden_configuration(line: str) -> None:
    fields = json.loads(line.rpartition(" | ")[2])
    assert installed_verdict(installed_release(), {"model": line.split("trtllm-serve ")[1].split()[0], **fields}) == ""


@real
def test_the_real_configuration_has_every_key_we_write() -> None:
    from tensorrt_llm.llmapi import llm_args as upstream

    pairs: dict[Any, type[BaseModel]] = {
        upstream.DFlashDecodingConfig: DFlashDecodingConfig,
        upstream.DSparkDecodingConfig: DSparkDecodingConfig,
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


@real
@pytest.mark.parametrize("family", ["Gemma4", "Mistral", "Qwen2", "Qwen2Moe"])
def test_the_real_classes_of_families_without_a_drafter_make_none(family: str) -> None:
    from tensorrt_llm._torch.models import _arch_index, modeling_speculative

    name = f"{family}ForCausalLM"
    module = importlib.import_module(f"tensorrt_llm._torch.models.{_arch_index.MODEL_ARCH_TO_MODULE[name]}")
    assert not issubclass(getattr(module, name), modeling_speculative.SpecDecOneEngineForCausalLM)
