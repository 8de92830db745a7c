"""A client of any OpenAI-compatible server (ours, SGLang, trtllm-serve, vLLM) that returns tokens if the server can.

vLLM and SGLang return the token ids of prompt and answer for `return_token_ids`; older releases ignore it. TensorRT-LLM
refuses unknown fields, and returns ids with `detokenize: false`. All return the tokens' texts with log-probabilities.
SGLang's router (0.3.2) drops `return_token_ids` from chats and refuses prompts of token ids; Dynamo's frontend (1.6.1)
refuses `return_token_ids` and ignores `detokenize`. The first request to each path tries these ways in turn and keeps
the first that works. Missing fields of replies are tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from threading import Lock
from typing import Any

from dflash_serve.answers.engine import Prompt, template_variables
from dflash_serve.client.metrics import MetricsSource
from dflash_serve.common.http import Connection, RefusedError
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAYS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    COMPLETIONS: ({"return_token_ids": True}, {"detokenize": False}, {"logprobs": 1}, {}),
    CHAT: ({"return_token_ids": True}, {"logprobs": True, "top_logprobs": 1}, {}),
}  # Path -> request fields that ask for tokens, best first; the last asks for text only
TOKEN_IDS, TOKENS, CHARACTERS = UNITS = ("token ids", "tokens", "characters")  # Units of an answer, finest first
SHORT = SamplingParams(temperature=0, max_tokens=8)  # An answer that shows its unit
ALWAYS = {"temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
"""Parameters sent even at their defaults, because servers take missing ones from the model's generation_config.json;
others are sent if set."""
REASONING = ("reasoning_content", "reasoning")  # Names of a chat's text before its answer: SGLang's, vLLM's


@dataclass(frozen=True)
class ScoredToken:
    """One generated token: its text, its log-probability, and the most probable tokens at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reply:
    """The answer to one request; None = not in the server's response."""

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[ScoredToken, ...] | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    choices: tuple[Reply, ...] = ()  # All choices of a request with n > 1, this one first
    prompt_ids: tuple[int, ...] | None = None  # Token ids of the prompt, as the chat template made it
    reasoning: str = ""  # Text before the answer, where the server has a reasoning parser
    accepted: int | None = None  # Accepted drafted tokens of all choices
    drafted: int | None = None  # Drafted tokens of all choices, accepted and rejected
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # Tokens of the prompt whose K/V were not computed for this answer

    @property
    def acceptance(self) -> AcceptanceStatistics | None:
        """Acceptance of all choices by the answer's `usage`; None = it does not tell."""
        if self.completion_tokens is None or self.accepted is None or self.drafted is None:
            return None
        rejected, answers = self.drafted - self.accepted, max(1, len(self.choices))
        return AcceptanceStatistics.of_usage(self.completion_tokens, self.accepted, rejected, answers)

    @property
    def pieces(self) -> tuple[str | int, ...]:
        """The smallest available units for comparing two answers: token ids, else token texts, else characters.

        Those of several choices follow one another.
        """
        if self.choices:
            return tuple(chain.from_iterable(choice.pieces for choice in self.choices))
        if self.token_ids is not None:
            return self.token_ids
        return tuple(self.text) if self.logprobs is None else tuple(token.text for token in self.logprobs)

    @property
    def unit(self) -> str:
        if self.token_ids is not None:
            return TOKEN_IDS
        return CHARACTERS if self.logprobs is None else TOKENS

    def in_unit(self, unit: str) -> Reply:
        """This answer without what is finer than a unit."""
        if unit == TOKEN_IDS:
            return self
        choices = tuple(one.in_unit(unit) for one in self.choices)
        logprobs = None if unit == CHARACTERS else self.logprobs
        return replace(self, token_ids=None, prompt_ids=None, logprobs=logprobs, choices=choices)


@dataclass(frozen=True)
class Endpoint:
    """One server; safe to use from several threads.

    Args:
        url: http or https, with or without /v1, without a user name or password.
        model: None = the first one that the server lists.
        api_key: None = none is sent. Never shown.
        timeout: seconds for one answer.
        concurrency: requests in flight in `complete_all`.
        unit: finest unit of answers; what is finer is not asked for, and left out.
        metrics_urls: addresses of its metrics, where they are not its own: those of the workers behind it.
        always: further fields of every request.

    Raises:
        UserError: a URL is not such an address.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 300.0
    concurrency: int = 16
    unit: str = TOKEN_IDS
    metrics_urls: tuple[str, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict)
    _ways: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _finding: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _ = self._connection, self.metrics  # checks the URLs now, not at the first request

    @property
    def base(self) -> str:
        return self._connection.base

    @cached_property
    def _connection(self) -> Connection:
        return Connection(self.url, self.api_key, self.timeout, self.concurrency)

    @cached_property
    def metrics(self) -> MetricsSource:
        """Its metrics, or those of the workers behind it."""
        return MetricsSource(self.base, self.metrics_urls, self.api_key)

    @cached_property
    def served_model(self) -> str:
        """Name of the model in requests.

        Raises:
            UserError: no server answers, or it lists no model.
        """
        if self.model is not None:
            return self.model
        try:
            return str(self._connection.json("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError("it lists no model", where=f"{self.base}/v1/models", do="name the model") from None

    @cached_property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer together; None = the server does not say."""
        longest = self._listed.get("max_model_len")
        return longest if isinstance(longest, int) else None

    @property
    def is_sglang(self) -> bool:
        """True if its list of models says so."""
        return self._listed.get("owned_by") == "sglang"

    @cached_property
    def _listed(self) -> Mapping[str, Any]:
        # the first model of the server's list
        try:
            listed = self._connection.json("GET", "/v1/models")
        except UserError:  # some servers have no such list; requests show what else is wrong
            return {}
        data = listed.get("data") if isinstance(listed, Mapping) else None
        first = data[0] if isinstance(data, list) and data else None
        return first if isinstance(first, Mapping) else {}

    def sglang_settings(self) -> Mapping[str, Any]:
        """The arguments that an SGLang server, or the first worker behind it, runs with.

        Empty for other engines, and where they cannot be read.
        """
        for server in (self._connection, *self.metrics.workers.values()):
            with suppress(UserError):
                found = server.json("GET", "/server_info")
                if isinstance(found, Mapping):
                    return found
        return {}

    def finest_unit(self, prompts: Sequence[Prompt]) -> str:
        """The finest unit of its answers to such prompts.

        Token ids count where completions take them as a prompt, too: further questions are made of them.

        Raises:
            UserError, RefusedError: as for `complete`.
        """
        for prompt in prompts:
            reply = self.complete(prompt, SHORT)
            if reply.pieces:
                break
        if reply.unit == TOKEN_IDS and self._takes("a") and not self._takes(reply.token_ids or [0]):
            return TOKENS
        return reply.unit

    def _takes(self, prompt: Prompt) -> bool:
        try:
            self.complete(prompt, SHORT)
        except RefusedError:
            return False
        return True

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        more: Mapping[str, Any] | None = None,
        *,
        top_logprobs: int | None = None,
    ) -> Reply:
        """One answer.

        Args:
            prompt: text or token ids go to /v1/completions, messages to /v1/chat/completions.
            more: further fields of the request, such as `n`. A streamed answer is returned whole.
            top_logprobs: number of most probable tokens with log-probabilities at each position; None = those of
                `params`.

        Raises:
            UserError: no server answers, or it is not OpenAI-compatible.
            RefusedError: the server refuses the request.
        """
        path = CHAT if _is_chat(prompt) else COMPLETIONS
        body = {"model": self.served_model, **_prompt(prompt), **_sampling(params), **(more or {}), **self.always}
        top_logprobs = params.logprobs if top_logprobs is None else top_logprobs
        if top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": top_logprobs} if path == CHAT else {"logprobs": top_logprobs}
        if path not in self._ways:
            with self._finding:  # other threads wait for the first one's result
                if path not in self._ways:
                    return self._find(path, body).in_unit(self.unit)
        return self._ask(path, {**self._ways[path], **body}).in_unit(self.unit)

    def complete_all(self, asked: Sequence[tuple[Any, ...]], *, top_logprobs: int | None = None) -> Iterator[Reply]:
        """The answers in the order of the requests, of which `concurrency` run at a time.

        Args:
            asked: the positional arguments of `complete`.

        Raises:
            UserError, RefusedError: as for `complete`, for the first request that fails.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                yield from pool.map(lambda one: self.complete(*one, top_logprobs=top_logprobs), asked)
            except BaseException:  # the remaining answers are not wanted
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _find(self, path: str, body: Mapping[str, Any]) -> Reply:
        # Tries every way until one returns tokens. A request is refused only if it is refused in all ways.
        refused: RefusedError | None = None
        for way in WAYS[path]:
            if UNITS.index(_unit(way)) < UNITS.index(self.unit):
                continue
            try:
                reply = self._ask(path, {**way, **body})
            except RefusedError as error:
                refused = error
                continue
            found = reply.token_ids is not None or ("logprobs" in way and reply.logprobs is not None)
            if found or (not way and reply.text):
                self._ways[path] = way
            if found or not way:
                return reply
        assert refused is not None
        raise refused

    def _ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        if body.get("stream"):
            events = self._connection.events(path, body)
            self._raise_error(path, events)
        else:
            completion = self._connection.json("POST", path, body)
        try:
            return _reply(_joined(events) if body.get("stream") else completion)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            do = "give the address of an OpenAI-compatible server"
            raise UserError("its answer is no completion", where=self.base + path, do=do) from None

    def _raise_error(self, path: str, events: Sequence[Any]) -> None:
        # Once a stream has begun, engines report an error as an event of it.
        error = next((one["error"] for one in events if isinstance(one, Mapping) and one.get("error")), None)
        if error is not None:
            about = error if isinstance(error, Mapping) else {"message": error}
            code, message = about.get("code"), " ".join(str(about.get("message")).split())[:300]
            status = code if isinstance(code, int) else 500
            raise RefusedError(f"HTTP {status}: {message}", where=self.base + path, status=status)


def _unit(way: Mapping[str, Any]) -> str:
    return TOKENS if "logprobs" in way else TOKEN_IDS if way else CHARACTERS


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    variables = template_variables(prompt)
    more = {"chat_template_kwargs": variables} if variables else {}
    return {"messages" if _is_chat(prompt) else "prompt": list(prompt), **more}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    given = {
        name: value
        for name, value in params.model_dump(mode="json", exclude={"logprobs"}).items()
        if name in ALWAYS or getattr(params, name) != getattr(default, name)
    }
    if params.logit_bias:
        given["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    return given


def _joined(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # the completion that the events of a streamed answer make together
    if not events:
        raise ValueError
    choices = dict[int, dict[str, Any]]()
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            empty = {"message": dict.fromkeys((*REASONING, "content"), ""), "logprobs": {}}
            choice = choices.setdefault(part.get("index") or 0, empty)
            message = choice["message"]
            delta = part["delta"] if "delta" in part else {"content": part["text"]}
            for name in message:
                message[name] += delta.get(name) or ""
            if part.get("token_ids") is not None:
                choice["token_ids"] = [*choice.get("token_ids", ()), *part["token_ids"]]
            for name, entries in (part.get("logprobs") or {}).items():
                choice["logprobs"][name] = [*choice["logprobs"].get(name, ()), *(entries or ())]
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _reply(body: Mapping[str, Any]) -> Reply:
    # Raises KeyError, IndexError, TypeError, ValueError, AttributeError or OverflowError for what is no completion.
    # vLLM has the prompt's ids beside the choices of a chat and within those of a completion, SGLang always within
    choices, common = body["choices"], {"prompt_token_ids": body.get("prompt_token_ids")}
    usage = body.get("usage") or {}
    completion_tokens = usage.get("completion_tokens")
    if not isinstance(completion_tokens, int | None):
        raise TypeError
    found = [_choice({**common, **choice}, completion_tokens) for choice in choices]
    accepted, drafted = _drafted(usage.get("completion_tokens_details"))
    prompt_tokens = usage.get("prompt_tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not isinstance(prompt_tokens, int | None) or not isinstance(cached, int | None):
        raise TypeError
    first = replace(found[0], accepted=accepted, drafted=drafted, prompt_tokens=prompt_tokens, cached_tokens=cached)
    return first if len(found) == 1 else replace(first, choices=tuple(found))


def _drafted(details: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    # Accepted tokens, and all drafted ones, by OpenAI's names for predicted outputs; some servers leave them null
    counts = [(details or {}).get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected")]
    known = [int(count) for count in counts if count is not None]
    return (known[0], sum(known)) if len(known) == len(counts) else (None, None)


def _choice(choice: Mapping[str, Any], completion_tokens: int | None) -> Reply:
    message = {"content": choice["text"]} if choice.get("message") is None else choice["message"]
    # a server that knows both names of the reasoning may give it twice
    reasoning, text = next((message[name] for name in REASONING if message.get(name)), ""), message.get("content") or ""
    if not (isinstance(text, str) and isinstance(reasoning, str)):
        raise TypeError
    return Reply(
        text=text,
        token_ids=_ids(choice.get("token_ids", choice.get("response_token_ids"))),  # the latter in SGLang's chats
        logprobs=_logprobs(choice.get("logprobs")),
        completion_tokens=completion_tokens,
        finish_reason=choice.get("finish_reason"),
        prompt_ids=_ids(choice.get("prompt_token_ids")),
        reasoning=reasoning,
    )


def _ids(given: Sequence[Any] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(int(token) for token in given)


def _logprobs(given: Mapping[str, Any] | None) -> tuple[ScoredToken, ...] | None:
    # Chat has a list of entries, completions have parallel lists.
    if not given:
        return None
    if given.get("content") is not None:
        return tuple(_entry(entry) for entry in given["content"])
    if not given.get("tokens"):
        return None
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    return tuple(
        ScoredToken(token, float(logprob), tuple((top or {}).items()))
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
        if logprob is not None
    )


def _entry(entry: Mapping[str, Any]) -> ScoredToken:
    top = tuple((_name(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ())
    return ScoredToken(_name(entry), float(entry["logprob"]), top)


def _name(entry: Mapping[str, Any]) -> str:
    # Tokens that are parts of a character have the same text (U+FFFD), so their bytes are read as Latin-1.
    raw = entry.get("bytes")
    if raw is None or "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return bytes(raw).decode("latin-1")
