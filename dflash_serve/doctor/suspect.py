"""A server's own acceptance over the doctor's prompts, from its metrics before and after each.

The prompts go out one at a time, as messages, so that the server's own template applies and its counters can be read
in between; nothing else may run on it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_serve.backend import Prompt
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.doctor.reference import Observation
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total


@dataclass(frozen=True)
class Interview:
    """All that a server told."""

    observation: Observation
    width: int
    """Slots verified a step."""
    engine: str | None
    """Whose metrics these were; None = nobody knows them."""
    notes: tuple[str, ...] = ()


def interview(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    block_size: int,
    advance: Callable[[], None] = lambda: None,
) -> Interview:
    """Asks a server every prompt.

    Args:
        params: greedy.
        block_size: the drafter's B.
        advance: called after each answer.

    Raises:
        UserError: no such server, one without acceptance figures, or one whose width changes from step to step.
    """
    answers, each = list[Reply](), list[AcceptanceStatistics]()
    before = read_acceptance(endpoint.base, api_key=endpoint.api_key)
    for prompt in prompts:
        answers.append(endpoint.complete(prompt, params))
        now = read_acceptance(endpoint.base, api_key=endpoint.api_key)
        each.append(now.since(before))
        before = now
        advance()
    whole = total(each)
    width = constant_width(whole, len(prompts), block_size, endpoint.base)
    if whole.acceptance_length is None:
        do = "start it with speculation and with its metrics (SGLang: --enable-metrics), or give --observed"
        raise UserError("it tells nothing of its acceptance", where=endpoint.base, do=do)
    paired = tuple(each) if all(one.verifications and one.accepted is not None for one in each) else None
    observation = Observation(whole, paired, tuple(answer.text for answer in answers))
    return Interview(observation, width, whole.engine, tuple(_others(whole, answers)))


def constant_width(whole: AcceptanceStatistics, answers: int, block_size: int, where: str) -> int:
    """The one width of all steps but those at the end of an answer, where fewer tokens than that are left.

    Each of those steps gains a token at least, so an answer has width - 1 of them at most.

    Raises:
        UserError: the widths differ by more than that.
    """
    wide = {width: steps for width, steps in (whole.widths or {}).items() if width > 1}
    if wide:
        width, steps = max(wide.items(), key=lambda item: item[1])
        constant = width == max(wide) and sum(wide.values()) - steps <= (width - 1) * answers
    elif whole.verifications and whole.drafted:
        mean = 1 + whole.drafted / whole.verifications
        width, constant = round(mean + 0.25), mean > round(mean + 0.25) - 0.5
    else:
        return block_size
    if not constant or width > block_size:
        do = f"start it with a fixed width (at best {block_size}) while the doctor looks"
        raise UserError("its width changes from step to step, which hides how far drafts are right", where=where, do=do)
    return width


def _others(whole: AcceptanceStatistics, answers: Sequence[Reply]) -> list[str]:
    """A note where the server generated more than it was asked for here."""
    tokens = [answer.completion_tokens for answer in answers if answer.completion_tokens is not None]
    if whole.verifications is None or whole.accepted is None or len(tokens) != len(answers):
        return []
    asked, gained = sum(tokens), whole.verifications + whole.accepted
    if gained <= 1.2 * asked + 8 * len(answers):
        return []
    return [f"the server gained {gained:.0f} tokens while {asked} were asked for: somebody else uses it"]
