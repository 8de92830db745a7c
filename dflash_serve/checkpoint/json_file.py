"""Reads the JSON files of a checkpoint, with one set of complaints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_serve.errors import Problem, raise_problems


def read_object(path: Path, problems: list[Problem], *, kind: str = "drafter") -> Mapping[str, object] | None:
    """The object in a JSON file; None, and a problem added, where there is none.

    Args:
        path: the file.
        problems: added to.
        kind: what the file describes, for the messages: `drafter` or `target`.
    """
    again = f"download the {kind} again"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(Problem(f"no {path.name}", str(path.parent), f"give a {kind}'s folder"))
    except (ValueError, OSError) as error:
        problems.append(Problem(f"not valid JSON ({error})", str(path), again))
    else:
        if isinstance(raw, dict):
            return raw
        problems.append(Problem("not a JSON object", str(path), again))
    return None


def load_object(path: Path, *, kind: str = "drafter") -> Mapping[str, object]:
    """The object in a JSON file; `kind` as for `read_object`.

    Raises:
        UserError: there is none.
    """
    problems: list[Problem] = []
    found = read_object(path, problems, kind=kind)
    raise_problems(problems)
    assert found is not None
    return found
