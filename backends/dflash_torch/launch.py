"""Choices of the embedded engine where a Deployment leaves a field open, its memory, and the settings of its server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_serve.checkpoint.config import BF16, DrafterConfig, context_bytes, weight_bytes
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
from .server.settings import ServerSettings

GIB = 2**30
# Exists on machines with an NVIDIA driver, where the GPU's memory counts; only the extra `[cuda]` can read it.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Requests at once where the deployment leaves the number open.
MOST_REQUESTS = 32
# Share of the free memory that K/V of an open number of requests may take; activations and other processes need some.
USED_SHARE = 0.8
# Most links of a Hopper or Blackwell GPU.
NVLINKS = 18


def memory_problems(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> list[Problem]:
    """A problem if weights and K/V caches need more than the free memory; none where that is not known."""
    free, on_gpu = _free(deployment)
    needed = needed_bytes(deployment, target, drafter, on_gpu=on_gpu)
    if free is None or needed <= free:
        return []
    what = f"weights and K/V need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
    do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
    return [Problem(what, "limits", do)]


def fitting_batch(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> int:
    """Number of requests whose K/V at full length fits: a power of two from 1 to `MOST_REQUESTS`."""
    free, on_gpu = _free(deployment)
    if free is None:
        return MOST_REQUESTS
    for batch in (MOST_REQUESTS >> halvings for halvings in range(MOST_REQUESTS.bit_length())):
        if needed_bytes(deployment, target, drafter, on_gpu=on_gpu, batch=batch) <= free * USED_SHARE:
            return batch
    return 1


def _free(deployment: Deployment) -> tuple[int | None, bool]:  # free bytes (None = not known); True = on a GPU
    gpus = [] if deployment.hardware.gpu == "none" else local_gpus()
    free = gpus[0].free if gpus else None if gpus is None and NVIDIA_DRIVER.exists() else free_bytes()
    return free, bool(gpus)


def needed_bytes(
    deployment: Deployment,
    target: TargetLayout,
    drafter: DrafterConfig | None,
    *,
    on_gpu: bool = False,
    batch: int | None = None,
) -> int:
    """Bytes of the weights and of the K/V caches of all requests (one if their number is open) at full length."""
    dtype, limits = deployment.hardware.dtype, deployment.limits
    size = 2 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else 4
    rows = (batch or limits.max_batch_size or 1) * (limits.max_model_len or target.shape.max_position_embeddings or 0)
    in_bf16 = target.weight_bytes + rows * target.kv_bytes(BF16)
    if drafter is not None:
        in_bf16 += weight_bytes(drafter) + rows * context_bytes(drafter)
    return in_bf16 * size // BF16


def free_bytes() -> int | None:
    """Available memory of a Linux machine; None = not known."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


@dataclass(frozen=True)
class LocalGpu:
    """An NVIDIA GPU of this machine; memory in bytes."""

    name: str
    compute: int  # 90 = SM90
    memory: int
    free: int
    nvlinks: int  # active NVLinks


def local_gpus() -> list[LocalGpu] | None:
    """The GPUs, in NVML's order; [] where no driver answers, None = not known (the extra `[cuda]` is not installed)."""
    try:
        nvml = import_module("cuda.bindings.nvml")
    except ImportError:
        return None
    try:
        nvml.init_v2()
    except Exception:  # no library, no driver, no device: cuda-python has an exception class for each
        return []
    try:
        handles = [nvml.device_get_handle_by_index_v2(index) for index in range(nvml.device_get_count_v2())]
        return [_read(nvml, handle) for handle in handles]
    finally:
        nvml.shutdown()


def _read(nvml: Any, handle: int) -> LocalGpu:
    major, minor = nvml.device_get_cuda_compute_capability(handle)
    memory = nvml.device_get_memory_info_v2(handle)
    links = sum(_active(nvml, handle, link) for link in range(NVLINKS))
    return LocalGpu(nvml.device_get_name(handle), 10 * major + minor, memory.total, memory.free, links)


def _active(nvml: Any, handle: int, link: int) -> bool:  # False also for a link that the device does not have
    try:
        return bool(nvml.device_get_nvlink_state(handle, link) == nvml.EnableState.FEATURE_ENABLED)
    except (nvml.InvalidArgumentError, nvml.NotSupportedError):
        return False


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
