"""A run as it happens: a progress bar for people, and one JSON object a line for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dflash_serve.training.trainer import Tick


class Display:
    """Takes every step's `Tick`; shows and logs the mean of the last `every` steps."""

    def __init__(self, log: Path, every: int, console: Console) -> None:
        self.log, self.every, self.console = log, every, console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("training", total=1.0)
        self.pending: list[Tick] = []
        self.since = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, tick: Tick) -> None:
        self.pending.append(tick)
        self.bar.update(self.task, completed=min(1.0, tick.progress))
        if tick.step % self.every == 0 or tick.scores is not None:
            self._report(tick)

    def _report(self, tick: Tick) -> None:
        ticks, self.pending = self.pending, []
        hits, slots = sum(t.slot_hits for t in ticks), sum(t.slots for t in ticks)
        seconds = max(1e-9, tick.seconds - self.since)
        self.since = tick.seconds
        accuracy = torch.as_tensor(hits / torch.as_tensor(slots).clamp(min=1)).tolist()
        row: dict[str, object] = {
            "step": tick.step,
            "seconds": round(tick.seconds, 1),
            "progress": round(tick.progress, 4),
            "lr": round(tick.lr, 8),
            "loss": round(sum(t.loss for t in ticks) / len(ticks), 4),
            "gradient_norm": round(tick.gradient_norm, 3),
            "slot_accuracy": [round(share, 4) for share in accuracy],
            "simulated_tau": round(sum(t.simulated_tau for t in ticks) / len(ticks), 4),
            "context_tokens_per_second": round(sum(t.context_tokens for t in ticks) / seconds),
            "anchors_per_second": round(sum(t.anchors for t in ticks) / seconds),
        }
        if tick.scores is not None:
            row["validation"] = tick.scores.as_json()
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.bar.update(self.task, description=self._line(row, tick))

    def _line(self, row: dict[str, object], tick: Tick) -> str:
        text = f"step {row['step']}  loss {row['loss']}  simulated tau {row['simulated_tau']}"
        text += f"  {row['context_tokens_per_second']} tok/s"
        if tick.scores is not None:
            line = f"step {tick.step}: held out: loss {tick.scores.loss:.3f}, "
            line += f"simulated tau {tick.scores.simulated_tau:.2f}, replayed tau {tick.scores.replayed_tau:.2f}"
            self.console.print(line)
        return text
