"""Targets that the embedded engine does not run, such as mixtures of experts: transformers computes their features.

Their answers come from a server (`data.answers.server`). Weights are read by transformers' own classes; code from a
checkpoint is never run. MXFP4 weights are computed in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig, TransformerConfig
from dflash_serve.checkpoint.dialects.keys import read_rope
from dflash_serve.checkpoint.section import ConfigSection
from dflash_serve.checkpoint.target_config import is_embedded, read_target_config
from dflash_serve.checkpoint.target_files import read_target
from dflash_serve.common.extras import need
from dflash_serve.common.settings import describe
from dflash_serve.errors import UserError, raise_problems

READ_FORMATS = (None, "mxfp4")  # Formats of weights that transformers turns into bfloat16 exactly
PROBED = 16  # Tokens of the pass that shows whether features, norm and head are where they are looked for
TOLERANCE = 0.02  # Of the largest logit: bfloat16 in another order of sums


def other_family(folder: Path) -> str | None:
    """The model_type of the target in `folder` if the embedded engine does not run it, else None."""
    found = read_target(folder).raw.get("model_type")
    return None if is_embedded(found) else str(found)


def read_sizes(folder: Path) -> TransformerConfig:
    """Sizes of any target, from its config.json, that its drafter takes over.

    Raises:
        UserError: a size is absent, a RoPE that drafters do not have, or quantised weights other than MXFP4.
    """
    if other_family(folder) is None:
        return read_target_config(folder)
    target = read_target(folder)
    path, stored, model = str(target.path), target.recipe.format, target.model
    if stored not in READ_FORMATS:
        what = f"the target is quantised ({stored}), and its features are computed in bfloat16"
        raise UserError(what, where=path, do="use its unquantised checkpoint")
    # a drafter has one kind of layer: the RoPE of full attention, over all of a head
    read = {*RopeConfig.model_fields, "rope_theta", "rope_type", "type"}
    section = ConfigSection({"rope_parameters": {key: model.rope[key] for key in model.rope.keys() & read}}, path, [])
    rope = read_rope(section)
    raise_problems(section.problems)
    heads, hidden = model.required("num_attention_heads"), model.required("hidden_size")
    optional = {key: model.get(key) for key in ("max_position_embeddings", "rms_norm_eps")}
    try:
        return TransformerConfig.model_validate(
            {
                "vocab_size": model.required("vocab_size"),
                "hidden_size": hidden,
                "intermediate_size": model.required("intermediate_size"),
                "num_attention_heads": heads,
                "num_key_value_heads": model.get("num_key_value_heads") or heads,
                "head_dim": model.get("head_dim") or hidden // heads,
                "layers": (AttentionKind(causal=True),) * (model.depth or model.required("num_hidden_layers")),
                "rope": rope,
                **{key: value for key, value in optional.items() if value is not None},
            }
        )
    except ValidationError as error:
        raise UserError(describe(error), where=path, do="give a language model") from None


class OtherTarget(nn.Module):
    """A causal language model of transformers, of which features, embedding, final norm and head are used."""

    def __init__(self, model: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.config, self.model, decoder = config, model, model.get_decoder()
        self.layers, self.norm, self.head = decoder.layers, decoder.norm, model.get_output_embeddings()
        self.embedding: Tensor = model.get_input_embeddings().weight

    @torch.no_grad()
    def features(self, sequences: Sequence[Tensor], target_layer_ids: Sequence[int]) -> list[Tensor]:
        """Outputs of layers for whole sequences, int64 [length] each -> [length, F*H] each, in the order of the ids.

        Shorter sequences are padded behind their end, where no token that counts sees them: every layer is causal.
        """
        found: dict[int, Tensor] = {}

        def keep(index: int, _module: nn.Module, _inputs: object, output: Any) -> None:
            found[index] = output[0] if isinstance(output, tuple) else output

        hooks = [self.layers[index].register_forward_hook(partial(keep, index)) for index in target_layer_ids]
        try:
            self.model.get_decoder()(pad_sequence(list(sequences), batch_first=True), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        rows = torch.cat([found[index] for index in target_layer_ids], dim=-1)
        return [part[: len(tokens)] for part, tokens in zip(rows, sequences, strict=True)]

    @torch.no_grad()
    def problem(self) -> str | None:
        """Why a drafter cannot be trained on this model; None if it can.

        A drafter reads embedding rows and the target's head reads the last layer's normed output as they are: a model
        that scales either (Gemma) would train a drafter that no engine runs as trained.
        """
        inputs: list[Tensor] = []

        def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        tokens = torch.arange(PROBED, device=self.embedding.device) % self.config.vocab_size
        hook = self.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            logits = self.model(tokens[None], use_cache=False).logits[0].float()
        finally:
            hook.remove()
        if not torch.equal(inputs[0][0], self.embedding[tokens]):
            return "its layers do not read the rows of its embedding as they are"
        ours = self.head(self.norm(self.features([tokens], [self.config.num_layers - 1])[0])).float()
        if (ours - logits).abs().max() > TOLERANCE * logits.abs().max():
            return "its logits are not its head's product with the last layer's normed output"
        return None

    def norm_weight(self) -> Tensor:
        """Factors of the final norm [H], however it keeps them."""
        ones = self.embedding.new_ones(1, self.config.hidden_size)
        factors: Tensor = self.norm(ones)[0]
        return factors

    def pack(self) -> None:
        """A `TargetModel` changes its layout here; this one keeps it."""


def load_other_target(folder: Path, device: torch.device) -> OtherTarget:
    """The target in `folder`, in bfloat16 and without gradients.

    Raises:
        UserError: transformers cannot read it, or a drafter cannot be trained on it.
    """
    need("train", "accelerate")  # transformers wants it for MXFP4, and to load onto a GPU without a copy in host memory
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

    more: dict[str, Any] = {"device_map": {"": device}}
    if read_target(folder).recipe.format == "mxfp4":
        more["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.bfloat16, use_safetensors=True, **more
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"transformers cannot read it ({str(error).splitlines()[0]})", where=str(folder)) from None
    target = OtherTarget(model.eval().requires_grad_(False), read_sizes(folder))
    if problem := target.problem():
        raise UserError(f"{problem}: no drafter can be trained on it", where=str(folder), do="use another target")
    return target


def empty_other_target(folder: Path) -> OtherTarget:
    """The target on the current device without weights, for a count of its memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    return OtherTarget(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), read_sizes(folder))
