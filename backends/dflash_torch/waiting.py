"""How OpenMP's threads wait for one another on a CPU, chosen before PyTorch is loaded.

A decoding step is some hundred short parallel loops. Threads that sleep in between cost half of the speed (two cores
with nothing else to do: 24 tokens/s of SmolLM2 asleep, 36 spinning for 10,000 turns); threads that spin cost twice as
much as that where somebody else wants the core (23 and 13; 9 as OpenMP itself would spin). So the machine is looked at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from time import sleep

CHOSEN_ALREADY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables of whoever knows better."""
SPINS = "10000"
"""Some 30 microseconds."""
LOOK_SECONDS = 0.1
IDLE = 0.9
"""The share of all cores' time that nobody wants on a quiet machine."""


def choose_waiting(environment: MutableMapping[str, str] = os.environ, stat: Path = Path("/proc/stat")) -> None:
    """Sets OpenMP's variables, unless they are set, PyTorch is loaded, or nothing is known of the machine."""
    if "torch" not in sys.modules:
        environment.update(waiting_here(environment, stat))


def waiting_here(environment: Mapping[str, str] = os.environ, stat: Path = Path("/proc/stat")) -> dict[str, str]:
    """OpenMP's variables that suit the machine as it is now; none where some are set, or nothing is known."""
    idle = None if any(name in environment for name in CHOSEN_ALREADY) else _idle(stat)
    if idle is None:
        return {}
    return {"GOMP_SPINCOUNT": SPINS} if idle >= IDLE else {"OMP_WAIT_POLICY": "PASSIVE"}


def _idle(stat: Path) -> float | None:
    """The share of the next tenth of a second that the cores have nothing to do, but for this thread's own."""
    before = _times(stat)
    sleep(LOOK_SECONDS)
    after = _times(stat)
    if before is None or after is None or sum(after) <= sum(before):
        return None
    return (after[3] + after[4] - before[3] - before[4]) / (sum(after) - sum(before))


def _times(stat: Path) -> list[int] | None:
    """Of all cores together: user, nice, system, idle, waiting for input, ...; proc(5)."""
    try:
        return [int(part) for part in stat.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
