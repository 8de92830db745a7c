"""Checks of a drafter inside vLLM: its files, and the model that vLLM built from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_serve.adapter.checks import layer_problems
from dflash_serve.checkpoint.loading import StrictLoader
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.target import TargetShape
from dflash_serve.errors import Problem
from dflash_vllm.drafter_rules import drafter_problems
from dflash_vllm.layouts import storage_problems

EXACT = ("standard", "block")  # acceptance tests that change no distribution; `synthetic` and `fly` do
OF_CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point", "q_zero_point")
"""Endings of parameters that a quantisation method adds to attention for quantised keys and values."""
LOADER = StrictLoader(
    spare=("t2d", "d2t", "rotary_emb.", ".g_idx"),  # columns of GPTQ's in another order are refused
    unfilled=("embed_tokens.weight", "lm_head.weight", "mask_embedding", "d2t", *OF_CACHE),
)


def loader_of(model: Any) -> StrictLoader:
    """The loader of a drafter; products of W4A16_NVFP4 have a parameter `input_scale` that vLLM drops unfilled."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    named = (one for one in methods if type(one).__name__ == "ModelOptLinearMethod")
    return LOADER.of_weights_alone if any(one.akey is None for one in named) else LOADER  # type: ignore[union-attr]


def draft_problems(vllm_config: Any, checkpoint: Checkpoint | None) -> list[Problem]:
    """Problems of the drafter that vLLM was given (None: it cannot be read), and of its settings."""
    asked, target = vllm_config.speculative_config, vllm_config.model_config
    found, where = [], "--speculative-config"
    if asked.rejection_sample_method not in EXACT:
        what = f"rejection_sample_method {asked.rejection_sample_method} changes what the target would have said"
        found.append(Problem(what, where, "use standard"))
    if checkpoint is not None:
        # vLLM itself says which devices, number formats and slices a layout does not run with.
        where = str(checkpoint.folder)
        found += [*checkpoint.problems, *storage_problems(checkpoint, 1, where, dtype="bfloat16", on_cpu=False)]
    if checkpoint is None or checkpoint.config is None:
        return found
    sizes = (target.get_vocab_size(), target.get_hidden_size(), target.get_total_num_hidden_layers())
    shape = TargetShape(target.model, target.hf_text_config.model_type, *sizes, target.max_model_len)
    v1_runner = not vllm_config.use_v2_model_runner
    found += layer_problems(checkpoint.config, "vLLM")
    found += drafter_problems(checkpoint.config, shape, max_model_len=target.max_model_len, v1_runner=v1_runner)
    most = checkpoint.config.block_size - 1
    if asked.num_speculative_tokens > most:
        # vLLM would draft slots for which the drafter was not trained; none of them would be accepted.
        what = f"num_speculative_tokens {asked.num_speculative_tokens} is more than block_size - 1 = {most}"
        found.append(Problem(what, where, f"use {most} or less: vLLM does not count the anchor"))
    return found


def reading_problems(model: Any, checkpoint: Checkpoint | None) -> Iterator[Problem]:
    """Windows and causality of the layers that vLLM built, where the checkpoint has others."""
    if checkpoint is None or checkpoint.config is None:
        return
    built = [(layer.self_attn.sliding_window, bool(layer.self_attn.causal)) for layer in model.model.layers]
    meant = [(kind.window, kind.causal) for kind in checkpoint.config.layers]
    for ours, theirs in [pair for pair in zip(meant, built, strict=False) if pair[0] != pair[1]][:1]:
        what = f"its layers' (window, causal) are {ours}, vLLM reads {theirs}"
        yield Problem(what, str(checkpoint.folder), "dflash-serve convert it --to zlab")
