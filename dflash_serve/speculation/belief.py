"""A Gaussian belief about numbers that drift: what survival and costs are estimated with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]


class Belief:
    """Mean [K] and covariance [K, K] of numbers that wander about a prior (an Ornstein-Uhlenbeck process).

    Between observations the belief relaxes towards its prior: what is not observed any more is known less and less,
    and numbers that the prior holds together stay together. With an observation each step this is a Kalman filter.

    Args:
        mean: [K], the prior's.
        covariance: [K, K], the prior's; how much the numbers differ from the mean, and with one another.
        memory: steps after which an observation has lost all but 1/e of its weight; [K] where numbers differ in it.
    """

    def __init__(self, mean: Vector, covariance: Matrix, memory: float | Vector) -> None:
        self._prior_mean = mean
        self._keep = np.exp(-1 / np.broadcast_to(memory, mean.shape))
        self._prior_covariance = covariance
        self.mean, self.covariance = mean.copy(), covariance.copy()

    @property
    def spread(self) -> Vector:
        """Standard deviations [K]."""
        return np.sqrt(np.maximum(np.diagonal(self.covariance), 0))

    def drift(self, steps: int = 1) -> None:
        """Steps go by."""
        keep = self._keep**steps
        self.mean = self._prior_mean + keep * (self.mean - self._prior_mean)
        self.covariance = self._prior_covariance + np.outer(keep, keep) * (self.covariance - self._prior_covariance)

    def learn(self, information: Matrix, gradient: Vector) -> None:
        """Takes in an observation by a Newton step on its log-likelihood (exact where that is quadratic).

        Args:
            information: [K, K], minus the second derivative of the log-likelihood at the mean.
            gradient: [K], the first derivative there.
        """
        covariance = np.linalg.solve(np.eye(len(self.mean)) + self.covariance @ information, self.covariance)
        self.covariance = (covariance + covariance.T) / 2
        self.mean = self.mean + self.covariance @ gradient

    def learn_sum(self, weights: Vector, surprise: float, spread: float) -> None:
        """Takes in a measured sum: `learn` where the information is of rank one (a Kalman update).

        Args:
            weights: [K], of the numbers in the sum.
            surprise: by how much the sum is more than the mean has it.
            spread: of the measurement.
        """
        shared = self.covariance @ weights
        gain = shared / (float(weights @ shared) + spread**2)
        self.covariance = self.covariance - np.outer(gain, shared)
        self.mean = self.mean + gain * surprise
