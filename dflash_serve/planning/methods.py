"""Methods of speculation side by side, at the split and the batches of a plan: `plan --methods`.

A drafter of the DFlash family is priced as in a plan, with a fixed width of its whole block. An EAGLE-3 head and a
target's own MTP layers draft one token after another: `StepTimes.chain`, and `Constants.chain_pass` for each pass.
Acceptance is what was published at one task; nothing is priced without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_serve.checkpoint.catalogue import CataloguedDrafter, Kind, PublishedAcceptance, catalogued_drafter
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.other_methods import OtherMethod, other_methods
from dflash_serve.checkpoint.target_files import read_target
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.planning.acceptance import catalogued_with, from_length, named_target, task_of
from dflash_serve.planning.pair import usual_drafter
from dflash_serve.planning.plan import OFF, Plan
from dflash_serve.planning.prediction import ExpectedAcceptance, OperatingPoint, Predictor
from dflash_serve.planning.step_times import Chain, Pair, priced

KINDS: Mapping[str, Kind] = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
CHAINS = {"eagle3": "EAGLE-3", "mtp": "MTP"}
METHODS = (OFF, *KINDS, *CHAINS)
HEAD_FEATURES, HEAD_VOCABULARY = 3, 32_000
"""Layers of the target that an EAGLE-3 head joins, and tokens that it can draft: those of most published heads."""
FEW = 8  # Requests at once that are priced beside one and the plan's own batch


@dataclass(frozen=True)
class PricedMethod:
    """One method at some batches of one copy."""

    name: str
    drafter: str | None  # What drafts; None = nothing
    acceptance: ExpectedAcceptance | None
    points: tuple[OperatingPoint, ...]  # By rising batch; () = it has no price
    gains: tuple[float, ...] = ()  # Tokens/s by plain decoding's at the same batch
    why_not: str | None = None  # The reason for having no price
    overlay: Mapping[str, Any] | None = None
    """Keys of a deployment that serve it, for `bench --variant`; None = the plan's deployment does."""


def methods_named(text: str) -> list[str]:
    """The methods of a comma-separated list, `off` first: all others are compared with it.

    Raises:
        UserError: one is none of them, or none is named.
    """
    named = [word.strip().lower() for word in text.split(",") if word.strip()]
    if not named:
        raise UserError("no method is named", where="--methods", do=f"use some of {','.join(METHODS)}")
    for word in named:
        if word not in METHODS:
            do = did_you_mean(word, METHODS) or f"use some of {','.join(METHODS)}"
            raise UserError(f"{word!r} is no method", where="--methods", do=do)
    return list(dict.fromkeys([OFF, *named]))


def compared(plan: Plan, names: Sequence[str], task: str | None) -> list[PricedMethod]:
    """Every method at the plan's split, at one request, at a few and at the plan's batch.

    Args:
        task: at which acceptance was published; None = only the acceptance that the plan was given.
    """
    return [_priced(plan, name, task and task.lower()) for name in names]


def batches(plan: Plan) -> list[int]:
    """The batches that are compared: the plan's own is the largest, where it has room beside a drafter."""
    most = min(plan.chosen.batch, plan.room[plan.chosen.split].speculative or plan.chosen.batch)
    return sorted({batch for batch in (1, FEW, most) if batch <= most})


def _priced(plan: Plan, name: str, task: str | None) -> PricedMethod:
    if name == OFF:
        plain = ExpectedAcceptance(OFF, (), "")
        return _at_batches(plan, PricedMethod(name, None, None, ()), plan.predictors[plan.chosen.split], plain, 1)
    if not plan.room[plan.chosen.split].speculative:
        return PricedMethod(name, None, None, (), why_not=f"{plan.chosen.split} has no room for a drafter")
    if name in CHAINS:
        return _chained(plan, name, task)
    asked = plan.question
    named, is_given = asked.deployment.drafter, len(asked.acceptances) == 1
    if asked.pair.drafter.family != KINDS[name] or (named is None and (task is not None or not is_given)):
        return _of_catalogue(plan, name, task)
    drafter = "an assumed drafter" if named is None else named.model
    if not is_given:
        row = catalogued_drafter(drafter)
        return PricedMethod(name, drafter, None, (), why_not=_unpublished(plan, name, task, [row] if row else []))
    given, predictor = asked.acceptances[0], plan.predictors[plan.chosen.split]
    return _at_batches(plan, PricedMethod(name, drafter, given, ()), predictor, given, asked.block_size)


def _of_catalogue(plan: Plan, name: str, task: str | None) -> PricedMethod:
    asked = plan.question
    rows = [row for row in catalogued_with(asked.deployment.target.model) if row.kind == KINDS[name] and row.block_size]
    at = [(row, one) for row in rows for one in row.acceptance_length if task_of(one) == task]
    return _fastest(plan, [_drafter(plan, name, row, one) for row, one in at], name, task, rows)


def _fastest(
    plan: Plan,
    priced: Sequence[PricedMethod],
    name: str,
    task: str | None,
    rows: Sequence[CataloguedDrafter | OtherMethod],
) -> PricedMethod:
    # For one request: of several published drafters, the one that a user would take.
    none = PricedMethod(name, None, None, (), why_not=_unpublished(plan, name, task, rows))
    return max(priced, key=lambda each: each.points[0].throughput, default=none)


def _drafter(plan: Plan, name: str, row: CataloguedDrafter, figure: PublishedAcceptance) -> PricedMethod:
    asked = plan.question
    block = row.block_size or asked.block_size
    source = f"published for {row.repository} at {figure.benchmark}: {figure.setting} ({figure.source})"
    layout, heads = asked.pair.layout, row.heads or Heads()
    if row.sizes is not None:
        drafter = row.sizes.config(block, heads, layout.shape.num_layers)
    else:
        drafter = usual_drafter(layout, read_target(asked.pair.folder), block).model_copy(update=heads.parts)
        source += "; its sizes are not known, and those of most drafters are assumed"
    split, tables = plan.chosen.split, asked.constants.tables
    times, _ = priced(replace(asked.pair, drafter=drafter), asked.on, split, tables, block, asked.load.context)
    acceptance = from_length(figure.value, block, source)
    overlay = {"drafter": {"model": row.repository, "revision": row.revision}, "speculation": {"width": block}}
    predictor = Predictor(times, asked.constants, asked.load, block, split)
    method = PricedMethod(name, row.repository, acceptance, (), overlay=overlay)
    return _at_batches(plan, method, predictor, acceptance, block)


def _chained(plan: Plan, name: str, task: str | None) -> PricedMethod:
    asked = plan.question
    rows = [row for row in other_methods(named_target(asked.deployment.target.model)) if row.method == CHAINS[name]]
    at = [(row, one) for row in rows for one in row.acceptance_length if task_of(one) == task]
    return _fastest(plan, [_chain_of(plan, name, row, one) for row, one in at], name, task, rows)


def _chain_of(plan: Plan, name: str, row: OtherMethod, figure: PublishedAcceptance) -> PricedMethod:
    asked = plan.question
    width = row.drafted + 1
    source = f"published for {row.title} at {figure.benchmark}: {figure.setting} ({figure.source})"
    acceptance = from_length(figure.value, width, source)
    head = chain_of_target(asked.pair, mtp=row.method == "MTP")
    predictor = replace(plan.predictors[plan.chosen.split], chain=head, block_size=width)
    method = PricedMethod(name, row.title, acceptance, (), overlay=overlay_of(row, asked.backend))
    return _at_batches(plan, method, predictor, acceptance, width)


def chain_of_target(pair: Pair, *, mtp: bool) -> Chain:
    """A target's MTP layer, or an EAGLE-3 head of the usual shape: one layer as wide as the target."""
    shape = pair.layout.shape
    if mtp:  # its `fc` joins the target's hidden state and the token's embedding
        return Chain(shape.hidden_size, 2, shape.vocab_size)
    usual = usual_drafter(pair.layout, read_target(pair.folder), 2)
    return Chain(
        hidden=shape.hidden_size,
        features=HEAD_FEATURES,
        vocabulary=min(HEAD_VOCABULARY, shape.vocab_size),
        intermediate=usual.intermediate_size,
        heads=usual.num_attention_heads,
        kv_heads=usual.num_key_value_heads,
        head_dim=usual.head_dim,
    )


def _at_batches(
    plan: Plan, method: PricedMethod, predictor: Predictor, acceptance: ExpectedAcceptance, width: int
) -> PricedMethod:
    at = batches(plan)
    plain = plan.predictors[plan.chosen.split].curve(OFF, at, 1, acceptance)
    points = predictor.curve(method.name, at, width, acceptance)
    gains = tuple(point.throughput / off.throughput for point, off in zip(points, plain, strict=True))
    return replace(method, points=tuple(points), gains=gains)


def _unpublished(plan: Plan, name: str, task: str | None, rows: Sequence[CataloguedDrafter | OtherMethod]) -> str:
    tasks = sorted({task_of(one) for row in rows for one in row.acceptance_length})
    whose = {**KINDS, **CHAINS}[name]
    if not tasks:
        return f"no acceptance of {whose} with this target is known"
    if task is None:
        other = " instead of the acceptance that was given" if len(plan.question.acceptances) == 1 else ""
        return f"give --task{other}: {whose} has published figures at {', '.join(tasks)}"
    return f"none of {whose} was published at {task}; there are: {', '.join(tasks)}"


def overlay_of(row: OtherMethod, backend: str) -> Mapping[str, Any]:
    """Keys of a deployment that run a chain on an engine, as examples/bench/ has them."""
    drafted, head = row.drafted, row.head or "${HEAD}"
    arguments: dict[str, Any] = {
        "sglang": {
            "speculative-algorithm": "NEXTN" if row.method == "MTP" else "EAGLE3",
            "speculative-num-steps": drafted,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": drafted + 1,
        },
        "vllm": {"speculative-config": {"method": "mtp", "num_speculative_tokens": drafted}},
        "tensorrt-llm": {"speculative_config": {"decoding_type": "MTP", "max_draft_len": drafted}},
    }
    if row.method == "EAGLE-3":
        plain = {"speculative-draft-model-path": head, "speculative-draft-model-quantization": "unquant"}
        arguments["sglang"] |= plain
        arguments["vllm"]["speculative-config"] |= {"method": "eagle3", "model": head}
        arguments["tensorrt-llm"]["speculative_config"] |= {"decoding_type": "Eagle3", "speculative_model": head}
    return {"drafter": None, "speculation": None, "engine_args": {backend: arguments[backend]}}
