"""The process of `examiner.examine_apart`: an examination described on stdin; an error is one line and exit code 2."""

from __future__ import annotations

import sys

from dflash_serve.doctor.examiner import examine_job
from dflash_serve.errors import UserError

if __name__ == "__main__":
    try:
        examine_job(sys.stdin.read())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
