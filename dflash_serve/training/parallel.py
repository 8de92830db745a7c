"""Training in several processes, one a GPU, as `torchrun` starts them: what they add up, and what they agree on.

Every process holds the whole target and the whole drafter, and trains on its share of a step's sequences. Losses are
divided by the weights of all processes together and gradients are summed, so that a step in n processes is the step of
one process on the same sequences. The processes need one folder that all of them read: their prompts, answers and
checkpoints are kept there, and only the first process writes checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import sleep

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAST_THREADS = 0.2
"""Seconds for gloo's threads to let go of the group: one process in about fifty was aborted at its exit without."""
PATIENCE = timedelta(hours=6)
"""Longest wait of a process for another: the first one validates alone, and answers end at different times."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run; one alone by default, for which every method does nothing."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """True in the process that speaks, validates and writes."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in its own memory."""
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def total_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes every gradient the sum of those of all processes."""
        if self.count > 1:
            running = [dist.all_reduce(p.grad, async_op=True) for p in parameters if p.grad is not None]
            for work in running:
                work.wait()

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Gives all processes the values of the first one's tensors."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def agree(self, seconds: float, stopping: bool) -> tuple[float, bool]:
        """The first process's seconds, and if any process is to stop. Waits for no GPU: gloo exchanges these."""
        if self.count == 1:
            return seconds, stopping
        both = self.total(torch.tensor([seconds if self.first else 0.0, float(stopping)], dtype=torch.float64)).tolist()
        return both[0], both[1] > 0

    def wait(self) -> None:
        """Returns when all processes have come here."""
        self.total(torch.zeros(1))

    @contextmanager
    def first_ahead(self) -> Iterator[None]:
        """Runs the block in the first process, then in the others, which find what it wrote."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()


ALONE = Processes()


def started() -> Processes:
    """This process among those that `torchrun` started; one alone without it."""
    return Processes(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def joined_processes(device: torch.device) -> Iterator[tuple[Processes, torch.device]]:
    """The processes that `torchrun` started, and this one's device; one alone without it.

    Args:
        device: where to train; on GPUs each process takes the one of its local rank.
    """
    processes = started()
    if processes.count == 1:
        yield processes, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield processes, device
    finally:
        sleep(LAST_THREADS)
        dist.destroy_process_group()
