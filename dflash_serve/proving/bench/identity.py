"""What an output folder is of: a sweep goes on only with what it was begun with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.common.frozen import Frozen
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.proving.bench.plan import Workload
from dflash_serve.proving.bench.results import write_whole
from dflash_serve.proving.bench.ways import Way

FILE = "bench-of.json"


class Identity(Frozen):
    """What runs must share to stand side by side; ways may be added."""

    workload: Workload
    backend: str | None
    ways: dict[str, str | Deployment]
    """By name: the URL of a server, or what is served."""


def claim(folder: Path, workload: Workload, backend: str | None, ways: Sequence[Way]) -> None:
    """Makes the folder ours, or finds that it is.

    Raises:
        UserError: it holds another benchmark, or cannot be written.
    """
    found = {way.name: way.deployment or way.url or "" for way in ways}
    mine = Identity(workload=workload, backend=backend, ways=found)
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            mine = _joined(mine, Identity.model_validate_json(path.read_text(encoding="utf-8")), folder)
        write_whole(path, mine.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})", where=str(folder), do="name another --output"
        ) from None
    except ValidationError:
        raise UserError("not of this bench", where=str(path), do="name another --output") from None


def _joined(mine: Identity, there: Identity, folder: Path) -> Identity:
    do = "name another --output, or repeat the command that it was begun with"
    for field in ("workload", "backend"):
        if getattr(mine, field) != getattr(there, field):
            raise UserError(f"it holds runs of another {field} ({_difference(mine, there)})", where=str(folder), do=do)
    for name, way in mine.ways.items():
        if there.ways.get(name, way) != way:
            raise UserError(f"it holds runs of another “{name}”", where=str(folder), do=do)
    return mine.model_copy(update={"ways": {**there.ways, **mine.ways}})


def _difference(mine: Identity, there: Identity) -> str:
    """The first setting that differs."""
    if mine.backend != there.backend:
        return f"{there.backend}, not {mine.backend}"
    old, new = there.workload.model_dump(), mine.workload.model_dump()
    name = next(key for key in new if new[key] != old[key])
    return f"{name} {old[name]!r}, not {new[name]!r}"
