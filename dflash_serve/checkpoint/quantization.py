"""How a drafter's files say that it is quantised. ModelOpt 0.47 writes the algorithm into `hf_quant_config.json` and,
in another shape, into config.json's `quantization_config`; `dflash-serve build` writes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_serve.checkpoint.files import read_object
from dflash_serve.errors import Problem, raise_problems

if TYPE_CHECKING:
    from dflash_serve.checkpoint.formats import Format

QUANT_CONFIG = "hf_quant_config.json"
IN_CONFIG = "quantization_config"
ALGORITHMS: Mapping[object, Format] = {"FP8": "fp8", "NVFP4": "nvfp4"}
BUILD = "build it with `dflash-serve build`, which writes FP8 and NVFP4"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint says it is quantised."""

    format: Format
    excluded: tuple[str, ...]
    """Modules left in bf16, as patterns."""
    kv_cache: str | None = None
    """Algorithm of the K/V cache; None = as the activations."""


def read_quantization(folder: Path) -> Quantization | None:
    """What a drafter's config.json and hf_quant_config.json say; None = not quantised.

    Raises:
        UserError: an algorithm that is not read, two files that disagree, or a file that is no JSON object.
    """
    problems: list[Problem] = []
    raw = read_object(folder / "config.json", problems)
    found = find_quantization(raw or {}, folder, problems)
    raise_problems(problems)
    return found


def find_quantization(config: Mapping[str, object], folder: Path, problems: list[Problem]) -> Quantization | None:
    """What a config.json that was read, and hf_quant_config.json beside it, say; None = not quantised, or a problem."""
    inline, beside = config.get(IN_CONFIG), folder / QUANT_CONFIG
    if inline is not None and not isinstance(inline, dict):
        what = f"{IN_CONFIG} is {inline!r}, not an object"
        problems.append(Problem(what, str(folder / "config.json"), "correct it"))
        return None
    given = {
        f"config.json's {IN_CONFIG}": inline,
        QUANT_CONFIG: read_object(beside, problems) if beside.is_file() else None,
    }
    entries = {name: entry for name, outer in given.items() if (entry := _entry(outer))}
    read = {name: _quantization(entry, name, folder, problems) for name, entry in entries.items()}
    formats = {found.format for found in read.values() if found is not None}
    if len(formats) > 1:
        said = ", ".join(f"{name} says {found.format}" for name, found in read.items() if found is not None)
        problems.append(Problem(said, str(folder), "keep the right one"))
    return next((found for found in read.values() if found is not None), None)


def _entry(outer: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The object with `quant_algo`: at either of the two depths that ModelOpt's exporters have; None = says nothing."""
    inner = (outer or {}).get("quantization")
    return cast("Mapping[str, object]", inner) if isinstance(inner, dict) and inner else outer or None


def _quantization(entry: Mapping[str, object], name: str, folder: Path, problems: list[Problem]) -> Quantization | None:
    algorithm = entry.get("quant_algo") or entry.get("quant_method")
    format = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if format is None:
        what = f"the drafter is quantised with {algorithm!r} ({name}), which is not read"
        problems.append(Problem(what, str(folder), BUILD))
        return None
    listed = entry.get("exclude_modules", entry.get("ignore"))
    excluded = tuple(str(module) for module in listed) if isinstance(listed, list) else ()
    kv_cache = entry.get("kv_cache_quant_algo")
    return Quantization(format, excluded, str(kv_cache) if kv_cache else None)


def plain_only(quantization: Quantization | None, reader: str, where: str) -> list[Problem]:
    """The problem of a quantised drafter before a reader of plain weights; none where it is not quantised.

    Args:
        quantization: the drafter's.
        reader: who would read it, as the user knows it: `the embedded backend`.
        where: the field or folder that names the drafter.
    """
    if quantization is None:
        return []
    what = f"the drafter is quantised to {quantization.format.upper()}, {reader} reads bf16 drafters only"
    return [Problem(what, where, "use the bf16 drafter it was made from, or a backend that reads quantised ones")]
