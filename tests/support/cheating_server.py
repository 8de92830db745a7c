"""A connection to a toy server that cheats: it changes requests before they are answered, or their answers.

Seeds make every answer a function of its request, so that the model is asked nothing twice.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import httpx

from dflash_serve.adapter.own_width import OFF, WAYS
from dflash_serve.common.http import Connection, RefusedError
from dflash_serve.verify.report import FaultKind
from tests.support.toy_model import CONTEXT, VOCABULARY, RefusedRequestError, ToyModel, tokenize

Body = dict[str, Any]
WRONG = 7  # Seeds of `seeds_in_turns`; its square: every so many answers of `crosstalk`


@dataclass
class CheatingServer:
    """A server that cheats: `cheat` is the function that changes the answer to a request."""

    model: ToyModel
    known: dict[str, Body] = field(default_factory=dict)  # Answers by path and request
    deaf: bool = False  # It ignores that a request switches speculation off
    way: Body = field(default_factory=lambda: dict(OFF))  # Fields of a request that does so
    tells: bool = True  # Its answers tell how many tokens were drafted
    lies: bool = False  # Its answers to requests that switch speculation off always tell that nothing was drafted
    remembers: bool = False  # It gives an answer again to the same request, whatever that says of speculation

    def __post_init__(self) -> None:
        self.begin(lambda server, body: server.ask(body))

    def begin(self, cheat: Cheat) -> None:
        """Another cheat, with nothing remembered of the last one."""
        self.cheat, self.counts, self.running, self.drafts = cheat, itertools.count(1), 0, 0
        self.given: dict[str, Body] = {}
        self.shared: Cheat = lambda server, body: server.ask(body)  # the cheat of requests that are not drafted for
        self.last: Body = {}
        self.prompts: set[str | tuple[int, ...]] = set()

    def answer(self, path: str, body: Body) -> httpx.Response:
        """The response to a client."""
        switched = {name: body.pop(name) for way in WAYS for name in way if name in body} == self.way
        key = json.dumps([path, body])
        answer = self.given.get(key) if self.remembers else None
        if answer is None:
            answer = self._draft(path, body, off=switched and not self.deaf, told_off=switched and self.lies)
            self.given[key] = answer
        if not body.get("stream"):
            return httpx.Response(200, json=answer)
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in _events(answer))
        return httpx.Response(200, text=events + "data: [DONE]\n\n")

    def _draft(self, path: str, body: Body, *, off: bool, told_off: bool) -> Body:
        self.drafts += not off
        self.running += 1
        try:
            answer = (self.shared if off else self.cheat)(self, {**body, "path": path})
        finally:
            self.running -= 1
        if "usage" in answer and self.tells:
            none = off or told_off
            counts = {"accepted_prediction_tokens": 0 if none else 3, "rejected_prediction_tokens": 0 if none else 4}
            answer["usage"]["completion_tokens_details"] = counts
        return answer

    def ask(self, body: Body) -> Body:
        """The server's own answer, not streamed."""
        path = body["path"]
        body = {name: value for name, value in body.items() if name not in ("path", "stream", "stream_options")}
        key = json.dumps([path, body])
        if key not in self.known:
            self.known[key] = self.model.complete(path, body)
        return json.loads(json.dumps(self.known[key]))  # type: ignore[no-any-return]

    def continued(self, body: Body, after: int, **changes: Any) -> Body:
        """The answer whose tokens behind the first `after` ones come from a request with these changes."""
        if body["max_tokens"] <= after or body.get("n") or body.get("response_format"):
            return self.ask(body)
        begun = self.ask({**body, "max_tokens": after, "return_token_ids": True})
        first = begun["choices"][0]
        if first["finish_reason"] != "length":
            return begun
        prompt = [*tokenize(body.get("messages") or body["prompt"]), *first["token_ids"]]
        rest = {name: value for name, value in body.items() if name not in ("messages", "top_logprobs")}
        if body.get("logprobs"):
            rest["logprobs"] = body.get("top_logprobs", body["logprobs"])
        rest |= {"prompt": prompt, "max_tokens": body["max_tokens"] - after, "return_token_ids": True, **changes}
        second = self.ask({**rest, "path": "/v1/completions"})["choices"][0]
        _edit_text(first, lambda text: text + second["text"])
        first["token_ids"] += second["token_ids"]
        _join_logprobs(first.get("logprobs"), second.get("logprobs"))
        begun["usage"]["completion_tokens"] = len(first["token_ids"])
        return begun


Cheat = Callable[[CheatingServer, Body], Body]


@dataclass(frozen=True)
class CheatingConnection(Connection):
    """A connection to a `CheatingServer` in this process."""

    server: CheatingServer | None = None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        assert self.server is not None
        if body is None:
            return httpx.Response(200, json={"data": [{"id": "toy", "max_model_len": CONTEXT}]})
        try:
            return self.server.answer(path, dict(body))
        except RefusedRequestError:
            raise RefusedError("the context is too short", where=path, status=400) from None


def _events(answer: Body) -> Iterator[Body]:
    for choice in answer["choices"]:
        whole = {name: value for name, value in choice.items() if name != "message"}
        yield {"choices": [whole | ({"delta": choice["message"]} if "message" in choice else {})]}
    yield {"choices": [], "usage": answer["usage"]}


def _join_logprobs(first: Body | None, rest: Body | None) -> None:
    # the log-probabilities of a completion behind those of a chat or a completion
    if not first or not rest:
        return
    if "content" not in first:
        for name, values in rest.items():
            first[name] += values
        return
    for token, value, top in zip(rest["tokens"], rest["token_logprobs"], rest["top_logprobs"], strict=True):
        best = [{"token": name, "logprob": one} for name, one in top.items()]
        first["content"].append({"token": token, "logprob": value, "top_logprobs": best})


def _edit_text(choice: Body, change: Callable[[str], str]) -> None:
    inside = choice.get("message", choice)
    name = "content" if "message" in choice else "text"
    inside[name] = change(inside[name] or "")


def without(*fields: str) -> Cheat:
    """Ignores these fields."""

    def cheat(server: CheatingServer, body: Body) -> Body:
        return server.ask({name: value for name, value in body.items() if name not in fields})

    return cheat


def sets(when: Callable[[Body], bool] = lambda body: True, **fields: Any) -> Cheat:
    """Sets these fields, where a request is of that kind."""

    def cheat(server: CheatingServer, body: Body) -> Body:
        return server.ask({**body, **(fields if when(body) else {})})

    return cheat


def edits(change: Callable[[Body], None], when: Callable[[Body], bool] = lambda body: True) -> Cheat:
    """Changes every choice of an answer."""

    def cheat(server: CheatingServer, body: Body) -> Body:
        answer = server.ask(body)
        for choice in answer.get("choices", ()) if when(body) else ():
            change(choice)
        return answer

    return cheat


def _greedy(body: Body) -> bool:
    return bool(body["temperature"] == 0)


def crosstalk(server: CheatingServer, body: Body) -> Body:
    """One answer in 7 * 7 is that of another request."""
    answer = server.ask(body)
    if next(server.counts) % WRONG**2 == 0 and server.last:
        given = server.last["choices"][0]
        mine = answer["choices"][0]
        _edit_text(mine, lambda _: given.get("message", {}).get("content") or given.get("text") or "")
        mine["token_ids"] = given["token_ids"]
    elif "choices" in answer:
        server.last = json.loads(json.dumps(answer))
    return answer


def fresh_seeds(server: CheatingServer, body: Body) -> Body:
    """No answer can be had twice."""
    return server.ask({**body, **({"seed": next(server.counts)} if "seed" in body else {})})


def seeds_in_turns(server: CheatingServer, body: Body) -> Body:
    """Every seed has one of seven answers."""
    return server.ask({**body, **({"seed": body["seed"] % WRONG} if "seed" in body else {})})


def greedy_after_8(server: CheatingServer, body: Body) -> Body:
    """Sampling turns greedy."""
    return server.ask(body) if _greedy(body) else server.continued(body, 8, temperature=0)


def wrong_after_128(server: CheatingServer, body: Body) -> Body:
    """Long answers go wrong."""
    return server.continued(body, 128, temperature=1.5, seed=1)


def wrong_under_load(server: CheatingServer, body: Body) -> Body:
    """Greedy answers go wrong while other requests run."""
    time.sleep(0.002)
    loaded = server.running > 2 and "prompt" in body and _greedy(body)
    return server.ask({**body, **({"temperature": 1.5, "seed": 1} if loaded else {})})


def wrong_after_a_prefix(server: CheatingServer, body: Body) -> Body:
    """A prompt that begins with an earlier one is read without its first character or token."""
    prompt = body.get("prompt")
    if prompt is not None:
        kept: str | tuple[int, ...] = prompt if isinstance(prompt, str) else tuple(prompt)
        reused = any(kept[: len(earlier)] == earlier for earlier in tuple(server.prompts) if earlier != kept)
        server.prompts.add(kept)
        body = {**body, "prompt": prompt[1:] if reused and len(prompt) > 1 else prompt}
    return server.ask(body)


def copies(server: CheatingServer, body: Body) -> Body:
    """All choices of a request are the first one."""
    answer = server.ask({name: value for name, value in body.items() if name != "n"})
    answer["choices"] *= body.get("n", 1)
    answer["usage"]["completion_tokens"] *= body.get("n", 1)
    return answer


def counts_wrongly(server: CheatingServer, body: Body) -> Body:
    """The usage has a token too many."""
    answer = server.ask(body)
    if "usage" in answer:
        answer["usage"]["completion_tokens"] += 1
    return answer


def one_token_replaced(server: CheatingServer, body: Body) -> Body:
    """The answers to every second prompt have a wrong token, whatever the order of requests."""
    answer, asked = server.ask(body), json.dumps(body.get("messages") or body.get("prompt"))
    if crc32(asked.encode()) % 2 == 0 and "choices" in answer:
        ids = answer["choices"][0]["token_ids"]
        ids[-1] = (ids[-1] + 1) % VOCABULARY
    return answer


def twice_penalised(server: CheatingServer, body: Body) -> Body:
    """The repetition penalty is applied twice."""
    return server.ask({**body, "repetition_penalty": body["repetition_penalty"] ** 2})


def second_choice(**changes: Any) -> Cheat:
    """The second choice comes from a request with these changes."""

    def cheat(server: CheatingServer, body: Body) -> Body:
        answer = server.ask(body)
        if body.get("n"):
            changed = {name: value * body[name] if name == "temperature" else value for name, value in changes.items()}
            answer["choices"][1] = server.ask({**body, **changed})["choices"][1]
            answer["usage"]["completion_tokens"] = sum(len(one["token_ids"]) for one in answer["choices"])
        return answer

    return cheat


def stops_at_once(server: CheatingServer, body: Body) -> Body:
    """A request with stop strings gets one token and no text."""
    answer = server.ask(body)
    for choice in answer["choices"] if body.get("stop") else ():
        _edit_text(choice, lambda _: "")
        choice["token_ids"] = choice["token_ids"][:1]
    return answer


def _scaled(choice: Body) -> None:
    given = choice.get("logprobs") or {}
    for entry in given.get("content") or ():
        entry["logprob"] *= 1.3
    if given.get("token_logprobs"):
        given["token_logprobs"] = [1.3 * value for value in given["token_logprobs"]]


def _says_more(choice: Body) -> None:
    _edit_text(choice, lambda text: text + "!")


def _says_less(choice: Body) -> None:
    _edit_text(choice, lambda text: text[:-3])


def _streams_less(choice: Body) -> None:
    _edit_text(choice, lambda text: text[:-1])


def _sampled(body: Body) -> bool:
    return not _greedy(body)


def _prompt(body: Body) -> Any:
    return body["messages"] if "messages" in body else body["prompt"]


def _crowded(server: CheatingServer, body: Body) -> bool:
    time.sleep(0.001)
    return server.running > 4


def _after_a_prefix(server: CheatingServer, body: Body) -> bool:
    prompt = tuple(tokenize(_prompt(body)))
    found = any(prompt[: len(earlier)] == earlier for earlier in tuple(server.prompts))
    server.prompts.add(prompt)
    return found


SITUATIONS: Mapping[str, Callable[[CheatingServer, Body], bool]] = {
    "in streams": lambda server, body: bool(body.get("stream")),
    "with n": lambda server, body: bool(body.get("n")),
    "after long prompts": lambda server, body: len(tokenize(_prompt(body))) > 256,
    "in large batches": _crowded,
    "in second turns": lambda server, body: any("assistant" in str(part) for part in body.get("messages", ())),
    "after a prefix": _after_a_prefix,
    "with stop": lambda server, body: bool(body.get("stop")),
}
FIELDS: Mapping[str, Callable[[Body], Body]] = {
    "greedy answers are drawn": lambda body: {**body, "temperature": 1.5, "seed": 1} if _greedy(body) else body,
    "hotter": lambda body: {**body, "temperature": 1.5 * body["temperature"]},
    "top_k ignored": lambda body: _less(body, "top_k"),
    "top_p ignored": lambda body: _less(body, "top_p"),
    "min_p ignored": lambda body: _less(body, "min_p"),
    "logit_bias ignored": lambda body: _less(body, "logit_bias"),
    "response_format ignored": lambda body: _less(body, "response_format"),
    "repetition penalty twice": lambda body: {**body, "repetition_penalty": body["repetition_penalty"] ** 2},
}


def _less(body: Body, *fields: str) -> Body:
    return {name: value for name, value in body.items() if name not in fields}


def _in_situation(situation: str, wrong: str) -> Cheat:
    def cheat(server: CheatingServer, body: Body) -> Body:
        return server.ask(FIELDS[wrong](body) if SITUATIONS[situation](server, body) else body)

    return cheat


CHEATS: Mapping[str, tuple[Cheat, FaultKind | None]] = {
    "top_k ignored": (without("top_k"), FaultKind.FIELD),
    "top_p ignored": (without("top_p"), FaultKind.DISTRIBUTION),
    "min_p ignored": (without("min_p"), FaultKind.FIELD),
    "logit_bias ignored": (without("logit_bias"), FaultKind.FIELD),
    "stop ignored": (without("stop"), FaultKind.FIELD),
    "min_tokens ignored": (without("min_tokens"), FaultKind.FIELD),
    "n ignored": (without("n"), FaultKind.FIELD),
    "n copies": (copies, FaultKind.FIELD),
    "response_format ignored": (without("response_format"), FaultKind.FIELD),
    "repetition_penalty ignored": (without("repetition_penalty"), FaultKind.PENALTIES),
    "penalties ignored": (without("presence_penalty", "frequency_penalty"), FaultKind.PENALTIES),
    "hotter": (sets(_sampled, temperature=1.9), FaultKind.DISTRIBUTION),
    "relaxed acceptance": (sets(_greedy, temperature=0.2, top_k=2, seed=3), FaultKind.STALE_STATE),
    "repetition penalty twice": (twice_penalised, FaultKind.PENALTIES),
    "top_p ignored beside top_k": (
        lambda server, body: server.ask(_less(body, "top_p") if body.get("top_k") else body),
        FaultKind.DISTRIBUTION,
    ),
    "top_k ignored beside top_p": (
        lambda server, body: server.ask(_less(body, "top_k") if body.get("top_p", 1) < 1 else body),
        FaultKind.DISTRIBUTION,
    ),
    "min_p ignored beside top_k": (
        lambda server, body: server.ask(_less(body, "min_p") if body.get("top_k") else body),
        FaultKind.DISTRIBUTION,
    ),
    "second choice hotter": (second_choice(temperature=1.3), FaultKind.DISTRIBUTION),
    "second choice greedy": (second_choice(temperature=0), FaultKind.DISTRIBUTION),
    "one token replaced": (one_token_replaced, FaultKind.STALE_STATE),
    "sampling is greedy": (sets(_sampled, temperature=0), FaultKind.GREEDY_SAMPLING),
    "sampling turns greedy after 8 tokens": (greedy_after_8, FaultKind.DISTRIBUTION),
    "wrong after the 128th token": (wrong_after_128, FaultKind.LONG),
    "answers of other requests": (crosstalk, None),  # the first requests that overlap are of any case
    "wrong under load": (wrong_under_load, FaultKind.LOAD),
    "wrong after a reused prefix": (wrong_after_a_prefix, FaultKind.LOAD),
    "seeds ignored": (fresh_seeds, FaultKind.SEEDS),
    "one of seven seeds for all": (seeds_in_turns, None),
    "text differs from the tokens": (edits(_says_more), FaultKind.TEXT),
    "streamed text lacks a character": (edits(_streams_less, lambda body: bool(body.get("stream"))), FaultKind.TEXT),
    "stop gives an empty text": (stops_at_once, FaultKind.FIELD),
    "stop cuts too much": (edits(_says_less, lambda body: bool(body.get("stop"))), FaultKind.TEXT),
    "stop ignored in streams": (
        lambda server, body: server.ask(_less(body, "stop") if body.get("stream") else body),
        FaultKind.FIELD,
    ),
    "seeds ignored in streams": (
        lambda server, body: (fresh_seeds if body.get("stream") else CheatingServer.ask)(server, body),
        FaultKind.SEEDS,
    ),
    "log-probabilities of another model in streams": (
        edits(_scaled, lambda body: bool(body.get("stream"))),
        FaultKind.LOGPROBS,
    ),
    "usage differs from the tokens": (counts_wrongly, FaultKind.TEXT),
    "finish reason is always stop": (edits(lambda choice: choice.update(finish_reason="stop")), FaultKind.TEXT),
    "log-probabilities of another model": (edits(_scaled), FaultKind.LOGPROBS),
    **{f"{wrong} {situation}": (_in_situation(situation, wrong), None) for situation in SITUATIONS for wrong in FIELDS},
}
"""Cheats, and the fault that a verification names among others; None: any."""
BY_CHANCE = {
    *("answers of other requests", "wrong under load", "wrong after a reused prefix"),
    *(f"{wrong} {situation}" for situation in ("in large batches", "after a prefix") for wrong in FIELDS),
}
"""Cheats that depend on other requests, so that an answer may differ when it is asked again."""
SEEDLESS = {"seeds ignored", "seeds ignored in streams"}
"""Cheats that give another answer every time."""


AGAINST_ITSELF = {"n copies", "streamed text lacks a character"}
"""Cheats whose answers contradict each other on either side."""


def alone(name: str) -> str | None:
    """The verdict on one server that cheats alike with speculation and without; None = it depends on the load."""
    return None if name in BY_CHANCE else "not lossless" if name in SEEDLESS | AGAINST_ITSELF else "lossless"


def told_of_one_server() -> list[str]:
    """Sentences of docs/verify.md about cheating servers that are asked alone."""
    hidden = [name for name in CHEATS if alone(name) == "lossless"]
    everywhere = {f"{wrong} {situation}" for situation in SITUATIONS for wrong in FIELDS}
    situations = [one for one in SITUATIONS if f"{next(iter(FIELDS))} {one}" in hidden]
    named = ", ".join(f"*{name}*" for name in hidden if name not in everywhere)
    return [
        f"| only where it drafts | all {len(CHEATS)} are seen |",
        f"| alike in both ways, always giving the same answer to the same request | {len(hidden)} are not seen |",
        f"| alike in both ways, by its load or by earlier requests | {len(BY_CHANCE)} are seen or not, by chance |",
        f"| alike in both ways, contradicting itself | {len(AGAINST_ITSELF)} are seen |",
        f"| alike in both ways, ignoring seeds | {len(SEEDLESS)} are seen with `--same-seeds` |",
        f"Not seen: {named}; and {', '.join(f'*{wrong}*' for wrong in FIELDS)}, each {', '.join(situations)}.",
    ]
