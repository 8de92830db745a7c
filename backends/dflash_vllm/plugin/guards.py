"""Checks of a drafter inside vLLM: its files, and the model that vLLM built from them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from dflash_serve.checkpoint.reader import Checkpoint, is_plain, open_checkpoint
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.target import TargetShape
from dflash_serve.checkpoint.tensors import parts_of, plain_only
from dflash_serve.errors import Problem, UserError
from dflash_vllm.drafter_rules import drafter_problems

logger = logging.getLogger(__name__)
EXACT = ("standard", "block")  # acceptance tests that change no distribution; `synthetic` and `fly` do
OF_THE_TARGET = ("embed_tokens", "lm_head", "mask_embedding", "d2t")
"""Parts of the names of parameters that a checkpoint need not fill."""
SKIPPED = ("t2d", "d2t", "rotary_emb.")  # parts of the names of tensors that no parameter of the drafter takes


def draft_problems(vllm_config: Any) -> list[Problem]:
    """Problems of the drafter that vLLM was given, and of its settings."""
    asked, target, checkpoint = vllm_config.speculative_config, vllm_config.model_config, draft_checkpoint(vllm_config)
    found, where = [], "--speculative-config"
    if asked.rejection_sample_method not in EXACT:
        what = f"rejection_sample_method {asked.rejection_sample_method} changes what the target would have said"
        found.append(Problem(what, where, "use standard"))
    if checkpoint is not None:
        found += [*checkpoint.problems, *plain_only(checkpoint.quantization, "vLLM", str(checkpoint.folder))]
    if checkpoint is None or checkpoint.config is None:
        return found
    sizes = (target.get_vocab_size(), target.get_hidden_size(), target.get_total_num_hidden_layers())
    shape = TargetShape(target.model, target.hf_text_config.model_type, *sizes, target.max_model_len)
    v1_runner = not vllm_config.use_v2_model_runner
    found += drafter_problems(checkpoint.config, shape, max_model_len=target.max_model_len, v1_runner=v1_runner)
    most = checkpoint.config.block_size - 1
    if asked.num_speculative_tokens > most:
        # vLLM would draft slots for which the drafter was not trained; none of them would be accepted.
        what = f"num_speculative_tokens {asked.num_speculative_tokens} is more than block_size - 1 = {most}"
        found.append(Problem(what, where, f"use {most} or less: vLLM does not count the anchor"))
    return found


def draft_checkpoint(vllm_config: Any) -> Checkpoint | None:
    """The drafter's files; None where they cannot be found, or have a head that we do not know."""
    draft = vllm_config.speculative_config.draft_model_config
    try:
        folder = local_folder(draft.model, draft.revision)
    except UserError as error:
        logger.warning("dflash-serve: only the names of the drafter's tensors are checked: %s", error)
        return None
    return open_checkpoint(folder) if is_plain(folder) else None


def reading_problems(model: Any, vllm_config: Any) -> Iterator[Problem]:
    """Windows and causality of the layers that vLLM built, where the checkpoint has others."""
    checkpoint = draft_checkpoint(vllm_config)
    if checkpoint is None or checkpoint.config is None:
        return
    built = [(layer.self_attn.sliding_window, bool(layer.self_attn.causal)) for layer in model.model.layers]
    meant = [(kind.window, kind.causal) for kind in checkpoint.config.layers]
    if built != meant:
        differing = [pair for pair in zip(meant, built, strict=False) if pair[0] != pair[1]]
        what = f"its layers' (window, causal) are {differing[0][0]}, vLLM reads {differing[0][1]}"
        yield Problem(what, str(checkpoint.folder), "dflash-serve convert it --to zlab")


def tensor_problems(names: Iterable[str], parameters: Collection[str]) -> Iterator[Problem]:
    """Tensors that no parameter takes, and parameters that no tensor fills."""
    taken = (name.replace("midlayer.", "layers.0.") for name in names if not any(part in name for part in SKIPPED))
    found = {part for name in taken for part in parts_of(name)}
    wanted = {part for name in parameters for part in parts_of(name)}
    unknown = sorted(found - wanted)
    missing = sorted(name for name in wanted - found if not any(part in name for part in OF_THE_TARGET))
    parts = [f"unknown tensors: {', '.join(unknown)}"] if unknown else []
    parts += [f"missing: {', '.join(missing)}"] if missing else []
    if parts:
        do = "`dflash-serve inspect` on the drafter's folder says more"
        yield Problem(f"the drafter does not fit its config.json: {'; '.join(parts)}", do=do)
