"""What a server does now: the difference of two readings of its metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_serve.client.metrics import ServerReading


@dataclass(frozen=True)
class LiveFigures:
    """A server between two readings. What it does not say, or did not happen, is None."""

    engine: str | None
    seconds: float
    """Between the readings."""
    tokens_per_second: float | None
    tokens_per_second_per_user: float | None
    """Shared out over the requests in the batch at the end."""
    running: float | None
    """Requests in the batch."""
    queued: float | None
    """Requests that wait."""
    kv_cache_usage: float | None
    """Share in use, 0 to 1."""
    acceptance_length: float | None
    """τ."""
    tokens_per_step: float | None
    """Steps without speculation counted."""
    survival: list[float | None]
    """Of slots 1, 2, ..., where the width covered them."""
    widths: dict[int, float] | None
    """Share of the steps that verified so many slots, the anchor counted; 1 = nothing was drafted."""

    @classmethod
    def between(cls, before: ServerReading, now: ServerReading) -> LiveFigures:
        """The figures of that time; a restart in between leaves counts unknown."""
        seconds, acceptance = now.seconds - before.seconds, now.acceptance.since(before.acceptance)
        rate = None
        if before.generated is not None and now.generated is not None and now.generated >= before.generated:
            rate = (now.generated - before.generated) / seconds
        steps = acceptance.steps
        return cls(
            engine=now.engine,
            seconds=seconds,
            tokens_per_second=rate,
            tokens_per_second_per_user=rate / now.running if rate and now.running else None,
            running=now.running,
            queued=now.queued,
            kv_cache_usage=now.kv_cache_usage,
            acceptance_length=acceptance.acceptance_length,
            tokens_per_step=acceptance.tokens_per_step,
            survival=acceptance.survival(),
            widths={w: n / steps for w, n in sorted((acceptance.widths or {}).items())} if steps else None,
        )

    @property
    def mean_width(self) -> float | None:
        """Slots verified a step, the anchor counted."""
        return sum(width * share for width, share in self.widths.items()) if self.widths else None

    def as_json(self) -> dict[str, Any]:
        """For scripts; widths' keys become texts."""
        return {**asdict(self), "mean_width": self.mean_width}
