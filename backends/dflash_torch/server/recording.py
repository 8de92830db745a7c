"""Chats and their answers in files that `dflash-serve adapt --traffic` reads, where the operator names a folder.

A line is `{"request": {"messages": [...], ...}, "response": {...}}`. It holds the turns' roles and texts, the variables
of the chat template, and the answer. Headers, keys, users and all other fields are left out. Chats with tools, grammars
or calls are not recorded, as `adapt` cannot use them. A request opts out with `store: false`.

A file is closed after an eighth of the size or of the age that is allowed. The oldest are deleted for size, and each
when its first line is too old. Files of other names are never touched.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dflash_serve.errors import UserError

from ..answer import PendingAnswer
from .api import ChatMessage, ChatRequest

log = logging.getLogger(__name__)

PREFIX, SUFFIX = "dflash-traffic-", ".jsonl"
FILES = 8  # at least, within the limits: the part of a limit that is lost with one file
LARGEST = 64 * 2**20  # Bytes of a file: `adapt` reads at most 100 MB
PRIVATE = 0o600
DAY = 86_400.0


class Recorder:
    """Writes chats to a folder, and keeps it within its limits.

    Args:
        folder: made where it is missing, for this user alone.
        most_bytes: of all files of this name in it.
        most_seconds: age of a chat at which it is deleted.
        clock: seconds since 1970.

    Raises:
        UserError: the folder cannot be made or written.
    """

    def __init__(
        self, folder: Path, most_bytes: int, most_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.most_bytes, self.most_seconds, self._clock = folder, most_bytes, most_seconds, clock
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._failed = False  # the last write failed, and the log says so
        self._opened_files = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(error.strerror) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise self._error("permission denied")

    def add(self, body: ChatRequest, answer: PendingAnswer) -> None:
        """Records a chat whose answer has ended, from any thread. A failure is logged, and the chat left out."""
        text = _line(body, answer)
        if text is None:
            return
        line = f"{text}\n".encode()
        with self._lock:
            try:
                self._expire(len(line))
                if len(line) <= self.most_bytes:
                    self._write(line)
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("chats are not recorded in %s: %s", self.folder, error.strerror)
                self._failed = True

    def expire(self) -> None:
        """Deletes what is too old, from any thread."""
        with self._lock:
            try:
                self._expire(0)
            except OSError as error:
                log.warning("old records in %s are not deleted: %s", self.folder, error.strerror)

    def _write(self, line: bytes) -> None:
        path = self._path
        if path is None or not path.exists() or self._is_full(path, len(line)):
            self._opened_files += 1
            name = f"{PREFIX}{int(self._clock() * 1000):015d}-{os.getpid()}-{self._opened_files}{SUFFIX}"
            path = self._path = self.folder / name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, PRIVATE)
        with os.fdopen(file, "ab") as opened:
            opened.write(line)

    def _is_full(self, path: Path, more: int) -> bool:
        largest = min(LARGEST, self.most_bytes // FILES)
        return path.stat().st_size + more > largest or self._age(path) > self.most_seconds / FILES

    def _age(self, path: Path) -> float:  # of its first line, whose time the name has
        return self._clock() - int(path.name.removeprefix(PREFIX).partition("-")[0]) / 1000

    def _expire(self, more: int) -> None:
        files = sorted(
            path
            for path in self.folder.glob(f"{PREFIX}*{SUFFIX}")
            if path.name[len(PREFIX) :].split("-")[0].isdecimal()
        )
        sizes = {path: path.lstat().st_size for path in files}
        for path in files:
            if self._age(path) >= self.most_seconds or sum(sizes.values()) + more > self.most_bytes:
                path.unlink(missing_ok=True)
                del sizes[path]

    def _error(self, why: str | None) -> UserError:
        where, do = f"record-to {self.folder}", "name a folder that the server can write, or leave it out"
        return UserError(f"chats cannot be recorded there ({why})", where=where, do=do)


def _line(body: ChatRequest, answer: PendingAnswer) -> str | None:
    # One line of JSON; None where the chat is not recorded.
    request = answer.request
    if body.store is False or request is None or request.finish_reason is None or request.failure is not None:
        return None
    if body.tools or body.forms or any(map(_is_call, body.messages)):
        return None
    asked: dict[str, object] = {"messages": [{"role": one.role, "content": one.text} for one in body.messages]}
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if variables:
        asked["chat_template_kwargs"] = variables
    choice = {"message": {"role": "assistant", "content": answer.text}, "finish_reason": request.finish_reason}
    return json.dumps({"request": asked, "response": {"choices": [choice]}}, ensure_ascii=False)


def _is_call(message: ChatMessage) -> bool:
    return bool(message.tool_calls) or message.role == "tool"
