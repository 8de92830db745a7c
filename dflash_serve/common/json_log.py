"""Logs with one JSON object per line (time, level, logger, message, traceback), and a stderr that cannot fail."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper

from .terminal import broken


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON. Engines import it by the path in `logging_config`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _Unfailing(TextIOWrapper):
    """A text stream that drops what it cannot write."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:  # the buffer belongs to the stream that this one replaces
        self.flush()


def make_stderr_unfailing() -> None:
    """Lets this process go on where stderr cannot be written (a full disk): notes and errors there are then lost."""
    # A program that runs us and catches stderr keeps its own stream.
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _Unfailing(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def remark(text: str, form: str) -> str:
    """A remark of ours for stderr as a log line in the given form, `text` or `json`."""
    if form == "text":
        return broken(f"dflash-serve: {text}", to=sys.stderr)
    return JsonFormatter().format(logging.LogRecord("dflash_serve", logging.INFO, "", 0, text, None, None))


def logging_config(*loggers: str) -> str:
    """A configuration for `logging.config.dictConfig`, as JSON: all records go to stderr by `JsonFormatter`.

    Args:
        loggers: names of loggers whose records an engine would otherwise not pass to the root's handler.
    """
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{JsonFormatter.__module__}.{JsonFormatter.__name__}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {name: {"level": "INFO", "handlers": [], "propagate": True} for name in loggers},
    }
    return json.dumps(config, indent=1) + "\n"
