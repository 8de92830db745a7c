"""A client for any OpenAI-compatible server (ours, SGLang, trtllm-serve, vLLM), which finds out how it names tokens.

vLLM and SGLang give token ids for `return_token_ids`; older ones ignore it. TensorRT-LLM refuses fields that it does
not know, and gives ids where `detokenize` is false. All give the tokens' texts with log-probabilities. The first
request to each path tries these in turn, and what worked is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.proving.answer import Answer, read_answer
from dflash_serve.speculation.params import SamplingParams

if TYPE_CHECKING:
    import httpx

API_KEY_ENV = "DFLASH_SERVE_API_KEY"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAYS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    COMPLETIONS: ({"return_token_ids": True}, {"detokenize": False}, {"logprobs": 1}, {}),
    CHAT: ({"return_token_ids": True}, {"logprobs": True, "top_logprobs": 1}, {}),
}
"""How to ask for tokens, finest first; the last is text alone."""
BUSY, PATIENCE = (429, 503), 8
"""Status codes that mean "later", and how often to come back (after 1/4, 1/2, 1, ... at most 4 seconds)."""
RECONNECTS = 2
"""How often a request is sent again over a new connection."""
ALWAYS = {"temperature", "top_p"}
"""Sent even at their defaults: some servers would fill in the model's own. The rest is sent where it is set."""


class RefusedError(UserError):
    """The server is there, and does not take this request.

    Args:
        status: of the HTTP response.
    """

    def __init__(self, what: str, *, where: str, do: str = "", status: int) -> None:
        super().__init__(what, where=where, do=do)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """One server; safe to use from several threads.

    Args:
        url: http or https, with or without /v1, without a user name or password.
        model: None = the first one that it lists.
        api_key: None = none is sent. Never shown.
        timeout: seconds for one answer.
        concurrency: requests in flight in `complete_all`.

    Raises:
        UserError: the URL is none of these.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 300.0
    concurrency: int = 16
    _ways: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _finding: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("not an address of a server", where=self.url, do="give http://host:port")
        if "@" in parts.netloc:
            raise UserError("an address must not carry a password", where=parts.hostname, do="use --api-key-file")

    @property
    def base(self) -> str:
        """The URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @cached_property
    def served_model(self) -> str:
        """The model to ask for.

        Raises:
            UserError: nothing listens there, or it lists no model.
        """
        if self.model is not None:
            return self.model
        try:
            return str(self.get_json("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError("it lists no model", where=f"{self.base}/v1/models", do="name the model") from None

    def complete(self, prompt: Prompt, params: SamplingParams, *, top_logprobs: int | None = None) -> Answer:
        """One answer.

        Args:
            prompt: text or token ids go to /v1/completions, messages to /v1/chat/completions.
            top_logprobs: ask for the log-probabilities of so many most probable tokens at each place.

        Raises:
            UserError: nothing listens there, or what listens is no such server.
            RefusedError: it does not take the request.
        """
        path = CHAT if _is_chat(prompt) else COMPLETIONS
        body = {"model": self.served_model, **_prompt(prompt), **_sampling(params)}
        if top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": top_logprobs} if path == CHAT else {"logprobs": top_logprobs}
        if path in self._ways:
            return self._ask(path, {**self._ways[path], **body})
        with self._finding:  # the others wait for the first to find the way
            return self._find(path, body)

    def complete_all(
        self, asked: Sequence[tuple[Prompt, SamplingParams]], *, top_logprobs: int | None = None
    ) -> Iterator[Answer]:
        """The answers in the order of what is asked, `concurrency` requests at a time.

        Raises:
            UserError, RefusedError: as `complete`, for the first that fails.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                yield from pool.map(lambda one: self.complete(*one, top_logprobs=top_logprobs), asked)
            except BaseException:  # do not send the rest for nobody
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def get_json(self, path: str) -> Any:
        """GET -> JSON.

        Raises:
            UserError: nothing listens there, it refuses, or it is no JSON.
        """
        return _json(self._send("GET", path), self.base + path)

    def get_text(self, path: str) -> str:
        """GET -> text: Prometheus metrics.

        Raises:
            UserError: nothing listens there, or it refuses.
        """
        return str(self._send("GET", path).text)

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.Client(base_url=self.base, headers=headers, timeout=self.timeout, limits=limits)

    def _find(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Asks in every way until one brings tokens, and keeps it. A request refused in all ways is refused."""
        if path in self._ways:
            return self._ask(path, {**self._ways[path], **body})
        refused: RefusedError | None = None
        for way in WAYS[path]:
            try:
                answer = self._ask(path, {**way, **body})
            except RefusedError as error:
                refused = error
                continue
            found = answer.token_ids is not None or ("logprobs" in way and answer.tokens is not None)
            if found or (not way and answer.text):
                self._ways[path] = way
            if found or not way:
                return answer
        assert refused is not None
        raise refused

    def _ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        response = self._send("POST", path, body)
        try:
            return read_answer(_json(response, self.base + path))
        except (KeyError, IndexError, TypeError, ValueError):
            do = "give the address of an OpenAI-compatible server"
            raise UserError("its answer is no completion", where=self.base + path, do=do) from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        import httpx

        where = self.base + path
        for attempt in range(PATIENCE + 1):
            try:
                response = self._client.request(method, path, json=body)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                # A server may close an idle connection just as it is used again; asking twice does no harm.
                if attempt < RECONNECTS:
                    continue
                raise _unreachable(error, where) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise _unreachable(error, where) from None
            if response.status_code not in BUSY or attempt == PATIENCE:
                break
            time.sleep(min(4.0, 0.25 * 2**attempt))
        if response.is_success:
            return response
        what, do = f"HTTP {response.status_code}: {_message(response)}", ""
        if response.status_code in (401, 403):
            do = f"give its key in --api-key-file, or in {API_KEY_ENV}"
        raise RefusedError(what, where=where, do=do, status=response.status_code)


def read_api_key(file: Path | None) -> str | None:
    """The first line of a file, else the environment's; None where there is neither.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(API_KEY_ENV) or None
    try:
        key = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        raise UserError("cannot be read", where=str(file), do="give a text file with the key") from None
    if not key:
        raise UserError("it is empty", where=str(file), do="put the key on its first line")
    return key


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"messages" if _is_chat(prompt) else "prompt": list(prompt)}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What is set, in the names that all servers share."""
    default = SamplingParams()
    given = {
        name: value
        for name, value in params.model_dump(mode="json", exclude={"logprobs"}).items()
        if name in ALWAYS or getattr(params, name) != getattr(default, name)
    }
    if params.logit_bias:
        given["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    return given


def _unreachable(error: Exception, where: str) -> UserError:
    what = f"no answer ({str(error) or type(error).__name__})"
    return UserError(what, where=where, do="check the address, and that the server runs")


def _json(response: httpx.Response, where: str) -> Any:
    try:
        return response.json()
    except ValueError:
        do = "give the address of an OpenAI-compatible server"
        raise UserError("its answer is not JSON", where=where, do=do) from None


def _message(response: httpx.Response) -> str:
    """The error in one line, whichever of the usual shapes it has."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase
