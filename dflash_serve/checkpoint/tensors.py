"""Tensors of a drafter's files, compared with those that its config.json asks for. No torch.

Each expected tensor must be there once, in the shape and dtype of its storage format and with its scales; no other
tensor may be there. Published checkpoints' own names are known (`ALIASES`, `FUSED`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import PLAIN_DRAFTER, DrafterConfig, expected_tensors
from dflash_serve.checkpoint.files import MANIFEST, Header
from dflash_serve.checkpoint.storage import FLOATS, KV_SCALES, LEAVES, OPTIONAL, TENSOR, Format, Leaf, Scheme
from dflash_serve.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
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
"""Other names of our tensors: engines' mappers know some, ModelOpt, TorchSpec and z-lab's own code write the others."""
RECOMPUTED = "rotary_emb."  # part of the names of rotary buffers in old checkpoints, which are computed instead
D2T, T2D = "d2t", "t2d"
"""Maps of a reduced draft vocabulary: int64 target id - draft id, and a bool mask of the draftable target ids."""
SCALES = ("weight_scale", "weight_scale_2", "input_scale")  # tensors that ModelOpt stores beside a quantised weight
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused products of engines, which some checkpoints store fused too -> their parts in the order of rows."""
ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
"""Modules whose outputs RoPE turns."""
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


Schemes = Callable[[str], Scheme]
"""Storage of a quantised module by its name."""


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
    schemes: Schemes | None = None,
) -> dict[str, Piece]:
    """Finds every expected tensor with its scales; missing, extra, misshapen and doubled ones become `problems`.

    Args:
        headers: the tensors of the files.
        config: the drafter that they should make.
        problems: added to.
        where: the folder, for messages about missing tensors.
        copies: names that repeat the target's own tensors in this dialect; they are skipped.
        schemes: storage of the quantised weights, by their modules; None = the checkpoint declares none.
    """
    shapes = expected_tensors(config)
    copies = {*copies, T2D} if D2T in shapes else copies
    skipped = {name for name in headers if _weight_of(name) in copies and _weight_of(proper_name(name)) not in shapes}
    if schemes is not None:
        skipped |= {name for name in headers if name.rpartition(".")[2] in KV_SCALES}
    ours = {name: header for name, header in headers.items() if name not in skipped and RECOMPUTED not in name}
    mask = headers.get(T2D) if T2D in skipped else None
    if mask is not None and (mask.shape, mask.dtype) != ((config.vocab_size,), "BOOL"):  # d2t holds the same map
        what = f"tensor {T2D} is {mask.dtype} {list(mask.shape)}, not BOOL [{config.vocab_size}]"
        problems.append(Problem(what, str(mask.file), ONE_DRAFTER))
    packed = next((name for name, h in ours.items() if _is_packed(name, h.dtype)), None)
    if schemes is None and packed is not None:  # every other problem would follow from this one
        what = f"the weights are quantised (tensor {packed} is {ours[packed].dtype}), but no file names the format"
        problems.append(Problem(what, str(ours[packed].file), "use the bf16 drafter, or add its hf_quant_config.json"))
        return {}
    return _Match(config, problems, schemes, quantised_modules(ours, config, schemes)).run(ours, where)


def quantised_modules(
    headers: Mapping[str, Header], config: DrafterConfig, schemes: Schemes | None
) -> dict[str, Scheme]:
    """Our names of the modules whose numbers are stored in the declared format -> their storage."""
    shapes, found = expected_tensors(config), dict[str, Scheme]()
    if schemes is None:
        return found
    for name, header in headers.items():
        for part in parts_of(name):
            module, _, leaf = part.rpartition(".")
            scheme = schemes(module)
            if (leaf, header.dtype) == (scheme.main, scheme.dtype) and len(shapes.get(f"{module}.weight", ())) == 2:
                found[module] = scheme
    return found


class _Match:
    """Comparison of the expected tensors with the stored ones."""

    def __init__(
        self,
        config: DrafterConfig,
        problems: list[Problem],
        schemes: Schemes | None,
        quantised: Mapping[str, Scheme],
    ) -> None:
        self.config, self.problems = config, problems
        self.form = next(iter(quantised.values())).format if quantised else "bf16"
        self.leaves = stored_tensors(config, quantised)
        self.pieces: dict[str, Piece] = {}
        self.unusable: set[str] = set()

    def run(self, headers: Mapping[str, Header], where: str) -> dict[str, Piece]:
        for name, header in headers.items():
            self._take(name, header)
        for name, leaf in self.leaves.items():
            if name not in self.pieces and name.rpartition(".")[2] not in OPTIONAL:
                self.problems.append(Problem(f"tensor {name} {list(leaf.shape)} is missing", where, ONE_DRAFTER))
        return {name: piece for name, piece in self.pieces.items() if name not in self.unusable}

    def _take(self, name: str, header: Header) -> None:
        parts = parts_of(name)
        if any(part not in self.leaves for part in parts):
            self._note(header, *self._extra(name, header))
            return
        leaves = [self.leaves[part] for part in parts]
        first = leaves[0]
        cut = bool(first.shape) and first.by_rows
        wanted = (sum(leaf.shape[0] for leaf in leaves), *first.shape[1:]) if cut else first.shape
        fault = self._fault(name, header, wanted, parts[0])
        if fault:
            self._note(header, *fault)
            self.unusable.update(parts)
        start = 0
        for part, leaf in zip(parts, leaves, strict=True):
            if part in self.pieces:
                twice = f"tensor {part} is there twice: {self.pieces[part].stored_name} and {name}"
                self._note(header, twice, "keep one")
            rows = slice(start, start + leaf.shape[0]) if cut and len(parts) > 1 else None
            self.pieces[part] = Piece(header.file, name, rows)
            start = rows.stop if rows else 0

    def _note(self, header: Header, what: str, do: str) -> None:
        self.problems.append(Problem(what, str(header.file), do))

    def _fault(self, name: str, header: Header, wanted: tuple[int, ...], ours: str) -> tuple[str, str] | None:
        # (what, do) for an expected tensor.
        if not replace(self.leaves[ours], shape=wanted).takes(header.shape):
            return _misshapen(name, header.shape, wanted, self.config)
        good = self.leaves[ours].dtypes
        if header.dtype in good:
            return None
        what = f"tensor {name} is {header.dtype}, not {' or '.join(sorted(good))} as {self.form} drafters store it"
        return what, ONE_DRAFTER

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
        if name.rpartition(".")[2] in LEAVES and all(weight in self.leaves for weight in weights):
            return f"tensor {name} {shape} belongs to no quantised weight", ONE_DRAFTER
        return f"tensor {name} {shape} is not part of a DFlash drafter of this config.json", ONE_DRAFTER


def _is_packed(name: str, dtype: str) -> bool:
    return (name.endswith(PACKED) or dtype not in FLOATS) and not _is_map(name)


def _weight_of(name: str) -> str:
    # Name of the weight that a scale belongs to, without the optional prefix; other names as they are.
    name = name.removeprefix("model.")
    module, _, leaf = name.rpartition(".")
    return f"{module}.weight" if leaf in LEAVES else name


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
    module, _, leaf = name.rpartition(".")
    if leaf in LEAVES:
        return f"{ALIASES.get(f'{module}.weight', f'{module}.weight').removesuffix('.weight')}.{leaf}"
    return ALIASES.get(name, name)


def parts_of(name: str) -> list[str]:
    """Our names of the tensors in a checkpoint's tensor, in order: one, or the parts of a fused product."""
    name = proper_name(name)
    for fused, pieces in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{piece}.") for piece in pieces]
    return [name]


def is_product(name: str) -> bool:
    """One of our tensors is the weight of a linear layer: a product of a decoder layer, `fc`, or a head of its own."""
    return name.endswith("_proj.weight") or name in ("fc.weight", "lm_head.weight")


def is_rotated(name: str, tensor: Tensor) -> bool:
    """RoPE turns the rows of one of our tensors, which has more than one value."""
    module, _, leaf = name.rpartition(".")
    return module.endswith(ROTATED) and tensor.numel() > 1 and leaf not in ("weight_shape", "weight_g_idx")


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
    if format != "nvfp4" and not (format == "fp8" and (folder / MANIFEST).is_file()):
        return []
    shared: Collection[str] = TENSOR if format == "nvfp4" else ("weight_scale", "input_scale")
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
    do = "`dflash-serve convert` gives them one and says what it rounds"
    return [Problem(what, str(folder), do)]


def _stored_bytes(header: Header) -> bytes:
    with header.file.open("rb") as file:
        file.seek(header.start)
        return file.read(header.bytes)


def stored_tensors(config: DrafterConfig, quantised: Mapping[str, Scheme]) -> dict[str, Leaf]:
    """Every tensor as a checkpoint stores it, with those of its quantised modules.

    Args:
        config: the drafter.
        quantised: our names of modules -> their storage.
    """
    leaves: dict[str, Leaf] = {}
    for name, shape in expected_tensors(config).items():
        module = name.removesuffix(".weight")
        if module == name or module not in quantised:
            leaves[name] = Leaf(shape, {"I64"} if name == D2T else FLOATS, is_weight=True)
            continue
        rows, columns = shape
        leaves |= {f"{module}.{leaf}": one for leaf, one in quantised[module].tensors(rows, columns).items()}
    return leaves
