"""Loads a target, its tokenizer, and a drafter of any dialect, by alias, folder or hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_serve.checkpoint.files import (
    AGAIN,
    INDEX,
    QUANT_CONFIG,
    Header,
    files_with,
    read_headers,
    tokenizer_problems,
)
from dflash_serve.checkpoint.quantization import plain_target_only
from dflash_serve.checkpoint.reader import Checkpoint, finite_problem, load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import local_folder, target_folder, target_source
from dflash_serve.checkpoint.storage import FLOATS
from dflash_serve.checkpoint.target_config import TargetConfig, read_target_headers, target_config
from dflash_serve.checkpoint.target_files import read_target
from dflash_serve.errors import Problem, UserError, raise_problems
from dflash_serve.models.drafter import Drafter, read_hot_tokens, takes_hot_tokens
from dflash_serve.models.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADS = ("lm_head.weight", "embed_tokens.weight")
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
RENAMED = {
    "o": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "qk_norm.0": "self_attn.q_norm",
    "qk_norm.1": "self_attn.k_norm",
}


def load_drafter(
    drafter_or_id: str | Path | Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    dequantise: bool = False,
) -> Drafter:
    """Loads a drafter of any dialect, in eval mode and without gradients; `dtype` None keeps the stored dtypes.

    Args:
        drafter_or_id: folder, hub id or alias, or a checkpoint that is open already.
        dtype: of its weights.
        device: on which they are.
        revision: of a hub id.
        dequantise: decode quantised weights to `dtype` (None = bfloat16); otherwise they are refused.

    Raises:
        UserError: the first of its problems, and how many more there are.
    """
    checkpoint = drafter_or_id if isinstance(drafter_or_id, Checkpoint) else open_checkpoint(drafter_or_id, revision)
    tensors = load_tensors(checkpoint, (dtype or torch.bfloat16) if dequantise else None)
    assert checkpoint.config is not None
    with torch.device("meta"):
        drafter = Drafter(checkpoint.config)
    state = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in tensors.items()}
    drafter.load_state_dict(state, assign=True)
    drafter.map_tokens()
    if takes_hot_tokens(checkpoint.config):
        drafter.hot_tokens = read_hot_tokens(checkpoint.folder, checkpoint.config.vocab_size)
    drafter.rotary.to(device)
    return drafter.eval().requires_grad_(False)


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> TargetModel:
    """Loads a target in `dtype`; None = fp32 on a CPU, bf16 elsewhere.

    Raises:
        UserError: the target is quantised; a tensor is missing, left over, misshapen or has a NaN or infinite value; a
            file is truncated, or there are no safetensors.
    """
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    target = read_target(target_folder(name, revision))
    config = target_config(target)
    headers, problems = read_target_headers(target, config)
    raise_problems(problems)
    weights = _Weights(headers)
    with torch.device("meta"):
        model = TargetModel(config)
    state = {}
    for parameter, _ in model.named_parameters():
        parts = (weights.finite(source, device).to(dtype) for source in sources(parameter, config))
        state[parameter] = torch.cat(list(parts))
    model.load_state_dict(state, assign=True, strict=False)
    if config.tie_word_embeddings:
        model.head.weight = model.embedding
    model.rotary.to(device)
    return model.eval().requires_grad_(False)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer with its chat template.

    Raises:
        UserError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    folder = target_folder(name, revision)
    raise_problems(tokenizer_problems(folder))
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"no usable tokenizer ({str(error).splitlines()[0]})", where=str(folder)) from None


def head_weight(name: str, revision: str | None = None) -> Tensor:
    """The target's head [V, H]: its `lm_head`, or its embedding if both are one tensor. Of a hub id, its file alone.

    Raises:
        UserError: there is neither, or it is quantised.
    """
    source, problems = target_source(name), list[Problem]()
    folder = local_folder(source, revision, files=["config.json", QUANT_CONFIG, INDEX])
    files = files_with(folder, HEADS, problems)
    folder = folder if Path(source).is_dir() else local_folder(source, revision, files=files)
    headers = read_headers(folder, problems, only=files)
    raise_problems(problems)
    for ending in HEADS:
        found = [stored for stored in headers if stored.endswith(ending)]
        if len(found) == 1:
            if headers[found[0]].dtype not in FLOATS:
                raise_problems(plain_target_only(read_target(folder).recipe, headers, folder))
            return _Weights(headers)[found[0]]
    do = "give the target's folder or hub id"
    raise UserError("neither lm_head.weight nor embed_tokens.weight", where=str(folder), do=do)


def sources(name: str, config: TargetConfig) -> list[str]:
    """Hugging Face names of the tensors that are stacked into our parameter `name`, in order."""
    top = {
        "embedding": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in top:
        return [top[name]]
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return [f"model.layers.{index}.{part}.{kind}" for part in FUSED.get(module) or (RENAMED[module],)]


def is_stored_in_bfloat16(folder: Path) -> bool:
    """Every weight in a target's folder is stored in bfloat16.

    Raises:
        UserError: there are no usable safetensors.
    """
    problems: list[Problem] = []
    headers = read_headers(folder, problems)
    raise_problems(problems)
    return {header.dtype for header in headers.values()} == {"BF16"}


class _Weights:
    """Tensors of a target's files, read when they are asked for; each file is opened once."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self.headers = headers
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self.headers[name].file
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot be read ({error})", where=str(path), do=AGAIN) from None
        return tensor

    def finite(self, name: str, device: torch.device | str) -> Tensor:
        """The tensor on a device.

        Raises:
            UserError: it has a NaN or infinite value.
        """
        tensor = self[name].to(device)
        problem = finite_problem(name, tensor, self.headers[name].file, AGAIN)
        if problem is not None:
            raise problem.error()
        return tensor
