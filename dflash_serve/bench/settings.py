"""What a bench compares and how much of it: its settings, the variants of serving, and the order of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, JsonValue

from dflash_serve.backend import EMBEDDED, Backend, ServerBackend, server_backend
from dflash_serve.catalogue import choose_drafter
from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.draft_method import drafting_by, drafting_problems, parse_method
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
    variants: Annotated[tuple[str, ...], BeforeValidator(_words)]
    """Widths of the deployment: `off`, `fixed`, `auto` or numbers of slots; or `eagle3:CHECKPOINT[:K]`, `mtp[:K]`."""
    endpoint: Annotated[tuple[str, ...], BeforeValidator(_several)]
    """`NAME=http://host:port` of servers that run already."""
    dataset: str
    concurrency: Annotated[tuple[PositiveInt, ...], BeforeValidator(_user_counts)]
    """Users at once, one run each; ascending."""
    rounds: PositiveInt
    requests_per_user: PositiveInt
    min_requests: PositiveInt
    max_tokens: PositiveInt
    ignore_eos: bool
    temperature: Annotated[float, Field(ge=0)]
    interactivity: float | None
    """Tokens/s/user at which variants are compared, too; None = at each load alone."""
    baseline: str | None
    """Variant that the others are compared with; None = `off`, else the first."""
    api_key_file: Path | None
    tokenizer: str | None
    hardware: str | None
    devices: int | None
    """Throughput is divided by that; None = the deployment's hardware.count, else 1."""
    in_turn: bool | None
    """One server at a time, for servers that take all of a GPU's memory; otherwise all run side by side, where one that
    nobody asks costs memory only. None = unless the embedded backend serves."""
    warm_up: bool
    """Each server answers a request for each user before it is measured."""
    output: Path
    engine_args: dict[str, dict[str, JsonValue]] = Field(default={})
    """On top of the deployment's."""

    def requests(self, concurrency: int) -> int:
        """Requests of one run."""
        return max(self.min_requests, self.requests_per_user * concurrency)

    def prompts_before(self, cell: Cell) -> int:
        """Prompts that the runs of its variant before it take: each run has its own, the same for all variants."""
        each = [self.requests(users) for users in self.concurrency]
        return cell.round * sum(each) + sum(each[: self.concurrency.index(cell.concurrency)])

    @property
    def one_at_a_time(self) -> bool:
        """Whether servers run one after the other."""
        return self.backend != EMBEDDED if self.in_turn is None else self.in_turn


Variant = str | Deployment
"""One way of serving that is measured: the URL of a server that runs already, or what one is started from."""


def slug(name: str) -> str:
    """A variant's name as a part of file names."""
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)


class Cell(NamedTuple):
    """One run of aiperf."""

    variant: str
    concurrency: int
    round: int

    @property
    def slug(self) -> str:
        """The name as a part of file names."""
        return f"{slug(self.variant)}-c{self.concurrency:03d}-r{self.round + 1}"


def read_deployment(settings: Settings) -> tuple[Deployment | None, str | None]:
    """What is served in each of `settings.variants`, None = nothing is started; and what is to be said of a drafter
    that was chosen.

    Raises:
        UserError: the file cannot be read, or is no deployment, or no drafter can be chosen.
    """
    if settings.deployment is None and settings.target is None:
        return None, None
    flags: dict[str, Any] = {"target": {"model": settings.target}, "drafter": {"model": settings.drafter}}
    described = load_deployment(settings.deployment, {**flags, "engine_args": settings.engine_args})
    return choose_drafter(described, server_backend(settings.backend))


def find_variants(settings: Settings, deployment: Deployment | None) -> tuple[dict[str, Variant], ServerBackend | None]:
    """All variants that are asked for, by name, and what starts the servers of those that are deployed.

    Raises:
        UserError: there are none, two share a name, the backend refuses one, or the baseline is none of them.
    """
    chosen: ServerBackend | None = None
    deployed: dict[str, Deployment] = {}
    if deployment is not None:
        chosen = server_backend(settings.backend)
        deployed = deployed_variants(deployment, settings.variants, chosen)
        for each in deployed.values():
            raise_problems(chosen.check(each))
    running = endpoint_variants(settings.endpoint)
    if not deployed and not running:
        do = "give a deployment.yaml, --target and --drafter, or --endpoint NAME=http://host:port"
        raise UserError("nothing to measure", where="bench", do=do)
    if deployed.keys() & running.keys():
        raise UserError("two variants have the same name", where="--endpoint", do="give the endpoint another one")
    found: dict[str, Variant] = {**deployed, **running}
    if settings.baseline is not None and settings.baseline not in found:
        do = f"use one of: {', '.join(found)}"
        raise UserError(f"there is no variant {settings.baseline!r}", where="--baseline", do=do)
    return found, chosen


def deployed_variants(deployment: Deployment, asked: Sequence[str], backend: Backend) -> dict[str, Deployment]:
    """The deployment at each width, and by each other drafting method, that was asked for, by the variant's name.

    Args:
        deployment: with a drafter, if any variant is to speculate with DFlash.
        asked: `off`, `fixed` (the whole block), `auto`, or numbers of slots, the anchor counted; or a word that
            `draft_method.parse_method` knows.
        backend: whose engine drafts by that method.

    Raises:
        UserError: an unknown word, speculation without a drafter, or a method that engine or target do not have.
    """
    raise_problems(list(drafting_problems(deployment, backend)))
    found = {}
    for word in asked:
        method = parse_method(word)
        if method is not None:
            found[word] = drafting_by(method, deployment, backend)
            continue
        if word != OFF and deployment.drafter is None:
            raise UserError("there is no drafter", where=f"--variants {word}", do="give one, or --variants off")
        width = _width(deployment, word)
        speculation = deployment.speculation.model_copy(update={"width": width})
        name = f"{FIXED} {width}" if isinstance(width, int) else width
        found[name] = deployment.model_copy(update={"speculation": speculation})
    return found


def endpoint_variants(asked: Sequence[str]) -> dict[str, str]:
    """URLs of servers that run already, by name; each given as `name=http://host:port`.

    Raises:
        UserError: not of that form, or a name given twice.
    """
    found: dict[str, str] = {}
    for text in asked:
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise UserError("not NAME=http://host:port", where=f"--endpoint {text}")
        if name in found:
            raise UserError("its name is given twice", where=f"--endpoint {text}")
        found[name] = url.rstrip("/").removesuffix("/v1")
    return found


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
    do = "use off, fixed, auto, a number of slots, eagle3:CHECKPOINT or mtp"
    raise UserError(f"{word!r} is no variant of serving", where="--variants", do=do)


def _block_size(deployment: Deployment) -> int:
    if deployment.speculation.block_size is not None:
        return deployment.speculation.block_size
    from dflash_serve.checkpoint.reader import read_config

    assert deployment.drafter is not None
    config, _ = read_config(deployment.drafter.model, deployment.drafter.revision)
    return config.block_size
