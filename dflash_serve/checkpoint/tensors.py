"""Tensors of a drafter's files, compared with those that its config.json asks for. No torch.

Each expected tensor must be there once, in the shape and dtype of its storage format and with its scales; no other
tensor may be there. Published checkpoints' own names are known (`ALIASES`, `FUSED`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import PLAIN_DRAFTER, DrafterConfig, expected_tensors
from dflash_serve.checkpoint.files import MANIFEST, Header
from dflash_serve.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_serve.checkpoint.formats import Format


ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "draft_id_to_target_id": "d2t",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "gate_proj.weight": "markov_head.gate_proj.weight",
    "gate_proj.bias": "markov_head.gate_proj.bias",
    "joint_proj.weight": "markov_head.joint_proj.weight",
    "joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
"""Other names of our tensors: SGLang's and vLLM's mappers know some, ModelOpt and z-lab's own code write the others."""
RECOMPUTED = "rotary_emb."  # part of the names of rotary buffers in old checkpoints, which are computed instead
D2T, T2D = "d2t", "t2d"
"""Maps of a reduced draft vocabulary: int64 target id - draft id, and a bool mask of the draftable target ids."""
FLOATS: Collection[str] = {"F64", "F32", "F16", "BF16"}  # safetensors dtypes of plain weights
STORED_AS: Mapping[Format, str] = {"fp8": "F8_E4M3", "nvfp4": "U8"}  # format -> safetensors dtype of its weights
SCALES = ("weight_scale", "weight_scale_2", "input_scale")  # tensors that ModelOpt stores beside a quantised weight
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused products of engines, which some checkpoints store fused too -> their parts in the order of rows."""
ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
"""Modules whose outputs RoPE turns."""
BLOCK = 16  # values along the input that share an NVFP4 scale
PACKED = (
    *("_packed", "_scale", "_scale_2", "_scale_inv", "_zero_point"),
    *("weight_shape", "qweight", "qzeros", "scales", "g_idx"),
)
"""Endings of the tensors that quantisers (compressed-tensors, ModelOpt, GPTQ, AWQ) put beside or instead of weights."""
ONE_DRAFTER = "use weights and config.json of one drafter"
HEADS_BY_TENSOR = {
    "DFlash2": ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    "DSpark": ("markov_head.", "confidence_head."),
    "Domino": ("prefix_gru.", "embed_proj."),
    "LiLiCorr": ("lilicorr.",),
    "Laguna": ("aux_hidden_norms.", ".g_proj."),
}
"""Head -> parts of tensor names that only it has (exports of z-lab, ModelOpt and DeepSpec)."""
SUPPORTED_HEADS = ("DFlash2", "DSpark")


@dataclass(frozen=True)
class Piece:
    """Place of one of our tensors: a stored tensor, or rows of it."""

    file: Path
    stored_name: str
    rows: slice | None = None

    def of(self, stored: Tensor) -> Tensor:
        return stored if self.rows is None else stored[self.rows]


def match_tensors(
    headers: Mapping[str, Header],
    config: DrafterConfig,
    problems: list[Problem],
    *,
    where: str,
    copies: Collection[str] = (),
    format: Format | None = None,
) -> dict[str, Piece]:
    """Finds every expected tensor with its scales; missing, extra, misshapen and doubled ones become `problems`.

    Args:
        headers: the tensors of the files.
        config: the drafter that they should make.
        problems: added to.
        where: the folder, for messages about missing tensors.
        copies: names that repeat the target's own tensors in this dialect; they are skipped.
        format: of the quantised weights; None = the checkpoint declares none.
    """
    shapes = expected_tensors(config)
    copies = {*copies, T2D} if D2T in shapes else copies
    skipped = {name for name in headers if name.removeprefix("model.") in copies and proper_name(name) not in shapes}
    ours = {name: header for name, header in headers.items() if name not in skipped and RECOMPUTED not in name}
    mask = headers.get(T2D) if T2D in skipped else None
    if mask is not None and (mask.shape, mask.dtype) != ((config.vocab_size,), "BOOL"):  # d2t holds the same map
        what = f"tensor {T2D} is {mask.dtype} {list(mask.shape)}, not BOOL [{config.vocab_size}]"
        problems.append(Problem(what, str(mask.file), ONE_DRAFTER))
    packed = next((name for name, h in ours.items() if _is_packed(name, h.dtype)), None)
    if format is None and packed is not None:  # every other problem would follow from this one
        what = f"the weights are quantised (tensor {packed} is {ours[packed].dtype}), but no file names the format"
        problems.append(Problem(what, str(ours[packed].file), "use the bf16 drafter, or add its hf_quant_config.json"))
        return {}
    stored = [name for name, header in ours.items() if format is not None and header.dtype == STORED_AS[format]]
    weights = [part for name in stored if name.endswith(".weight") for part in parts_of(name)]
    quantised = {name.removesuffix(".weight") for name in weights}
    return _Match(config, problems, format, quantised).run(ours, where)


class _Match:
    """Comparison of the expected tensors with the stored ones."""

    def __init__(
        self, config: DrafterConfig, problems: list[Problem], format: Format | None, quantised: Collection[str]
    ) -> None:
        self.config, self.problems, self.format = config, problems, format
        self.shapes = stored_tensors(config, format, quantised)
        self.pieces: dict[str, Piece] = {}
        self.unusable: set[str] = set()

    def run(self, headers: Mapping[str, Header], where: str) -> dict[str, Piece]:
        for name, header in headers.items():
            self._take(name, header)
        for name, shape in self.shapes.items():
            if name not in self.pieces and not name.endswith(".input_scale"):  # without it, weights alone are quantised
                self.problems.append(Problem(f"tensor {name} {list(shape)} is missing", where, ONE_DRAFTER))
        return {name: piece for name, piece in self.pieces.items() if name not in self.unusable}

    def _take(self, name: str, header: Header) -> None:
        parts = parts_of(name)
        if any(part not in self.shapes for part in parts):
            self._note(header, *self._extra(name, header))
            return
        shapes = [self.shapes[part] for part in parts]
        wanted = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
        fault = self._fault(name, header, wanted, parts[0])
        if fault:
            self._note(header, *fault)
            self.unusable.update(parts)
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            if part in self.pieces:
                twice = f"tensor {part} is there twice: {self.pieces[part].stored_name} and {name}"
                self._note(header, twice, "keep one")
            rows = slice(start, start + shape[0]) if shape and len(parts) > 1 else None
            self.pieces[part] = Piece(header.file, name, rows)
            start = rows.stop if rows else 0

    def _note(self, header: Header, what: str, do: str) -> None:
        self.problems.append(Problem(what, str(header.file), do))

    def _fault(self, name: str, header: Header, wanted: tuple[int, ...], ours: str) -> tuple[str, str] | None:
        # (what, do) for an expected tensor; a scale of one number may have any rank.
        found = () if not wanted and prod(header.shape) == 1 else header.shape
        if found != wanted:
            return _misshapen(name, header.shape, wanted, self.config)
        module, _, leaf = ours.rpartition(".")
        good: Collection[str] = {"I64"} if ours == D2T else FLOATS
        if self.format and leaf == "weight" and f"{module}.weight_scale" in self.shapes:
            good = {STORED_AS[self.format]}
        elif leaf == "weight_scale" and wanted:
            good = {"F8_E4M3"}
        if header.dtype in good:
            return None
        what = f"tensor {name} is {header.dtype}, not {' or '.join(sorted(good))} as {self.format or 'bf16'} drafters"
        return f"{what} store it", ONE_DRAFTER

    def _extra(self, name: str, header: Header) -> tuple[str, str]:
        known, shape = proper_name(name), list(header.shape)
        head = next((head for head, parts in HEADS_BY_TENSOR.items() if any(part in known for part in parts)), None)
        if head in SUPPORTED_HEADS:
            return f"tensor {name} {shape} belongs to a {head} head, which config.json does not have", ONE_DRAFTER
        if head is not None:
            return f"tensor {name} {shape} belongs to a {head} head, which is not supported yet", PLAIN_DRAFTER
        if _is_map(name):
            what = f"tensor {name} {shape} maps a reduced draft vocabulary, which config.json does not have"
            return what, "add draft_vocab_size, or remove the tensor"
        whole = {"embed_tokens.weight": "an embedding", "lm_head.weight": "a whole head"}.get(known)
        if whole is not None:
            what = f"tensor {name} {shape}: a drafter with {whole} of its own is not supported yet"
            return what, f"{PLAIN_DRAFTER}, or remove the tensor if it is a copy of the target's"
        weights = [part.rpartition(".")[0] + ".weight" for part in parts_of(name)]
        if name.endswith(SCALES) and all(weight in self.shapes for weight in weights):
            return f"tensor {name} {shape} belongs to no quantised weight", ONE_DRAFTER
        return f"tensor {name} {shape} is not part of a DFlash drafter of this config.json", ONE_DRAFTER


def _is_packed(name: str, dtype: str) -> bool:
    return (name.endswith(PACKED) or dtype not in FLOATS) and not _is_map(name)


def _is_map(name: str) -> bool:
    return proper_name(name) in (D2T, T2D)


def _misshapen(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], config: DrafterConfig) -> tuple[str, str]:
    what = f"tensor {name} has shape {list(shape)}, config.json asks for {list(wanted)}"
    if wanted != (config.hidden_size, config.feature_size):
        return what, ONE_DRAFTER
    what += f" = [hidden_size, {len(config.target_layer_ids)} target_layer_ids x hidden_size]"
    return what, f"correct target_layer_ids, or {ONE_DRAFTER}"


def proper_name(name: str) -> str:
    """Our name of a checkpoint's tensor: without the optional prefix, and with aliases resolved."""
    name = name.removeprefix("model.")
    return ALIASES.get(name, name)


def parts_of(name: str) -> list[str]:
    """Our names of the tensors in a checkpoint's tensor, in order: one, or the parts of a fused product."""
    name = proper_name(name)
    for fused, pieces in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{piece}.") for piece in pieces]
    return [name]


def is_rotated(name: str, tensor: Tensor) -> bool:
    """RoPE turns the rows of one of our tensors, which has more than one value."""
    return name.rpartition(".")[0].endswith(ROTATED) and tensor.numel() > 1


def as_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys for RoPE that pairs halves of a head, from those for RoPE that pairs neighbours.

    Queries and keys keep their products: both have the same new order.
    """
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def scale_problems(headers: Mapping[str, Header], format: Format, folder: Path) -> list[Problem]:
    """The problem of products in `FUSED` groups with different scales; reads the scales from the files.

    An engine has one scale for a fused product. TensorRT-LLM asserts that the NVFP4 parts agree; SGLang and vLLM take
    the largest, which makes the other parts' weights too large. All three round FP8 parts again to the largest, which
    costs some accuracy. ModelOpt's exporter relies on this, so FP8 is refused only in folders of `dflash-serve build`.
    """
    if format == "fp8" and not (folder / MANIFEST).is_file():
        return []
    shared = ("weight_scale_2" if format == "nvfp4" else "weight_scale", "input_scale")
    found: dict[tuple[str, str, str], set[bytes]] = {}
    for name, header in headers.items():
        module, _, tensor = proper_name(name).rpartition(".")
        parent, _, product = module.rpartition(".")
        for fused, parts in FUSED.items():
            if product in parts and tensor in shared:
                found.setdefault((parent, fused, tensor), set()).add(_stored_bytes(header))
    apart = list(dict.fromkeys((parent, fused) for (parent, fused, _), values in found.items() if len(values) > 1))
    if not apart:
        return []
    parent, fused = apart[0]
    what = f"{', '.join(FUSED[fused])} of {parent} do not share their scales"
    what += f", nor do {len(apart) - 1} other groups" if len(apart) > 1 else ""
    what += "; engines multiply them as one product with one scale"
    do = "build it again with `dflash-serve build` (0.1.0 wrote such scales), or use the bf16 drafter"
    return [Problem(what, str(folder), do)]


def _stored_bytes(header: Header) -> bytes:
    with header.file.open("rb") as file:
        file.seek(header.start)
        return file.read(header.bytes)


def stored_tensors(
    config: DrafterConfig, format: Format | None, quantised: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor as a checkpoint stores it, with the scales of quantised modules.

    FP8: weight [out, in], one scale. NVFP4: weight [out, in / 2], a scale for 16 values [out, in / 16], and one more.
    Both may have an input_scale, of the activations. (ModelOpt 0.47.)
    """
    shapes = expected_tensors(config)
    for module in quantised:
        if format is None or f"{module}.weight" not in shapes:
            continue
        rows, *columns = shapes[f"{module}.weight"]
        scales: dict[str, tuple[int, ...]] = {"weight_scale": (), "input_scale": ()}
        if format == "nvfp4" and columns:
            shapes[f"{module}.weight"] = (rows, columns[0] // 2)
            scales |= {"weight_scale": (rows, columns[0] // BLOCK), "weight_scale_2": ()}
        shapes |= {f"{module}.{name}": shape for name, shape in scales.items()}
    return shapes
