"""The run of a verification: both sides answer, greedy answers that differ are asked again, and all are compared.

The plain side gives all its answers first, then the speculating one, so that an engine which needs the whole machine
can run them one after the other. Every answer is kept in a store, so a resumed verification asks only for missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

from dflash_serve.backend import Prompt
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.verify.distributions import DistributionComparison, p_value, repeats, smallest_deviation
from dflash_serve.verify.questions import SEEDED, WITH, WITHOUT, Case, Question, VerifyPlan, prompt_index, questions
from dflash_serve.verify.report import Findings, conclude
from dflash_serve.verify.subjects import Subject, SubjectPair
from dflash_serve.verify.tokens import TOP, AnswerPair, Piece, ScoredAnswer, TokenComparison, compare_tokens

UNIT, ACCEPTANCE = "unit", "acceptance"  # Names in the store beside the answers: the unit of their pieces, and counts
PROBE = SamplingParams(temperature=0, max_tokens=32)  # An answer long enough for a speculating server to draft
Progress = Callable[[str, int], None]
"""Called with the kind of question (`with speculation, greedy`) and the number of new answers."""


class Verification:
    """One run over a pair of subjects.

    Args:
        prompts: greedy cases take the first `plan.prompts` of them, each sampled case one.
        store: finished answers, which are not asked again.
    """

    def __init__(
        self,
        plan: VerifyPlan,
        prompts: Sequence[Prompt],
        pair: SubjectPair,
        store: Store,
        progress: Progress = lambda what, count: None,
    ) -> None:
        self.plan, self.prompts, self.pair, self.store, self.progress = plan, prompts, pair, store, progress
        self.refused: dict[str, str] = {}  # case -> the server's reason; asked again by a resumed run
        self.asked_with = 0  # answers that the speculating side gave in this run

    def run(self) -> Findings:
        """Asks, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be reached or started, or is none.
        """
        cases = (*self.plan.token_cases, *self.plan.sampled_cases)
        with self.pair.plain() as plain:
            self._refuse_drafts(plain, Question(self.prompts[0], PROBE))
            for case in cases:
                self._ask(plain, WITHOUT, case)
            is_plain = self._refuse_drafts(plain)
        with self.pair.speculating() as speculating:
            for case in cases:
                self._ask(speculating, WITH, case)
            self._ask_again(speculating, WITH)
            acceptance = self._acceptance(speculating)
        if any(self._parted()):
            with self.pair.plain() as plain:
                self._ask_again(plain, WITHOUT)
        return conclude(
            tuple(self._tokens(case) for case in self.plan.greedy_cases),
            tuple(self._distributions(case) for case in self.plan.sampled_cases),
            self._tokens(SEEDED) if self.plan.same_seeds else None,
            acceptance,
            unit=str(self.store.get(UNIT, "nothing")),
            is_plain=is_plain,
            scope=self.plan.scope,
        )

    def _refuse_drafts(self, plain: Subject, probe: Question | None = None) -> bool:
        # True if the plain side is known to be plain; if it speculates, errors of both sides would not be seen
        speculates = plain.speculates(probe)
        if speculates:
            where = (self.pair.descriptions.get(WITHOUT) or {}).get("url") or "--without"
            do = "give --without a server that was started without a drafter"
            raise UserError("it speculates, too: its own metrics count drafted tokens", where=where, do=do)
        return self.pair.plain_is_ours or speculates is False

    def _ask(self, subject: Subject, side: str, case: Case) -> None:
        """Asks the questions that are not answered; a refusal ends the case."""
        asked = questions(self.plan, self.prompts, case, side)
        missing = [index for index in range(len(asked)) if _key(side, case, index) not in self.store]
        what = f"{side} speculation, {case.name}"
        self.progress(what, len(asked) - len(missing))
        if case.name in self.refused or not missing:
            return
        try:
            for index, reply in subject.answers([asked[index] for index in missing]):
                if reply.pieces:
                    self._check_unit(side, reply.unit)
                self.store.put(_key(side, case, missing[index]), list(reply.pieces))
                self.asked_with += side == WITH
                self.progress(what, 1)
        except RefusedError as error:
            self.refused[case.name] = f"{side} speculation, {error.what}"

    def _check_unit(self, side: str, unit: str) -> None:
        if UNIT not in self.store:
            self.store.put(UNIT, unit)
        if unit != self.store[UNIT]:
            what = f"the side {side} speculation gives {unit}, the other {self.store[UNIT]}"
            raise UserError(what, where="verify", do="compare two servers of the same engine and version")

    def _answers(self, side: str, case: Case, count: int) -> list[list[Piece]]:
        return [self.store[_key(side, case, index)] for index in range(count)]

    def _pairs(self, case: Case) -> list[AnswerPair]:
        # both sides' answers with their scores
        def score(side: str, index: int) -> ScoredAnswer | None:
            kept = self.store.get(_again(side, case, index))
            return None if kept is None else ScoredAnswer(**kept)

        plain, other = (self._answers(side, case, self.plan.prompts) for side in (WITHOUT, WITH))
        return [
            AnswerPair(plain[index], other[index], score(WITHOUT, index), score(WITH, index))
            for index in range(self.plan.prompts)
        ]

    def _distributions(self, case: Case) -> DistributionComparison:
        """Both sides' sampled answers to a case, compared as draws from a distribution."""
        prompt, samples, rate = prompt_index(case, len(self.prompts)) + 1, self.plan.samples, self.plan.rate
        if why := self.refused.get(case.name):
            return DistributionComparison(case=case.name, prompt=prompt, samples=0, refused=why)
        plain, other = (self._answers(side, case, samples) for side in (WITHOUT, WITH))
        p = p_value(plain, other, rate, seed=crc32(case.name.encode()))
        return DistributionComparison(
            case=case.name,
            prompt=prompt,
            samples=samples,
            p_value=p,
            differs=p <= rate,
            smallest_deviation=None if p <= rate else smallest_deviation(plain, samples, rate, self.plan.power),
            repeats_without=repeats(plain),
            repeats_with=repeats(other),
        )

    def _parted(self) -> Iterator[tuple[Case, int, int]]:
        # (greedy case, prompt, first differing position) of all answers that differ
        for case in self.plan.greedy_cases:
            pairs = [] if case.name in self.refused else self._pairs(case)
            yield from ((case, index, at) for index, pair in enumerate(pairs) if (at := pair.position) is not None)

    def _ask_again(self, subject: Subject, side: str) -> None:
        """Asks for answers that differ again, with log-probabilities and the end-of-sequence token as a token."""
        for case, index, position in self._parted():
            if _again(side, case, index) in self.store:
                continue
            params = case.params.model_copy(update={"max_tokens": position + 1, "ignore_eos": True})
            try:
                ((_, reply),) = subject.answers([Question(self.prompts[index], params)], top_logprobs=TOP)
            except RefusedError:
                scored = None
            else:
                scored = ScoredAnswer.of(reply, position)
            self.store.put(_again(side, case, index), None if scored is None else vars(scored))

    def _tokens(self, case: Case) -> TokenComparison:
        """A case's answers, compared token for token.

        Seeded differences are unscored: no score says how close a draw was to the edge between two tokens.
        """
        if why := self.refused.get(case.name):
            return TokenComparison(case=case.name, prompts=self.plan.prompts, refused=why)
        return compare_tokens(case, self._pairs(case), self.plan.noise)

    def _acceptance(self, speculating: Subject) -> AcceptanceStatistics:
        """Acceptance over all runs of an interrupted verification; unknown if none was counted to its end."""
        now, kept = speculating.acceptance(), self.store.get(ACCEPTANCE)
        before = None if kept is None else AcceptanceStatistics.from_dict(kept)
        if not self.asked_with:
            return before or AcceptanceStatistics.unknown(now.engine)
        whole = now if before is None else total([before, now])
        self.store.put(ACCEPTANCE, whole.to_dict())
        return whole


def _key(side: str, case: Case, index: int) -> str:
    return f"{side}/{case.name}/{index}"


def _again(side: str, case: Case, index: int) -> str:
    return f"{_key(side, case, index)}/again"
