"""PromQL for the dashboard: rates, gauges and quantiles of our pods' series."""

from __future__ import annotations

WHERE = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
"""Labels that the chart's PodMonitor puts on every series."""
WINDOW = "$__rate_interval"


def rate(metric: str, *, by: str, extra: str = "") -> str:
    """Per second over the window, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{WHERE}{extra}}}[{WINDOW}]))"


def gauge(metric: str, *, by: str = "pod", fold: str = "sum") -> str:
    """A gauge as it stands."""
    return f"{fold} by ({by}) ({metric}{{{WHERE}}})"


def quantile(q: float, histogram: str) -> str:
    """The q-quantile of a histogram, over all pods."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', by='le')})"
