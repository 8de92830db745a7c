"""Choice of the way in which OpenMP's threads wait for one another on a CPU, before PyTorch is loaded.

A decoding step has some hundred short parallel loops. On two idle cores SmolLM2 runs at 24 tokens/s with threads that
sleep between loops and at 36 with threads that spin for 10,000 turns. On two busy cores it is 23 and 13 tokens/s, and 9
with OpenMP's default spinning. So the idle time of the machine is measured first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from time import sleep

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
