"""The questions of a verification and the shares of its false-alarm rate, fixed before the first answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from pydantic import Field, JsonValue

from dflash_serve.backend import Prompt
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
LOAD_STEP = 5  # Characters by which prompts under load grow where tokens are unknown: about one token
BIASED_TOKENS = 4  # Tokens that are possible under `logit_bias`
STRIDE = 64  # Tokens of a piece of a continued answer
LONG_PROMPTS, FEW_PROMPTS = 2, 8  # Prompts of the long answers, and of each case of `FIELDS`
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


class Question(NamedTuple):
    """One request."""

    prompt: Prompt
    params: SamplingParams
    more: Mapping[str, Any] = {}


class Known(NamedTuple):
    """An answer of the plain side to a greedy question, from which other questions are made."""

    text: str
    pieces: Sequence[str | int]
    prompt_ids: Sequence[int] | None = None  # Given where streamed chats have no token ids: completions have them


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
STREAMED = Case(
    "streamed", SamplingParams(temperature=0), 32, {"stream": True, "stream_options": {"include_usage": True}}
)
LOGPROBS = Case("log-probabilities", SamplingParams(temperature=0, logprobs=5), 32)
MIN_TOKENS = Case("min_tokens", SamplingParams(temperature=0, min_tokens=24), 24)
STOP = Case("stop strings", SamplingParams(temperature=0), 64)
EXACT = (LOAD, LONG, STREAMED, LOGPROBS, MIN_TOKENS)
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
BIASED = SAMPLED[6]
BASE = 4  # The first sampled cases. Those after them show a field that is ignored, at once.
SEEDED = Case("same seeds", SamplingParams(temperature=0.8, top_p=0.95))
REPEATED = Case("repeated seeds", SamplingParams(temperature=1), 16)
"""Every question twice: a side that keeps seeds gives the same answer."""
PENALISED = {case.name for case in (*GREEDY, *SAMPLED) if case.params.penalised}
OPTIONAL = (*EXACT, STOP, *SAMPLED[BASE:], REPEATED, *(one for one in (*GREEDY, *SAMPLED) if one.name in PENALISED))
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
    def exact_cases(self) -> tuple[Case, ...]:
        """Greedy cases beside `greedy_cases`; under load there are as many answers as samples."""
        return tuple(case for case in EXACT if (self.samples if case is LOAD else self.long_tokens or case is not LONG))

    @property
    def cases(self) -> tuple[Case, ...]:
        """All cases in the order of their questions; those of later ones are made from greedy answers."""
        seeded = (SEEDED,) if self.same_seeds else (REPEATED,) if self.samples else ()
        return (*self.greedy_cases, *seeded, *self.sampled_cases, *self.exact_cases, STOP)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of what the settings leave out."""
        sampled, long = self.samples > 0, self.long_tokens > 0
        chosen = {"sampling": sampled, LOAD.name: sampled, "penalties": self.penalties, LONG.name: long}
        return tuple(name for name, tested in chosen.items() if not tested)

    @property
    def rate(self) -> float:
        """The false-alarm rate of one sampled case: by the union bound, whatever their dependence on each other."""
        return self.false_alarm / len(SAMPLED)

    def samples_of(self, case: Case) -> int:
        """Answers on a side: a quarter suffices for a field that would change most of them."""
        few = case not in SAMPLED[:BASE]
        return min(self.samples, max(FEWEST, self.samples // 4)) if few else self.samples

    def _wanted(self, cases: tuple[Case, ...]) -> tuple[Case, ...]:
        return tuple(case for case in cases if self.penalties or not case.params.penalised)


def questions(
    plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, side: str, known: Sequence[Known] = (), context: int = 0
) -> list[Question]:
    """The questions to a side: greedy and seeded cases take the plan's prompts, each sampled case repeats one.

    Args:
        known: the plain side's greedy answers, which are needed for the cases in `OPTIONAL`.
        context: most tokens of a prompt and its answer.
    """

    def question(prompt: Prompt, tokens: int, seed: int | None = None, **more: Any) -> Question:
        changes = {"max_tokens": min(tokens, case.tokens or tokens), "seed": seed, **more}
        return Question(prompt, case.params.model_copy(update=changes), case.more)

    chosen = prompts[: plan.prompts]
    few = list(zip(chosen, known, strict=False))[:FEW_PROMPTS]
    if case is STREAMED:
        return [question(list(one.prompt_ids) if one.prompt_ids else prompt, plan.max_tokens) for prompt, one in few]
    if case in GREEDY or case is LOGPROBS:
        return [question(prompt, plan.max_tokens) for prompt in (chosen if case in GREEDY else chosen[:FEW_PROMPTS])]
    if case is SEEDED:
        return [question(prompt, min(SEEDED_TOKENS, plan.max_tokens), seed) for seed, prompt in enumerate(chosen)]
    if case is REPEATED:
        return [
            question(prompt, SEEDED_TOKENS, seed) for seed, prompt in enumerate(chosen[:FEW_PROMPTS]) for _ in range(2)
        ]
    if case is LOAD:
        return [question(prompt, plan.max_tokens) for prompt in _beginnings(known, plan.samples)]
    if case is LONG:
        length = min(plan.long_tokens, context - LONG_ROOM)
        return [question(begun, length) for one in known if (begun := _beginning(one))][:LONG_PROMPTS]
    if case is MIN_TOKENS:
        ends = [(prompt, one.pieces[4]) for prompt, one in few if len(one.pieces) > 5]
        return [
            question(prompt, MIN_TOKENS.params.min_tokens, stop_token_ids=(end,))
            for prompt, end in ends
            if isinstance(end, int)
        ]
    if case is STOP:
        words = [(prompt, one.text.split()) for prompt, one in few if len(one.text.split()) > 1]
        return [question(prompt, plan.max_tokens, stop=(found[len(found) // 2],)) for prompt, found in words]
    prompt, bias = prompts[prompt_index(case, len(prompts))], {}
    if case is BIASED:
        counts = Counter(piece for one in known for piece in one.pieces[:-1] if isinstance(piece, int))
        bias = {"logit_bias": {piece: 100.0 for piece, _ in counts.most_common(BIASED_TOKENS)}}
        if len(counts) < BIASED_TOKENS:
            return []
    first = FIRST_SEED[side] + SAMPLED.index(case) * SEEDS_A_CASE
    # Some engines ignore seeds; others give the choices of a request the seeds that follow its own.
    seeds = [first + n * case.more.get("n", 1) for n in range(plan.samples_of(case))]
    return [question(prompt, case.tokens or plan.sample_tokens, seed, **bias) for seed in seeds]


def prompt_index(case: Case, count: int) -> int:
    """The index among `count` prompts of the one that a sampled case asks."""
    return SAMPLED.index(case) % count


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
