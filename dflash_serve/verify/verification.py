"""The run of a verification: both sides answer, greedy answers that differ are asked again, and all are compared.

The plain side gives all its answers first, then the speculating one, so that an engine which needs the whole machine
can run them one after the other. Sampled answers are tested at several looks and end at the first that tells the sides
apart. Every answer is kept in a store, so a resumed verification asks only for missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from dflash_serve.backend import Prompt
from dflash_serve.client.endpoint import Reply
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.verify.distributions import DistributionComparison, Look, p_value, repeats, smallest_deviation
from dflash_serve.verify.questions import SEEDED, WITH, WITHOUT, Case, Question, VerifyPlan, prompt_index, questions
from dflash_serve.verify.report import Findings, conclude
from dflash_serve.verify.subjects import Subject, SubjectPair
from dflash_serve.verify.tokens import TOP, AnswerPair, Piece, ScoredAnswer, TokenComparison, again, compare_tokens

UNIT, ACCEPTANCE = "unit", "acceptance"  # Names in the store beside the answers
PROBE = SamplingParams(temperature=0, max_tokens=32)  # An answer long enough for a speculating server to draft
Progress = Callable[[str, int], None]
"""Called with the kind of question (`with speculation, greedy`) and the number of new answers."""


class AnswerRecord:
    """Both sides' answers by side, case and index, in a store; refusals are kept in memory only."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.refused: dict[str, str] = {}
        """Case -> the server's reason."""

    @property
    def unit(self) -> str:
        """The pieces of answers: token ids, tokens, or characters."""
        return str(self.store.get(UNIT, "nothing"))

    def missing(self, side: str, case: Case, count: int) -> list[int]:
        """The indexes of missing answers among the first `count`."""
        return [index for index in range(count) if _key(side, case, index) not in self.store]

    def keep(self, side: str, case: Case, index: int, reply: Reply) -> None:
        """Keeps an answer.

        Raises:
            UserError: the sides give different kinds of pieces, which cannot be compared.
        """
        if reply.pieces:
            if UNIT not in self.store:
                self.store.put(UNIT, reply.unit)
            if self.unit != reply.unit:
                what = f"the side {side} speculation gives {reply.unit}, the other {self.unit}"
                raise UserError(what, where="verify", do="compare two servers of the same engine and version")
        self.store.put(_key(side, case, index), list(reply.pieces))

    def answers(self, side: str, case: Case, count: int) -> list[list[Piece]]:
        """The first `count` of them."""
        return [self.store[_key(side, case, index)] for index in range(count)]

    def pairs(self, case: Case, count: int) -> list[AnswerPair]:
        """Both sides' first `count` answers with their scores."""
        answers = zip(self.answers(WITHOUT, case, count), self.answers(WITH, case, count), strict=True)
        return [
            AnswerPair(plain, other, self._score(WITHOUT, case, index), self._score(WITH, case, index))
            for index, (plain, other) in enumerate(answers)
        ]

    def _score(self, side: str, case: Case, index: int) -> ScoredAnswer | None:
        kept = self.store.get(_again(side, case, index))
        return None if kept is None else ScoredAnswer(**kept)

    def is_scored(self, side: str, case: Case, index: int) -> bool:
        """True if an answer was asked again, with log-probabilities."""
        return _again(side, case, index) in self.store

    def keep_score(self, side: str, case: Case, index: int, scored: ScoredAnswer | None) -> None:
        """Keeps the score of an answer asked again; None = the engine gave none."""
        self.store.put(_again(side, case, index), None if scored is None else vars(scored))

    def keep_acceptance(self, now: AcceptanceStatistics) -> None:
        """Adds a run's acceptance to that of the interrupted runs before it; unknown if one is unknown."""
        kept = self.acceptance
        self.store.put(ACCEPTANCE, (now if kept is None else total([kept, now])).to_dict())

    @property
    def acceptance(self) -> AcceptanceStatistics | None:
        """The kept acceptance; None = nothing is kept."""
        return AcceptanceStatistics.from_dict(self.store[ACCEPTANCE]) if ACCEPTANCE in self.store else None


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
        self.plan, self.prompts, self.pair, self.progress = plan, prompts, pair, progress
        self.record = AnswerRecord(store)
        self.asked_with = 0
        """Answers that the speculating side gave in this run."""

    def run(self) -> Findings:
        """Asks, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be reached or started, or is none.
        """
        with self.pair.plain() as plain:
            self._refuse_drafts(plain, Question(self.prompts[0], PROBE))
            for case in (*self.plan.token_cases, *self.plan.sampled_cases):
                self._ask(plain, WITHOUT, case)
            is_plain = self._refuse_drafts(plain)
        with self.pair.speculating() as speculating:
            for case in self.plan.token_cases:
                self._ask(speculating, WITH, case)
            sampled = [self._look(speculating, case) for case in self.plan.sampled_cases]
            self._ask_again(speculating, WITH)
            acceptance = self._acceptance(speculating)
        if self._parted():
            with self.pair.plain() as plain:
                self._ask_again(plain, WITHOUT)
        greedy = [self._tokens(case) for case in self.plan.greedy_cases]
        seeded = self._tokens(SEEDED) if self.plan.same_seeds else None
        return conclude(
            greedy, sampled, seeded, acceptance, unit=self.record.unit, is_plain=is_plain, scope=self.plan.scope
        )

    def _refuse_drafts(self, plain: Subject, probe: Question | None = None) -> bool:
        """True if the plain side is known to be plain.

        Raises:
            UserError: it speculates, too, so errors of both sides would not be seen.
        """
        speculates = plain.speculates(probe)
        if speculates:
            where = (self.pair.descriptions.get(WITHOUT) or {}).get("url") or "--without"
            do = "give --without a server that was started without a drafter"
            raise UserError("it speculates, too: its own metrics count drafted tokens", where=where, do=do)
        return self.pair.plain_is_ours or speculates is False

    def _ask(self, subject: Subject, side: str, case: Case, count: int | None = None) -> None:
        """Asks the first `count` questions (None: all) that are not answered; a refusal ends the case."""
        asked = questions(self.plan, self.prompts, case, side)[:count]
        missing, what = self.record.missing(side, case, len(asked)), f"{side} speculation, {case.name}"
        self.progress(what, len(asked) - len(missing))
        if case.name in self.record.refused or not missing:
            return
        try:
            for index, reply in subject.answers([asked[index] for index in missing]):
                self.record.keep(side, case, missing[index], reply)
                self.asked_with += side == WITH
                self.progress(what, 1)
        except RefusedError as error:
            self.record.refused[case.name] = f"{side} speculation, {error.what}"

    def _look(self, speculating: Subject, case: Case) -> DistributionComparison:
        prompt, looks = prompt_index(case, len(self.prompts)) + 1, list[Look]()
        for samples, rate in self.plan.looks:
            self._ask(speculating, WITH, case, samples)
            if why := self.record.refused.get(case.name):
                return DistributionComparison(case=case.name, prompt=prompt, samples=0, refused=why)
            plain, other = (self.record.answers(side, case, samples) for side in (WITHOUT, WITH))
            p = p_value(plain, other, rate, seed=crc32(case.name.encode()))
            looks.append(Look(samples=samples, p_value=p, false_alarm=rate))
            if p <= rate:
                break
        return DistributionComparison(
            case=case.name,
            prompt=prompt,
            samples=samples,
            looks=tuple(looks),
            differs=p <= rate,
            smallest_deviation=None if p <= rate else smallest_deviation(plain, samples, rate, self.plan.power),
            repeats_without=repeats(plain),
            repeats_with=repeats(other),
        )

    def _parted(self) -> list[tuple[Case, int, int]]:
        """(greedy case, prompt, first differing position) of all answers that differ."""
        return [
            (case, index, position)
            for case in self.plan.greedy_cases
            if case.name not in self.record.refused
            for index, pair in enumerate(self.record.pairs(case, self.plan.prompts))
            if (position := pair.position) is not None
        ]

    def _ask_again(self, subject: Subject, side: str) -> None:
        """Asks for answers that differ again, up to the difference, with log-probabilities."""
        for case, index, position in self._parted():
            if self.record.is_scored(side, case, index):
                continue
            question = Question(self.prompts[index], again(case.params, position))
            try:
                ((_, reply),) = subject.answers([question], top_logprobs=TOP)
            except RefusedError:
                self.record.keep_score(side, case, index, None)
            else:
                self.record.keep_score(side, case, index, ScoredAnswer.of(reply, position))

    def _tokens(self, case: Case) -> TokenComparison:
        """A case's answers, compared token for token.

        Seeded differences are unscored: no score says how close a draw was to the edge between two tokens.
        """
        if why := self.record.refused.get(case.name):
            return TokenComparison(case=case.name, prompts=self.plan.prompts, refused=why)
        return compare_tokens(case, self.record.pairs(case, self.plan.prompts), self.plan.noise)

    def _acceptance(self, speculating: Subject) -> AcceptanceStatistics:
        """Acceptance over all runs of an interrupted verification; unknown if none was counted to its end."""
        now = speculating.acceptance()
        if self.asked_with:
            self.record.keep_acceptance(now)
        return self.record.acceptance or AcceptanceStatistics.unknown(now.engine)


def _key(side: str, case: Case, index: int) -> str:
    return f"{side}/{case.name}/{index}"


def _again(side: str, case: Case, index: int) -> str:
    return f"{_key(side, case, index)}/again"
