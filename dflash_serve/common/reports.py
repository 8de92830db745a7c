"""Reports of all verbs: JSON, HTML pages, and figures as they are printed. Provenance is in `common.provenance`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dflash_serve.common.files import write_whole

UNKNOWN = "\N{EN DASH}"  # A figure of a page that is not known
PAGE, TEMPLATE = "page.html.jinja", "report.html.jinja"
ANOTHER = "name another --output"


def json_text(value: BaseModel | Mapping[str, Any]) -> str:
    """A report as JSON, with a line for each value."""
    if isinstance(value, BaseModel):
        return value.model_dump_json(indent=1) + "\n"
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: BaseModel | Mapping[str, Any]) -> None:
    """Writes a report as JSON, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    write_whole(path, json_text(value), do=ANOTHER)


def write_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Writes the files of a report, each whole or not at all, and returns their paths.

    Raises:
        UserError: one cannot be written.
    """
    for name, content in contents.items():
        write_whole(folder / name, content, do=ANOTHER)
    return [folder / name for name in contents]


def html_page(package: str, **values: Any) -> str:
    """One HTML document that needs no network: the package's template, which extends ours, with these values."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    templates = {PAGE: __package__, TEMPLATE: package}
    texts = {name: (files(place) / name).read_text(encoding="utf-8") for name, place in templates.items()}
    jinja = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters.update(figure=_figure, counted=counted)
    return jinja.get_template(TEMPLATE).render(**values)


def _figure(value: float | None, digits: int = 1, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def counted(count: int, word: str) -> str:
    """`1 user`, `2 users`."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def number(value: float | None, digits: int) -> str:
    """The figure as a terminal shows it; one that is not known is `unknown`."""
    return "unknown" if value is None else f"{value:.{digits}f}"


def survival_text(survival: Iterable[float | None]) -> str:
    """Survival slot by slot, as a terminal shows it; `?` = not known."""
    return " ".join("?" if value is None else f"{value:.2f}" for value in survival) or "unknown"
