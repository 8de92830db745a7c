"""A logger that prints."""

from __future__ import annotations

import sys


class Logger:
    def info(self, line: str) -> None:
        print(line, file=sys.stderr)


logger = Logger()
