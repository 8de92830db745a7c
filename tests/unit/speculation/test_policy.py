"""The policies that engines start from: a fixed width, and a guard around a policy that may fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_serve.speculation.policy import FixedWidth, GuardedPolicy, Step, WidthPolicy


class Failing:
    """Fails in one of the methods of `WidthPolicy`."""

    def __init__(self, method: str) -> None:
        self.method = method

    def fail(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError(method)

    @property
    def paused(self) -> bool:
        self.fail("paused")
        return True

    def widths(self, request_ids: Sequence[object], *_: object) -> list[int]:
        self.fail("widths")
        return [2] * len(request_ids)

    def observe(self, step: Step) -> None:
        self.fail("observe")

    def forget(self, request_id: object) -> None:
        self.fail("forget")


@pytest.mark.parametrize("method", ["paused", "widths", "observe", "forget"])
def test_a_policy_that_fails_is_logged_once_and_replaced_by_whole_blocks(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy: WidthPolicy = GuardedPolicy(Failing(method), 8)
    for _ in range(3):
        chosen = policy.widths(["a", "b"], 10, {"b"})
        assert chosen in ([2, 2], [8, 8])
        policy.observe(Step(["a", "b"], chosen, [0, 1]))
        policy.forget("b")
        assert policy.paused in (True, False)
    assert (policy.widths(["a"]), policy.paused) == ([8], False)
    assert caplog.text.count("the choice of widths failed") == 1


def test_a_policy_that_works_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    policy = GuardedPolicy(Failing("none"), 8)
    policy.observe(Step(["a"], policy.widths(["a"]), [1], 0.1, 5))
    policy.forget("a")
    assert (policy.widths(["a", "b"]), policy.paused, caplog.text) == ([2, 2], True, "")


def test_a_fixed_width_stays_and_a_width_below_one_is_refused() -> None:
    policy: WidthPolicy = FixedWidth(4)
    policy.observe(Step("a", [4], [3]))
    policy.forget("a")
    assert policy.widths(["a", "b"]) == [4, 4]
    assert (policy.paused, FixedWidth(1).paused) == (False, True)
    with pytest.raises(ValueError, match="width 0"):
        FixedWidth(0)
