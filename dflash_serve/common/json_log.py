"""Logs with one JSON object per line: time, level, logger, message, and the traceback if there is one."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


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


def remark(text: str, form: str) -> str:
    """A remark of ours as a log line in the given form, `text` or `json`."""
    if form == "text":
        return f"dflash-serve: {text}"
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
