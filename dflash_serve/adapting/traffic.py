"""Logged requests as prompts, and their split by conversation.

A line is a prompt ({"prompt"} or {"messages"}), the body of an OpenAI chat request, or a pair of `request` (or `body`)
and `response`. Only messages, template variables and the fields `task`, `language`, `thinking` and `conversation` are
read: everything else of a log, keys and headers included, is left out. Answers are not read; the target writes them.

Requests belong to one conversation if they name the same `conversation`, or if they are alike up to their first user
turn, as the turns of a chat are. All requests of a conversation are on one side of the split.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_serve.answers.groups import labelled
from dflash_serve.common.documents import DATA, parse_json, read_text
from dflash_serve.common.files import sha256
from dflash_serve.errors import UserError

LABELS = ("task", "language", "thinking", "chat_template_kwargs")
FORMS = '{"prompt": text}, {"messages": [...]}, or {"request": {...}}'
FEWEST = 4
"""Least number of conversations: two to train on, and two to hold out, without which no interval is known."""


@dataclass(frozen=True)
class LoggedRequest:
    """The messages of a request and its labels, as a line of a prompt file."""

    line: Mapping[str, Any]
    names: tuple[str, ...]  # of its conversation: its opening, and the log's own name if there is one

    @property
    def text(self) -> str:
        """The line of a prompt file."""
        return json.dumps(self.line, ensure_ascii=False, sort_keys=True) + "\n"


@dataclass
class Traffic:
    """Distinct requests of all files, and what was left out of them."""

    requests: list[LoggedRequest] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # Name of each file -> sha256
    left_out: Counter[str] = field(default_factory=Counter)  # Reason -> requests


def read_traffic(paths: Sequence[Path]) -> Traffic:
    """All requests of JSONL files, or of folders of them, that the embedded engine can answer as text.

    Raises:
        UserError: a file that cannot be read or is given twice, a line that is no request, or no request at all.
    """
    traffic, seen = Traffic(), set[str]()
    for path in _files(paths):
        if not path.is_file():
            raise UserError("no such file", where=f"--traffic {path}", do="check the path")
        checksum = sha256(path)
        if checksum in traffic.files.values():
            raise UserError("its contents are given twice", where=f"--traffic {path}", do="give each log once")
        lines = read_text(path, DATA, do="check the path").split("\n")  # not splitlines: a text may hold U+2028
        traffic.files[path.name if path.name not in traffic.files else str(path)] = checksum
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            found = _request(parse_json(text, where=where, do="give one JSON object a line"), where)
            reason = found if isinstance(found, str) else "repeated" if found.text in seen else None
            if reason is not None:
                traffic.left_out[reason] += 1
            elif isinstance(found, LoggedRequest):
                seen.add(found.text)
                traffic.requests.append(found)
    if not traffic.requests:
        raise UserError("no requests in it", where="--traffic", do=f"give lines such as {FORMS}")
    return traffic


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    # A folder stands for its JSONL files, as a server records them.
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise UserError("no .jsonl file in it", where=f"--traffic {path}", do="check the path")
        yield from found


def split(requests: Sequence[LoggedRequest], share: float) -> tuple[list[LoggedRequest], list[LoggedRequest]]:
    """(training, held-out) requests; a conversation is on one side. The same requests are always split alike.

    Args:
        share: of the conversations that are held out; two at least.

    Raises:
        UserError: fewer than `FEWEST` conversations.
    """
    conversations = _conversations(requests)
    if len(conversations) < FEWEST:
        what = f"{len(conversations)} conversations are too few to train on some and measure others"
        raise UserError(what, where="--traffic", do=f"give {FEWEST} or more; hundreds are better")
    count = min(max(2, round(share * len(conversations))), len(conversations) - 2)
    # Ordered by what they say: adding a log or changing the order of files moves few of them.
    ordered = sorted(conversations, key=lambda each: _hash(min(requests[index].text for index in each)))
    held = {index for each in ordered[:count] for index in each}
    training = [one for index, one in enumerate(requests) if index not in held]
    return training, [requests[index] for index in sorted(held)]


def _conversations(requests: Sequence[LoggedRequest]) -> list[list[int]]:
    # Requests joined by any common name, by union-find.
    parent = list(range(len(requests)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    first: dict[str, int] = {}
    for index, request in enumerate(requests):
        for name in request.names:
            parent[root(index)] = root(first.setdefault(name, index))
    found: dict[int, list[int]] = {}
    for index in range(len(requests)):
        found.setdefault(root(index), []).append(index)
    return [*found.values()]


def _request(entry: object, where: str) -> LoggedRequest | str:
    # A request, or the reason why it is left out.
    if not isinstance(entry, dict):
        raise UserError("no request", where=where, do=f"give {FORMS}")
    body = next((entry[key] for key in ("request", "body") if isinstance(entry.get(key), dict)), entry)
    body = body["body"] if isinstance(body.get("body"), dict) else body
    messages = body.get("messages")
    if messages is None and isinstance(body.get("prompt"), str) and body["prompt"].strip():
        if "model" in body:
            return "a completion without a chat"
        messages = [{"role": "user", "content": body["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        raise UserError("no request", where=where, do=f"give {FORMS}")
    if body.get("tools") or body.get("functions") or body.get("response_format"):
        return "tools or a grammar"
    turns = [{"role": turn.get("role"), "content": _text(turn.get("content"))} for turn in messages]
    if any(not isinstance(value, str) for turn in turns for value in turn.values()):
        return "a turn that is no text"
    while turns and turns[-1]["role"] == "assistant":  # The answer, which the target writes anew
        turns.pop()
    if not any(turn["role"] == "user" for turn in turns):
        return "no user turn"
    labels = {key: value for key in LABELS if (value := body.get(key, entry.get(key))) is not None}
    until = next(index for index, turn in enumerate(turns) if turn["role"] == "user") + 1
    labelled(turns, labels, {}, where=where)
    names = [f"opening {json.dumps(turns[:until])}"]
    own = body.get("conversation", entry.get("conversation"))
    if isinstance(own, str | int):
        names.append(f"own {own}")
    return LoggedRequest({"messages": turns, **labels}, tuple(names))


def _text(content: object) -> str | None:
    # The text of a message; None where a part of it is none, such as an image.
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def lines_of(requests: Iterable[LoggedRequest]) -> str:
    """The requests as a prompt file."""
    return "".join(request.text for request in requests)
