"""The search of `dflash-serve plan`: every split, width and batch that a question leaves open, priced."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from dflash_serve.common.settings import overlay
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.pair import HALVES
from dflash_serve.errors import UserError
from dflash_serve.planning.memory import kv_tokens, missing_bytes
from dflash_serve.planning.plan import AUTO, OFF, Curves, Plan, Room, fixed, launch_of, points_of, refuses_pairs
from dflash_serve.planning.prediction import ExpectedAcceptance, Predictor
from dflash_serve.planning.question import PlanQuestion
from dflash_serve.planning.step_times import Split

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WIDTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16)


def make_plan(question: PlanQuestion) -> Plan:
    """Prices every split, width and batch that a question leaves open.

    Raises:
        UserError: not one request fits, or nothing meets the limits.
    """
    question.require_lengths()
    pair = question.deployment.pair is not None
    if pair and refuses_pairs(question):
        raise UserError(f"{question.backend} serves no pair", where="pair", do="leave it out, or use another --backend")
    predictors: dict[Split, Predictor] = {}
    room: dict[Split, Room] = {}
    notes: dict[str, list[Split]] = defaultdict(list)
    by_hand: dict[Split, str] = {}
    for split in question.splits():
        if (most := question.most(split)) == 0:
            notes["limits.max_batch_size leaves less than one request to a copy"].append(split)
            continue
        if pair and question.copies(split) < len(HALVES):
            notes["A pair needs two copies"].append(split)
            continue
        fits = _room(question, split)
        if fits.plain < 1:
            notes["Weights leave no room for one request's K/V"].append(split)
            continue
        if fits.speculative < 1:
            missing = _missing(question, split, drafts=True)
            notes[f"Only plain decoding fits: beside the drafter {missing} are missing on each GPU"].append(split)
        times, why = question.step_times(split)
        if why:
            by_hand[split] = why
        predictors[split] = Predictor(times, question.constants, question.load, question.block_size, split)
        room[split] = Room(*(min(each, most or each) for each in fits))
    some_measured = len(by_hand) < len(predictors)
    for split, why in by_hand.items():
        if some_measured:  # the roofline promises more than tables do, and would often win for that alone
            notes[f"Left out beside splits that the tables price: {why}"].append(split)
            del predictors[split], room[split]
        else:
            notes[f"Roofline: {why}"].append(split)
    if not predictors:
        raise _nothing_fits(question, needs_two="A pair needs two copies" in notes)
    whole, least = _automatic(question)
    curves = [_curves(question, predictors, room, each, least) for each in question.acceptances]
    others = "more GPUs, or another GPU" if question.wider(question.count) else "another GPU"
    question.objective.require_met([point for each in curves for point in points_of(each)], others)
    told = [f"{note}: {'; '.join(map(str, splits))}" for note, splits in notes.items()]
    return Plan(question, whole, predictors, room, told, curves)


def _longest(question: PlanQuestion) -> int:
    return question.load.isl + question.load.osl


def _room(question: PlanQuestion, split: Split) -> Room:
    longest, pair = _longest(question), question.pair
    both = (kv_tokens(pair, question.on, split, longest, drafts=drafts) // longest for drafts in (True, False))
    return Room(*both)


def _missing(question: PlanQuestion, split: Split, *, drafts: bool) -> str:
    missing = missing_bytes(question.pair, question.on, split, _longest(question), drafts=drafts)
    return f"{ceil(missing / 1e8) / 10:.1f} GB"


def _nothing_fits(question: PlanQuestion, *, needs_two: bool) -> UserError:
    splits = question.splits()
    if all(question.most(split) == 0 for split in splits):
        do = f"give at least {question.copies(splits[-1])}, one for each copy, or fewer GPUs"
        return UserError("not one request for each copy of the model", where="limits.max_batch_size", do=do)
    if needs_two:
        return UserError("a pair needs two copies of the model that fit", where="--count", do="give more GPUs")
    widest, longest = splits[-1], _longest(question)
    what = (
        f"{question.pair.layout.shape.name} does not fit {question.count} x {question.on.name}: with {widest}, "
        f"{_missing(question, widest, drafts=False)} are missing on each GPU for one request of {longest} tokens"
    )
    ways = [
        f"--count {split.tensor}{f' --tensor {split.tensor}' if question.is_split else ''}, where {split} fits"
        for split in question.wider(widest.tensor)
        if _room(question, split).plain
    ][:1]
    ways.append("a GPU with more memory")
    if question.pair.layout.native_quantization is None and question.pair.model.quantization == "none":
        ways.append("a quantised target")
    return UserError(what, where="--count", do=f"give {', or '.join(ways)}")


def _automatic(question: PlanQuestion) -> tuple[str | None, int | None]:
    # Words after "it verifies" where `width: auto` is the whole block; and its least width, None = it is not compared.
    if question.given_width is not None:
        return None, None
    if question.deployment.pair is not None:
        return "whole blocks on both halves of a pair", None
    given = question.deployment.model_dump(exclude_unset=True)
    launch = launch_of(question, Deployment.model_validate(overlay(given, {"speculation": {"width": AUTO}})))
    if launch is None:
        return None, 1
    return launch.never_narrow, None if launch.never_narrow else 2 if launch.always_drafts else 1


def _curves(
    question: PlanQuestion,
    predictors: dict[Split, Predictor],
    room: dict[Split, Room],
    acceptance: ExpectedAcceptance,
    least: int | None,
) -> Curves:
    block, width = question.block_size, question.width
    curves: Curves = {OFF: [], fixed(width): [], **({AUTO: []} if least else {})}
    for split, predictor in predictors.items():
        batches, plain = (_batches(most) for most in room[split])
        curves[OFF] += predictor.curve(OFF, sorted({*batches, *plain}), 1, acceptance)
        curves[fixed(width)] += predictor.curve(fixed(width), batches, width, acceptance)
        if least:  # at each batch, the width that the policy chooses
            chosen = [max(least, predictor.auto(batch, widths(block), acceptance)) for batch in batches]
            by_width = {width: predictor.curve(AUTO, batches, width, acceptance) for width in sorted(set(chosen))}
            curves[AUTO] += [by_width[width][place] for place, width in enumerate(chosen)]
    return curves


def _batches(most: int) -> list[int]:
    # Batches to price, the largest included; none where no request fits.
    if most < 1:
        return []
    most = min(most, BATCHES[-1])
    return sorted({*(batch for batch in BATCHES if batch < most), most})


def widths(block_size: int) -> list[int]:
    """Widths among which `auto` chooses."""
    return sorted({*(width for width in WIDTHS if width < block_size), block_size})
