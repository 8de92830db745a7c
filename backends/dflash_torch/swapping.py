"""Another drafter for a running engine, put in place between two steps.

1. `load`, in any thread: the folder is checked as at a start and loaded beside the served drafter. A refusal, or a lack
   of memory, leaves the served one as it is.
2. `put`, in the thread that runs the steps, while none is in flight: the new drafter takes its place. Its module is a
   new one, because packed weights do not follow a copy into their tensors. Requests that have begun go on without
   drafts (`Scheduler.replace_drafter`).

The block keeps its size, so that K/V caches, and widths that requests have asked for, stay valid. A drafter with K/V of
the same sizes takes over the cache of the one before it.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from dflash_serve.adapter.last_run import KeptWidth
from dflash_serve.checkpoint.config import BF16, DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.deployment.gpus import GIB
from dflash_serve.deployment.variables import given_cost
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.models.drafter import Drafter
from dflash_serve.speculation.policy import WidthPolicy

from .calibration import kept_cost
from .engine import EmbeddedEngine, chosen_width, load_fused
from .launch import EmbeddedLaunch, free_bytes, readable
from .scheduler import Scheduler
from .speculator import Speculator

log = logging.getLogger(__name__)

RESTART = "restart the server with it"
# Weights of a drafter that is loaded, and once more while they are stacked and packed.
COPIES = 2
CACHE_SIZES = ("num_layers", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that is loaded and not in place."""

    name: Model
    speculator: Speculator
    policy: WidthPolicy
    seconds: float  # that checking and loading took
    is_back: bool


@dataclass(frozen=True)
class Swapped:
    """A drafter that was put in place."""

    revision: int  # Number of drafters before it
    drafter: str
    before: str  # The drafter that it replaced
    load_seconds: float
    pause_seconds: float  # Time in which no step ran
    undrafted: int  # Answers in flight, which go on without drafts


class DrafterSwap:
    """The drafters of a running engine. One `load` and its `put` run at a time.

    Args:
        folder: drafters below it may be loaded.
    """

    def __init__(self, engine: EmbeddedEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        named = engine.deployment.drafter if engine.deployment else None
        self.served: list[Model] = [named] if named else []
        """The served drafter, and before it those to which it can be taken back."""
        self.names = [one.model for one in self.served]  # by revision

    def load(self, path: str | None) -> LoadedDrafter:
        """Checks and loads a drafter; None = the one before the served one.

        Raises:
            UserError: it cannot be served here, or it or its K/V cache does not fit into memory.
        """
        begun, scheduler = perf_counter(), self.engine.scheduler
        served, old = self.engine.deployment, scheduler.speculator
        if served is None or old is None or not self.served:
            raise UserError("no drafter is served", where="model_path", do=f"name one, and {RESTART}")
        wanted = self._before() if path is None else Model(model=str(self._below(path)))
        speculation = served.speculation.model_copy(update={"block_size": old.block_size})
        deployment = served.model_copy(update={"drafter": wanted, "speculation": speculation})
        launch = EmbeddedLaunch(deployment=deployment)
        raise_problems(launch.problems)
        assert launch.drafter is not None
        self._check_memory(launch.drafter, scheduler, old)
        drafter = self._fused(deployment, scheduler, launch.checkpoint)
        policy = _policy(deployment, drafter, scheduler, old)
        return LoadedDrafter(wanted, _speculator(drafter, scheduler, old), policy, perf_counter() - begun, path is None)

    def put(self, loaded: LoadedDrafter) -> Swapped:
        """Puts a drafter in place of the served one; no step may be in flight."""
        begun, scheduler, before = perf_counter(), self.engine.scheduler, self.served[-1]
        policy = loaded.policy
        if isinstance(policy, KeptWidth) and isinstance(scheduler.policy, KeptWidth):
            policy.pace = scheduler.policy.pace  # counters only rise
        undrafted = scheduler.replace_drafter(loaded.speculator, policy)
        if loaded.is_back:
            self.served.pop()
        elif loaded.name != before:
            self.served.append(loaded.name)
        self.names.append(loaded.name.model)
        done = Swapped(
            revision=len(scheduler.earlier),
            drafter=loaded.name.model,
            before=before.model,
            load_seconds=loaded.seconds,
            pause_seconds=perf_counter() - begun,
            undrafted=undrafted,
        )
        log.info("drafter %s in place of %s; %d answers go on without drafts", done.drafter, done.before, undrafted)
        return done

    def _before(self) -> Model:
        if len(self.served) < 2:
            raise UserError("there is no drafter before the served one", where="back", do="give a model_path")
        return self.served[-2]

    def _below(self, path: str) -> Path:
        root = self.folder.resolve()
        try:
            found = (root / path).resolve()
            is_folder = found.is_relative_to(root) and found.is_dir()
        except (OSError, ValueError, RuntimeError):  # a name that is too long, a zero byte, a circle of links
            is_folder = False
        if not is_folder:
            do = f"give a folder below {root}, as the server sees it"
            raise UserError(f"{path!r} is no folder with a drafter that may be loaded", where="model_path", do=do)
        return found

    def _check_memory(self, config: DrafterConfig, scheduler: Scheduler, old: Speculator) -> None:
        target, size = scheduler.target, scheduler.target.embedding.element_size()
        needed = COPIES * weight_bytes(config)
        if not _same_cache(config, old):
            needed += old.cache.entries * old.cache.capacity * context_bytes(config)
        needed, free = needed * size // BF16, _free(target.device)
        if free is not None and needed > free:
            what = f"beside the served drafter it needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
            raise UserError(what, where="model_path", do=RESTART)

    def _fused(self, deployment: Deployment, scheduler: Scheduler, opened: Checkpoint | None) -> Drafter:
        try:
            return load_fused(deployment, scheduler.target, opened)
        except (MemoryError, RuntimeError) as error:
            raise readable(error) from None


def _speculator(drafter: Drafter, scheduler: Scheduler, old: Speculator) -> Speculator:
    # a list of frequent tokens copies rows of the target's head, which takes longer than a step
    try:
        return Speculator(
            drafter,
            scheduler.target,
            block_size=old.block_size,
            max_batch_size=old.cache.entries,
            capacity=scheduler.capacity,
            cache=old.cache if _same_cache(drafter.config, old) else None,
        )
    except (MemoryError, RuntimeError) as error:
        raise readable(error) from None


def _policy(deployment: Deployment, drafter: Drafter, scheduler: Scheduler, old: Speculator) -> WidthPolicy:
    # A measurement would disturb the requests: without one of an earlier start the served drafter's costs are the first
    # estimate, and served steps correct it.
    served, entries = scheduler.policy, old.cache.entries
    if not isinstance(served, KeptWidth):
        return served
    cost = given_cost() or kept_cost(scheduler.target, drafter, old.block_size, entries) or served.times.measured
    return chosen_width(deployment, cost, old.block_size, static=old.drafter_runner.static)


def _same_cache(config: DrafterConfig, old: Speculator) -> bool:
    served = old.drafter.config
    return all(getattr(config, name) == getattr(served, name) for name in CACHE_SIZES)


def _free(device: torch.device) -> int | None:
    if device.type != "cuda":
        return free_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def trim() -> None:
    """Gives memory that was freed back to the machine, where the C library can."""
    with suppress(OSError, AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)
