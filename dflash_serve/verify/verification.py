"""The run of a verification: both sides answer, greedy answers that differ are asked again, and all are compared.

The plain side gives all its answers first, then the speculating one, so that an engine which needs the whole machine
can run them one after the other. Every answer is kept in a store, so a resumed verification asks only for missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count, takewhile
from zlib import crc32

from dflash_serve.answers.engine import Prompt
from dflash_serve.client.endpoint import Reply
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import MAX_LOGIT_BIAS, SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.verify.cases import CaseQuestion, RefusedCases, side_by_side
from dflash_serve.verify.distributions import DistributionComparison, p_value, repeats, smallest_deviation
from dflash_serve.verify.questions import (
    AS_ASKED,
    AS_IDS,
    CONTINUABLE,
    CONTINUED,
    GREEDY,
    MIXED,
    NONE,
    OPTIONAL,
    PENALISED,
    REPEATED,
    SAMPLED,
    SEEDED,
    STOP,
    STREAMED,
    STRIDE,
    TURNS,
    WITH,
    WITHOUT,
    Case,
    Known,
    PlainFacts,
    Question,
    VerifyPlan,
    prompt_index,
    questions,
)
from dflash_serve.verify.ranks import compare_mixed
from dflash_serve.verify.report import Findings, conclude
from dflash_serve.verify.rules import SEED, Answer, Asked, RuleCheck, check_rules, comparable
from dflash_serve.verify.subjects import Subject, SubjectPair
from dflash_serve.verify.tokens import (
    NOT_PENALISED,
    TOP,
    AnswerPair,
    Piece,
    ScoredAnswer,
    TokenComparison,
    compare_tokens,
    penalties_as_bias,
)

UNIT, ACCEPTANCE = "unit", "acceptance"  # Names in the store beside the answers: the unit of their pieces, and counts
STREAMS = "streams"  # Begins names in the store: the form of a case's streamed prompts
FORMS = (AS_ASKED, AS_IDS, NONE)
PROBE = SamplingParams(temperature=0, max_tokens=32)  # An answer long enough for a speculating server to draft
FAILURES = (429, 500, 502, 503, 504)  # Status codes of a server that takes such requests, and fails to answer one
CONTEXT = 576  # Context, in tokens, of a target whose own is unknown
Place = tuple[Case, int, int]  # A case, the index of its question, a position in the answers
Scoring = tuple[Question, list[Piece] | None]
"""A question for one token, and the answer's tokens in its prompt; None: it has none, the whole answer is asked for."""
Progress = Callable[[str, int], None]
"""Called with the kind of question (`with speculation, greedy`) and the number of new answers."""


class Verification:
    """One run over a pair of subjects.

    Its state is the store with all finished answers, and `refused`, which end cases.

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
        self.refused = RefusedCases()
        self.asked_with = 0  # answers that the speculating side gave in this run
        self._cache = dict[tuple[str, ...], list[Question]]()  # questions by side, case and form of streams

    def run(self) -> Findings:
        """Asks, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be reached or started, or is none.
        """
        first, unasked = self.plan.greedy_cases, self.pair.agree(self.prompts)
        with self.pair.plain() as plain:
            self._refuse_drafts(plain, Question(self.prompts[0], PROBE))
            if wrong := plain.wrong_penalties():
                for case in self.plan.cases:
                    if case.name in PENALISED:
                        self.refused.add(case, wrong)
            made_from = (STREAMED, TURNS)  # other questions take their streams and their prompts' token ids from these
            for cases in (first, made_from, [case for case in self.plan.cases if case not in (*first, *made_from)]):
                self._ask(plain, WITHOUT, cases)
            is_plain = self._refuse_drafts(plain)
        with self.pair.speculating() as speculating:
            self._ask(speculating, WITH, self.plan.cases)
            self._ask_again(speculating, WITH)
            acceptance = self._acceptance(speculating)
        if any(self._parted()):
            with self.pair.plain() as plain:
                self._ask_again(plain, WITHOUT)
                for case in CONTINUABLE:
                    self._continue(plain, case)
        optional = [case.name for case in OPTIONAL if case in self.plan.cases]
        reasons, unit = self.refused.reasons, str(self.store.get(UNIT, "nothing"))
        return conclude(
            tuple(self._tokens(case) for case in self.plan.greedy_cases),
            (*(self._distributions(case) for case in self.plan.sampled_cases), *self._mixed()),
            self._tokens(SEEDED) if self.plan.same_seeds else None,
            acceptance,
            exact=tuple(self._exact()),
            rules=(*check_rules(self._asked(), unit, self.plan.noise), *self._repeated()),
            unit=unit,
            is_plain=is_plain,
            failed=tuple(f"{name}: failed ({reasons[name]})" for name in optional if name in self.refused.failures),
            scope=(
                *self.plan.left_out,
                *unasked,
                *(f"{name} ({reasons[name]})" for name in optional if name in self.refused.untested),
            ),
        )

    def _refuse_drafts(self, plain: Subject, probe: Question | None = None) -> bool:
        # True if the plain side is known to be plain; if it speculates, errors of both sides would not be seen
        speculates = plain.speculates(probe)
        if speculates:
            where = (self.pair.descriptions.get(WITHOUT) or {}).get("url") or "--without-url"
            do = "give --without-url a server that was started without a drafter"
            raise UserError("it speculates, too: its own metrics count drafted tokens", where=where, do=do)
        return self.pair.plain_is_ours or speculates is False

    @cached_property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.pair.context() or CONTEXT

    def _questions(self, side: str, case: Case) -> list[Question]:
        key = side, case.name, self._form(case)
        if key not in self._cache:
            self._cache[key] = questions(self.plan, self.prompts, case, side, self._facts(case))
        return self._cache[key]

    def _form(self, case: Case) -> str:
        # the form of a case's streamed prompts: that of `STREAMED`, unless the plain side refused it
        name = f"{STREAMS}/{case.name}"
        return str(self.store.get(name) or self.store.get(f"{STREAMS}/{STREAMED.name}") or AS_ASKED)

    def _facts(self, case: Case) -> PlainFacts:
        # facts from the plain side's answers, as far as the case needs them
        greedy = self.plan.greedy_cases[0]
        if case in GREEDY:
            return PlainFacts()
        known, prompt_ids = list[Known](), dict[str, list[int]]()
        for one in (greedy, TURNS) if case not in (STREAMED, TURNS) else (greedy,):
            if one in self.refused:
                continue
            answers = self._answers(WITHOUT, one)
            asked = zip(self._questions(WITHOUT, one), answers, strict=True)
            prompt_ids |= {repr(question.prompt): list(a.prompt_ids) for question, a in asked if a.prompt_ids}
            if one is greedy:
                known = [Known(a.reasoning + a.text, a.pieces, a.prompt_ids) for a in answers]
        return PlainFacts(known, prompt_ids, self.context, self._form(case))

    def _ask(self, subject: Subject, side: str, cases: Sequence[Case]) -> None:
        """Asks what is not answered. A refusal ends its case.

        Each case is tried with one short answer. Then all questions of those that were not refused run side by side, so
        that an engine which mixes up requests or their settings shows it.
        """
        missing = [self._missing(side, case) for case in cases if self._accepts(subject, side, case)]
        if not self._answer(subject, side, side_by_side(missing)):
            for case in cases:  # one was refused, and nothing says which
                self._answer(subject, side, [] if case in self.refused else self._missing(side, case))

    def _accepts(self, subject: Subject, side: str, case: Case) -> bool:
        """False for a case that is refused, at last by a try; one whose answers are all there is not tried."""
        count, missing = len(self._questions(side, case)), len(self._missing(side, case))
        self.progress(f"{side} speculation, {case.name}", count - missing)
        if case not in self.refused:
            if (reason := self.refused.reason_of_need(case)) is not None:
                self.refused.add(case, reason)
            elif not count:
                self.refused.add(case, "its questions need token ids and greedy answers")
            elif missing:
                self._try(subject, side, case)
        return case not in self.refused

    def _missing(self, side: str, case: Case) -> list[CaseQuestion]:
        requests = (CaseQuestion(case, index, one) for index, one in enumerate(self._questions(side, case)))
        return [one for one in requests if _key(side, case, one.number) not in self.store]

    def _try(self, subject: Subject, side: str, case: Case) -> None:
        """Asks for a short answer, and for a streamed one. A refusal ends the case.

        Streams that the plain side refuses are asked in another form, and at last not at all.
        """
        whole = next((one for one in self._questions(side, case) if "stream" not in one.more), None)
        if whole is not None:
            self._ask_short(subject, side, case, whole)
        if whole is not None and case in self.refused:
            return
        for form in FORMS[FORMS.index(self._form(case)) :]:
            if form != self._form(case):
                self.store.put(f"{STREAMS}/{case.name}", form)
            streamed = next((one for one in self._questions(side, case) if "stream" in one.more), None)
            if streamed is None:
                self.refused.withdraw(case)
                return
            self.refused.withdraw(case)
            self._ask_short(subject, side, case, streamed)
            if case not in self.refused or side == WITH:
                return

    def _ask_short(self, subject: Subject, side: str, case: Case, question: Question) -> None:
        short = question.params.model_copy(update={"max_tokens": max(1, case.params.min_tokens)})
        self._answer(subject, side, [CaseQuestion(case, None, question._replace(params=short))])

    def _answer(self, subject: Subject, side: str, requests: Sequence[CaseQuestion]) -> bool:
        """Keeps the answers, except to tries. False if one is refused, which ends a case that is alone."""
        try:
            for number, reply in subject.answers([one.question for one in requests]) if requests else ():
                request = requests[number]
                if request.number is None:
                    self._judge_try(side, request.case, reply)
                    continue
                if reply.pieces:
                    self._check_unit(side, reply.unit)
                self._keep(side, request, Answer.of(reply))
        except RefusedError as error:
            cases = {one.case.name: one.case for one in requests}
            if len(cases) == 1:
                (case,) = cases.values()
                self.refused.add(case, f"{side} speculation, {error.what}")
                if side == WITH and error.status in FAILURES:
                    self.refused.failures.add(case.name)
            return False
        return True

    def _judge_try(self, side: str, case: Case, reply: Reply) -> None:
        if case in OPTIONAL and reply.pieces and reply.unit != self.store.get(UNIT):
            self.refused.add(case, f"{side} speculation, its answers have {reply.unit}")
        elif case in MIXED and case.params.logprobs and reply.logprobs is None:
            self.refused.add(case, f"{side} speculation, its answers have no log-probabilities")
        elif reply.pieces:
            self._check_unit(side, reply.unit)

    def _keep(self, side: str, request: CaseQuestion, answer: Answer) -> None:
        plain = self.store.get(_key(WITHOUT, request.case, request.number))
        if side == WITH and plain is not None and _token_ids(request.question.prompt) is None:
            self._check_prompt(Answer(*plain), answer)
        self.store.put(_key(side, request.case, request.number), list(answer))
        self.asked_with += side == WITH
        self.progress(f"{side} speculation, {request.case.name}", 1)

    def _check_unit(self, side: str, unit: str) -> None:
        if UNIT not in self.store:
            self.store.put(UNIT, unit)
        if unit != self.store[UNIT]:
            what = f"the side {side} speculation gives {unit}, the other {self.store[UNIT]}"
            raise UserError(what, where="verify", do="compare two servers of the same engine and version")

    def _check_prompt(self, plain: Answer, other: Answer) -> None:
        if None not in (plain.prompt_ids, other.prompt_ids) and plain.prompt_ids != other.prompt_ids:
            what = "the two sides make different tokens of the same prompt"
            do = "start both with one tokenizer and chat template, and verify within one day if it writes the date"
            raise UserError(what, where="verify", do=do)

    def _answers(self, side: str, case: Case) -> list[Answer]:
        return [Answer(*self.store[_key(side, case, n)]) for n in range(len(self._questions(side, case)))]

    def _asked(self, cases: Sequence[Case] = ()) -> Iterator[Asked]:
        # what both sides answered: everything, or these cases
        for case in cases or self.plan.cases:
            if case in self.refused or case not in self.plan.cases:
                continue
            each = self._questions(WITH, case), self._answers(WITHOUT, case), self._answers(WITH, case)
            for index, (question, plain, other) in enumerate(zip(*each, strict=True), start=1):
                yield Asked(case.name, index, question, case in SAMPLED, plain, other)

    def _repeated(self) -> Iterator[RuleCheck]:
        """Sides that give a seed's answer again. Rounding lets few of them differ, so only most of them count."""
        if REPEATED not in self.plan.cases or REPEATED in self.refused:
            return
        pairs = [self._answers(side, REPEATED) for side in (WITHOUT, WITH)]
        plain, other = (sum(a.pieces == b.pieces for a, b in zip(one[::2], one[1::2], strict=True)) for one in pairs)
        count = len(pairs[0]) // 2
        broken = count - other if 4 * other <= count else 0
        yield RuleCheck(rule=SEED, answers=count, broken=broken, honoured=4 * plain >= 3 * count)

    def _pairs(self, case: Case) -> list[AnswerPair]:
        # both sides' answers with their scores
        def score(side: str, index: int) -> ScoredAnswer | None:
            kept = self.store.get(_again(side, case, index))
            return None if kept is None else ScoredAnswer(**kept)

        plain, other = (self._answers(side, case) for side in (WITHOUT, WITH))
        return [
            AnswerPair(*comparable(case, mine, theirs), score(WITHOUT, index), score(WITH, index))
            for index, (mine, theirs) in enumerate(zip(plain, other, strict=True))
        ]

    def _distributions(self, case: Case) -> DistributionComparison:
        """Both sides' sampled answers to a case, compared as draws from a distribution."""
        prompt, samples, rate = prompt_index(self.plan, case) + 1, self.plan.samples_of(case), self.plan.rate
        if why := self.refused.reasons.get(case.name):
            return DistributionComparison(case=case.name, prompt=prompt, samples=0, refused=why)
        plain, other = ([one.drawn for one in self._answers(side, case)] for side in (WITHOUT, WITH))
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

    def _mixed(self) -> Iterator[DistributionComparison]:
        """All cases of `MIXED` that were not refused, compared at once."""
        asked = list(self._asked(MIXED))
        if asked:
            yield compare_mixed(asked, self.plan.rate)

    def _parted(self) -> Iterator[Place]:
        # (greedy case, prompt, first differing position) of all answers that differ
        for case in (*self.plan.greedy_cases, *self.plan.exact_cases):
            pairs = [] if case in self.refused else self._pairs(case)
            yield from ((case, index, at) for index, pair in enumerate(pairs) if (at := pair.position) is not None)

    def _ask_again(self, subject: Subject, side: str) -> None:
        """Asks for answers that differ again, with log-probabilities and the end-of-sequence token as a token."""
        missing = [one for one in self._parted() if _again(side, *one[:2]) not in self.store]
        asked = [self._scoring(*one) for one in missing]
        scores = dict[int, ScoredAnswer | None]()
        for biased in (False, True):  # apart, because a side may refuse a bias
            numbers = [n for n, (question, _) in enumerate(asked) if bool(question.params.logit_bias) == biased]
            with suppress(RefusedError):
                for at, reply in subject.answers([asked[n][0] for n in numbers], top_logprobs=TOP) if numbers else ():
                    n = numbers[at]
                    scores[n] = ScoredAnswer.of(reply, missing[n][2], asked[n][1] or ())
        if side == WITHOUT:
            places = dict[int, tuple[Question, AnswerPair]]()
            for n, score in scores.items():
                (case, index, position), (question, before) = missing[n], asked[n]
                if score is not None and before is not None:
                    mine, theirs = (self._answers(one, case)[index].pieces[position:] for one in (WITHOUT, WITH))
                    places[n] = question, AnswerPair(mine, theirs)
            scores |= {n: replace(one, spelt=names) for n, names in self._spell(subject, places) if (one := scores[n])}
        for n, score in scores.items():
            self.store.put(_again(side, *missing[n][:2]), None if score is None else vars(score))

    def _scoring(self, case: Case, index: int, position: int) -> Scoring:
        """The question for the token at a position."""
        prompt, params, _ = self._questions(WITHOUT, case)[index]
        answer, before = self._answers(WITHOUT, case)[index], None
        begin = position - position % (len(answer.pieces) // answer.choices) if answer.choices > 1 else 0
        ids, agreed = self._prompt_ids(prompt, answer), _token_ids(answer.pieces[begin:position])
        changes: dict[str, object] = {"stop": ()}  # what a stop string would have ended is scored, too
        if ids is not None and agreed is not None:
            before, prompt = answer.pieces[:position], [*ids, *agreed]
            if params.penalised:  # penalties count the tokens of the answer alone, and here these are in the prompt
                changes |= {"logit_bias": penalties_as_bias(agreed, params), **NOT_PENALISED}
        tokens = position + 1 - len(before or ())
        least = min(tokens, max(0, params.min_tokens - len(before or ())))
        changes |= {"max_tokens": tokens, "min_tokens": least, "ignore_eos": True}
        return Question(prompt, params.model_copy(update=changes)), before

    def _prompt_ids(self, prompt: Prompt, answer: Answer) -> list[int] | None:
        """The tokens of a prompt; None: it is a text or a chat, and the server does not tell them."""
        if answer.prompt_ids is not None:
            return list(answer.prompt_ids)
        ids = _token_ids(prompt)
        prompt_ids = self._facts(STOP).prompt_ids.get(repr(prompt)) if ids is None else None  # streams tell none
        return ids if prompt_ids is None else list(prompt_ids)

    def _spell(
        self, plain: Subject, places: Mapping[int, tuple[Question, AnswerPair]]
    ) -> Iterator[tuple[int, list[str | None]]]:
        """Has the plain side spell the first token of both answers behind each question: a bias makes it come next."""
        wanted = list[tuple[int, int, Piece, Question]]()
        for n, (question, pair) in places.items():
            for which, pieces in enumerate((pair.plain, pair.other)):
                if pieces and isinstance(token := pieces[0], int):
                    changes = {"logit_bias": {token: MAX_LOGIT_BIAS}, "min_tokens": 0, "stop_token_ids": ()}
                    biased = question._replace(params=question.params.model_copy(update=changes))
                    wanted.append((n, which, token, biased))
        names: dict[int, list[str | None]] = {n: [None, None] for n in places}
        with suppress(RefusedError):
            for number, reply in plain.answers([one[3] for one in wanted], top_logprobs=1) if wanted else ():
                n, which, token, _ = wanted[number]
                if reply.logprobs and reply.pieces[:1] == (token,):
                    names[n][which] = reply.logprobs[0].text
        yield from names.items()

    def _continue(self, plain: Subject, case: Case) -> None:
        """Asks the plain side to go on from each place of a case's answers behind their first difference."""
        if case in self.refused or case not in self.plan.cases:
            return
        continued, wanted = CONTINUED[case.name], list[tuple[list[int], list[int]]]()
        each = zip(self._questions(WITHOUT, case), self._answers(WITHOUT, case), self._pairs(case), strict=True)
        for (prompt, _, _), answer, pair in each:
            ids, tokens = self._prompt_ids(prompt, answer), _token_ids(pair.other)
            if pair.position is not None and ids is not None and tokens is not None:
                starts = range(pair.position + 1, len(tokens), STRIDE)
                wanted += [([*ids, *tokens[:start]], tokens[start : start + STRIDE]) for start in starts]
        missing = [index for index in range(len(wanted)) if _key(WITHOUT, continued, index) not in self.store]
        asked = [
            Question(wanted[n][0], continued.params.model_copy(update={"max_tokens": len(wanted[n][1])}))
            for n in missing
        ]
        replies = dict[int, Reply]()
        with suppress(RefusedError):  # it may refuse so many log-probabilities, or prompts of tokens
            replies |= plain.answers(asked) if asked else {}
        pieces = {n: AnswerPair(list(reply.pieces), list(wanted[missing[n]][1])) for n, reply in replies.items()}
        parted = {n: at for n, pair in pieces.items() if (at := pair.position) is not None}
        one = continued.params.model_copy(update={"max_tokens": 1})
        places = {
            n: (
                Question([*wanted[missing[n]][0], *wanted[missing[n]][1][:at]], one),
                AnswerPair(pieces[n].plain[at:], pieces[n].other[at:]),
            )
            for n, at in parted.items()
        }
        names = dict(self._spell(plain, places))
        for n, pair in pieces.items():
            score = ScoredAnswer.of(replies[n], parted[n]) if n in parted else None
            kept = None if score is None else vars(replace(score, spelt=names[n]))
            self.store.put(_key(WITHOUT, continued, missing[n]), [pair.plain, pair.other, kept])

    def _exact(self) -> Iterator[TokenComparison]:
        """Further greedy cases that were not refused, and the pieces of `_continue`."""
        yield from (self._tokens(case) for case in self.plan.exact_cases if case not in self.refused)
        for case in CONTINUED.values():
            kept = list(takewhile(bool, (self.store.get(_key(WITHOUT, case, index)) for index in count())))
            if kept:
                pairs = [AnswerPair(plain, other, scored and ScoredAnswer(**scored)) for plain, other, scored in kept]
                yield compare_tokens(case, pairs, self.plan.noise)

    def _tokens(self, case: Case) -> TokenComparison:
        """A case's answers, compared token for token.

        Seeded differences are unscored: no score says how close a draw was to the edge between two tokens.
        """
        if why := self.refused.reasons.get(case.name):
            return TokenComparison(case=case.name, prompts=len(self._questions(WITH, case)), refused=why)
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


def _key(side: str, case: Case, index: int | None) -> str:
    return f"{side}/{case.name}/{index}"


def _again(side: str, case: Case, index: int) -> str:
    return f"{_key(side, case, index)}/again"


def _token_ids(pieces: Prompt | Sequence[Piece]) -> list[int] | None:
    tokens = [] if isinstance(pieces, str) else [piece for piece in pieces if isinstance(piece, int)]
    return tokens if len(tokens) == len(pieces) else None
