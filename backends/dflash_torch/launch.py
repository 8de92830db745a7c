"""Choices of the embedded engine where a Deployment leaves a field open, and the settings of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import target_source
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.common.settings import describe
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import key_problems, uses_drafter
from dflash_serve.engine_args import ArgumentTable, EngineArgs, EngineParser, add_flag
from dflash_serve.errors import Problem
from dflash_serve.server_adapter import Choice, PreparedFile, Preview

from .facts import SETTINGS_PREFIX
from .memory import MOST_REQUESTS, fitting_batch, memory_problems
from .server.settings import ServerSettings

DEPLOYMENT_FILE = "deployment.json"
KEYS = {
    "host": "--host and --port of `dflash-serve serve`",
    "port": "--host and --port of `dflash-serve serve`",
    "served_model_name": "serving.served_model_name",
    "api_key_file": "serving.api_key_file",
    "log_format": "serving.log_format",
}


def own_arguments(deployment: Deployment) -> EngineArgs:
    """`engine_args.torch`: settings of the embedded server."""
    return deployment.engine_args.get("torch", {})


def with_operators(deployment: Deployment, operators: str) -> Deployment:
    """The deployment with the operators of the server's environment; `plain` overrides the deployment."""
    if operators != "plain":
        return deployment
    own = {**own_arguments(deployment), "operators": operators}
    return deployment.model_copy(update={"engine_args": {**deployment.engine_args, "torch": own}})


def argument_problems(deployment: Deployment) -> Iterator[Problem]:
    """Problems of unknown or invalid settings of the embedded server, and of the file of API keys."""
    given = own_arguments(deployment)
    table = ArgumentTable("torch", "the embedded engine's server", _parser, KEYS)
    found = table.problems(given)
    yield from found
    if not found:
        try:
            ServerSettings.model_validate({name.replace("-", "_"): value for name, value in given.items()})
        except ValidationError as error:
            yield Problem(describe(error), table.where, "correct the value")
    if deployment.serving.api_key_file is not None:
        yield from key_problems(deployment.serving.api_key_file)


def _parser() -> EngineParser:
    parser = EngineParser()
    for name in ServerSettings.model_fields:
        add_flag(parser, [f"--{name.replace('_', '-')}"], name, takes="?")
    return parser


def server_environment(deployment: Deployment) -> dict[str, str]:
    """The embedded server's settings as environment variables."""
    serving = deployment.serving
    named = {
        "served_model_name": serving.served_model_name,
        "api_key_file": serving.api_key_file,
        "log_format": None if serving.log_format == "text" else serving.log_format,
    }
    given = {name.replace("-", "_"): value for name, value in own_arguments(deployment).items()}
    return {
        SETTINGS_PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {**named, **given}.items()
        if value is not None
    }


def sizes(deployment: Deployment) -> tuple[TargetLayout, DrafterConfig | None]:
    """Target and drafter, as far as their memory depends on them."""
    named = deployment.target.model_copy(update={"model": str(target_source(deployment.target.model))})
    target, drafter = read_target_layout(target_configuration(named), named), None
    if uses_drafter(deployment) and deployment.drafter is not None:
        drafter, _ = read_config(deployment.drafter.model, deployment.drafter.revision)
    return target, drafter


def memory_of(deployment: Deployment) -> list[Problem]:
    """Problems of memory. A server reserves its whole K/V cache; without the memory it would be killed under load."""
    return memory_problems(deployment, *sizes(deployment))


def with_batch_size(deployment: Deployment) -> Deployment:
    """The deployment with `limits.max_batch_size` filled in where it is left open."""
    if deployment.limits.max_batch_size is not None:
        return deployment
    limits = deployment.limits.model_copy(update={"max_batch_size": fitting_batch(deployment, *sizes(deployment))})
    return deployment.model_copy(update={"limits": limits})


def preview(deployment: Deployment, folder: Path) -> Preview:
    """The file that its server reads, and what is chosen."""
    filled = with_batch_size(deployment)
    text = filled.model_dump_json(indent=1)
    return Preview([PreparedFile(DEPLOYMENT_FILE, "the deployment, merged", text)], list(_choices(deployment, filled)))


def _choices(deployment: Deployment, filled: Deployment) -> Iterator[Choice]:
    target, drafter = sizes(deployment)
    batch = filled.limits.max_batch_size
    if deployment.limits.max_batch_size is None:
        why = f"{MOST_REQUESTS}, or the power of two whose K/V the free memory holds"
        yield Choice("limits.max_batch_size", f"{batch}", why)
    if deployment.limits.max_model_len is None:
        yield Choice("limits.max_model_len", f"{target.shape.max_position_embeddings}", "the target's positions")
    if drafter is not None and deployment.speculation.block_size is None:
        yield Choice("speculation.block_size", f"{drafter.block_size}", "the drafter's own")
    if drafter is not None and deployment.speculation.width == "auto":
        yield Choice("speculation.width", "auto", "by costs that are measured when the engine starts")
    if deployment.hardware.gpu is None:
        yield Choice("hardware.gpu", "what is there", "the first GPU that PyTorch sees, else the CPU")
    if deployment.hardware.dtype == "auto":
        yield Choice("hardware.dtype", "auto", "bfloat16 on a GPU; on a CPU by measurement, if the weights are")
