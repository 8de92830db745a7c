"""What a bench compares and how much of it: its settings, the variants of serving, and the order of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from dflash_serve.backend import EMBEDDED, ServerBackend, server_backend
from dflash_serve.common.frozen import Frozen, PositiveInt
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError, raise_problems

OFF, FIXED, AUTO = "off", "fixed", "auto"


def _words(text: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text.split(",") if isinstance(text, str) else text))


def _user_counts(text: str | Sequence[int]) -> tuple[int, ...]:
    words = _words(text if isinstance(text, str) else [str(count) for count in text])
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UserError(f"{text!r} is no list of numbers of users", where="--concurrency", do="give 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _several(given: Any) -> Any:
    return given or ()


class Settings(Frozen):
    """What the user asks for: a field for each option of `dflash-serve bench`, by its name."""

    deployment: Path | None
    """YAML file of what is served in each of `variants`; None = target and drafter say it, or nothing is started."""
    target: str | None
    drafter: str | None
    backend: str
    """Starts the servers of `variants`."""
    variants: Annotated[tuple[str, ...], BeforeValidator(_words)]
    """Widths of the deployment: `off`, `fixed`, `auto` or numbers of slots."""
    endpoint: Annotated[tuple[str, ...], BeforeValidator(_several)]
    """`NAME=http://host:port` of servers that run already."""
    dataset: str
    """As `load_dataset` takes it."""
    concurrency: Annotated[tuple[PositiveInt, ...], BeforeValidator(_user_counts)]
    """Users at once, one run each; ascending."""
    rounds: PositiveInt
    """Runs of each variant at each concurrency."""
    requests_per_user: PositiveInt
    min_requests: PositiveInt
    max_tokens: PositiveInt
    ignore_eos: bool
    temperature: Annotated[float, Field(ge=0)]
    interactivity: float | None
    """Tokens/s/user of the headline's comparison; None = the most that both variants reach."""
    baseline: str | None
    """Variant that the others are compared with; None = `off`, else the first."""
    api_key_file: Path | None
    tokenizer: str | None
    """A folder or hub id; None = the target's."""
    hardware: str | None
    """What servers elsewhere run on."""
    devices: int | None
    """Throughput is divided by that; None = the deployment's hardware.count, else 1."""
    in_turn: bool | None
    """One server at a time, for servers that take all of a GPU's memory; otherwise all run side by side, where one that
    nobody asks costs memory only. None = unless the embedded backend serves."""
    warm_up: bool
    """Each server answers a request for each user before it is measured."""
    output: Path
    """Folder of runs and report."""

    def requests(self, concurrency: int) -> int:
        """Requests of one run."""
        return max(self.min_requests, self.requests_per_user * concurrency)

    @property
    def one_at_a_time(self) -> bool:
        """Whether servers run one after the other."""
        return self.backend != EMBEDDED if self.in_turn is None else self.in_turn


@dataclass(frozen=True)
class Variant:
    """One way of serving that is measured: a line of the plot."""

    name: str
    url: str | None = None
    """Of a server that runs already; None = it is started from `deployment`."""
    deployment: Deployment | None = None

    @property
    def slug(self) -> str:
        """The name as a part of file names."""
        return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in self.name)


class Cell(NamedTuple):
    """One run of aiperf."""

    variant: str
    concurrency: int
    round: int


def read_deployment(settings: Settings) -> Deployment | None:
    """What is served in each of `settings.variants`; None = nothing is started.

    Raises:
        UserError: the file cannot be read, or is no deployment.
    """
    if settings.deployment is None and settings.target is None:
        return None
    flags = {"target": {"model": settings.target}, "drafter": {"model": settings.drafter}}
    return load_deployment(settings.deployment, flags)


def find_variants(settings: Settings, deployment: Deployment | None) -> tuple[list[Variant], ServerBackend | None]:
    """All variants that are asked for, and what starts the servers of those that have a deployment.

    Raises:
        UserError: there are none, two share a name, the backend refuses one, or the baseline is none of them.
    """
    chosen = server_backend(settings.backend) if deployment else None
    found = deployed_variants(deployment, settings.variants) if deployment else []
    for variant in found:
        if chosen is not None and variant.deployment is not None:
            raise_problems(chosen.check(variant.deployment))
    found += endpoint_variants(settings.endpoint)
    names = [variant.name for variant in found]
    if not found:
        do = "give a deployment.yaml, --target and --drafter, or --endpoint NAME=http://host:port"
        raise UserError("nothing to measure", where="bench", do=do)
    if len(names) > len(set(names)):
        raise UserError("two variants have the same name", where="--endpoint", do="give the endpoint another one")
    if settings.baseline is not None and settings.baseline not in names:
        do = f"use one of: {', '.join(names)}"
        raise UserError(f"there is no variant {settings.baseline!r}", where="--baseline", do=do)
    return found, chosen


def deployed_variants(deployment: Deployment, asked: Sequence[str]) -> list[Variant]:
    """The deployment at each width that was asked for.

    Args:
        deployment: with a drafter, if any variant is to speculate.
        asked: `off`, `fixed` (the whole block), `auto`, or numbers of slots, the anchor counted.

    Raises:
        UserError: an unknown word, or speculation without a drafter.
    """
    found: dict[str, Variant] = {}
    for word in asked:
        if word != OFF and deployment.drafter is None:
            raise UserError("there is no drafter", where=f"--variants {word}", do="give one, or --variants off")
        width = _width(deployment, word)
        name = f"{FIXED} {width}" if isinstance(width, int) else width
        speculation = deployment.speculation.model_copy(update={"width": width})
        found[name] = Variant(name, deployment=deployment.model_copy(update={"speculation": speculation}))
    return list(found.values())


def endpoint_variants(asked: Sequence[str]) -> list[Variant]:
    """Servers that run already, each given as `name=http://host:port`.

    Raises:
        UserError: not of that form, or a name given twice.
    """
    found: dict[str, Variant] = {}
    for text in asked:
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise UserError("not NAME=http://host:port", where=f"--endpoint {text}")
        if name in found:
            raise UserError("its name is given twice", where=f"--endpoint {text}")
        found[name] = Variant(name, url=url.rstrip("/").removesuffix("/v1"))
    return list(found.values())


def schedule(variants: Sequence[str], settings: Settings) -> list[Cell]:
    """All runs in order, interleaved so that a machine's moods fall on all variants alike.

    Side by side, variants change at every concurrency; one at a time, only once a round. Each time another is first.
    """
    cells: list[Cell] = []
    for turn in range(settings.rounds):
        if settings.one_at_a_time:
            cells += [Cell(name, users, turn) for name in _rotated(variants, turn) for users in settings.concurrency]
            continue
        for place, users in enumerate(settings.concurrency):
            cells += [Cell(name, users, turn) for name in _rotated(variants, turn + place)]
    return cells


def _rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names)
    return [*names[start:], *names[:start]]


def _width(deployment: Deployment, word: str) -> int | str:
    if word in (OFF, AUTO):
        return word
    if word == FIXED:
        return _block_size(deployment)
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    do = "use off, fixed, auto or a number of slots"
    raise UserError(f"{word!r} is no variant of serving", where="--variants", do=do)


def _block_size(deployment: Deployment) -> int:
    if deployment.speculation.block_size is not None:
        return deployment.speculation.block_size
    from dflash_serve.checkpoint.reader import read_config

    assert deployment.drafter is not None
    config, _ = read_config(deployment.drafter.model, deployment.drafter.revision)
    return config.block_size
