"""How a container ends: no longer sent requests, told to stop, it answers those it has, and only then may be killed."""

from __future__ import annotations

PRE_STOP_SECONDS = 15
"""Between the pod's leaving the endpoints and SIGTERM: routers hear of it late."""
DRAIN_SECONDS = 120
"""What answers that have begun may take."""
MARGIN_SECONDS = 15
"""For the process to end by itself after the drain's deadline; a grace that equals it would be a race."""


def grace_seconds() -> int:
    """Kubernetes' terminationGracePeriodSeconds, which counts preStop too."""
    return PRE_STOP_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS
