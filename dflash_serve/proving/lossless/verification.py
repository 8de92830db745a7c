"""The verification itself: ask both sides, compare, and ask again where greedy answers part.

The plain side answers first and in full, then the speculating one, so that an engine which needs the whole machine can
run them one after the other; sampled answers are looked at while they come and stop at the first look that tells them
apart. Every answer goes through the journal, so a verification that is run again asks only for what it has not got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.proving.acceptance_reading import AcceptanceReading, counted
from dflash_serve.proving.answer import Answer
from dflash_serve.proving.endpoint import RefusedError
from dflash_serve.proving.journal import Journal
from dflash_serve.proving.lossless import diagnosis
from dflash_serve.proving.lossless.findings import (
    Difference,
    DistributionComparison,
    Findings,
    Look,
    TokenComparison,
)
from dflash_serve.proving.lossless.near_tie import TOP, Piece, Scored, again, classify, first_difference
from dflash_serve.proving.lossless.plan import (
    GREEDY,
    SAMPLED,
    SEEDED,
    Case,
    Plan,
    Question,
    greedy_question,
    sampled_questions,
)
from dflash_serve.proving.lossless.power import smallest_deviation
from dflash_serve.proving.lossless.sides import Pair, Side
from dflash_serve.proving.lossless.two_sample import p_value, repeats

WITH, WITHOUT = "with", "without"
FIRST_SEED = {WITHOUT: 0, WITH: 2**40}
"""Sides draw from seeds of their own: with the same ones an engine that honours them would leave nothing to test."""
SEEDS_A_CASE = 2**20
SEEDED_TOKENS = 32
Progress = Callable[[str, int], None]
"""Told what is being asked for (`with, greedy`) and how many answers have come."""


class Verification:
    """One run over a Pair.

    Args:
        prompts: greedy cases take the first `plan.prompts` of them, each sampled case one.
        journal: finished answers; what it has is not asked again.
    """

    def __init__(
        self,
        plan: Plan,
        prompts: Sequence[Prompt],
        pair: Pair,
        journal: Journal,
        progress: Progress = lambda what, count: None,
    ) -> None:
        self.plan, self.prompts, self.pair, self.journal, self.progress = plan, prompts, pair, journal, progress
        self.refused: dict[str, str] = {}
        """Case -> what the server said."""
        self.asked_with = 0
        """Answers that the speculating side gave in this run."""

    def run(self) -> Findings:
        """Asks, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be reached or started, or is none.
        """
        with self.pair.plain() as plain:
            for case in self._token_cases:
                self._ask(plain, WITHOUT, case, self._questions(case, WITHOUT))
            for case in self.plan.sampled_cases:
                self._ask(plain, WITHOUT, case, self._questions(case, WITHOUT))
        with self.pair.speculating() as speculating:
            for case in self._token_cases:
                self._ask(speculating, WITH, case, self._questions(case, WITH))
            sampled = [self._sampled(case, speculating) for case in self.plan.sampled_cases]
            self._ask_again(speculating, WITH)
            reading = self._acceptance(speculating)
        if self._differing():
            with self.pair.plain() as plain:
                self._ask_again(plain, WITHOUT)
        return self._findings(sampled, reading)

    @property
    def _token_cases(self) -> tuple[Case, ...]:
        return (*self.plan.greedy_cases, SEEDED) if self.plan.same_seeds else self.plan.greedy_cases

    def _questions(self, case: Case, side: str) -> list[Question]:
        prompts, plan = self.prompts[: self.plan.prompts], self.plan
        if case in GREEDY:
            return [greedy_question(case, prompt, plan.max_tokens) for prompt in prompts]
        if case is SEEDED:
            tokens = min(SEEDED_TOKENS, plan.max_tokens)
            return [
                q for n, prompt in enumerate(prompts) for q in sampled_questions(case, prompt, 1, tokens, first_seed=n)
            ]
        number = SAMPLED.index(case)
        prompt = self.prompts[number % len(self.prompts)]
        first_seed = FIRST_SEED[side] + number * SEEDS_A_CASE
        return sampled_questions(case, prompt, plan.samples, plan.sample_tokens, first_seed=first_seed)

    def _ask(self, side: Side, name: str, case: Case, questions: Sequence[Question]) -> None:
        """Has all of the questions answered, in the journal; a refusal ends the case."""
        keys = [f"{name}/{case.name}/{index}" for index in range(len(questions))]
        missing = [index for index, key in enumerate(keys) if key not in self.journal]
        self.progress(f"{name} speculation, {case.name}", len(questions) - len(missing))
        if case.name in self.refused or not missing:
            return
        try:
            for index, answer in side.answers([questions[index] for index in missing]):
                self._same_unit(name, answer)
                self.journal.put(keys[missing[index]], list(answer.pieces))
                self.asked_with += name == WITH
                self.progress(f"{name} speculation, {case.name}", 1)
        except RefusedError as error:
            self.refused[case.name] = f"{name} speculation, {error.what}"

    def _same_unit(self, name: str, answer: Answer) -> None:
        """Both sides must name tokens in the same way, or everything would differ."""
        if not answer.pieces:
            return
        if "unit" not in self.journal:
            self.journal.put("unit", answer.unit)
        if self.journal["unit"] != answer.unit:
            what = f"the side {name} speculation gives {answer.unit}, the other {self.journal['unit']}"
            raise UserError(what, where="verify", do="compare two servers of the same engine and version")

    def _answers(self, name: str, case: Case, count: int) -> list[list[Piece]]:
        return [self.journal[f"{name}/{case.name}/{index}"] for index in range(count)]

    def _sampled(self, case: Case, speculating: Side) -> DistributionComparison:
        """Looks at growing numbers of answers until they differ or are all there."""
        prompt, samples, looks, differs = SAMPLED.index(case) % len(self.prompts) + 1, 0, list[Look](), False
        questions = self._questions(case, WITH)
        for samples, rate in self.plan.looks:
            self._ask(speculating, WITH, case, questions[:samples])
            if case.name in self.refused:
                return DistributionComparison(case=case.name, prompt=prompt, samples=0, refused=self.refused[case.name])
            plain, other = (self._answers(name, case, samples) for name in (WITHOUT, WITH))
            p = p_value(plain, other, rate, seed=crc32(case.name.encode()))
            looks.append(Look(samples=samples, p_value=p, false_alarm=rate))
            differs = p <= rate
            if differs:
                break
        return DistributionComparison(
            case=case.name,
            prompt=prompt,
            samples=samples,
            looks=tuple(looks),
            differs=differs,
            repeats_without=repeats(plain),
            repeats_with=repeats(other),
        )

    def _differing(self) -> list[tuple[Case, int, int]]:
        """(greedy case, prompt, first differing position) of all answers that both sides have given."""
        found = []
        for case in self.plan.greedy_cases:
            if case.name not in self.refused:
                pairs = zip(*(self._answers(name, case, self.plan.prompts) for name in (WITHOUT, WITH)), strict=True)
                found += [
                    (case, index, position)
                    for index, sides in enumerate(pairs)
                    if (position := first_difference(*sides)) is not None
                ]
        return found

    def _ask_again(self, side: Side, name: str) -> None:
        """Has answers that differ given again up to there, with log-probabilities."""
        for case, index, position in self._differing():
            key = f"{name}/{case.name}/{index}/again"
            if key in self.journal:
                continue
            question = Question(self.prompts[index], again(case.params, position))
            try:
                ((_, answer),) = side.answers([question], top_logprobs=TOP)
            except RefusedError:
                self.journal.put(key, None)
            else:
                scored = Scored.of(answer, position)
                self.journal.put(key, None if scored is None else vars(scored))

    def _acceptance(self, speculating: Side) -> AcceptanceReading:
        """Over the runs that an interrupted verification took; unknown where none was counted to its end."""
        now = speculating.acceptance()
        steps, accepted = self.journal.get("accepted", (None, None))
        if self.asked_with:
            steps = None if now.steps is None else now.steps + (steps or 0)
            accepted = None if now.accepted is None else now.accepted + (accepted or 0)
            self.journal.put("accepted", [steps, accepted])
        return counted(now.engine, steps, None, accepted)

    def _compared(self, case: Case) -> TokenComparison:
        if case.name in self.refused:
            zero: Any = dict.fromkeys(("identical", "tokens", "compared"), 0)
            return TokenComparison(case=case.name, prompts=self.plan.prompts, **zero, refused=self.refused[case.name])
        sides = [self._answers(name, case, self.plan.prompts) for name in (WITHOUT, WITH)]
        positions = [first_difference(*pair) for pair in zip(*sides, strict=True)]
        return TokenComparison(
            case=case.name,
            prompts=self.plan.prompts,
            identical=positions.count(None),
            tokens=sum(map(len, sides[0])),
            compared=sum(len(a) if p is None else p for a, p in zip(sides[0], positions, strict=True)),
            differences=tuple(
                self._difference(case, index, position, *(side[index] for side in sides))
                for index, position in enumerate(positions)
                if position is not None
            ),
        )

    def _difference(self, case: Case, index: int, position: int, plain: list[Piece], other: list[Piece]) -> Difference:
        keys = [f"{name}/{case.name}/{index}/again" for name in (WITHOUT, WITH)]
        scored = [Scored.read(self.journal[key]) if key in self.journal else None for key in keys]
        kind, gap = classify(plain, other, position, *scored, params=case.params, noise=self.plan.noise)
        if case is SEEDED:  # no score tells how close a draw was to the edge between two tokens
            kind, gap = "unscored", None
        return Difference(
            prompt=index + 1,
            position=position,
            with_speculation=_shown(other, position, scored[1]),
            without_speculation=_shown(plain, position, scored[0]),
            gap=gap,
            kind=kind,
        )

    def _findings(self, sampled: list[DistributionComparison], reading: AcceptanceReading) -> Findings:
        greedy = [self._compared(case) for case in self.plan.greedy_cases]
        seeded = self._compared(SEEDED) if self.plan.same_seeds else None
        found = diagnosis.faults(greedy, sampled, seeded)
        reasons = tuple(diagnosis.doubts(greedy, sampled, reading.accepted, seeded))
        return Findings(
            verdict=diagnosis.verdict_of(found, reasons),
            faults=found,
            reasons=reasons,
            unit=self.journal.get("unit", "nothing"),
            greedy=tuple(greedy),
            sampled=tuple(
                self._with_power(case, one) for case, one in zip(self.plan.sampled_cases, sampled, strict=True)
            ),
            seeded=seeded,
            accepted=reading.accepted,
            acceptance_length=reading.acceptance_length,
        )

    def _with_power(self, case: Case, found: DistributionComparison) -> DistributionComparison:
        """What the last look could have seen, from the answers of the plain side."""
        if found.differs or found.refused:
            return found
        answers = self._answers(WITHOUT, case, found.samples)
        least = smallest_deviation(answers, found.samples, found.looks[-1].false_alarm, self.plan.power)
        return found.model_copy(update={"smallest_deviation": least})


def _shown(pieces: list[Piece], position: int, scored: Scored | None) -> str | None:
    """A token for a reader: its number and, where the engine spelt it when asked again, its text."""
    if position >= len(pieces):
        return None
    piece = pieces[position]
    same = scored is not None and scored.pieces[position : position + 1] == [piece]
    return str(piece) if scored is None or not same or scored.token == piece else f"{scored.token!r} ({piece})"
