"""The width policy of a server, and what vLLM's scheduler tells it of a step. Needs no vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dflash_serve.adapter.counters import EXPECTED, GAINED
from dflash_serve.adapter.last_run import KeptWidth, LastRun
from dflash_serve.adapter.own_width import FIELD, most_slots
from dflash_serve.deployment.variables import given_cost
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import Pace, Step, WidthPolicy
from dflash_vllm.facts import GUESSED_COSTS


def trims(speculative_config: Any) -> bool:
    """vLLM verifies an unknown part of each drafted block (adaptive verification)."""
    return bool(getattr(speculative_config, "enable_adaptive_verification", False))


def width_policy(
    block_size: int,
    allowed_widths: Sequence[int],
    run: LastRun,
    environment: Mapping[str, str] = os.environ,
    *,
    trimmed: bool = False,
) -> WidthPolicy:
    """The policy of a server, from the costs that it was given or from a guess.

    Args:
        run: has corrections of the guess, if the last run learnt any.
        environment: has the costs or the guess.
        trimmed: vLLM trims blocks: what it did not verify counts as rejected here.

    Raises:
        UserError: the costs cannot be read.
    """
    cost = given_cost(environment)
    if cost is not None:
        return KeptWidth(cost, block_size, run, allowed_widths, believed=True, trimmed=trimmed)
    try:
        guess = CostModel.model_validate_json(environment.get(GUESSED_COSTS, ""))
    except ValidationError as error:
        where, do = GUESSED_COSTS, "start it by `dflash-serve serve`, or give a cost table"
        raise UserError(f"no costs ({str(error).splitlines()[0]})", where=where, do=do) from None
    learnt = run.costs() or LearntCosts.of_unit(1.0)
    return KeptWidth(guess, block_size, run, allowed_widths, learnt=learnt, trimmed=trimmed)


def own_width(params: Any) -> int | None:
    """Most slots that a request's blocks may have, by its sampling parameters, which were checked; None: as we choose.

    A pooling request has none.
    """
    given = (getattr(params, "extra_args", None) or {}).get(FIELD)
    return 1 if given == "off" else given if isinstance(given, int) else None


def refusal(params: Any, speculative_config: Any, *, follows_load: bool) -> str | None:
    """The reason to refuse a request that asks for a width of its own; None: it does not, or it is honoured.

    Args:
        params: vLLM's sampling parameters.
        follows_load: our scheduler runs, which gives each request its width.
    """
    given = (params.extra_args or {}).get(FIELD)
    try:
        most = most_slots(given, speculative_config.num_speculative_tokens + 1)
    except UserError as error:
        return f"dflash-serve: vllm_xargs.{error}"
    if most is None or follows_load:
        return None
    what = "asks for a width of this request alone, and in this server all requests have one width"
    return f"dflash-serve: vllm_xargs.{FIELD} {what}; leave it out, or serve with speculation.width: auto"


def send_pace(stats: Any, pace: Pace) -> None:
    """Puts tokens gained and expected into vLLM's `SchedulerStats`, which go to another process.

    That process decodes the declared fields alone, so they go into one that takes any names: a dictionary of numbers,
    of which vLLM reads its own names. `taken_pace` removes ours, because the log line shows it where any is not 0.
    """
    stats.num_kv_fetch_reqs_by_stage |= {GAINED: round(pace.gained), EXPECTED: round(pace.expected)}


def taken_pace(stats: Any) -> tuple[float, float] | None:
    """The numbers of `send_pace`, which are removed; None = there are none."""
    found = getattr(stats, "num_kv_fetch_reqs_by_stage", {})
    gained, expected = found.pop(GAINED, None), found.pop(EXPECTED, None)
    return None if gained is None or expected is None else (float(gained), float(expected))


def observed(output: Any, result: Any, seconds: float | None, context_tokens: int) -> Step:
    """A step of the requests that decoded; prefilled requests are left out.

    The time is kept only if the step did nothing else, and its drafts and verifications had one width: a block is
    drafted in one step and verified in the next, so a step in which the width changes mixes two widths.

    Args:
        output: vLLM's `SchedulerOutput`.
        result: vLLM's `ModelRunnerOutput`: the tokens of each request, accepted ones and one more.
    """
    rows, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    begun = {request.req_id for request in output.scheduled_new_reqs}
    ids, widths, accepted = [], [], []
    for request_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=False):  # no tokens: a prompt's part
        width = len(drafts.get(request_id, ())) + 1
        if tokens and width == rows.get(request_id) and request_id not in begun:
            ids.append(request_id)
            widths.append(width)
            accepted.append(len(tokens) - 1)
    is_clean = set(widths) <= {output.num_spec_tokens_to_schedule + 1} and len(widths) == len(rows)
    return Step(ids, widths, accepted, seconds if is_clean else None, context_tokens)
