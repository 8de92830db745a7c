"""Reads drafter checkpoints of any dialect, quantised or not, and reports every fault before an engine is started.

A missing, extra, misshapen or non-finite tensor is an error. Engines are lenient here (SGLang 0.5.23 ignores unknown
and missing names) and then accept no draft. Only `load_*`, `read_tensors` and `assemble` need torch; the rest reads
JSON, safetensors headers and, by numpy, values. `DIALECTS` is the registry of dialects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dflash_serve.checkpoint.catalogue import catalogued_drafter
from dflash_serve.checkpoint.config import BUILD, MASK_EMBEDDING, PLAIN_DRAFTER, DrafterConfig, expected_tensors
from dflash_serve.checkpoint.dialects import latent, speculators, zlab
from dflash_serve.checkpoint.dialects.keys import Dialect, embedding_is_copied, pairs_neighbours
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, Header, read_headers, read_object
from dflash_serve.checkpoint.quantization import Quantization, find_quantization, plain_only
from dflash_serve.checkpoint.section import ConfigSection
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.checkpoint.storage import KV_SCALES, LEAVES, TURNED
from dflash_serve.checkpoint.tensors import (
    D2T,
    HEADS_BY_TENSOR,
    ROTATED,
    SUPPORTED_HEADS,
    T2D,
    Piece,
    as_halves,
    is_product,
    is_rotated,
    match_tensors,
    proper_name,
    quantised_modules,
    scale_problems,
)
from dflash_serve.common.documents import CONFIG, read_json
from dflash_serve.errors import Problem, UserError, first_line, raise_problems

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dflash_serve.checkpoint.formats import Weight
    from dflash_serve.checkpoint.storage import Format, Scheme

DIALECTS: Mapping[str, Dialect] = {
    one.name: one
    for one in (speculators.DIALECT, latent.DIALECT, zlab.MODELOPT, zlab.DEEPSPEC, zlab.SPECFORGE, zlab.DIALECT)
}
"""Name -> dialect. The most specific comes first: ModelOpt's form is z-lab's with more keys, under any architecture."""
LATENT = ("K3DSpark", "DeepseekV3DSpark", "DeepSeekV4DSpark")
"""Parts of architecture names: DSpark heads on a backbone with latent attention. One of them is read (`latent`)."""
MAY_BE_ZERO = (
    "zero_point",
    "qzeros",
    "kernel_projection.weight",
    "markov_w1.weight",
    "markov_w2.weight",
    "confidence_head.proj.weight",
)
"""Endings of tensors that may be all zero: zero points, and heads before their training."""
EMBEDDING = "embed_tokens.weight"
HINT = "`dflash-serve inspect` shows all"
TRAIN_AGAIN = "download the drafter again, or train it again"
PLAIN = ("DFlashDraftModel", "DFlashSpeculator", "Qwen3DFlashModel")
"""Architectures whose tensors are all known. Inside an engine, only names are checked for other architectures."""


@dataclass
class Checkpoint:
    """A drafter folder as read; fields that could not be read keep their defaults."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    config: DrafterConfig | None = None
    dialect: Dialect | None = None
    quantization: Quantization | None = None  # None = not quantised
    neighbours: bool = False  # RoPE pairs neighbours: rows of queries and keys are put in order when they are read
    copies: frozenset[str] = frozenset()  # names of tensors that repeat the target's own and are skipped
    headers: dict[str, Header] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)  # our tensor names, with scales -> their place in the files
    quantised: dict[str, Scheme] = field(default_factory=dict)  # our names of quantised modules -> their storage

    @property
    def mislisted(self) -> list[str]:
        """Linear modules of which the files say otherwise than their tensors: quantised, or left in bf16.

        The tensors are right. Engines go by the lists, in their own names of modules; `convert` writes such lists.
        """
        if self.quantization is None or self.config is None:
            return []
        linear = [name.removesuffix(".weight") for name in expected_tensors(self.config) if is_product(name)]
        return [module for module in linear if (module in self.quantised) != self.quantization.declares(module)]

    @property
    def unshared(self) -> list[Problem]:
        """The problem of products that engines fuse and that have different scales; reads the scales from the files."""
        if self.quantization is None:
            return []
        return scale_problems(self.headers, self.quantization.format, self.folder)


def open_checkpoint(
    folder_or_id: str | Path, revision: str | None = None, *, block_size: int | None = None
) -> Checkpoint:
    """Reads config.json and the safetensors headers and collects every problem; reads no weights.

    Args:
        block_size: B of a drafter whose config.json has no block_size, and which the catalogue does not know either.

    Raises:
        UserError: neither a folder nor an id that can be fetched.
    """
    unreadable: list[Problem] = []
    known = _known_block_size(folder_or_id) or block_size
    checkpoint = _describe(drafter_folder(folder_or_id, revision), unreadable, known)
    checkpoint.problems += unreadable
    if checkpoint.config is not None and checkpoint.dialect is not None and not unreadable:
        schemes = checkpoint.quantization.scheme if checkpoint.quantization else None
        checkpoint.quantised = quantised_modules(checkpoint.headers, checkpoint.config, schemes)
        checkpoint.pieces = match_tensors(
            checkpoint.headers,
            checkpoint.config,
            checkpoint.problems,
            where=str(checkpoint.folder),
            copies=checkpoint.copies,
            schemes=schemes,
        )
        checkpoint.quantised = {name: _with_inputs(checkpoint, name) for name in checkpoint.quantised}
        checkpoint.problems += _storage_problems(checkpoint)
    return checkpoint


def _known_block_size(folder_or_id: str | Path) -> int | None:
    row = catalogued_drafter(str(folder_or_id))
    return None if row is None else row.block_size


def _with_inputs(checkpoint: Checkpoint, module: str) -> Scheme:
    # ModelOpt's files do not say whether activations have scales; the tensors do.
    scheme = checkpoint.quantised[module]
    has_scale = scheme.layout == "modelopt" and f"{module}.input_scale" in checkpoint.pieces
    return replace(scheme, static_inputs=True) if has_scale else scheme


def _storage_problems(checkpoint: Checkpoint) -> list[Problem]:
    # A declared format in which nothing is stored; scales that cannot follow rows into another order.
    found, declared = list[Problem](), checkpoint.quantization
    if declared is not None and not checkpoint.quantised and not checkpoint.problems:
        what = f"the files say that the drafter is quantised to {declared.words}, but no tensor is"
        found.append(Problem(what, str(checkpoint.folder), f"remove {IN_CONFIG} and {QUANT_CONFIG}"))
    if checkpoint.quantised and checkpoint.config is not None and checkpoint.config.latent is not None:
        what = "a quantised drafter with latent attention (MLA), of which no published one shows the names"
        found.append(Problem(what, str(checkpoint.folder), BUILD))
    turned = (scheme for name, scheme in checkpoint.quantised.items() if f".{name}".endswith(ROTATED))
    if checkpoint.neighbours and any(
        one.strategy == "block" or not one.symmetric or one.layout in TURNED for one in turned
    ):
        what = "RoPE pairs neighbours, and the scales of its queries and keys cannot be put in the order of halves"
        found.append(Problem(what, str(checkpoint.folder), PLAIN_DRAFTER))
    return found


def parse(
    raw: Mapping[str, object],
    path: Path,
    problems: list[Problem],
    *,
    stored: Collection[str] = (),
    block_size: int | None = None,
) -> tuple[DrafterConfig | None, Dialect | None]:
    """Reads a config.json, adding everything wrong with it to `problems`; then the config is None.

    Args:
        stored: names of the checkpoint's tensors, which settle what its configuration leaves open.
        block_size: B where the file has no block_size, as for some of NVIDIA's and of TorchSpec's drafters.
    """
    fills = block_size is not None and not _has_block_size(raw) and "speculators_model_type" not in raw
    raw = {**raw, "block_size": block_size} if fills else raw
    section = ConfigSection(raw, str(path), problems)
    dialect = next((one for one in DIALECTS.values() if one.matches(ConfigSection(raw, str(path), []))), None)
    inner = section.section("dflash_config", falls_back=True)
    unsupported = _unsupported(inner)
    if unsupported is not None:  # problems of its other keys would follow from this one
        section.note(*unsupported)
        return None, dialect
    if dialect is None:
        section.note(
            "not a DFlash drafter: no dflash_config, no speculators_model_type, no DFlash architecture",
            f"give a drafter in one of the dialects {', '.join(DIALECTS)}",
        )
        return None, None
    before = len(problems)
    fields = dialect.read(section, stored)
    if len(problems) > before:
        return None, dialect
    fields |= {"block_size": block_size} if fills else {}  # read as rows, of which anchor-first blocks have one fewer
    try:
        return DrafterConfig.model_validate({key: value for key, value in fields.items() if value is not None}), dialect
    except ValidationError as error:
        for fault in error.errors():
            place = ".".join(str(part) for part in fault["loc"])
            message = fault["msg"].removeprefix("Value error, ")
            section.note(f"{place}: {message}" if place else message, "correct config.json")
        return None, dialect


def _has_block_size(raw: Mapping[str, object]) -> bool:
    sections = (raw, *(raw.get(key) for key in ("dflash_config", "dspark_config")))
    return any(isinstance(section, Mapping) and section.get("block_size") is not None for section in sections)


def _unsupported(config: ConfigSection) -> tuple[str, str] | None:
    # (what, do) for a drafter that is recognised by its architecture, projector type or keys, and is not supported.
    bundled = any(config.has(key) for key in ("dspark_block_size", "dspark_markov_rank", "dspark_target_layer_ids"))
    if bundled and not any("DSpark" in name for name in config.architectures):  # NVIDIA's drafters have such keys, too
        what = (
            "the drafter is part of its target's checkpoint (dspark_* keys, mtp.* tensors), which is not supported yet"
        )
        return what, "serve it by the engine itself, or use a drafter of its own"
    kinds = (config.given(key, str) or "" for key in ("projector_type", "speculators_model_type"))
    named = " ".join([*config.architectures, *kinds]).lower()
    if latent.matches(config):
        return None
    if config.given("attention_mode", str) == "mla" or any(name.lower() in named for name in LATENT):
        what = f"the drafter's layers have latent attention (MLA), which is read of {latent.ARCHITECTURE} alone"
        return what, f"serve it by an engine that has its class, or {PLAIN_DRAFTER}"
    for head in (*HEADS_BY_TENSOR, "xPress", "DFlare"):
        if head not in SUPPORTED_HEADS and head.lower() in named:
            return f"the drafter has a {head} head, which is not supported yet", PLAIN_DRAFTER
    return None


def is_plain(folder: Path) -> bool:
    """config.json has an architecture of `PLAIN`, or cannot be read (`open_checkpoint` then reports why)."""
    try:
        raw = read_json(folder / "config.json", CONFIG)
        architectures = raw.get("architectures") or [PLAIN[0]]
        return architectures[0] in PLAIN
    except (UserError, AttributeError, TypeError, LookupError):
        return True


def _describe(folder: Path, unreadable: list[Problem], block_size: int | None) -> Checkpoint:
    # With a quantisation that is not read, config stays None: the weights cannot be interpreted.
    checkpoint = Checkpoint(folder, headers=read_headers(folder, unreadable))
    raw = read_object(folder / "config.json", checkpoint.problems)
    if raw is None:
        return checkpoint
    pickled = folder / f"{MASK_EMBEDDING}.pt"
    if pickled.exists():
        what, do = "a pickled mask embedding is never loaded", "store it as tensor mask_embedding"
        checkpoint.problems.append(Problem(what, str(pickled), do))
    checkpoint.quantization, unread = find_quantization(raw, folder)
    checkpoint.problems += unread
    checkpoint.neighbours = pairs_neighbours(raw)
    plain = {key: value for key, value in raw.items() if key != IN_CONFIG}  # the dialects differ in all but this key
    stored = {proper_name(name) for name in checkpoint.headers}
    config, checkpoint.dialect = parse(
        plain, folder / "config.json", checkpoint.problems, stored=stored, block_size=block_size
    )
    checkpoint.config = None if unread else config
    checkpoint.copies = checkpoint.dialect.copies_of_target if checkpoint.dialect else frozenset()
    checkpoint.copies |= {EMBEDDING} if embedding_is_copied(raw) else set()
    return checkpoint


def read_config(
    folder_or_id: str | Path, revision: str | None = None, *, block_size: int | None = None
) -> tuple[DrafterConfig, Checkpoint]:
    """The neutral description of a drafter, quantised or not, and its checkpoint without `pieces`; needs no weights.

    Args:
        block_size: as for `open_checkpoint`.

    Raises:
        UserError: config.json is absent, broken, of an unknown dialect, or describes an unsupported drafter.
    """
    known = _known_block_size(folder_or_id) or block_size
    checkpoint = _describe(drafter_folder(folder_or_id, revision), [], known)
    raise_problems(checkpoint.problems, hint=HINT)
    assert checkpoint.config is not None
    return checkpoint.config, checkpoint


def weight_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Problems of values: NaN, infinity, matrices of zeros, and wrong vocabulary maps; needs numpy and no torch."""
    from safetensors import SafetensorError, safe_open

    from dflash_serve.checkpoint.values import extent, stored_bits, unusable_problem

    found, empty = list[Problem](), list[str]()
    for file in sorted({piece.file for piece in checkpoint.pieces.values()}):
        try:
            with safe_open(file, framework="numpy"):  # the library refuses what engines would refuse
                pass
            for name, piece in checkpoint.pieces.items():
                if piece.file != file:
                    continue
                header = checkpoint.headers[piece.stored_name]
                bits = stored_bits(header)
                bits = bits if piece.rows is None else bits[piece.rows]
                seen = extent(bits, header.dtype)
                if seen.unusable:
                    found.append(unusable_problem(name, seen.unusable, bits.size, file, TRAIN_AGAIN))
                if name == D2T:
                    found += _map_problems(checkpoint)
                if seen.zero and bits.ndim > 1 and bits.size and not name.endswith(MAY_BE_ZERO):
                    empty.append(name)
        except (SafetensorError, OSError, ValueError) as error:
            found.append(_unreadable(file, error))
    if empty:
        what = f"nothing but zeros in {empty[0]}" + (f" and {len(empty) - 1} more" if len(empty) > 1 else "")
        found.append(Problem(what, str(checkpoint.folder), "download the drafter again: this one drafts nothing"))
    return found


def _unreadable(file: Path, error: Exception) -> Problem:
    return Problem(f"not a safetensors file ({first_line(error)})", str(file), "download the drafter again")


def read_tensors(checkpoint: Checkpoint, problems: list[Problem]) -> Iterator[tuple[str, Tensor]]:
    """(our name, stored tensor, memory-mapped) of each; values that are not finite, and bad maps, become `problems`."""
    from safetensors import SafetensorError, safe_open

    for file in sorted({piece.file for piece in checkpoint.pieces.values()}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name, piece in checkpoint.pieces.items():
                    if piece.file == file:
                        tensor = piece.of(opened.get_tensor(piece.stored_name))
                        if checkpoint.neighbours and checkpoint.config is not None and is_rotated(name, tensor):
                            tensor = as_halves(tensor, checkpoint.config.head_dim)
                        unusable = finite_problem(name, tensor, file, TRAIN_AGAIN)
                        problems += [unusable] if unusable else []
                        if name == D2T:
                            problems += _map_problems(checkpoint)
                        yield name, tensor
        except SafetensorError as error:
            problems.append(_unreadable(file, error))


def _map_problems(checkpoint: Checkpoint) -> list[Problem]:
    from dflash_serve.checkpoint.values import map_problems, mask_problems, stored_bits

    assert checkpoint.config is not None
    d2t = stored_bits(checkpoint.headers[checkpoint.pieces[D2T].stored_name]).view("<i8")
    found = list(map_problems(d2t, checkpoint.config.vocab_size, checkpoint.folder))
    header = checkpoint.headers.get(T2D)
    if header is not None and not found:
        found += mask_problems(d2t, stored_bits(header).view("?"), checkpoint.folder)
    return found


def finite_problem(name: str, tensor: Tensor, file: Path, do: str) -> Problem | None:
    """The problem of a tensor with NaN or infinite values; None if all are finite."""
    values = tensor.float() if tensor.element_size() == 1 else tensor  # PyTorch has no aminmax of FP8
    # The smallest or largest value is not finite if any value is not. Testing each takes 50 times as long on a CPU.
    if not values.numel() or all(extreme.isfinite() for extreme in values.aminmax()):
        return None
    from dflash_serve.checkpoint.values import unusable_problem

    return unusable_problem(name, values.numel() - int(values.isfinite().sum()), values.numel(), file, do)


def load_tensors(checkpoint: Checkpoint, dequantise: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every tensor of a drafter by our name, in the dtype it is stored in.

    Args:
        checkpoint: of `open_checkpoint`.
        dequantise: dtype to which quantised weights are decoded; None = they are refused.

    Raises:
        UserError: the checkpoint has problems, or is quantised.
    """
    raise_problems(checkpoint.problems, hint=HINT)
    if dequantise is None:
        raise_problems(plain_only(checkpoint.quantization, "this command", str(checkpoint.folder)))
    from torch import Tensor, float32

    return {
        name: weight if isinstance(weight, Tensor) else weight.dequantize(dequantise or float32)
        for name, weight in weights_of(checkpoint).items()
    }


def weights_of(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Every weight of a drafter by our name: a tensor, or a QuantizedTensor with its scales.

    Raises:
        UserError: the checkpoint has problems.
    """
    return _with_scales(stored_of(checkpoint), checkpoint.quantised)


def stored_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor of a drafter by our name as it is stored, scales of quantised modules among them.

    Raises:
        UserError: the checkpoint has problems.
    """
    raise_problems(checkpoint.problems, hint=HINT)
    return _read_all(checkpoint)


def load_weights(folder_or_id: str | Path, revision: str | None = None) -> tuple[DrafterConfig, dict[str, Weight]]:
    """A drafter, and the result of `weights_of` for it.

    Raises:
        UserError: the checkpoint has problems.
    """
    checkpoint = open_checkpoint(folder_or_id, revision)
    raise_problems(checkpoint.problems, hint=HINT)
    assert checkpoint.config is not None
    return checkpoint.config, weights_of(checkpoint)


def _read_all(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found: list[Problem] = []
    tensors = dict(read_tensors(checkpoint, found))
    raise_problems(found, hint=HINT)
    return tensors


def assemble(stored: Mapping[str, Tensor], config: DrafterConfig, format: Format | None) -> dict[str, Weight]:
    """The result of `load_weights` from tensors that the caller has read, by their names in a checkpoint of ModelOpt's.

    Raises:
        UserError: a tensor is missing, extra, doubled or misshapen.
    """
    where = "drafter weights"
    headers = {
        name: Header(Path(where), _dtype_name(tensor), tuple(tensor.shape), tensor.nbytes)
        for name, tensor in stored.items()
    }
    problems: list[Problem] = []
    schemes = Quantization(format, ()).scheme if format else None
    pieces = match_tensors(headers, config, problems, where=where, schemes=schemes)
    raise_problems(problems)
    tensors = {name: piece.of(stored[piece.stored_name]) for name, piece in pieces.items()}
    return _with_scales(tensors, quantised_modules(headers, config, schemes))


def _dtype_name(tensor: Tensor) -> str:  # of safetensors
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
    return names.get(tensor.dtype, str(tensor.dtype))


def _with_scales(tensors: Mapping[str, Tensor], quantised: Mapping[str, Scheme]) -> dict[str, Weight]:
    from dflash_serve.checkpoint.formats import quantized_tensor

    modules: dict[str, dict[str, Tensor]] = {module: {} for module in quantised}
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module not in modules or leaf == "bias":
            weights[name] = tensor
            continue
        modules[module][leaf] = tensor
        weights.setdefault(f"{module}.weight", tensor)  # keeps the order of names; replaced below
    weights |= {f"{name}.weight": quantized_tensor(quantised[name], leaves) for name, leaves in modules.items()}
    return weights


def sizes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Parameters and bytes of everything stored; scales are no parameters, and packed numbers count one by one."""
    beside = {*LEAVES, *KV_SCALES} - {"weight_packed", "qweight"}
    weights = [header for name, header in checkpoint.headers.items() if name.rpartition(".")[2] not in beside]
    w4a16 = checkpoint.quantization is not None and checkpoint.quantization.format == "w4a16"
    packed = {"U8": 2, "I32": 8 if w4a16 else 4}
    parameters = sum(prod(header.shape) * packed.get(header.dtype, 1) for header in weights)
    return parameters, sum(header.bytes for header in checkpoint.headers.values())
