"""Does this drafter belong to this target? Found out from two config.json files, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.target_shape import TargetShape
from dflash_serve.errors import Problem


def check_pairing(config: DrafterConfig, target: TargetShape) -> list[Problem]:
    """Everything in which the drafter cannot be this target's."""
    where = f"drafter for {target.name}"
    return [Problem(what, where, do) for what, do in _mismatches(config, target)]


def _mismatches(config: DrafterConfig, target: TargetShape) -> Iterator[tuple[str, str]]:
    """(what, do) of each."""
    other = "use the drafter that was trained for this target"
    if config.hidden_size != target.hidden_size:
        yield f"hidden_size is {config.hidden_size}, the target's is {target.hidden_size}", other
    if config.vocab_size != target.vocab_size:
        yield f"vocab_size is {config.vocab_size}, the target's is {target.vocab_size}", other
    if config.num_target_layers not in (None, target.num_layers):
        yield f"trained for a target of {config.num_target_layers} layers, this one has {target.num_layers}", other
    beyond = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
    if beyond:
        yield (
            f"target_layer_ids {list(config.target_layer_ids)} name {beyond}, but the target has layers "
            f"0..{target.num_layers - 1} (ids are 0-based layer outputs)",
            "correct target_layer_ids (speculators and GGUF count from 1), or use this target's drafter",
        )
    token = config.mask_token_id
    if token is not None and token >= target.vocab_size:
        yield (
            f"mask_token_id {token} has no row in the target's embedding of {target.vocab_size}",
            "correct mask_token_id; a special token added after training does not count",
        )
    longest = target.max_position_embeddings
    if longest is not None and config.block_size > longest:
        yield f"block_size {config.block_size} exceeds the target's {longest} positions", "correct block_size"
