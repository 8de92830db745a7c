"""Samples of a server's Prometheus metrics, and PromQL of our pods' series for the dashboard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from dflash_serve.errors import UserError

WHERE = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
"""Labels that the chart's PodMonitor puts on every series."""
WINDOW = "$__rate_interval"


class Samples:
    """Prometheus samples by name; label sets (ranks, models) are summed.

    Raises:
        UserError: the text is not in Prometheus' format.
    """

    def __init__(self, text: str, where: str = "/metrics") -> None:
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise UserError(f"not Prometheus text ({error})", where=where) from None
        self.all = [sample for family in families for sample in family.samples]

    def named(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """(labels, value) of every sample with a name."""
        return ((sample.labels, sample.value) for sample in self.all if sample.name == name)

    def knows(self, prefix: str) -> bool:
        return any(sample.name.startswith(prefix) for sample in self.all)

    def total(self, name: str) -> float | None:
        """The sum over label sets; None if there is no such sample."""
        values = [value for _, value in self.named(name)]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        """The mean of a gauge over label sets; 0 means unknown and is left out. None if all are unknown."""
        values = [value for _, value in self.named(name) if value > 0]
        return sum(values) / len(values) if values else None

    def by(self, name: str, label: str) -> dict[int, float]:
        """Number in a label -> the sum of its samples."""
        counts: dict[int, float] = {}
        for labels, value in self.named(name):
            if labels.get(label, "").isdecimal():
                counts[int(labels[label])] = counts.get(int(labels[label]), 0.0) + value
        return counts

    def by_slot(self, name: str, label: str, *, first: int) -> list[float]:
        """Sums of slots, whose number (from `first` on) is in a label; 0 for a slot without a sample."""
        counts = self.by(name, label)
        return [counts.get(slot, 0.0) for slot in range(first, max(counts, default=first - 1) + 1)]


class Scrape:
    """One reading of a server's metrics. Each page is fetched at most once: reading TensorRT-LLM's empties it.

    Args:
        fetch: path -> the page's text; None if the server has no such page.
        base: of the server, for messages.
    """

    def __init__(self, fetch: Callable[[str], str | None], base: str = "") -> None:
        self._fetch, self._base = fetch, base
        self._texts: dict[str, str] = {}
        self._samples: dict[str, Samples] = {}

    def text(self, path: str) -> str:
        """The page's text, "" if there is none."""
        if path not in self._texts:
            self._texts[path] = self._fetch(path) or ""
        return self._texts[path]

    def samples(self, path: str = "/metrics") -> Samples:
        """The page's samples; empty for a page of JSON.

        Raises:
            UserError: the page is neither JSON nor Prometheus text.
        """
        if path not in self._samples:
            text = self.text(path)
            self._samples[path] = Samples("" if _is_json(text) else text, self._base + path)
        return self._samples[path]


def _is_json(text: str) -> bool:
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def rate(metric: str, *, by: str, extra: str = "") -> str:
    """PromQL of a counter's rate per second over the window, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{WHERE}{extra}}}[{WINDOW}]))"


def gauge(metric: str, *, by: str = "pod", fold: str = "sum") -> str:
    """PromQL of a gauge's current value."""
    return f"{fold} by ({by}) ({metric}{{{WHERE}}})"


def quantile(q: float, histogram: str) -> str:
    """PromQL of the q-quantile of a histogram over all pods."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', by='le')})"
