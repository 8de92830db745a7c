"""What any OpenAI-compatible server answered, read with tolerance: engines differ in how they name tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScoredToken:
    """One generated token: its text, its log-probability, and the most probable tokens at its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came back for one request. What a server did not say is None."""

    text: str
    tokens: tuple[str, ...] | None = None
    """The text of each token, from the log-probabilities."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[ScoredToken, ...] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def pieces(self) -> tuple[str | int, ...]:
        """The finest thing to compare two answers by: token ids, else token texts, else characters."""
        if self.token_ids is not None:
            return self.token_ids
        return tuple(self.text) if self.tokens is None else self.tokens

    @property
    def unit(self) -> str:
        """What `pieces` are."""
        if self.token_ids is not None:
            return "token ids"
        return "characters" if self.tokens is None else "tokens"


def read_reply(body: Mapping[str, Any]) -> Reply:
    """The first choice of a chat or plain completion.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it has none, or is no completion at all.
    """
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content")
    ids = choice.get("token_ids")
    logprobs = _logprobs(choice.get("logprobs"))
    return Reply(
        text=text or "",
        tokens=None if logprobs is None else tuple(entry.text for entry in logprobs),
        token_ids=None if ids is None else tuple(int(token) for token in ids),
        logprobs=logprobs,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
    )


def _logprobs(given: Mapping[str, Any] | None) -> tuple[ScoredToken, ...] | None:
    """Chat's list of entries, or completions' parallel lists."""
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
    """The token's text; its bytes as Latin-1 where they are half a character, which as text would all look alike."""
    raw = entry.get("bytes")
    if raw is None or "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return bytes(raw).decode("latin-1")
