"""The questions of a verification and the shares of its false-alarm rate, fixed before the first answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, Literal, NamedTuple

from pydantic import Field, JsonValue

from dflash_serve.answers.engine import Conversation, Prompt, template_variables
from dflash_serve.common.settings import Frozen
from dflash_serve.speculation.params import SamplingParams

Precision = Literal["float32", "bfloat16"]
WITH, WITHOUT = "with", "without"  # The two sides of a verification: with and without speculation
FEWEST = 64  # Least samples on a side: fewer show only very large deviations
NOISE: dict[Precision, float] = {"float32": 3e-4, "bfloat16": 1.05}
"""Largest gap of two log-probabilities whose order rounding may change, in nats; measured, see `tokens`."""
FIRST_SEED = {WITHOUT: 2**39, WITH: 2**40}
"""The sides draw from different seeds: with equal ones an engine that keeps seeds would give equal answers."""
SEEDS_A_CASE = 2**20
SEEDED_TOKENS = 32  # Length of answers with the same seed on both sides


LONG_ROOM = 64  # Characters of a long answer's prompt, and tokens of the context that are left for it
CHARACTERS = 2  # Characters of a token of a long prompt whose tokens are unknown: so few that it fits into the context
SAFE = 0.8  # Share of an answer's characters by token that is counted on, where these are fewer, as in Chinese
LOAD_STEP = 5  # Characters by which prompts under load grow where tokens are unknown: about one token
BIASED_TOKENS = 4  # Tokens that are possible under `logit_bias`
STRIDE = 64  # Tokens of a piece of a continued answer
LONG_PROMPTS, FEW_PROMPTS = 2, 8  # Prompts of the long answers, and of most other cases
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows of a prefill's pass: powers of two by default, from our 1,024 to 16,384 (SGLang's `chunked_prefill_size` and
vLLM's `max_num_batched_tokens` by the memory of the GPU). A prompt of one token more has a last pass of one row."""
MIXED_PROMPT = 384  # Tokens of a sampled question's long prompt: beyond the shortest chunk, and cheap without a cache
PAIRS, RULED = 32, 4
"""Questions of each case of `MIXED`, on a side: those compared as distributions, and those that only rules look at.

With 32 pairs the z of `ranks` comes up to 5.7, and that of chance reaches 5.1 in one of 10,000 runs, over some 120
columns. With 24 pairs, which reach 4.9, a fault in one setting of one situation could not be seen.
"""
NEVER = "<the end that no answer has>"  # A stop string that does not come
STREAM: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
AS_ASKED, AS_IDS, NONE = "as asked", "token ids", "none"
"""Forms of a prompt in streams: its own; token ids where streamed chats return none (SGLang 0.5.23); no streams."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    """A named setting of sampling."""

    name: str
    params: SamplingParams
    tokens: int | None = None  # Longest answer, in tokens; None = the plan's
    more: Mapping[str, Any] = {}  # Further fields of the request, which only a server takes
    needs: tuple[str, ...] = ()  # Names of cases with the same fields: if one is refused, this one is not asked


class Question(NamedTuple):
    """One request."""

    prompt: Prompt
    params: SamplingParams
    more: Mapping[str, Any] = {}


class Known(NamedTuple):
    """An answer of the plain side to a greedy question, from which other questions are made."""

    text: str
    pieces: Sequence[str | int]
    prompt_ids: Sequence[int] | None = None


class PlainFacts(NamedTuple):
    """Facts from the answers of the plain side, of which further questions are made."""

    known: Sequence[Known] = ()  # Its answers to the first greedy case
    prompt_ids: Mapping[str, Sequence[int]] = {}  # Token ids of prompts, by the prompt's `repr`
    context: int = 0  # Most tokens of a prompt and its answer
    streams: str = NONE  # Form of prompts in streams

    def streamed(self, one: Question) -> Question:
        """The question, streamed if the server can."""
        fields = {name: value for name, value in one.more.items() if name not in STREAM}
        if self.streams == AS_ASKED or (self.streams == AS_IDS and not _is_chat(one.prompt)):
            return one._replace(more={**fields, **STREAM})
        ids = self.prompt_ids.get(repr(one.prompt))
        if self.streams == AS_IDS and ids and not fields:
            return one._replace(prompt=list(ids), more=STREAM)
        return one


GREEDY = (
    Case("greedy", SamplingParams(temperature=0)),
    # No repetition penalty: it scales logits, and log-probabilities do not tell what it made of a near-tie.
    Case("greedy, penalties", SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.5)),
)
LOAD = Case("short answers under load", SamplingParams(temperature=0), 4)
LONG = Case("long answers", SamplingParams(temperature=0, ignore_eos=True))
CONTINUABLE = (GREEDY[0], LONG)
CONTINUED = {
    case.name: Case(f"{case.name}, continued", SamplingParams(temperature=0, ignore_eos=True, logprobs=5))
    for case in CONTINUABLE
}
"""Pieces of a case's answers with speculation behind a near-tie: the plain side continues what comes before each."""
STREAMED = Case("streamed", SamplingParams(temperature=0), 32, STREAM)
LOGPROBS = Case("log-probabilities", SamplingParams(temperature=0, logprobs=5), 32)
MIN_TOKENS = Case("min_tokens", SamplingParams(temperature=0, min_tokens=24), 24)
STOP = Case("stop strings", SamplingParams(temperature=0))
TURNS = Case("second turns", SamplingParams(temperature=0), 24)
PROMPTS = Case("long prompts", SamplingParams(temperature=0, ignore_eos=True), 24)
CHOICES = Case("greedy, n 2", SamplingParams(temperature=0, ignore_eos=True), 24, {"n": 2})
EXACT = (LOAD, LONG, STREAMED, LOGPROBS, MIN_TOKENS, STOP, TURNS, PROMPTS, CHOICES)
"""Further greedy cases, compared token for token."""
SAMPLED = (
    Case("temperature 0.7", SamplingParams(temperature=0.7)),
    Case("temperature 1", SamplingParams(temperature=1)),
    Case("temperature 1.3, top-p 0.5", SamplingParams(temperature=1.3, top_p=0.5)),
    Case(
        "temperature 0.8, penalties",
        SamplingParams(temperature=0.8, presence_penalty=0.8, frequency_penalty=0.8, repetition_penalty=1.2),
    ),
    # A high temperature: what a filter keeps out must have been likely.
    Case("temperature 2, top-k 2", SamplingParams(temperature=2, top_k=2)),
    Case("temperature 2, min-p 0.5", SamplingParams(temperature=2, min_p=0.5)),
    # Few tokens are possible, so that draws far from the beginning can be compared, too.
    Case("temperature 2, logit_bias", SamplingParams(temperature=2), 24),
    Case(
        "temperature 1, JSON schema",
        SamplingParams(temperature=1),
        24,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ),
    Case("temperature 2, n 2", SamplingParams(temperature=2), 4, {"n": 2}),
)
PENALTIES, TOP_K, MIN_P, BIASED, JSON, CHOSEN = SAMPLED[3:]
BASE = 4  # The first sampled cases. Those after them show a field that is ignored, at once.
MIXED_TOKENS, PENALISED_TOKENS = 12, 24  # The longer an answer, the more of its tokens a penalty can count
TURN, LONG_CHOICES, STOPPABLE = "second turn", "long prompt, n 2", "stop string"
SITUATIONS: Mapping[str, Mapping[str, Any]] = {TURN: {}, LONG_CHOICES: {"n": 2}, STOPPABLE: {}}
"""Situations of requests, with the fields that they need; every second question is streamed besides."""
SETTINGS = (
    Case("temperature 1", SamplingParams(temperature=1)),
    # Each filter is the one that decides, beside others that are set.
    Case("top-p in top-k", SamplingParams(temperature=1.5, top_k=20, top_p=0.4), needs=(TOP_K.name,)),
    Case("top-k in top-p", SamplingParams(temperature=2, top_k=2, top_p=0.95), needs=(TOP_K.name,)),
    Case("all filters", SamplingParams(temperature=2, top_k=50, top_p=0.95, min_p=0.5), needs=(TOP_K.name, MIN_P.name)),
    # Mild and alone, so that tokens of the prompt still come: a language model's best logits are near 20.
    Case("repetition penalty", SamplingParams(temperature=1, repetition_penalty=1.1), needs=(PENALTIES.name,)),
    Case("logit_bias", BIASED.params, needs=(BIASED.name,)),
    Case("JSON schema", JSON.params, more=JSON.more, needs=(JSON.name,)),
)
RULES_ALONE = {"logit_bias", "JSON schema"}


def _mixed(setting: Case, situation: str) -> Case:
    ruled, more = setting.name in RULES_ALONE, SITUATIONS[situation]
    changes: dict[str, Any] = {} if setting.more else {"ignore_eos": True}
    if not (ruled or setting.params.penalised):
        changes["logprobs"] = 5
    params = setting.params.model_copy(update=changes)
    needs = (*setting.needs, *((CHOSEN.name,) if "n" in more else ()))
    tokens = PENALISED_TOKENS if params.penalised else MIXED_TOKENS
    return Case(f"{situation}, {setting.name}", params, tokens, {**setting.more, **more}, needs)


CELLS = {f"{situation}, {setting.name}": (situation, setting.name) for situation in SITUATIONS for setting in SETTINGS}
"""Situation and setting of each case of `MIXED`."""
MIXED = tuple(_mixed(setting, situation) for situation in SITUATIONS for setting in SETTINGS)
"""Sampled questions in situations that the other sampled cases do not have; all together are compared by `ranks`."""
SEEDED = Case("same seeds", SamplingParams(temperature=0.8, top_p=0.95))
REPEATED = Case("repeated seeds", SamplingParams(temperature=1), 16)
"""Every question twice: a side that keeps seeds gives the same answer."""
PENALISED = {case.name for case in (*GREEDY, *SAMPLED) if case.params.penalised}
OPTIONAL = (*EXACT, *SAMPLED[BASE:], REPEATED, *MIXED, *(one for one in (*GREEDY, *SAMPLED) if one.name in PENALISED))
"""Cases that an engine may refuse; the verdict says that they were not tested."""


class VerifyPlan(Frozen):
    """The settings of a verification."""

    prompts: int  # Prompts compared greedily
    prompts_sha256: str
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default={}
    )  # Variables that every prompt gives the target's chat template
    max_tokens: int  # Longest greedy answer, in tokens
    samples: int  # Answers on each side for each sampled case; 0 = sampling is not verified
    sample_tokens: int = 8  # Longest sampled answer, in tokens
    pairs: int = PAIRS  # Answers on each side for each case of `MIXED`; twice as many with a penalty, a weak feature
    long_tokens: int = 2048  # Longest of the long answers, cut to the target's context; 0 = none
    false_alarm: float = 1e-3  # Probability that a correct engine is called faulty, over all sampled cases together
    power: float = 0.9  # Probability with which the smallest visible deviation is seen
    dtype: Precision = "bfloat16"  # The engine's precision, which sets the bound of a near-tie
    penalties: bool = True  # True if cases with penalties are verified, too
    same_seeds: bool = False
    """True if the engine promises the same sampled tokens for the same seed at any width; they are compared, too."""

    @property
    def noise(self) -> float:
        return NOISE[self.dtype]

    @property
    def greedy_cases(self) -> tuple[Case, ...]:
        return self._wanted(GREEDY)

    @property
    def sampled_cases(self) -> tuple[Case, ...]:
        return self._wanted(SAMPLED) if self.samples else ()

    @property
    def mixed_cases(self) -> tuple[Case, ...]:
        return self._wanted(MIXED) if self.samples else ()

    @property
    def exact_cases(self) -> tuple[Case, ...]:
        """Greedy cases beside `greedy_cases`; under load there are as many answers as samples."""
        return tuple(case for case in EXACT if (self.samples if case is LOAD else self.long_tokens or case is not LONG))

    @property
    def cases(self) -> tuple[Case, ...]:
        """All cases in the order of their questions; those of later ones are made from greedy answers."""
        seeded = (SEEDED,) if self.same_seeds else (REPEATED,) if self.samples else ()
        return (*self.greedy_cases, *seeded, *self.sampled_cases, *self.exact_cases, *self.mixed_cases)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of what the settings leave out."""
        sampled, long = self.samples > 0, self.long_tokens > 0
        chosen = {"sampling": sampled, LOAD.name: sampled, "penalties": self.penalties, LONG.name: long}
        return tuple(name for name, tested in chosen.items() if not tested)

    @property
    def rate(self) -> float:
        """The false-alarm rate of one sampled comparison, by the union bound."""
        return self.false_alarm / (len(SAMPLED) + 1)  # one for all of `MIXED` together

    def samples_of(self, case: Case) -> int:
        """Answers on a side: a quarter suffices for a field that would change most of them."""
        few = case not in SAMPLED[:BASE]
        return min(self.samples, max(FEWEST, self.samples // 4)) if few else self.samples

    def _wanted(self, cases: tuple[Case, ...]) -> tuple[Case, ...]:
        return tuple(case for case in cases if self.penalties or not case.params.penalised)


def questions(plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, side: str, facts: PlainFacts) -> list[Question]:
    """The questions to a side: greedy and seeded cases take the plan's prompts, each sampled case repeats one.

    Every second question is streamed, but for those whose answers tell the token ids of their prompt.
    """
    made = _mixed_questions(plan, prompts, case, side, facts) if case in MIXED else None
    if made is None:
        made = _sampled(plan, prompts, case, side, facts) if case in SAMPLED else _greedy(plan, prompts, case, facts)
    if case in (*GREEDY, TURNS):
        return made
    return [facts.streamed(one) if number % 2 or case is STREAMED else one for number, one in enumerate(made)]


def _question(case: Case, prompt: Prompt, tokens: int, seed: int | None = None, **more: Any) -> Question:
    changes = {"max_tokens": min(tokens, case.tokens or tokens), "seed": seed, **more}
    return Question(prompt, case.params.model_copy(update=changes), case.more)


def _greedy(plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, facts: PlainFacts) -> list[Question]:
    # the questions of all cases but the sampled ones
    chosen, known = prompts[: plan.prompts], facts.known
    few, question = list(zip(chosen, known, strict=False))[:FEW_PROMPTS], partial(_question, case)
    if case in GREEDY:
        return [question(prompt, plan.max_tokens) for prompt in chosen]
    if case is STREAMED:
        return [question(prompt, plan.max_tokens) for prompt, _ in few]
    if case is LOGPROBS:
        return [question(prompt, plan.max_tokens) for prompt in chosen[:FEW_PROMPTS]]
    if case is SEEDED:
        return [question(prompt, min(SEEDED_TOKENS, plan.max_tokens), seed) for seed, prompt in enumerate(chosen)]
    if case is REPEATED:
        return [
            question(prompt, SEEDED_TOKENS, seed) for seed, prompt in enumerate(chosen[:FEW_PROMPTS]) for _ in range(2)
        ]
    if case is LOAD:
        return [question(prompt, plan.max_tokens) for prompt in _beginnings(known, plan.samples)]
    if case is LONG:
        length = min(plan.long_tokens, facts.context - LONG_ROOM)
        return [question(begun, length) for one in known if (begun := _beginning(one))][:LONG_PROMPTS]
    if case is MIN_TOKENS:
        ends = [(prompt, one.pieces[4]) for prompt, one in few if len(one.pieces) > 5]
        return [
            question(prompt, MIN_TOKENS.params.min_tokens, stop_token_ids=(end,))
            for prompt, end in ends
            if isinstance(end, int)
        ]
    if case is TURNS:
        return [question(prompt, plan.max_tokens) for prompt in _second_turns(chosen, known)]
    if case is PROMPTS:
        return [question(prompt, plan.max_tokens) for prompt in _long_prompts(known, facts.context)]
    if case is CHOICES:  # of token ids, so that a difference in the second choice can be scored
        return [question(list(one.prompt_ids), plan.max_tokens) for _, one in few if one.prompt_ids]
    words = [(prompt, one.text.split()) for prompt, one in few if len(one.text.split()) > 1]
    return [question(prompt, plan.max_tokens, stop=(found[len(found) // 2],)) for prompt, found in words]


def _sampled(plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, side: str, facts: PlainFacts) -> list[Question]:
    # answers to one prompt
    prompt, bias = prompts[prompt_index(plan, case)], {}
    if case is BIASED and not (bias := _bias(facts.known)):
        return []
    # Some engines ignore seeds; others give the choices of a request the seeds that follow its own.
    first, choices = FIRST_SEED[side] + SAMPLED.index(case) * SEEDS_A_CASE, case.more.get("n", 1)
    seeds = [first + n * choices for n in range(plan.samples_of(case))]
    return [_question(case, prompt, case.tokens or plan.sample_tokens, seed, **bias) for seed in seeds]


def _mixed_questions(
    plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, side: str, facts: PlainFacts
) -> list[Question]:
    # answers to several prompts in a situation
    (situation, setting), chosen = CELLS[case.name], prompts[: plan.prompts][:FEW_PROMPTS]
    if situation == LONG_CHOICES:
        length = min(MIXED_PROMPT, facts.context - LONG_ROOM)
        chosen = [_long_prompt(facts.known, length, first) for first in range(min(RULED, len(facts.known)))]
    else:  # with a stop string, too: in a first turn few tokens are there that a penalty could count
        chosen = _second_turns(chosen, facts.known)
    more: dict[str, Any] = {"stop": (NEVER,)} if situation == STOPPABLE else {}
    if setting == "logit_bias":
        more |= _bias(facts.known) or {"logit_bias": {}}
        chosen = chosen if more["logit_bias"] else []
    first = FIRST_SEED[side] + (len(SAMPLED) + MIXED.index(case)) * SEEDS_A_CASE
    count = RULED if setting in RULES_ALONE else plan.pairs * 2 if case.params.penalised else plan.pairs
    asked = zip(range(count), cycle(chosen), strict=False)
    return [_question(case, prompt, PENALISED_TOKENS, first + 2 * n, **more) for n, prompt in asked]


def prompt_index(plan: VerifyPlan, case: Case) -> int:
    """The index of the prompt that a sampled case asks."""
    return SAMPLED.index(case) % plan.prompts


def _bias(known: Sequence[Known]) -> dict[str, Any]:
    # the most frequent tokens alone are possible; empty: too few are known
    counts = Counter(piece for one in known for piece in one.pieces[:-1] if isinstance(piece, int))
    bias = {piece: 100.0 for piece, _ in counts.most_common(BIASED_TOKENS)}
    return {"logit_bias": bias} if len(bias) == BIASED_TOKENS else {}


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _second_turns(chosen: Sequence[Prompt], known: Sequence[Known]) -> list[Prompt]:
    # each prompt with its answer, and the next prompt's last turn
    found = list[Prompt]()
    following = [*chosen[1:], *chosen[:1]]
    for prompt, after, one in list(zip(chosen, following, known, strict=False))[:FEW_PROMPTS]:
        if _is_chat(prompt) and _is_chat(after):
            if one.text.strip():
                turns = [*prompt, {"role": "assistant", "content": one.text}, after[-1]]
                variables = template_variables(prompt)
                found.append(Conversation(turns, variables) if variables else turns)
        elif isinstance(prompt, str) and isinstance(after, str):
            found.append(f"{prompt}{one.text}\n{after}")
        elif ids := _token_ids(one):
            found.append(ids)
    return found


def _long_prompts(known: Sequence[Known], context: int) -> list[Prompt]:
    # one token longer than each number of rows that fits into the context, and the longest
    longest = min(context - LONG_ROOM, CHUNKS[-1] + 1)
    lengths = [*(rows + 1 for rows in CHUNKS if rows + 1 < longest), longest]
    return [_long_prompt(known, length, first) for first, length in enumerate(lengths) if known and length > 0]


def _long_prompt(known: Sequence[Known], length: int, first: int) -> Prompt:
    # prompts and answers from the one with that number on, again and again; text where token ids are not known
    first %= len(known)
    texts = [*known[first:], *known[:first]]
    ids = [_token_ids(one) for one in texts]
    if all(ids):
        return list(islice(cycle(chain.from_iterable(filter(None, ids))), length))
    characters = "\n".join(one.text for one in texts) + "\n"
    seen = sum(len(one.text) for one in texts) / max(1, sum(len(one.pieces) for one in texts))
    return "".join(islice(cycle(characters), int(length * min(CHARACTERS, SAFE * seen))))


def _token_ids(known: Known) -> list[int] | None:
    # of prompt and answer; None where the engine does not give both
    answer = [piece for piece in known.pieces if isinstance(piece, int)]
    return [*known.prompt_ids, *answer] if known.prompt_ids and len(answer) == len(known.pieces) else None


def _beginning(known: Known) -> Prompt:
    # token ids where the engine gives them, so that tokens can follow them; no end of sequence
    ids = [piece for piece in known.pieces[:-1] if isinstance(piece, int)][: LONG_ROOM // 4]
    return ids or known.text[:LONG_ROOM]


def _beginnings(known: Sequence[Known], count: int) -> list[Prompt]:
    # different beginnings of the answers, the shortest ones first: each reuses the prefix of an earlier one
    tokens = [tuple(piece for piece in one.pieces[:-1] if isinstance(piece, int)) for one in known]
    if any(tokens):
        lengths = range(1, max(map(len, tokens)) + 1)
        different = dict.fromkeys(one[:length] for length in lengths for one in tokens if one)
        return [list(one) for one in islice(different, count)]
    longest = max((len(one.text) for one in known), default=0)
    texts = (one.text[:length] for length in range(LOAD_STEP, longest + 1, LOAD_STEP) for one in known)
    return list(islice((text for text in dict.fromkeys(texts) if text.strip()), count))
