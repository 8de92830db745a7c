"""Commands that run long: however they end, what is finished stays on disk, and how to go on is said."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_serve.common.journal import Journal
from dflash_serve.common.processes import sigterm_interrupts


@contextmanager
def resumable(output: Path, belongs_to: dict[str, Any], what: str, *, resume: bool) -> Iterator[Journal]:
    """The journal beside a command's output; it is gone once the block has ended well.

    Args:
        belongs_to: the settings that its entries hold for.
        what: what the message calls its entries: `finished answers`.
        resume: go on with the one that is there.

    Raises:
        UserError: as `Journal` raises it.
    """

    journal = Journal(output.with_name(output.name + ".partial.jsonl"), belongs_to, resume=resume)
    try:
        with sigterm_interrupts():
            yield journal
    except BaseException:
        journal.close(remove=not journal.entries)
        if journal.entries:
            again = shlex.join(["dflash-serve", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            print(f"{len(journal.entries)} {what} are kept in {journal.path}; go on with: {again}", file=sys.stderr)
        raise
    journal.close(remove=True)
