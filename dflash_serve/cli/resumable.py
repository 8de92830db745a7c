"""Commands that run long: however they end, what is finished stays on disk, and how to go on is said."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_serve.common.journal import Journal


@contextmanager
def resumable(output: Path, belongs_to: dict[str, Any], what: str, *, resume: bool) -> Iterator[Journal]:
    """The journal beside a command's output; it is gone once the block has ended well.

    Args:
        belongs_to: settings that its entries hold for.
        what: they are called in the message: `finished answers`.
        resume: go on with the one that is there.

    Raises:
        UserError: as `Journal`.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    journal = Journal(output.with_name(output.name + ".partial.jsonl"), belongs_to, resume=resume)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield journal
    except BaseException:
        journal.close(remove=not journal.entries)
        if journal.entries:
            again = shlex.join(["dflash-serve", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            print(f"{len(journal.entries)} {what} are kept in {journal.path}; go on with: {again}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    journal.close(remove=True)
