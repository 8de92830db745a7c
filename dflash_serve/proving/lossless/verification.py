"""The course of a verification: ask both sides, and ask again where greedy answers part.

The plain side answers first and in full, then the speculating one, so that an engine which needs the whole machine can
run them one after the other; sampled answers are looked at while they come and stop at the first look that tells them
apart. Every answer is put on record, so a verification that is run again asks only for what it has not got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from dflash_serve.backend import Prompt
from dflash_serve.common.http import RefusedError
from dflash_serve.common.journal import Journal
from dflash_serve.proving.lossless.comparison import compare
from dflash_serve.proving.lossless.findings import DistributionComparison, Findings, Look
from dflash_serve.proving.lossless.near_tie import TOP, Scored, again
from dflash_serve.proving.lossless.plan import SEEDED, Case, Plan, Question
from dflash_serve.proving.lossless.questions import prompt_of, questions
from dflash_serve.proving.lossless.record import WITH, WITHOUT, Record
from dflash_serve.proving.lossless.sides import Pair, Side
from dflash_serve.proving.lossless.two_sample import p_value, repeats
from dflash_serve.speculation.statistics import AcceptanceStatistics

Progress = Callable[[str, int], None]
"""Told what is being asked for (`with speculation, greedy`) and how many answers have come."""


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
        self.plan, self.prompts, self.pair, self.progress = plan, prompts, pair, progress
        self.record = Record(journal)
        self.asked_with = 0
        """Answers that the speculating side gave in this run."""

    def run(self) -> Findings:
        """Asks, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be reached or started, or is none.
        """
        plan = self.plan
        in_full = (*plan.greedy_cases, SEEDED) if plan.same_seeds else plan.greedy_cases
        with self.pair.plain() as plain:
            for case in (*in_full, *plan.sampled_cases):
                self._ask(plain, WITHOUT, case, questions(plan, self.prompts, case, WITHOUT))
        with self.pair.speculating() as speculating:
            for case in in_full:
                self._ask(speculating, WITH, case, questions(plan, self.prompts, case, WITH))
            sampled = [self._sampled(case, speculating) for case in plan.sampled_cases]
            self._ask_again(speculating, WITH)
            reading = self._acceptance(speculating)
        if self.record.differing(plan):
            with self.pair.plain() as plain:
                self._ask_again(plain, WITHOUT)
        return compare(plan, self.record, sampled, reading)

    def _ask(self, side: Side, name: str, case: Case, asked: Sequence[Question]) -> None:
        """Has all of the questions answered, on record; a refusal ends the case."""
        missing = self.record.missing(name, case, len(asked))
        self.progress(f"{name} speculation, {case.name}", len(asked) - len(missing))
        if case.name in self.record.refused or not missing:
            return
        try:
            for index, answer in side.answers([asked[index] for index in missing]):
                self.record.keep(name, case, missing[index], answer)
                self.asked_with += name == WITH
                self.progress(f"{name} speculation, {case.name}", 1)
        except RefusedError as error:
            self.record.refused[case.name] = f"{name} speculation, {error.what}"

    def _sampled(self, case: Case, speculating: Side) -> DistributionComparison:
        """Looks at growing numbers of answers until they differ or are all there."""
        prompt, samples, looks, differs = prompt_of(case, len(self.prompts)) + 1, 0, list[Look](), False
        asked = questions(self.plan, self.prompts, case, WITH)
        for samples, rate in self.plan.looks:
            self._ask(speculating, WITH, case, asked[:samples])
            if case.name in self.record.refused:
                refused = self.record.refused[case.name]
                return DistributionComparison(case=case.name, prompt=prompt, samples=0, refused=refused)
            plain, other = self.record.both(case, samples)
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

    def _ask_again(self, side: Side, name: str) -> None:
        """Has answers that differ given again up to there, with log-probabilities."""
        for case, index, position in self.record.differing(self.plan):
            if self.record.is_scored(name, case, index):
                continue
            question = Question(self.prompts[index], again(case.params, position))
            try:
                ((_, answer),) = side.answers([question], top_logprobs=TOP)
            except RefusedError:
                self.record.keep_score(name, case, index, None)
            else:
                self.record.keep_score(name, case, index, Scored.of(answer, position))

    def _acceptance(self, speculating: Side) -> AcceptanceStatistics:
        """Over the runs that an interrupted verification took; unknown where none was counted to its end."""
        now = speculating.acceptance()
        return self.record.counting(now) if self.asked_with else self.record.counted(now.engine)
