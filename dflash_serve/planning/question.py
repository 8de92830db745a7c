"""The question of a plan: pair, GPUs, load, limits and expected acceptance. All mistakes in it are found here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from dflash_serve.adapter.checks import (
    attention_head_problems,
    expert_block_problems,
    length_problems,
)
from dflash_serve.deployment.description import Deployment, Parallel
from dflash_serve.deployment.gpus import GPUS, Gpu
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.planning.prediction import (
    Constants,
    ExpectedAcceptance,
    Load,
    OperatingPoint,
)
from dflash_serve.planning.step_times import (
    Pair,
    Split,
    StepTimes,
    priced,
)

TENSORS = (1, 2, 4, 8)  # Sizes of TP that are planned


@dataclass(frozen=True)
class Objective:
    """Limits that a plan must meet; None = no limit."""

    interactivity: float | None = None  # Tokens/s/user at least
    first_token_ms: float | None = None  # TTFT at most

    def is_met(self, point: OperatingPoint) -> bool:
        """True where every limit holds."""
        slow = self.interactivity is not None and point.interactivity < self.interactivity
        late = self.first_token_ms is not None and point.first_token_ms > self.first_token_ms
        return not (slow or late)

    def best(self, points: Iterable[OperatingPoint]) -> OperatingPoint | None:
        """The most tokens/s/GPU of those that meet it; among equals, the more interactive. None = none does."""
        met = [point for point in points if self.is_met(point)]
        return max(met, key=lambda point: (point.throughput, point.interactivity), default=None)

    def require_met(self, points: Sequence[OperatingPoint], others: str) -> None:
        """Names the nearest limit that is met.

        Args:
            others: further ways to meet this one.

        Raises:
            UserError: no point meets it.
        """
        if any(map(self.is_met, points)):
            return
        user, late = self.interactivity, self.first_token_ms
        in_time = [point for point in points if late is None or point.first_token_ms <= late]
        if in_time:
            near = fastest(in_time)
            what, limit = f"no way of running gives {user:g} tokens/s/user", f"interactivity {int(near.interactivity)}"
        else:
            near = min(points, key=lambda point: point.first_token_ms)
            what, limit = (
                f"no way of running has its first token after {late:g} ms",
                f"ttft {ceil(near.first_token_ms)}",
            )
        how = f"--slo-{limit} ({near.variant}, {near.split}, batch {near.batch})"
        raise UserError(what, where="the SLO", do=f"the nearest that is met is {how}; or {others}")


def fastest(points: Iterable[OperatingPoint]) -> OperatingPoint:
    """The point that gives one user the most tokens/s."""
    return max(points, key=lambda point: point.interactivity)


@dataclass(frozen=True)
class PlanQuestion:
    """Everything that a plan depends on."""

    deployment: Deployment
    backend: str
    on: Gpu
    pair: Pair
    block_size: int
    load: Load
    objective: Objective
    acceptances: tuple[ExpectedAcceptance, ...]  # One, or a band from low to high
    constants: Constants
    calibration: tuple[str, ...] = ()
    """A line for each point that the constants were fitted to; empty = they were not fitted here."""

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return self.deployment.hardware.count

    @property
    def given_width(self) -> int | None:
        """The number of slots that `speculation.width` names; None = the plan chooses."""
        given = self.deployment.speculation.width
        return given if isinstance(given, int) and given > 1 else None

    @property
    def width(self) -> int:
        """The fixed width that is compared: the whole block where none is given."""
        return self.given_width or self.block_size

    def copies(self, split: Split) -> int:
        """Copies of the model on all GPUs."""
        return self.count // split.tensor

    def most(self, split: Split) -> int | None:
        """Requests at once on one copy by `limits.max_batch_size`, which all copies share; None = no limit."""
        asked = self.deployment.limits.max_batch_size
        return None if asked is None else asked // self.copies(split)

    def require_lengths(self) -> None:
        """Refuses requests that are longer than target, drafter or `limits.max_model_len` allow.

        Raises:
            UserError: they are; says which.
        """
        shape, drafter, deployment = self.pair.layout.shape, self.pair.drafter, self.deployment
        raise_problems(list(length_problems(deployment, shape)))
        windowed = deployment.speculation.draft_window or any(kind.window for kind in drafter.layers)
        unbounded = windowed or drafter.rope.scaling or self.pair.assumed or self.pair.catalogued
        allowed = (
            (shape.max_position_embeddings, f"the positions of {shape.name}"),
            (deployment.limits.max_model_len, "limits.max_model_len"),
            (None if unbounded else drafter.max_position_embeddings, "the positions of the drafter"),
        )
        isl, osl = self.load.isl, self.load.osl
        most, name = min(((most, name) for most, name in allowed if most), default=(isl + osl, ""))
        if isl + osl > most:
            what = f"prompts of {isl} and answers of {osl} tokens exceed {name}, {most}"
            raise UserError(what, where="--isl, --osl", do=f"give {most} together at most")

    def splits(self) -> list[Split]:
        """Ways of laying one copy over GPUs: the one that was asked for, or all that divide.

        Raises:
            UserError: the one that was asked for does not.
        """
        parallel, layout = self.deployment.parallel, self.pair.layout
        for name in ("pipeline", "context", "attention_data", "nodes"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                do = "leave it out: a plan has TP, EP and copies alone"
                raise UserError("this is not planned for", where=f"parallel.{name}", do=do)
        sizes = [size for size in TENSORS if size <= min(self.count, self.on.per_node)]
        tensors = [size for size in sizes if not list(self._split_problems(size))]
        if self.is_split:
            for what in self._split_problems(parallel.tensor):
                possible = " or ".join(map(str, tensors))
                more = "; more GPUs (--count) allow more" if self.count < self.on.per_node else ""
                raise UserError(what, where="--tensor", do=f"use {possible or 'another'}{more}")
            tensors = [parallel.tensor]
        asked = {parallel.expert} if "expert" in parallel.model_fields_set else None
        found = [
            Split(tensor, expert)
            for tensor in tensors
            for expert in sorted(asked or {1, tensor})
            if expert == 1 or (layout.experts and not layout.experts % expert and not tensor % expert)
            if asked or not list(expert_block_problems(layout, tensor, expert))
        ]
        if not found and asked:
            if layout.experts:
                what = f"EP {parallel.expert} does not divide both TP and {layout.experts} experts"
                do = "leave it out, or use 1 or as many as TP"
            else:
                what = f"{layout.shape.name} has no experts to share out over {parallel.expert} GPUs"
                do = "leave it out, or use 1"
            raise UserError(what, where="--expert", do=do)
        if not found:
            why = next((what for size in sizes for what in self._split_problems(size)), "none fits a node")
            what = f"no split of {layout.shape.name} over {self.count} GPUs is possible ({why})"
            raise UserError(what, where="--count", do="give another number of GPUs")
        return found

    @property
    def is_split(self) -> bool:
        """TP was given."""
        return "tensor" in self.deployment.parallel.model_fields_set

    def wider(self, tensor: int) -> list[Split]:
        """Splits over more GPUs than `tensor`, on as many GPUs as each needs."""
        layout, drafter = self.pair.layout, self.pair.drafter
        sizes = (size for size in TENSORS if tensor < size <= self.on.per_node)
        return [Split(size) for size in sizes if not list(attention_head_problems(layout, drafter, size))]

    def step_times(self, split: Split) -> tuple[StepTimes, str | None]:
        """Step times of one copy, and why they are not from operator tables (None: they are)."""
        return priced(self.pair, self.on, split, self.constants.tables, self.block_size, self.load.context)

    def _split_problems(self, tensor: int) -> Iterator[str]:
        if tensor > self.on.per_node:
            yield f"TP {tensor} is more than the {self.on.per_node} GPUs of a node"
        if self.count % tensor:
            yield f"TP {tensor} does not divide {self.count} GPU{'s' * (self.count > 1)}"
        parallel, copies = self.deployment.parallel, self.count // tensor
        if "data" in parallel.model_fields_set and copies != parallel.data:
            yield f"TP {tensor} makes {copies} copies on {self.count} GPUs, and parallel.data is {parallel.data}"
        for problem in attention_head_problems(self.pair.layout, self.pair.drafter, tensor):
            yield f"TP {tensor}: {problem.what} ({problem.where})"


def specification(gpu: str | None) -> Gpu:
    """The data sheet of a GPU.

    Raises:
        UserError: no GPU was named, or its data sheet is not known.
    """
    have = ", ".join(GPUS)
    if gpu is None:
        raise UserError("which GPU?", where="--gpu", do=f"name one: {have}")
    if (gpu := gpu.lower()) in GPUS:
        return GPUS[gpu]
    what = "a CPU is not planned for" if gpu == "none" else f"nothing is known of a GPU {gpu!r}"
    raise UserError(what, where="--gpu", do=f"there are: {have}")
