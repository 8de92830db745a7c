"""Settings of a bench, the variants that it compares, and the order of its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from dflash_serve.adapter.checks import block_size_of
from dflash_serve.adapter.launch import drafting_argument
from dflash_serve.adapter.protocol import Backend, ServerBackend
from dflash_serve.adapter.registry import EMBEDDED, choose_drafter, server_backend
from dflash_serve.answers.prompts import template_kwargs
from dflash_serve.common.documents import read_recipe_file
from dflash_serve.common.processes import require_program
from dflash_serve.common.settings import Frozen, PositiveInt, Several, describe, without_nulls
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_layers, with_absolute_paths
from dflash_serve.errors import UserError, raise_problems

OFF, FIXED, AUTO = "off", "fixed", "auto"
ADDRESS, SCHEMES = "http://host:port", ("http://", "https://")


def _words(text: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text.split(",") if isinstance(text, str) else text))


def _user_counts(text: str | Sequence[int]) -> tuple[int, ...]:
    words = _words(text if isinstance(text, str) else [str(count) for count in text])
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UserError(f"{text!r} is no list of numbers of users", where="--concurrency", do="give 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


class BenchSettings(Frozen):
    """A field for each option of `dflash-serve bench`, with the same name, and its `engine_args`."""

    deployment: Path | None
    """None = target and drafter say what is served, or nothing is started."""
    target: str | None
    drafter: str | None
    backend: str
    variants: Annotated[tuple[str, ...], BeforeValidator(_words)]
    variant: Several = ()
    endpoint: Several = ()
    metrics_url: Several = ()
    dataset: str
    concurrency: Annotated[tuple[PositiveInt, ...], BeforeValidator(_user_counts)]
    rounds: PositiveInt
    requests_per_user: PositiveInt
    min_requests: PositiveInt
    max_tokens: PositiveInt
    ignore_eos: bool
    temperature: Annotated[float, Field(ge=0)]
    interactivity: float | None = None
    baseline: str | None = None
    api_key_file: Path | None = None
    tokenizer: str | None = None
    hardware: str | None = None
    devices: int | None = None
    in_turn: bool | None
    """One server at a time, for servers that take all of a GPU's memory; otherwise all run side by side, where an idle
    one costs only memory. None = true unless the embedded backend serves."""
    warm_up: bool
    output: Path
    engine_args: dict[str, dict[str, JsonValue]] = Field(default={})
    chat_template_kwargs: Annotated[dict[str, JsonValue], BeforeValidator(template_kwargs)] = Field(default={})

    def requests(self, concurrency: int) -> int:
        """Requests of one run."""
        return max(self.min_requests, self.requests_per_user * concurrency)

    def prompts_before(self, cell: Cell) -> int:
        """Number of prompts that earlier runs of its variant use. Each run has its own, the same for all variants."""
        each = [self.requests(users) for users in self.concurrency]
        return cell.round * sum(each) + sum(each[: self.concurrency.index(cell.concurrency)])

    @property
    def one_at_a_time(self) -> bool:
        """True where servers run one after the other."""
        return self.backend != EMBEDDED if self.in_turn is None else self.in_turn


Variant = str | Deployment
"""One way of serving: the URL of a running server, or the deployment of one to start."""


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


def read_deployment(settings: BenchSettings) -> tuple[Deployment | None, str | None]:
    """The deployment of `settings.variants` (None = no server is started), and a remark on values from elsewhere.

    Raises:
        UserError: the file cannot be read, or is no deployment, or no drafter can be chosen.
    """
    if settings.deployment is None and settings.target is None:
        return None, None
    flags: dict[str, Any] = {"target": {"model": settings.target}, "drafter": {"model": settings.drafter}}
    layers = load_layers(settings.deployment, {**flags, "engine_args": settings.engine_args})
    chosen, remark = choose_drafter(layers.deployment, server_backend(settings.backend))
    remarks = [*(each.line for each in layers.from_variables), *([] if remark is None else [remark])]
    return chosen, "; ".join(remarks) or None


def find_variants(
    settings: BenchSettings, deployment: Deployment | None
) -> tuple[dict[str, Variant], ServerBackend | None]:
    """All variants by their names, and the backend that starts the servers of the deployed ones.

    Raises:
        UserError: there are none, two share a name, the backend refuses one, or the baseline is none of them.
    """
    chosen: ServerBackend | None = None
    deployed: dict[str, Deployment] = {}
    if deployment is not None:
        chosen = server_backend(settings.backend)
        deployed = deployed_variants(deployment, settings.variants, chosen)
        overlaid = overlay_variants(deployment, settings.variant, chosen)
        _refuse_twice(deployed.keys() & overlaid.keys(), "--variant")
        deployed |= overlaid
        for name, each in deployed.items():
            launch = chosen.launch(each)
            raise_problems(launch.problems)
            if name == AUTO and (why := launch.never_narrow) is not None:
                what = f"{chosen.name} verifies the whole block in every step, as fixed does ({why})"
                raise UserError(what, where="--variants auto", do="leave auto out")
    running = endpoint_variants(settings.endpoint)
    if not deployed and not running:
        do = "give a deployment.yaml, --target and --drafter, or --url NAME=http://host:port"
        raise UserError("nothing to measure", where="bench", do=do)
    _refuse_twice(deployed.keys() & running.keys(), "--url")
    found: dict[str, Variant] = {**deployed, **running}
    if settings.baseline is not None and settings.baseline not in found:
        do = f"use one of: {', '.join(found)}"
        raise UserError(f"there is no variant {settings.baseline!r}", where="--baseline", do=do)
    return found, chosen


def require_servers(settings: BenchSettings) -> None:
    """Checks that the servers of the deployed variants can be started; nothing is written.

    Raises:
        UserError: as `read_deployment` and `find_variants`, or the engine is not installed.
    """
    variants, backend = find_variants(settings, read_deployment(settings)[0])
    for one in variants.values():
        if isinstance(one, Deployment) and backend is not None:
            require_program(backend.launch(one).command(Path()).argv, backend.name)


def deployed_variants(deployment: Deployment, asked: Sequence[str], backend: Backend) -> dict[str, Deployment]:
    """The deployment at each width that was asked for, by the variant's name.

    Args:
        deployment: with a drafter, if any variant is to speculate.
        asked: `off`, `fixed` (the whole block), `auto`, or numbers of slots, the anchor counted.
        backend: its engine must not be told by `engine_args` to draft in every variant.

    Raises:
        UserError: an unknown word, speculation without a drafter, or arguments that make `off` draft.
    """
    if (name := drafting_argument(backend, deployment)) is not None:
        do = "leave it out, and put it into an overlay: --variant NAME=FILE"
        raise UserError("the variants say how it drafts", where=f"engine_args.{backend.name}.{name}", do=do)
    found = {}
    for word in asked:
        if word != OFF and deployment.drafter is None:
            raise UserError("there is no drafter", where=f"--variants {word}", do="give one, or --variants off")
        width = _width(deployment, word)
        speculation = deployment.speculation.model_copy(update={"width": width})
        name = f"{FIXED} {width}" if isinstance(width, int) else width
        found[name] = deployment.model_copy(update={"speculation": speculation})
    return found


def _width(deployment: Deployment, word: str) -> int | str:
    if word in (OFF, AUTO):
        return word
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    if word != FIXED:
        do = "use off, fixed, auto or a number of slots; other methods are overlays, --variant NAME=FILE"
        raise UserError(f"{word!r} is no variant of serving", where="--variants", do=f"{do} (examples/bench/)")
    return block_size_of(deployment)


def overlay_variants(deployment: Deployment, asked: Sequence[str], backend: Backend) -> dict[str, Deployment]:
    """The deployment under each overlay, by name; each given as `NAME=FILE.yaml`.

    Raises:
        UserError: not of that form, a name given twice, a file that is no overlay, or one that is for other engines.
    """
    found: dict[str, Deployment] = {}
    for name, file in _named(asked, "--variant", "FILE.yaml", do="examples: examples/bench/").items():
        over = read_recipe_file(Path(file))
        if not isinstance(over, dict):
            raise UserError("not a mapping", where=file, do="give keys of a deployment, such as `drafter: null`")
        over = with_absolute_paths(over, Path(file))
        engines = over.get("engine_args")
        if isinstance(engines, dict) and backend.name not in engines:
            what = f"it has arguments of {', '.join(map(str, engines))}, and none of {backend.name}"
            raise UserError(what, where=f"{file} engine_args", do="add them, or leave this variant out")
        try:
            patched = _patched(deployment.model_dump(exclude_unset=True), over)
            found[name] = Deployment.model_validate(without_nulls(patched, Deployment.model_fields))
        except ValidationError as error:
            raise UserError(describe(error, Deployment), where=file) from None
    return found


def endpoint_variants(asked: Sequence[str]) -> dict[str, str]:
    """URLs of running servers, each given as `NAME=http://host:port`.

    Raises:
        UserError: not of that form, or a name given twice.
    """
    found = _named(asked, "--url", ADDRESS, starts=SCHEMES)
    return {name: url.rstrip("/").removesuffix("/v1") for name, url in found.items()}


def metrics_urls(asked: Sequence[str], endpoints: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Addresses of the workers' metrics by variant, each given as `NAME=http://host:port`.

    Args:
        endpoints: names of the running servers.

    Raises:
        UserError: not of that form, or no running server has that name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in asked:
        ((name, url),) = _named([text], "--metrics-url", ADDRESS, starts=SCHEMES).items()
        if name not in endpoints:
            do = (
                f"give --url {name}=http://router:port, too" if not endpoints else f"use one of: {', '.join(endpoints)}"
            )
            raise UserError(f"there is no --url {name!r}", where=f"--metrics-url {text}", do=do)
        found[name] = (*found.get(name, ()), url)
    return found


def _named(
    asked: Sequence[str], option: str, form: str, *, starts: tuple[str, ...] = ("",), do: str = ""
) -> dict[str, str]:
    # NAME=VALUE for each; a value begins with one of `starts`.
    found: dict[str, str] = {}
    for text in asked:
        name, _, value = text.partition("=")
        if not name or not value or not value.startswith(starts):
            raise UserError(f"not NAME={form}", where=f"{option} {text}", do=do)
        _refuse_twice({name} & found.keys(), f"{option} {text}")
        found[name] = value
    return found


def _refuse_twice(names: Collection[str], where: str) -> None:
    if names:
        raise UserError(f"two variants are called {min(names)!r}", where=where, do="give another name")


def _patched(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    # `over` on top of `base`, key by key; null removes a key that is there (RFC 7386), and is else a value.
    out = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = base.get(key)
            out[key] = _patched(below if isinstance(below, Mapping) else {}, value)
        elif value is not None or key not in base:
            out[key] = value
    return out


def schedule(variants: Sequence[str], settings: BenchSettings) -> list[Cell]:
    """All runs in order, interleaved so that a busy spell of the machine slows all variants alike.

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
