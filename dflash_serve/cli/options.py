"""Options that several verbs share, and the deployment that they describe.

Functions import what they need beside typer, because every verb's `--help` imports this module.
A verb adds its own default. Where it has bounds of its own, it shares the wording alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from dflash_serve.adapter.registry import choose_drafter
from dflash_serve.cli.grammar import INTERRUPTED, in_todays_words
from dflash_serve.common.json_log import remark
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.adapter.protocol import Backend as InstalledBackend
    from dflash_serve.common.settings import Frozen
    from dflash_serve.deployment.description import Deployment
    from dflash_serve.deployment.layers import Layers

BUNDLED = "smollm2"  # The target and drafter that need no download
DEPLOYMENT = "YAML file that describes target, drafter and how to serve them."
WIDTH = "Slots verified in a step: a number, auto or off."
MAX_TOKENS = "Longest answer, in tokens."
NUM_PROMPTS = "How many prompts to use, the first ones."
REPORT = "File for the report, JSON."

DeploymentFile = Annotated[Path | None, typer.Argument(metavar="DEPLOYMENT", help=DEPLOYMENT)]
DeploymentOption = Annotated[Path | None, typer.Option("--deployment", help=DEPLOYMENT)]
RequiredDeploymentFile = Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help=DEPLOYMENT)]
Target = Annotated[str | None, typer.Option(help="Target: hub id, folder, or the bundled smollm2.")]
DRAFTER = "Drafter: hub id, folder, the bundled smollm2 or smollm2-dspark (with a Markov head), or auto."
Drafter = Annotated[str | None, typer.Option(help=DRAFTER)]
Revision = Annotated[str | None, typer.Option(help="Commit of the drafter's hub repository.")]
BACKEND = "Installed backend: torch (embedded), sglang, tensorrt-llm, vllm."
Backend = Annotated[str, typer.Option("--backend", help=BACKEND)]
BlockSize = Annotated[
    int | None, typer.Option(help="B: slots of a block, the anchor counted. [default: the drafter's own]")
]
UnwrittenBlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size", help="B, the anchor counted, of a drafter whose config.json has no block_size.", min=2
    ),
]
Width = Annotated[str | None, typer.Option(help=WIDTH)]
Dtype = Annotated[str | None, typer.Option(help="What is computed in: auto, float32 or bfloat16.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Requests that run at once.")]
MaxTokens = Annotated[int, typer.Option(help=MAX_TOKENS, min=1)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0, max=2)]
ServedModel = Annotated[str | None, typer.Option(help="Name of the served model. [default: the first one listed]")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the server's API key. [default: the environment's DFLASH_SERVE_API_KEY]"),
]
METRICS_URL = "Address of the metrics of {}, where it stands behind a router or a frontend; once for each worker."
MetricsUrl = Annotated[list[str] | None, typer.Option(help=METRICS_URL.format("the engine"))]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", help="JSONL file of {'prompt': text}. [default: the bundled prompts]")
]
Raw = Annotated[bool, typer.Option("--raw", help="Send prompts as they are, without the chat template.")]
VARIABLES = "Variables of the target's chat template, as JSON: '{\"enable_thinking\": false}'."
TemplateKwargs = Annotated[str | None, typer.Option("--chat-template-kwargs", metavar="JSON", help=VARIABLES)]
Report = Annotated[Path, typer.Option(help=REPORT)]
ServedName = Annotated[str | None, typer.Option(help="Name that clients use for the model. [default: the target]")]
KeyFile = Annotated[Path | None, typer.Option(help="File of API keys, one a line; without it the server is open.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone: no progress, no remarks.")]

Settings = TypeVar("Settings", bound="Frozen")
ENGINE_WORDS = "dflash_serve.engine_words"  # Key of a command's context for the words after `--`


class Verb(TyperCommand):
    """A command that knows options of the release before, refuses infinity and says that it was interrupted."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_todays_words(str(self.name), args, quiet=ctx.resilient_parsing))

    def invoke(self, ctx: Any) -> Any:
        for one in self.params:
            value = ctx.params.get(one.name)
            if isinstance(value, float) and not isfinite(value):  # infinity is above every lower bound
                raise UserError(f"{value} is no finite number", where=one.opts[0])
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("dflash-serve: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


class TakesEngineArguments(Verb):
    """A verb whose words after `--` are the engine's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes them off before anything else is read: none of them is a file of ours."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[ENGINE_WORDS], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE ARGUMENTS]"]


def engine_arguments(context: typer.Context, backend: str, *named: str) -> dict[str, Any]:
    """The words after `--`, and parameters of the verb that are an engine's own, as a Deployment's `engine_args`.

    Raises:
        UserError: words that are no flags.
    """
    from dflash_serve.adapter.arguments import from_words

    own = {name.replace("_", "-"): context.params[name] for name in named if context.params[name] is not None}
    given = {**from_words(context.meta.get(ENGINE_WORDS, ())), **own}
    return {"engine_args": {backend: given}} if given else {}


def settings_of(kind: type[Settings], given: Mapping[str, Any], **fixed: Any) -> Settings:
    """A verb's options as its settings, whose fields have the options' names; `fixed` replaces some."""
    named = {name: given[name] for name in kind.model_fields if name in given}
    return kind.model_validate({**named, **fixed})


def refuse_ignored(context: typer.Context, names: Iterable[str], why: str, do: str = "leave it out") -> None:
    """Refuses options of the command line that would have no effect.

    Args:
        names: the options' parameters.
        why: why they have none.

    Raises:
        UserError: the first that is given.
    """
    shown = {one.name: one.opts[0] if one.opts[0].startswith("-") else one.metavar for one in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(why, where=shown[name] or name, do=do)


def names_target(path: Path | None, target: str | None) -> bool:
    """A file, a flag or the environment names a target."""
    from dflash_serve.common.settings import ENV_PREFIX

    return path is not None or target is not None or any(name.startswith(f"{ENV_PREFIX}TARGET") for name in os.environ)


def names_pair(path: Path | None, target: str | None, drafter: str | None) -> bool:
    """A file, a flag or the environment names a target or a drafter."""
    from dflash_serve.common.settings import ENV_PREFIX

    variables = any(name.startswith(f"{ENV_PREFIX}DRAFTER") for name in os.environ)
    return names_target(path, target) or drafter is not None or variables


def require_target(verb: str, path: Path | None, target: str | None) -> None:
    """Asks for anything that names a target: a file, a flag, or the environment.

    Raises:
        UserError: nothing does.
    """
    if not names_target(path, target):
        raise UserError(f"nothing to {verb}", where=verb, do="give a deployment.yaml, or --target and --drafter")


def deployment_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's options, by their parameters' names, as keys of a Deployment, which beat its file.

    None counts as not given, and so does a name that is not there.
    """
    keys = given.get("api_key_file")
    limits = ("max_batch_size", "max_model_len", "max_queued_requests")
    return {
        "serving": {
            "served_model_name": given.get("served_model_name"),
            "api_key_file": str(keys.resolve()) if keys else None,
            "log_format": given.get("log_format"),
        },
        "target": {"model": given.get("target")},
        "drafter": {"model": given.get("drafter")},
        "speculation": {name: given.get(name) for name in ("block_size", "width")},
        "hardware": {"dtype": given.get("dtype")},
        "limits": {name: given.get(name) for name in limits},
        "role": given.get("role"),
    }


def described_pair(
    path: Path | None, flags: Mapping[str, Any], backend: InstalledBackend, *, quiet: bool = False, **bundled: Any
) -> Deployment:
    """The deployment of a file and `deployment_flags`; the bundled target and drafter if nothing is named.

    Args:
        bundled: other keys of the deployment, for the bundled pair.

    Raises:
        UserError: as `load_layers` and `name_drafter`.
    """
    target = flags["target"]["model"]
    if path is None and (target == BUNDLED or not names_target(path, target)):
        drafter = flags["drafter"]["model"] or BUNDLED
        flags = {**flags, "target": {"model": BUNDLED}, "drafter": {"model": drafter}, **bundled}
    return name_drafter(load_described(path, flags, quiet=quiet), backend, quiet=quiet)


def load_described(path: Path | None, flags: Mapping[str, Any], *, quiet: bool) -> Deployment:
    """The deployment of a file, the environment and flags; stderr says which values the environment gives.

    Raises:
        UserError: as `load_layers`.
    """
    from dflash_serve.deployment.layers import load_layers

    layers = load_layers(path, flags)
    if not quiet:
        tell_variables(layers)
    return layers.deployment


def tell_variables(layers: Layers) -> None:
    """Prints on stderr every value that an environment variable gives: it may be left from an earlier command."""
    for each in layers.from_variables:
        typer.echo(remark(each.line, layers.deployment.serving.log_format), err=True)


def name_drafter(deployment: Deployment, backend: InstalledBackend, *, quiet: bool = False) -> Deployment:
    """The deployment with `drafter: auto` replaced by the best drafter that the backend serves; stderr says which.

    Raises:
        UserError: there is none.
    """
    found, told = choose_drafter(deployment, backend)
    if told is not None and not quiet:
        typer.echo(remark(told, deployment.serving.log_format), err=True)
    return found
