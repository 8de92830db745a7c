"""Prompts for a drafter of code: signatures and docstrings of the functions of installed packages, as JSONL.

    python examples/function_stubs.py FILE.jsonl numpy scipy torch ...

One {"prompt": stub} a line; a training recipe puts them into a sentence (`templates`). Tests, private functions and
those with long or no docstrings are left out. Mind the packages' licences: the stubs are theirs.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

MOST = 2800
SHORTEST, LONGEST = 40, 450
"""Characters of a docstring."""
WIDEST = 160
"""Characters of a signature."""
HEADS = ("", "", "from typing import List\n\n\n", "import math\n\n\n", "from typing import List, Tuple\n\n\n")
"""What stands above a stub, in turn."""


def stubs_of(package: str) -> Iterator[tuple[str, str]]:
    """Names and stubs of a package's public functions and methods."""
    spec = find_spec(package)
    roots = [] if spec is None else spec.submodule_search_locations or []
    for path in sorted(found for root in roots for found in Path(root).rglob("*.py")):
        if any(part.startswith("test") for part in path.parts[-3:]):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                stub = stub_of(node)
                if stub is not None:
                    yield node.name, stub


def stub_of(function: ast.FunctionDef) -> str | None:
    """Signature and docstring, without `self` and decorators; None where it has no docstring of a good length."""
    written = ast.get_docstring(function)
    arguments = function.args.args
    if written is None or not SHORTEST <= len(written) <= LONGEST or not 1 <= len(arguments) <= 5:
        return None
    if arguments[0].arg in ("self", "cls"):
        arguments.pop(0)
    function.decorator_list, function.body = [], [ast.Pass()]
    signature = ast.unparse(function).split("\n")[0]
    indented = written.replace("\n", "\n    ")
    return f'{signature}\n    """\n    {indented}\n    """\n' if len(signature) <= WIDEST else None


def main(output: Path, packages: list[str]) -> None:
    """Writes a random choice, one of each name."""
    found: dict[str, str] = {}
    for package in packages:
        for name, stub in stubs_of(package):
            found.setdefault(name, stub)
    stubs = list(found.values())
    random.Random(7).shuffle(stubs)
    lines = (json.dumps({"prompt": HEADS[number % len(HEADS)] + stub}) for number, stub in enumerate(stubs[:MOST]))
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
