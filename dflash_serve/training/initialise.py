"""The drafter's shape, taken from its target, and its first weights: the target's, or another drafter's."""

from __future__ import annotations

import torch
from pydantic import ValidationError
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.target import TargetConfig
from dflash_serve.common.settings import describe
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import ConvolvedLayer, Drafter
from dflash_serve.models.loader import load_drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.training.recipe import DrafterSection

HEAD_NORM = 1.5
"""First value of the q/k norms: unit rows would leave the scores of a target without such norms too flat."""
NOISE = 0.002
RANDOM = 0.02
FRESH = ("target", "random")  # first weights that do not come from another drafter
ADDED = ("convolution", "markov", "confidence")  # parts that a given drafter without them gets, idle at first


def drafter_config(section: DrafterSection, target: TargetConfig) -> DrafterConfig:
    """The description of a drafter for this target.

    Raises:
        UserError: the recipe asks for layers or a mask token that the target does not have.
    """
    ids = section.target_layer_ids or uniform_target_layer_ids(target.num_layers, section.num_features)
    try:
        return DrafterConfig(
            block_size=section.block_size,
            target_layer_ids=ids,
            num_target_layers=target.num_layers,
            mask_token_id=section.mask_token_id,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            layers=(AttentionKind(),) * section.num_layers,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            slots=section.slots,
            markov=section.markov,
            confidence=section.confidence,
            convolution=section.convolution,
        )
    except ValidationError as error:
        raise UserError(describe(error), where="drafter", do="correct the recipe") from None


def check_drafter(section: DrafterSection, target: TargetConfig) -> None:
    """Checks that `new_drafter` can make the drafter; reads no weights.

    Raises:
        UserError: the recipe does not fit the target, or the drafter to go on from is described otherwise or not there.
    """
    wanted = drafter_config(section, target)
    if section.init not in FRESH:
        _refuse_other(wanted, read_config(section.init)[0], section.init)


@torch.no_grad()
def new_drafter(config: DrafterConfig, target: TargetModel, *, init: str, seed: int) -> Drafter:
    """A drafter in fp32 on the target's device, before training; the same for the same seed.

    Args:
        init: as in the recipe.

    Raises:
        UserError: the drafter to go on from cannot be read, or is described otherwise.
    """
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, RANDOM, generator=generator)
    _make_idle(drafter)
    drafter.norm.weight.copy_(target.get_parameter("norm.weight").float().cpu())
    if init == "target":
        _from_target(drafter, target, generator)
    elif init not in FRESH:
        given = load_drafter(init, dtype=torch.float32)
        _refuse_other(config, given.config, init)
        drafter.load_state_dict({**drafter.state_dict(), **given.state_dict()})  # parts it does not have stay idle
    return drafter.float().to(target.embedding.device)


def _make_idle(drafter: Drafter) -> None:
    for layer in drafter.layers:
        if isinstance(layer, ConvolvedLayer):
            layer.attention_conv.make_idle()
            layer.mlp_conv.make_idle()
    if drafter.markov_head is not None:
        drafter.markov_head.make_idle()
    if drafter.confidence_head is not None:
        drafter.confidence_head.make_idle()


def _from_target(drafter: Drafter, target: TargetModel, generator: torch.Generator) -> None:
    # layers from the target's last ones; the context starts as its deepest feature, normed as in the target
    config, depth = drafter.config, target.config.num_layers
    state: dict[str, Tensor] = {}
    for index in range(config.num_layers):
        source = max(0, depth - config.num_layers + index)
        state |= {f"layers.{index}.{name}": weight for name, weight in target.layer_weights(source).items()}
        for norm in ("q_norm", "k_norm"):
            name = f"layers.{index}.self_attn.{norm}.weight"
            state.setdefault(name, torch.full((config.head_dim,), HEAD_NORM))
    after = min(depth - 1, config.target_layer_ids[-1] + 1)
    state["hidden_norm.weight"] = target.layer_weights(after)["input_layernorm.weight"]
    drafter.load_state_dict({name: weight.float().cpu() for name, weight in state.items()}, strict=False)
    size = config.hidden_size
    drafter.fc.weight.normal_(0.0, NOISE, generator=generator)
    drafter.fc.weight[:, -size:] += torch.eye(size)


def _refuse_other(config: DrafterConfig, given: DrafterConfig, name: str) -> None:
    without = {head: None for head in ADDED if getattr(given, head) is None}
    config = config.model_copy(update={**without, "block_size": given.block_size})  # no weight depends on the latter
    wanted, found = config.model_dump(), given.model_dump()
    different = ", ".join(key for key in wanted if wanted[key] != found[key])
    if different:
        do = "give the recipe its values, or start from the target"
        raise UserError(f"its {different} differ from the recipe's", where=f"drafter.init {name}", do=do)
