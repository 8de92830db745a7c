"""An endpoint's own acceptance over the doctor's prompts, from its metrics before and after each.

The prompts go out one at a time, as messages, so that the server's own template applies and its counters can be read
in between; nothing else may run on it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_serve.backend import Prompt
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.engine_metrics import AcceptanceReading, read_acceptance
from dflash_serve.client.reply import Reply
from dflash_serve.errors import UserError
from dflash_serve.proving.doctor.counts import Counts
from dflash_serve.proving.doctor.fit import Observation
from dflash_serve.speculation.params import SamplingParams


@dataclass(frozen=True)
class Interview:
    """All that the endpoint told."""

    observation: Observation
    width: int
    """Slots verified a step."""
    engine: str | None
    notes: tuple[str, ...] = field(default=())


def interview(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    block_size: int,
    advance: Callable[[], None] = lambda: None,
) -> Interview:
    """Asks every prompt, greedily.

    Args:
        block_size: the drafter's B.
        advance: called after each answer.

    Raises:
        UserError: no such server, one without acceptance figures, or one whose width changes from step to step.
    """
    first = before = read_acceptance(endpoint.base, api_key=endpoint.api_key)
    readings, answers = list[AcceptanceReading](), list[Reply]()
    for prompt in prompts:
        answers.append(endpoint.complete(prompt, params))
        now = read_acceptance(endpoint.base, api_key=endpoint.api_key)
        readings.append(now.since(before))
        before = now
        advance()
    whole = before.since(first)
    width = _width(whole, len(prompts), block_size, endpoint.base)
    each = [Counts.read(reading, width) for reading in readings]
    known = tuple(counts for counts in each if counts is not None)
    everything = Counts.read(whole, width)
    length = everything.length if everything else whole.acceptance_length
    if length is None:
        do = "start it with speculation and with its metrics (SGLang: --enable-metrics), or give --observed"
        raise UserError("it tells nothing of its acceptance", where=endpoint.base, do=do)
    paired = known if len(known) == len(prompts) else None
    observation = Observation(length, paired, everything, tuple(answer.text for answer in answers))
    return Interview(observation, width, whole.engine, tuple(_strangers(known, answers)))


def _width(reading: AcceptanceReading, answers: int, block_size: int, where: str) -> int:
    """The one width of all steps but those at the end of an answer, where fewer tokens than that are left.

    Each of those steps gains a token at least, so an answer has width - 1 of them at most.
    """
    wide = {width: steps for width, steps in (reading.widths or {}).items() if width > 1}
    if wide:
        width, steps = max(wide.items(), key=lambda item: item[1])
        constant = width == max(wide) and sum(wide.values()) - steps <= (width - 1) * answers
    elif reading.steps and reading.drafted:
        mean = 1 + reading.drafted / reading.steps
        width, constant = round(mean + 0.25), mean > round(mean + 0.25) - 0.5
    else:
        return block_size
    if not constant or width > block_size:
        do = f"start it with a fixed width (at best {block_size}) while the doctor looks"
        raise UserError("its width changes from step to step, which hides how far drafts are right", where=where, do=do)
    return width


def _strangers(counts: Sequence[Counts], answers: Sequence[Reply]) -> list[str]:
    """A note where more was generated than we asked for."""
    if len(counts) != len(answers) or any(answer.completion_tokens is None for answer in answers):
        return []
    ours = sum(answer.completion_tokens or 0 for answer in answers)
    gained = sum(one.steps + one.accepted for one in counts)
    if gained <= 1.2 * ours + 8 * len(answers):
        return []
    return [f"the server gained {gained} tokens while we asked for {ours}: somebody else uses it, figures are mixed"]
