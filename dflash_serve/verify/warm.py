"""Prompts that are asked again after their K/V left the devices: `verify --warm`.

An engine with a host tier (SGLang's HiCache, vLLM's OffloadingConnector, LMCache) copies the K/V of prompts that its
devices have no room for, and loads them when such a prompt comes again. The drafter's K/V must come back, too: without
them the tokens stay right, and fewer drafts are accepted (sglang#21125, vllm#47890, vllm#57032).

One server that speculates is asked long prompts, one at a time. Then other prompts fill its K/V pool until no room is
left for the first ones, and these are asked again. Both answers are compared token for token with those without
speculation, and the two acceptances with each other, prompt by prompt (one-sided sign-flip test).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import ceil

from dflash_serve.answers.engine import Conversation, Prompt, template_variables
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.common.store import Store
from dflash_serve.doctor.examination import MATERIAL, gain_p_value
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.verify.cases import CaseQuestion
from dflash_serve.verify.questions import WITH, WITHOUT, Case, PlainFacts, Question, VerifyPlan
from dflash_serve.verify.report import RELOADED, SLOWER, Findings, Reload, conclude
from dflash_serve.verify.rules import Answer
from dflash_serve.verify.subjects import ServerSubject, SubjectPair
from dflash_serve.verify.verification import CONTEXT, PROBE, Place, Progress, Verification

FIRST = Case("long prompts", SamplingParams(temperature=0))
AGAIN = Case(RELOADED, SamplingParams(temperature=0))
PROMPT_TOKENS = 1024  # Tokens of a prompt, about: several pages of every engine, and cheap to compute
CHARACTERS = 4  # Characters of a token of a prompt, about
BEYOND = 1.25
"""Tokens that are asked between the two askings, for each token of the pool: pages that are not full hold fewer. A host
tier must hold them, too, or it drops the first prompts; HiCache's is by default twice as large as the pool."""
FALSE_ALARM = 1e-3  # Probability that a server whose acceptance is the same is called slower
ENOUGH = 0.5  # Share of the prompts' tokens that must come back: a fall of acceptance shows in most prompts then
FEWEST = 10  # Prompts with which a fall can be shown: 0.5 ** 10 < FALSE_ALARM
FILLER_TOKENS = 4096  # Most tokens of a prompt that fills the pool
FILLER = SamplingParams(temperature=0, max_tokens=1)
FIRST_NUMBER = 10_000_000  # Fillers are numbers of eight digits, so that no two begin alike for long
FIRST_WORDS = 8  # Numbers of the first filler, which shows how many tokens a number has


@dataclass(frozen=True)
class Asking:
    """One asking of all prompts."""

    each: tuple[AcceptanceStatistics, ...]  # By prompt
    prompt_tokens: int
    cached_tokens: int | None  # None = its answers do not tell


class WarmVerification(Verification):
    """A verification of prompts that are asked twice.

    Args:
        pair: running servers.
        pool_tokens: tokens that the K/V cache on the devices holds; None = the server's metrics tell.
    """

    def __init__(
        self,
        plan: VerifyPlan,
        prompts: Sequence[Prompt],
        pair: SubjectPair,
        pool_tokens: int | None = None,
        progress: Progress = lambda what, count: None,
    ) -> None:
        super().__init__(plan, prompts, pair, Store(None, {}), progress)
        self.pool_tokens = pool_tokens
        self._long = list[Question]()

    def run(self) -> Findings:
        """Asks, fills the pool, asks again, compares and comes to a verdict.

        Raises:
            UserError: a server cannot be asked, does not tell its pool's size, or refuses such prompts.
        """
        unasked, probe = self.pair.agree(self.prompts), Question(self.prompts[0], PROBE)
        with self.pair.speculating() as speculating, self.pair.plain() as plain:
            assert isinstance(speculating, ServerSubject)
            pool, told = self._pool(speculating)
            self._long = self._made(pool)
            self._refuse_drafts(plain, probe)
            first = self._ask_each(speculating, FIRST)
            self._refuse_drafts(plain, probe)  # its metrics are read anew
            for index, reply in plain.answers(self._long):
                self._put(WITHOUT, FIRST, index, reply)
                self._put(WITHOUT, AGAIN, index, reply)
            is_plain = self._refuse_drafts(plain)
            filler = sum(self._told("filling the K/V pool", fill(speculating.endpoint, BEYOND * pool)))
            before = speculating.settled().kv_reloaded
            again = self._ask_each(speculating, AGAIN)
            after = speculating.settled().kv_reloaded
            if any(self._parted()):
                self._ask_again(speculating, WITH)
                self._ask_again(plain, WITHOUT)
        reloaded = None if before is None or after is None or after < before else int(after - before)
        reload = reload_of(first, again, pool=pool, pool_told=told, filler=filler, reloaded=reloaded)
        found = conclude(
            (self._tokens(FIRST),),
            (),
            None,
            total([*first.each, *again.each]),
            exact=(self._tokens(AGAIN),),
            unit=str(self.store.get("unit", "nothing")),
            is_plain=is_plain,
            failed=tuple(_unproven(first, again, reload)),
            scope=("sampling", *unasked),
        )
        falls = acceptance_falls(first.each, again.each)
        verdict = SLOWER if falls and found.verdict == "lossless" else found.verdict
        notes = (*found.notes, *([reload.fall] if falls else []), str(reload))
        return found.model_copy(update={"verdict": verdict, "notes": notes, "reload": reload})

    def _pool(self, subject: ServerSubject) -> tuple[int, str]:
        # the pool's tokens, and who told
        if self.pool_tokens is not None:
            return self.pool_tokens, "--pool-tokens"
        pool = subject.before.kv_pool
        if not pool:
            do = "give --pool-tokens: SGLang logs max_total_num_tokens, vLLM its GPU KV cache size"
            raise UserError(
                "its metrics do not tell how many tokens its K/V pool holds", where=subject.endpoint.base, do=do
            )
        return int(pool), "its metrics"

    def _made(self, pool: int) -> list[Question]:
        # together they fill half of the pool at most, so that none pushes another one out
        length = min(PROMPT_TOKENS, self.context // 4, pool // (2 * self.plan.prompts))
        params = FIRST.params.model_copy(update={"max_tokens": max(1, min(self.plan.max_tokens, length))})
        prompts = self.prompts[: self.plan.prompts]
        return [Question(one, params) for one in long_prompts(prompts, length * CHARACTERS, secrets.token_hex(6))]

    def _ask_each(self, subject: ServerSubject, case: Case) -> Asking:
        # one prompt at a time, so that what the server counts meanwhile is the prompt's
        each, prompt_tokens, cached = list[AcceptanceStatistics](), 0, list[int | None]()
        for index, question in enumerate(self._long):
            before = subject.settled()
            ((_, reply),) = subject.answers([question])
            counted = subject.settled().since(before)
            each.append(counted if counted.verifications is not None else reply.acceptance or counted)
            prompt_tokens += reply.prompt_tokens or 0
            cached.append(reply.cached_tokens)
            self._put(WITH, case, index, reply)
        known = [one for one in cached if one is not None]
        return Asking(tuple(each), prompt_tokens, sum(known) if len(known) == len(cached) else None)

    def _put(self, side: str, case: Case, index: int, reply: Reply) -> None:
        if reply.pieces:
            self._check_unit(side, reply.unit)
        self._keep(side, CaseQuestion(case, index, self._long[index]), Answer.of(reply))

    def _told(self, what: str, each: Iterator[int]) -> Iterator[int]:
        for one in each:
            self.progress(what, 0)
            yield one

    def _questions(self, side: str, case: Case) -> list[Question]:
        return self._long

    def _facts(self, case: Case) -> PlainFacts:
        return PlainFacts()

    def _parted(self) -> Iterator[Place]:
        for case in (FIRST, AGAIN):
            pairs = enumerate(self._pairs(case))
            yield from ((case, index, at) for index, pair in pairs if (at := pair.position) is not None)


def long_prompts(prompts: Sequence[Prompt], characters: int, nonce: str) -> list[Prompt]:
    """Prompts with the texts of the others before them, of about so many characters each.

    Args:
        nonce: begins each one, behind its number, so that no server has it in its cache, nor the pages of another one.
    """
    texts = [_text(prompt) for prompt in prompts]
    found = list[Prompt]()
    for number, prompt in enumerate(prompts):
        others = cycle(f"{text}\n" for text in [*texts[number + 1 :], *texts[: number + 1]])
        begun = f"{number} {nonce}\n" + "".join(islice(chain.from_iterable(others), max(0, characters - len(nonce))))
        if isinstance(prompt, str):
            found.append(f"{begun}\n{prompt}")
            continue
        turns = [turn for turn in prompt if not isinstance(turn, int)]
        longer = [*turns[:-1], {**turns[-1], "content": f"{begun}\n{turns[-1]['content']}"}]
        variables = template_variables(prompt)
        found.append(Conversation(longer, variables) if variables else longer)
    return found


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(turn, int) for turn in prompt):
        do = "give prompts that are texts or messages"
        raise UserError("prompts of token ids cannot be made longer", where="--warm", do=do)
    return " ".join(str(turn["content"]) for turn in prompt if not isinstance(turn, int))


def fill(endpoint: Endpoint, tokens: float) -> Iterator[int]:
    """Asks prompts that begin unlike until their tokens are that many; yields the tokens of each."""
    longest = min(FILLER_TOKENS, (endpoint.context or CONTEXT) // 2)
    asked, words, number = 0.0, FIRST_WORDS, FIRST_NUMBER
    while asked < tokens:
        wanted = 1 if words == FIRST_WORDS else ceil((tokens - asked) / longest)
        starts = [number + place * words for place in range(wanted)]
        prompts = [" ".join(map(str, range(start, start + words))) for start in starts]
        for reply in endpoint.complete_all([(prompt, FILLER) for prompt in prompts]):
            if not reply.prompt_tokens:
                raise UserError("its answers do not tell how many tokens a prompt has", where=endpoint.base)
            asked += reply.prompt_tokens
            longest_words = longest * words // reply.prompt_tokens
            yield reply.prompt_tokens
        number, words = number + wanted * words, max(FIRST_WORDS + 1, longest_words)


def acceptance_falls(first: Sequence[AcceptanceStatistics], again: Sequence[AcceptanceStatistics]) -> bool:
    """True if acceptance is lower the second time: significantly (`FALSE_ALARM`), and by a share that matters."""
    before, after = total(first).acceptance_length, total(again).acceptance_length
    pairs = _counted(first, again)
    if before is None or after is None or len(pairs) < 2 or after - 1 > (1 - MATERIAL) * (before - 1):
        return False
    return gain_p_value([two for _, two in pairs], [one for one, _ in pairs]) <= FALSE_ALARM


def reload_of(first: Asking, again: Asking, *, pool: int, pool_told: str, filler: int, reloaded: int | None) -> Reload:
    """The figures of both askings.

    Args:
        reloaded: prompt tokens whose K/V came from the host tier, by the server's metrics; None = unknown. Then those
            count that its answers tell as cached, because its devices have no room for them.
    """
    return Reload(
        prompts=len(again.each),
        prompt_tokens=again.prompt_tokens,
        pool_tokens=pool,
        pool_told_by=pool_told,
        filler_tokens=filler,
        reloaded_tokens=again.cached_tokens if reloaded is None else reloaded,
        cached_tokens=again.cached_tokens,
        first_length=total(first.each).acceptance_length,
        again_length=total(again.each).acceptance_length,
    )


def _counted(
    first: Sequence[AcceptanceStatistics], again: Sequence[AcceptanceStatistics]
) -> list[tuple[AcceptanceStatistics, AcceptanceStatistics]]:
    # both counts of the prompts that were drafted for twice
    pairs = zip(first, again, strict=True)
    return [pair for pair in pairs if all(one.verifications and one.accepted is not None for one in pair)]


def _unproven(first: Asking, again: Asking, reload: Reload) -> Iterator[str]:
    # reasons why nothing is shown of a reload
    if reload.reloaded_tokens is None:
        do = "SGLang: --enable-metrics or --enable-cache-report; vLLM: --enable-prompt-tokens-details"
        yield f"the server does not tell how many prompt tokens came back from its host tier ({do})"
    elif reload.reloaded_tokens < ENOUGH * reload.prompt_tokens:
        others, of = (reload.cached_tokens or 0) - reload.reloaded_tokens, f"of {reload.prompt_tokens} prompt tokens"
        least = reload.filler_tokens + reload.prompt_tokens
        yield (
            f"{others} {of} were still on the devices: the pool is larger than {reload.pool_tokens} tokens "
            "(--pool-tokens)"
            if others > ENOUGH * reload.prompt_tokens
            else f"{reload.reloaded_tokens or 'none'} {of} came back from a host tier: it is off, holds less than "
            f"{least} tokens, or has lost the drafter's K/V (vllm#47890)"
        )
    known = len(_counted(first.each, again.each))
    if known < FEWEST:
        yield f"acceptance is known of {known} prompts, too few to compare; give {FEWEST} or more (--num-prompts)"
