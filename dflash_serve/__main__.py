"""Entry point of `dflash-serve` and of `python -m dflash_serve`."""

from __future__ import annotations

import sys


def run() -> None:
    """Runs a verb. Ctrl-C ends it with exit code 130 and no traceback, while the verbs are imported (0.4 s) too."""
    try:
        from dflash_serve.cli.main import run as run_verb
    except KeyboardInterrupt:
        print("dflash-serve: interrupted", file=sys.stderr)
        sys.exit(130)
    run_verb()


if __name__ == "__main__":
    run()
