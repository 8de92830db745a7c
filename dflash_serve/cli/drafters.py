"""`dflash-serve drafters`: the published drafters, of one target or all, and which engines serve them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

from dflash_serve.backend import DraftingBackend, backend, installed
from dflash_serve.catalogue import CataloguedDrafter, catalogue, drafters_of, unknown_target
from dflash_serve.cli import options

Verdicts = Mapping[str, str | None]  # By backend: why it does not serve a drafter; None = it does


def drafters(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]", help="Hub id of a target.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List published drafters: kind, block size, revision, licence, engines that serve them, published acceptance.

    From a file of this release: nothing is fetched. A drafter named `auto` is chosen from it.
    """
    found = list(catalogue().drafters) if target is None else drafters_of(target)
    if not found and target is not None:
        raise unknown_target(target)
    backends = [served for served in map(backend, installed()) if isinstance(served, DraftingBackend)]
    rows = [(one, _verdicts(one, backends)) for one in found]
    if as_json:
        releases = {backend.name: backend.releases for backend in backends}
        listed = [
            {
                **one.model_dump(mode="json"),
                "kind": one.heads.family,
                "engines": {name: {"serves": why is None, "why_not": why} for name, why in verdicts.items()},
            }
            for one, verdicts in rows
        ]
        typer.echo(json.dumps({"gathered": catalogue().gathered, "releases": releases, "drafters": listed}, indent=2))
        return
    for one, verdicts in rows:
        typer.echo(one.repository if quiet else _text(one, verdicts))
    if not quiet:
        engines = ", ".join(f"{backend.facts.title} {backend.releases}" for backend in backends)
        typer.echo(f"{len(found)} drafters, looked up on {catalogue().gathered}. Engines: {engines}")
        typer.echo("Whether an engine runs the target itself, `dflash-serve serve --dry-run` says.")


def _verdicts(drafter: CataloguedDrafter, backends: list[DraftingBackend]) -> Verdicts:
    if drafter.unsupported is not None:
        return {backend.name: drafter.unsupported for backend in backends}
    found = {backend.name: backend.head_problems(drafter.heads) for backend in backends}
    return {name: problems[0].what if problems else None for name, problems in found.items()}


def _text(drafter: CataloguedDrafter, verdicts: Verdicts) -> str:
    heads = f" ({drafter.heads.words})" if drafter.heads.words else ""
    serving = [name for name, why in verdicts.items() if why is None]
    figures = [f"{one.value:g} {one.benchmark} ({one.setting}; {one.source})" for one in drafter.acceptance_length]
    lines = [
        f"{drafter.repository}  for {drafter.target}",
        f"  {drafter.heads.family}{heads}, block size {drafter.block_size}",
        f"  revision {drafter.revision or 'not pinned'}; licence {drafter.licence or 'not known'}",
        f"  its kind is served by {', '.join(serving) or 'none'}",
        *(f"  not by {name}: {why}" for name, why in verdicts.items() if why is not None),
        *([f"  published acceptance length: {'; '.join(figures)}"] if figures else []),
    ]
    return "\n".join(lines) + "\n"
