"""The policies that engines start from: a fixed width, and a guard around a policy that may fail."""

from __future__ import annotations

import pytest

from dflash_serve.speculation.policy import FixedWidth, GuardedPolicy, Step, WidthPolicy


def failing(method: str) -> WidthPolicy:
    """A fixed width of 2, of which one method fails."""

    def fail(*_: object) -> None:
        raise RuntimeError(method)

    changed = {method: property(fail) if method == "paused" else fail}
    policy: WidthPolicy = type("Failing", (FixedWidth,), changed)(2)
    return policy


@pytest.mark.parametrize("method", ["paused", "widths", "observe", "forget"])
def test_a_policy_that_fails_is_logged_once_and_replaced_by_whole_blocks(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy: WidthPolicy = GuardedPolicy(failing(method), 8)
    for _ in range(3):
        chosen = policy.widths(["a", "b"], 10, {"b"})
        assert chosen in ([2, 2], [8, 8])
        policy.observe(Step(["a", "b"], chosen, [0, 1]))
        policy.forget("b")
        assert not policy.paused
    assert (policy.widths(["a"]), policy.paused) == ([8], False)
    assert caplog.text.count("the choice of widths failed") == 1


def test_a_policy_that_works_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    policy = GuardedPolicy(FixedWidth(2), 8)
    policy.observe(Step(["a"], policy.widths(["a"]), [1], 0.1, 5))
    policy.forget("a")
    assert (policy.widths(["a", "b"]), policy.paused, caplog.text) == ([2, 2], False, "")


def test_a_fixed_width_stays_and_a_width_below_one_is_refused() -> None:
    policy: WidthPolicy = FixedWidth(4)
    policy.observe(Step("a", [4], [3]))
    policy.forget("a")
    assert policy.widths(["a", "b"]) == [4, 4]
    assert (policy.paused, FixedWidth(1).paused) == (False, True)
    with pytest.raises(ValueError, match="width 0"):
        FixedWidth(0)
