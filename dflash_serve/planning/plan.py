"""The answer of `dflash-serve plan`: the best of all that was priced, in figures and in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from dflash_serve.adapter.protocol import DescribedBackend, Launch
from dflash_serve.adapter.registry import backend, server_backend
from dflash_serve.common.settings import overlay
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import Gpu
from dflash_serve.deployment.pair import HALVES, both_halves
from dflash_serve.deployment.variables import COST_TABLE
from dflash_serve.errors import Problem, UserError
from dflash_serve.planning.long_contexts import long_context
from dflash_serve.planning.prediction import Constants, OperatingPoint, Predictor
from dflash_serve.planning.question import Objective, PlanQuestion, fastest
from dflash_serve.planning.step_times import Split

DEPLOYMENT, COSTS = "deployment.yaml", "costs.json"  # Files of a plan that its next commands name
OFF, AUTO = "off", "auto"
ALIKE = 0.99  # `auto` is preferred up to this share of the best throughput: it follows the load
ROOFLINE_ERROR = 0.3
"""Mean relative error where the roofline prices, with constants that were fitted with the tables (plan-published.json:
28 % of plain tokens/s, 16 % of speed-ups).
"""

FITTED_ON, OTHER_GPU_ERROR = "b200", 0.16
"""The GPU of every fit, and the mean relative error of tokens/s that a plan tells of others at least
(plan-published.json, `gpus`: 15 % of 17 cells by tables).
"""

Curves = dict[str, list[OperatingPoint]]  # Variant -> points, split after split, by rising batch


class Room(NamedTuple):
    """Requests at once whose K/V and states fit on one copy, and that the deployment's own limit allows."""

    speculative: int
    plain: int  # Without the drafter and its K/V, and with one recurrent state for a request instead of one for a slot


@dataclass(frozen=True)
class Plan:
    """The answer to a question, derived from all points that were priced."""

    question: PlanQuestion
    never_narrow: str | None  # `Launch.never_narrow`: the engine's `width: auto` is the whole block in every step
    predictors: dict[Split, Predictor]
    room: dict[Split, Room]
    notes: list[str]
    curves: list[Curves]  # For each acceptance of the question

    @cached_property
    def known(self) -> Curves:
        """Points at the known acceptance, or at the middle of the band."""
        return self.curves[len(self.curves) // 2]

    @cached_property
    def chosen(self) -> OperatingPoint:
        """The most tokens/s/GPU within the limits; at the highest acceptance of a band if the middle one meets none."""
        objective = self.question.objective
        found = objective.best(points_of(self.known))
        follows = objective.best(self.known.get(AUTO, ()))
        if found is not None and follows is not None and follows.throughput >= ALIKE * found.throughput:
            return follows
        return found or next(point for curves in reversed(self.curves) if (point := objective.best(points_of(curves))))

    @cached_property
    def plain(self) -> OperatingPoint | None:
        """The best without speculation within the same limits; None = it does not reach them."""
        return self.question.objective.best(self.known[OFF])

    @cached_property
    def plain_fastest(self) -> OperatingPoint:
        """The point of plain decoding with the most tokens/s/user."""
        return fastest(self.known[OFF])

    @cached_property
    def plain_at_equal_batch(self) -> OperatingPoint:
        """Plain decoding at the chosen split and batch."""
        chosen = self.chosen
        return next(each for each in self.known[OFF] if (each.split, each.batch) == (chosen.split, chosen.batch))

    @property
    def equal_batch_gain(self) -> float:
        """Tokens/s/GPU by plain decoding's at the chosen split and batch."""
        return self.chosen.throughput / self.plain_at_equal_batch.throughput

    @property
    def equal_interactivity_ratio(self) -> float | None:
        """Tokens/s/GPU by plain decoding's, both within the limits; None = plain decoding does not reach them."""
        return None if self.plain is None else self.chosen.throughput / self.plain.throughput

    @cached_property
    def losing(self) -> list[tuple[int, int | None]]:
        """Stretches of batches at which the fixed width is slower than plain decoding, at the chosen split: the first
        and the last batch of each; None = to the end.
        """
        wide, plain = (
            {point.batch: point.throughput for point in self.known[name] if point.split == self.chosen.split}
            for name in (fixed(self.question.width), OFF)
        )
        runs = [(loses, list(run)) for loses, run in groupby(sorted(wide), lambda batch: wide[batch] < plain[batch])]
        return [(run[0], None if run[-1] == max(wide) else run[-1]) for loses, run in runs if loses]

    @property
    def stops_at(self) -> int | None:
        """Number of requests from which the fixed width is slower than plain decoding; None = it never is."""
        return next((first for first, last in self.losing if last is None), None)

    def error(self, point: OperatingPoint) -> float:
        """Relative error of its tokens/s: the mean error of such figures against published measurements."""
        by_hand = point.step.roofline > 0 and point.step.measured == 0
        return shown_error(self.question.constants, self.question.on, point.width, by_hand=by_hand)

    @cached_property
    def range(self) -> tuple[float, float]:
        """Tokens/s/GPU, lowest and highest: the error, and the band of acceptances where that is not known."""
        within = [p for curves in self.curves if (p := self.question.objective.best(points_of(curves)))]
        low, high = (f(within, key=lambda point: point.throughput) for f in (min, max))
        return low.throughput * (1 - self.error(low)), high.throughput * (1 + self.error(high))

    @property
    def copies(self) -> int:
        """Copies of the model on all GPUs."""
        return self.question.copies(self.chosen.split)

    @property
    def copies_in_one_server(self) -> int:
        """Copies of the model in one server, which stays within a node. All other copies are in servers like it."""
        if self.question.deployment.pair is not None:
            return 1
        several = backend(self.question.backend).facts.data_parallel
        room = self.question.on.per_node // self.chosen.split.tensor if several else 1
        return max(copies for copies in range(1, room + 1) if self.copies % copies == 0)

    @property
    def basis(self) -> str:
        """The sources of all step times."""
        return "; ".join(dict.fromkeys(each.times.basis for each in self.predictors.values()))

    @cached_property
    def deployment(self) -> Deployment | None:
        """The given deployment with the chosen split, width and limits; None = no drafter was named."""
        asked, chosen, copies = self.question.deployment, self.chosen, self.copies_in_one_server
        if asked.drafter is None:
            return None
        width: int | str = chosen.width if chosen.variant.startswith("fixed") else chosen.variant
        update: dict[str, Any] = {
            "speculation": {"width": width},
            "parallel": {"tensor": chosen.split.tensor, "expert": chosen.split.expert, "data": copies},
            "limits": {"max_batch_size": chosen.batch * copies},
            "hardware": {"count": chosen.split.tensor * copies},
        }
        if asked.pair is not None and self.halves is not None:
            update["pair"] = {name: {"replicas": count} for name, count in zip(HALVES, self.halves, strict=True)}
        made = Deployment.model_validate(overlay(asked.model_dump(exclude_unset=True), update))
        drafter, load = self.question.pair.drafter.max_position_embeddings, self.question.load
        if asked.limits.max_model_len is not None or load.isl + load.osl > drafter:
            return made
        # Engines may refuse the target's positions where the drafter has fewer.
        shorter = Deployment.model_validate(
            overlay(made.model_dump(exclude_unset=True), {"limits": {"max_model_len": drafter}})
        )
        return min(made, shorter, key=lambda each: len(self._refusals(each)))

    def refusals(self) -> list[Problem]:
        """Problems that the engine's checks find in the deployment."""
        return [] if self.deployment is None else self._refusals(self.deployment)

    def _refusals(self, deployment: Deployment) -> list[Problem]:
        if self.question.pair.catalogued:  # the engine's checks would read a model that is not here
            return []
        try:
            backend = server_backend(self.question.backend)
            found = [problem for half in both_halves(deployment) for problem in backend.launch(half).problems]
            return list(dict.fromkeys(found))
        except UserError as error:
            return [error.problem()]

    @cached_property
    def halves(self) -> tuple[int, int] | None:
        """Copies that would prefill and that would decode, in the ratio of `busy_ms`; None = only one copy."""
        if self.copies == 1:
            return None
        prompt, answer = self.busy_ms
        prefill = min(self.copies - 1, max(1, round(self.copies * prompt / (prompt + answer))))
        return prefill, self.copies - prefill

    @cached_property
    def busy_ms(self) -> tuple[float, float]:
        """Milliseconds of one copy that a request's prompt takes, and its answer as one of the chosen batch."""
        chosen, predictor = self.chosen, self.predictors[self.chosen.split]
        steps = self.question.load.osl / chosen.acceptance_length
        return predictor.prefill(1).total, predictor.step(chosen.batch, chosen.width).total * steps / chosen.batch

    def fronts(self) -> Curves:
        """The Pareto front of each variant, by rising interactivity: points that no other beats in both figures."""
        fronts: Curves = {}
        for name, points in self.known.items():
            kept: list[OperatingPoint] = []
            for point in sorted(points, key=lambda each: (-each.interactivity, -each.throughput)):
                if not kept or point.throughput > kept[-1].throughput:
                    kept.append(point)
            fronts[name] = kept[::-1]
        return fronts

    def verdict(self) -> list[str]:
        """Three lines: what to run, what it gives, and where that comes from."""
        return [self._what(), self._gives(), self._trust()]

    def _what(self) -> str:
        chosen, asked = self.chosen, self.question
        width = "without speculation" if chosen.variant == OFF else f"width {chosen.variant.removeprefix('fixed ')}"
        load = f"about {chosen.width}" if chosen.width > 1 else "off"
        wide = f" ({load} at full load)" if chosen.variant == AUTO else ""
        copies = f", {self.copies} copies on {asked.count} GPUs" if self.copies > 1 else ""
        most = f"{chosen.batch} request{'s' * (chosen.batch > 1)} at once"
        if self.copies > 1:
            pair = asked.deployment.pair is not None and self.halves
            decode, kind = (pair[1], " that decodes") if pair else (self.copies, "")
            each = f"each copy{kind}, {chosen.batch * decode} on all {decode}"
            most += f" on {each if decode > 1 else f'the one copy{kind}'}"
        return (
            f"Run {asked.pair.layout.shape.name} on {asked.on.name.upper()} with {chosen.split}{copies}, "
            f"{width}{wide}, at most {most}."
        )

    def _gives(self) -> str:
        chosen, (low, high) = self.chosen, self.range
        told = (
            f"Expect {chosen.throughput:,.0f} tokens/s/GPU ({low:,.0f} to {high:,.0f}) at {chosen.interactivity:,.0f} "
            f"tokens/s/user, first token after {chosen.first_token_ms:,.0f} ms{self._met_at()}"
        )
        if chosen.variant == OFF:
            wide = [point for point in points_of(self.known) if point.width > 1]
            best = self.question.objective.best(wide)
            if best is None:
                return f"{told}. No setting with speculation {'meets the limits' if wide else 'fits'}."
            setting = f"{best.split}, batch {best.batch}, width {best.width}"
            return f"{told}. Speculation does not pay here: its best gives {best.throughput:,.0f} ({setting})."
        plain, equal, end = self.plain, self.plain_at_equal_batch, self.plain_fastest
        gain = (
            f"With the same split and batch plain decoding gives {equal.throughput:,.0f}, at "
            f"{equal.interactivity:,.0f} tokens/s/user: speculation is {self.equal_batch_gain:.2f} times as fast"
        )
        ends = f"the fastest point is {end.interactivity:,.0f} tokens/s/user ({end.split}, batch {end.batch})"
        if plain is None or self.equal_interactivity_ratio is None:
            return f"{told}. {gain}. No setting of plain decoding meets the limits: {ends}."
        limits = " that meets the limits" if self.question.objective != Objective() else ""
        return (
            f"{told}. {gain}. The best setting of plain decoding{limits} gives {plain.throughput:,.0f} "
            f"({plain.split}, batch {plain.batch}): this plan gives {self.equal_interactivity_ratio:.2f} times as "
            f"many. In plain decoding, {ends}."
        )

    def _met_at(self) -> str:
        # The part of a band at which the chosen setting meets the limits, where that is not all of it.
        setting = (self.chosen.variant, self.chosen.split, self.chosen.batch)
        met = [
            acceptance.name
            for acceptance, curves in zip(self.question.acceptances, self.curves, strict=True)
            for point in points_of(curves)
            if (point.variant, point.split, point.batch) == setting and self.question.objective.is_met(point)
        ]
        if len(met) in (0, len(self.curves)):
            return ""
        return f"; the limits are met only at {' and '.join(met)}"

    def _pays(self) -> str:
        if not self.room[self.chosen.split].speculative:
            return f"{self.chosen.split} has no room for the drafter"
        told = f"At equal batch, speculation with a fixed width of {self.question.width} is "
        if not self.losing:
            return f"{told}faster than plain decoding at every batch that has room for it"
        where = [
            f"from batch {first} on" if last is None else f"at batch {first}" + f" to {last}" * (last > first)
            for first, last in self.losing
        ]
        faster = "" if self.losing[0][1] is None else ", and faster at all others that have room for it"
        return f"{told}slower than plain decoding {' and '.join(where)}{faster}"

    def _trust(self) -> str:
        parts = ", ".join(f"{share:.0%} {name}" for name, share in self.chosen.step.shares().items() if share)
        return (
            f"{self._pays()}. Nothing was run: {self._acceptance()}; step times from {self.basis}; engine constants "
            f"{self.question.constants.name} ({parts})."
        )

    def _acceptance(self) -> str:
        # A name is the Greek letter and the figure of the whole block.
        low, high = self.question.acceptances[0], self.question.acceptances[-1]
        figure = low.name if low is high else f"{low.name} to {high.name.partition(' ')[2]}"
        return f"{figure} tokens a step, {low.source}"

    def cautions(self) -> Iterator[str]:
        """Limits and assumptions of this plan, one sentence each."""
        asked, constants, chosen = self.question, self.question.constants, self.chosen
        yield from (f"{note}." for note in self.notes)
        yield from (f"{told}." for told in asked.pair.catalogued)
        if self.halves is not None and not refuses_pairs(asked):
            yield self._as_pair(*self.halves)
        if (long := long_context(asked)) is not None:
            yield long
        if asked.pair.catalogued:
            yield f"{asked.backend}'s own checks were not made: `dflash-serve serve --dry-run` makes them."
        if asked.pair.assumed:
            yield f"{_capital(asked.pair.assumed)}."
        if constants.evidence in ("implied", "assumed"):
            told = f"The engine constants are {constants.evidence}: {constants.source}."
            yield f"{told} Measure with `bench`, then --calibrate."
        if asked.pair.layout.experts:
            missed = "; on Hopper, published gpt-oss-120b cells were missed by -35 to +35 %"
            where = missed if asked.on.compute == 90 else ""
            yield f"Experts are taken as chosen independently by every slot of a block{where}."
        room = self.room[chosen.split]
        if asked.pair.layout.state_bytes and room.plain > room.speculative:
            yield (
                "The target's recurrent layers keep a state for each request, and with a drafter one more for each "
                f"slot of its block: {chosen.split} has room for {room.speculative} requests at once, {room.plain} "
                "without a drafter."
            )
        yield from self._about_widths()
        ratio = self.equal_interactivity_ratio
        if ratio is not None and ratio > 3 * self.equal_batch_gain:
            yield (
                f"The ratio of {ratio:.1f} is where plain decoding runs out of speed, not a speed-up: 5 % in its "
                "fastest point move it by half. The gain at equal batch is what speculation does."
            )
        yield (
            f"Prompts of {asked.load.isl} and answers of {asked.load.osl} tokens are means; nothing waits in a queue, "
            "and limits hold for means, not for tails."
        )
        made = self.deployment
        if made is not None and made.limits.max_model_len != asked.deployment.limits.max_model_len:
            yield (
                f"limits.max_model_len is set to {made.limits.max_model_len}, the positions of the drafter: "
                f"{asked.backend} does not serve this pair with more."
            )
        for problem in self.refusals():
            yield f"`serve` would refuse the deployment here: {problem}."

    def _about_widths(self) -> Iterator[str]:
        asked, fits = self.question, any(room.speculative for room in self.room.values())
        if self.never_narrow is not None:
            yield f"`width: auto` was not compared: {asked.backend} verifies {self.never_narrow}."
        given = asked.deployment.speculation.width
        if asked.given_width is not None:
            yield f"speculation.width: {given} is given: only it and off were compared."
        elif given in (OFF, 1):
            yield f"speculation.width: {given} is given, and the plan compares it with speculation."
        if self.chosen.variant == OFF and asked.objective.interactivity is None and fits:
            yield (
                "This is the most tokens/s/GPU, whatever one user gets: --slo-interactivity keeps so many tokens/s for "
                "each user, and speculation may pay there."
            )

    def _as_pair(self, prefill: int, decode: int) -> str:
        (prompt, answer), load = self.busy_ms, self.question.load
        rates = f"{1e3 * load.isl / prompt:,.0f} tokens/s of prompts on one, {1e3 * load.osl / answer:,.0f} of answers"
        told = (
            f"As a pair, about {prefill} of the {self.copies} copies would prefill and {decode} decode: a prompt takes "
            f"{prompt:.0f} ms of one, an answer {answer:.0f} ms ({rates}), so one prefills for "
            f"{answer / prompt:.2g} that decode. No GPU has checked this estimate."
        )
        if self.question.deployment.pair is None:
            return told
        return f"{told} The expected speed is that of servers which do both: a pair's is not predicted."

    def next_steps(self, folder: Path) -> Iterator[str]:
        """Commands that serve and measure the plan, in order."""
        chosen, asked = self.chosen, self.question
        if self.deployment is None:
            yield "name --drafter, and a deployment.yaml is written"
            return
        if self.deployment.pair is not None:
            serve = f"dflash-serve serve {folder}/{DEPLOYMENT} --backend {asked.backend} --role"
            yield from (f"{serve} {role}" for role in HALVES)
            return
        launch = launch_of(asked, self.deployment) if chosen.variant == AUTO else None
        environment = f"{COST_TABLE}={folder}/{COSTS} " if launch is not None and not launch.measures_costs else ""
        yield f"{environment}dflash-serve serve {folder}/{DEPLOYMENT} --backend {asked.backend}"
        fits = self.room[chosen.split].speculative
        most = min(chosen.batch, fits or chosen.batch)
        loads = sorted({1, *(max(1, most >> shift) for shift in range(0, 7, 2))})
        width = str(asked.given_width or "fixed")
        variants = ",".join([OFF, *([width] if fits else []), *([AUTO] if chosen.variant == AUTO else [])])
        words = [
            *("dflash-serve", "bench", f"{folder}/{DEPLOYMENT}", "--backend", asked.backend, "--variants", variants),
            *("--concurrency", ",".join(str(load * self.copies_in_one_server) for load in loads)),
            *("--max-tokens", str(asked.load.osl), "--output", f"{folder}/bench"),
        ]
        yield shlex.join(words)
        words = [
            *("dflash-serve", "plan", f"{folder}/{DEPLOYMENT}", "--backend", asked.backend),
            *("--isl", str(asked.load.isl), "--osl", str(asked.load.osl)),
            *("--calibrate", f"{folder}/bench/bench.json", "--output", f"{folder}/calibrated"),
        ]
        yield shlex.join(words)


def shown_error(constants: Constants, on: Gpu, width: int, *, by_hand: bool) -> float:
    """The error that a plan tells of tokens/s: more where no fit has seen the GPU, or a roofline prices (`by_hand`)."""
    own = constants.plain_error if width == 1 else constants.error
    if on.name != FITTED_ON and constants.evidence != "calibrated":
        own = max(own, OTHER_GPU_ERROR)
    return max(own, ROOFLINE_ERROR) if by_hand else own


def refuses_pairs(question: PlanQuestion) -> bool:
    """The engine serves no pair."""
    return any(one.key == "pair" for one in server_backend(question.backend).facts.refusals)


def launch_of(question: PlanQuestion, deployment: Deployment) -> Launch | None:
    """The launch of a deployment with the question's models; None where the engine cannot read them."""
    engine, pair = server_backend(question.backend), question.pair
    try:
        if isinstance(engine, DescribedBackend) and (pair.catalogued or deployment.drafter is None):
            return engine.described(deployment, pair.layout, pair.drafter)
        return engine.launch(deployment)
    except UserError:
        return None


def fixed(block_size: int) -> str:
    """The variant that verifies the same number of tokens in every step."""
    return f"fixed {block_size}"


def points_of(curves: Curves) -> list[OperatingPoint]:
    """The points of all variants."""
    return [point for points in curves.values() for point in points]


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
