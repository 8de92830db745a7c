"""The gate: acceptance of two drafters on the same prompts, and if the new one should be served.

Both drafters answer the same prompts greedily at the same width, so a prompt is its own control. The 95 % interval of
the gain in τ is the paired bootstrap over prompts (`doctor.examination.gain_interval`). The new drafter passes if

- the interval of the gain on held-out traffic lies above 0,
- the interval of the gain on the general prompts lies above the loss that is allowed,
- no task, language, thinking or context length of the held-out traffic loses surely more than that.

It fails if an interval lies wholly on the wrong side. Otherwise there were too few prompts to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from dflash_serve.answers.engine import RequestOutput
from dflash_serve.answers.groups import Dimension, LabelledPrompt, grouped
from dflash_serve.common.settings import Frozen
from dflash_serve.doctor.examination import gain_interval
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

TRAFFIC, GENERAL = "held-out traffic", "general prompts"
WHOLE = "all"


class GateVerdict(StrEnum):
    """Answer of the gate."""

    swap = "swap"
    keep = "do not swap"
    unknown = "could not tell"


EXIT_CODES = {GateVerdict.swap: 0, GateVerdict.keep: 1, GateVerdict.unknown: 3}


class Change(Frozen):
    """Acceptance of a group with the served drafter and with the new one; an unknown figure is None."""

    prompts: int  # Those in which both drafters drafted
    steps: float | None  # Of the served drafter
    before: float | None  # τ
    after: float | None
    gain_95: tuple[float, float] | None  # 95 % interval of after - before; None below two prompts


Changes = Mapping[Dimension | str, Mapping[str, Change]]


class Answered(Frozen, arbitrary_types_allowed=True):
    """Answers to a set of prompts, with the served drafter and with the new one."""

    prompts: tuple[LabelledPrompt, ...]
    before: tuple[RequestOutput, ...]
    after: tuple[RequestOutput, ...]

    def changes(self) -> dict[str, dict[str, Change]]:
        """`all` -> the whole set, and dimension -> group -> its change."""
        pairs = [(a.statistics, b.statistics) for a, b in zip(self.before, self.after, strict=True)]
        found = {WHOLE: {WHOLE: change(*zip(*pairs, strict=True))}}
        for dimension in Dimension:
            old = grouped(self.prompts, self.before, dimension)
            new = grouped(self.prompts, self.after, dimension)
            found[dimension.value] = {
                group: change(
                    [counts for number, counts in old[group].items() if number in new[group]],
                    [new[group][number] for number in old[group] if number in new[group]],
                )
                for group in old
                if group in new
            }
        return found


def change(before: Sequence[AcceptanceStatistics], after: Sequence[AcceptanceStatistics]) -> Change:
    """The change of one group; both sides in the order of the same prompts."""
    drafted = [(a, b) for a, b in zip(before, after, strict=True) if a.verifications and b.verifications]
    old, new = [a for a, _ in drafted], [b for _, b in drafted]
    return Change(
        prompts=len(drafted),
        steps=total(old).steps if old else 0,
        before=total(old).acceptance_length if old else None,
        after=total(new).acceptance_length if new else None,
        gain_95=gain_interval(old, new) if len(drafted) >= 2 else None,
    )


def judge(
    traffic: Mapping[str, Mapping[str, Change]], general: Mapping[str, Mapping[str, Change]], allowed: float
) -> tuple[GateVerdict, str]:
    """The verdict and its reason in one line.

    Args:
        allowed: loss of τ on general prompts and in groups of the traffic, as a share of τ before.
    """
    own, other = traffic[WHOLE][WHOLE], general[WHOLE][WHOLE]
    worse = [
        _told(f"{dimension} {group}", one)
        for dimension, groups in traffic.items()
        if dimension != WHOLE
        for group, one in groups.items()
        if one.gain_95 and one.gain_95[1] < -_loss(one, allowed)
    ]
    unsure = None
    if own.gain_95 is None or own.gain_95[0] <= 0 <= own.gain_95[1]:
        unsure = f"{_told(TRAFFIC, own)}: give more traffic, or train for longer"
    elif own.gain_95[1] < 0:
        return GateVerdict.keep, f"{_told(TRAFFIC, own)}: it got worse"
    if other.gain_95 and other.gain_95[1] < -_loss(other, allowed):
        return GateVerdict.keep, f"{_told(GENERAL, other)}: it lost more than {allowed:.0%}"
    if worse:
        return GateVerdict.keep, f"{worse[0]}: this group lost more than {allowed:.0%}"
    if unsure is None and (other.gain_95 is None or other.gain_95[0] < -_loss(other, allowed)):
        unsure = f"{_told(GENERAL, other)}: a loss of more than {allowed:.0%} is not excluded; give more --general"
    if unsure is not None:
        return GateVerdict.unknown, unsure
    return GateVerdict.swap, f"{_told(TRAFFIC, own)}; {_told(GENERAL, other)}"


def _loss(one: Change, allowed: float) -> float:
    return allowed * (one.before or 0)


def _told(name: str, one: Change) -> str:
    if one.before is None or one.after is None:
        return f"{name}: nothing was drafted"
    between = "" if one.gain_95 is None else f" (95 % of the gain {one.gain_95[0]:+.3f} to {one.gain_95[1]:+.3f})"
    return f"{name}: τ {one.before:.3f} to {one.after:.3f}{between}"
