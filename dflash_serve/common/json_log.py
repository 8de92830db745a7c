"""Logs of one JSON object a line: time, level, logger and message, and the traceback where there is one."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """A record as one line. An engine finds it by its name in `logging_config`."""

    def format(self, record: logging.LogRecord) -> str:
        """Keys in this order; times in UTC."""
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
    """A remark of ours as a line of a log in that form, `text` or `json`."""
    if form == "text":
        return f"dflash-serve: {text}"
    return JsonFormatter().format(logging.LogRecord("dflash_serve", logging.INFO, "", 0, text, None, None))


def logging_config(*loggers: str) -> str:
    """What `logging.config.dictConfig` takes, as JSON: everything to stderr by `JsonFormatter`.

    Args:
        loggers: names of loggers that an engine would otherwise keep from the root's handler.
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
