"""HTTP client of one server: waits for a busy one, and turns every failure into one line without the API key."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dflash_serve.common.documents import read_text
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    import httpx

API_KEY_ENV = "DFLASH_SERVE_API_KEY"
BUSY = (429, 503)  # Status codes of a busy server
LOCAL = ("localhost", "127.0.0.1", "::1")  # Hosts that no proxy of the environment is asked for
PATIENCE = 8  # Number of retries (after 1/4, 1/2, 1, ... at most 4 seconds)
RECONNECTS = 2  # Number of retries over a new connection
DONE = "[DONE]"  # Data of the last event of a stream


class RefusedError(UserError):
    """The server answered and refused the request; `status` is that of its response."""

    def __init__(self, what: str, *, where: str, do: str = "", status: int) -> None:
        super().__init__(what, where=where, do=do)
        self.status = status


class NoAnswerError(UserError):
    """No server answers at an address, or its answer breaks off."""


@dataclass(frozen=True)
class Connection:
    """A connection to one server; safe to use from several threads.

    Args:
        url: http or https, with or without /v1, without a user name or password.
        api_key: None = none is sent. Never shown.
        timeout: seconds for one answer.
        connections: largest number at the same time.

    Raises:
        UserError: the URL is not such an address.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 300.0
    connections: int = 16

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError:  # http://[
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("not an address of a server", where=self.url, do="give http://host:port")
        if "@" in parts.netloc:
            raise UserError("an address must not carry a password", where=parts.hostname, do="use --api-key-file")
        if self.api_key is not None:
            check_key(self.api_key, "the API key")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the response.

        Raises:
            UserError: no server answers, or the response is not JSON.
            RefusedError: the server refuses the request.
        """
        return self._parsed(path, self._send(method, path, body).text)

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The JSON of every server-sent event of a streamed response, after its end.

        Events of the type `error` are `{"error": ...}`. A stream is whole if it has `[DONE]`, the last event of all
        engines, or if all its choices have a finish_reason. One that was cut is asked for again.

        Raises:
            UserError: as for `json`.
            RefusedError: as for `json`, or the stream is cut every time.
        """
        for _ in range(RECONNECTS + 1):
            text = self._send("POST", path, body).text
            blocks = [block.split("\n") for block in text.replace("\r\n", "\n").split("\n\n")]
            each = [one for block in blocks for one in self._data(path, block)]
            events = [one for one in each if one != DONE]
            if (text.strip() and not events) or DONE in each or any(map(_is_error, events)) or _all_finished(events):
                return events
        do = "look into the logs of the server, and of a router before it"
        raise RefusedError("its stream ends before the answer does", where=self.base + path, do=do, status=502)

    def _data(self, path: str, block: Sequence[str]) -> list[Any]:
        # the data of one event; Dynamo's frontend reports an error as an event of that type whose text is a comment
        data = [line.removeprefix("data:").strip() for line in block if line.startswith("data:")]
        if any(line.startswith("event:") and line.removeprefix("event:").strip() == "error" for line in block):
            told = [line.removeprefix(":").strip() for line in block if line.startswith(":")]
            return [{"error": {"message": " ".join([*data, *told])}}]
        return [one if one == DONE else self._parsed(path, one) for one in data]

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            do = "give the address of an OpenAI-compatible server"
            raise UserError("its answer is not JSON", where=self.base + path, do=do) from None

    def text(self, path: str) -> str | None:
        """The text of a page; None if the server has no such page.

        Raises:
            UserError: no server answers.
            RefusedError: the server refuses the request (for example, it needs a key).
        """
        try:
            return self._send("GET", path, None).text
        except RefusedError as error:
            if error.status in (404, 405, 501):
                return None
            raise

    def has_header(self, path: str, name: str) -> bool:
        """True if the answer to a page has a header.

        Raises:
            UserError: as for `text`.
            RefusedError: as for `text`, or the server has no such page.
        """
        return name in self._send("GET", path, None).headers

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=self.connections)
        proxied = urlsplit(self.url).hostname not in LOCAL
        return httpx.Client(base_url=self.base, headers=headers, timeout=self.timeout, limits=limits, trust_env=proxied)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        import httpx

        where = self.base + path
        for attempt in range(PATIENCE + 1):
            try:
                response = self._client.request(method, path, json=body)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                # A server may close an idle connection at the moment of a new request; requests are safe to repeat.
                if attempt < RECONNECTS:
                    continue
                raise _unreachable(error, where) from None
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # of idna, for a long name
                raise _unreachable(error, where) from None
            if response.status_code not in BUSY or attempt == PATIENCE:
                break
            time.sleep(min(4.0, 0.25 * 2**attempt))
        if response.is_success:
            return response
        is_page = response.text.lstrip().startswith("<")  # HTML of a web server or a gateway
        what = f"HTTP {response.status_code}: {response.reason_phrase if is_page else _message(response)}"
        do = "give the address of an OpenAI-compatible server" if is_page else ""
        if response.status_code in (401, 403):
            do = f"give its key in --api-key-file, or in {API_KEY_ENV}"
        raise RefusedError(what, where=where, do=do, status=response.status_code)


def _is_error(event: Any) -> bool:
    return isinstance(event, Mapping) and bool(event.get("error"))


def _all_finished(events: Sequence[Any]) -> bool:
    finished = dict[object, bool]()
    for event in events:
        choices = event.get("choices") if isinstance(event, Mapping) else None
        for part in choices if isinstance(choices, list) else ():
            if isinstance(part, Mapping):
                index = str(part.get("index"))
                finished[index] = finished.get(index, False) or bool(part.get("finish_reason"))
    return bool(finished) and all(finished.values())


def page_status(url: str, *, timeout: float = 30.0) -> int | None:
    """The HTTP status of a page of this machine, which no proxy is asked for; None if no server answers."""
    import httpx

    certificates = url.startswith("https")  # loading them takes longer than asking
    try:
        return httpx.get(url, timeout=timeout, verify=certificates, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def read_keys(file: str | Path) -> list[str]:
    """API keys, one a line; empty lines and lines that begin with # are skipped.

    Raises:
        UserError: the file cannot be read, or has none.
    """
    text = read_text(Path(file), do="give a file with one key a line")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError("has no key", where=str(file), do="write one key a line, or leave the file out")
    for key in keys:
        check_key(key, str(file))
    return keys


def check_key(key: str, where: str) -> None:
    """Refuses an API key that no HTTP header can carry; it is not shown.

    Raises:
        UserError: it has other characters than visible ASCII and spaces.
    """
    if not (key.isascii() and key.isprintable()):
        raise UserError("a key has a character that is no visible ASCII", where=where, do="choose another key")


def read_api_key(file: Path | None) -> str | None:
    """The first API key of a file, else the environment's; None if neither is given.

    Raises:
        UserError: as `read_keys`.
    """
    return os.environ.get(API_KEY_ENV, "").strip() or None if file is None else read_keys(file)[0]


def _unreachable(error: Exception, where: str) -> NoAnswerError:
    what = f"no answer ({str(error) or type(error).__name__})"
    return NoAnswerError(what, where=where, do="check the address, and that the server runs")


def _message(response: httpx.Response) -> str:
    # Servers have several shapes of error bodies.
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    except (ValueError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase
