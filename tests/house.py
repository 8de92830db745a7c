"""The house in figures: `python tests/house.py [ROOT]`, and `--request` for what one request reaches (needs torch).

Product files are those of dflash_serve, backends and engines. An import counts wherever it stands: at the top, inside a
function, or under TYPE_CHECKING. A package's `__init__` counts as a module where it holds code.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOMES = ("dflash_serve", "backends", "engines")


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    """As it is imported: dflash_serve.checkpoint.reader."""
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def functions(self) -> Iterator[tuple[str, int]]:
        """Name and length of every function, from `def` to its last line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                yield node.name, node.end_lineno - node.lineno + 1

    @property
    def imports(self) -> Iterator[str]:
        """Absolute names of all it imports: modules, and names in them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    @property
    def named(self) -> Iterator[str]:
        """Dotted names of ours in its strings, docstrings left out: commands, and imports by name."""
        bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        said = {
            id(statement.value)
            for node in ast.walk(self.tree)
            if isinstance(node, bodies)
            for statement in node.body
            if isinstance(statement, ast.Expr)  # a docstring, of a name, too
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                yield from re.findall(r"\bdflash_\w+(?:\.\w+)+", node.value)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class House:
    """All modules of a checkout and who imports whom."""

    root: Path = ROOT

    @cached_property
    def modules(self) -> dict[str, Module]:
        tracked = subprocess.run(
            [
                "git",
                "ls-files",
                "--cached",
                "--others",
                "--exclude-standard",
                "--",
                *(f"{home}/*.py" for home in HOMES),
            ],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        found = {}
        for line in tracked.stdout.splitlines():
            path = self.root / line
            parts = list(Path(line).with_suffix("").parts)
            name = ".".join(parts if parts[0] == "dflash_serve" else parts[1:]).removesuffix(".__init__")
            if path.is_file():
                found[name] = Module(name, path)
        return found

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """Module -> the modules of ours that it imports; a name imported from a package's module is that module."""
        arrows: dict[str, set[str]] = {}
        for module in self.modules.values():
            named = [name for name in module.imports if name in self.modules]
            # `from package import module` names both; the package itself counts where only its own names are taken.
            inner = {
                name for name in named if not any(other != name and other.startswith(name + ".") for other in named)
            }
            arrows[module.name] = inner - {module.name}
        return arrows

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, targets in self.arrows.items():
            for target in targets:
                found[target].add(name)
        return found

    @cached_property
    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, however far around (Tarjan's algorithm)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for target in sorted(self.arrows[name]):
                if target not in index:
                    visit(target)
                    low[name] = min(low[name], low[target])
                elif target in stack:
                    low[name] = min(low[name], index[target])
            if low[name] == index[name]:
                group = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(group) > 1:
                    found.append(sorted(group))

        for name in sorted(self.modules):
            if name not in index:
                visit(name)
        return found

    @cached_property
    def longest_chain(self) -> list[str]:
        """The longest way along arrows; a circle is walked into once."""
        best: dict[str, list[str]] = {}

        def chain(name: str, above: frozenset[str]) -> list[str]:
            if name not in best:
                ways = [chain(target, above | {name}) for target in self.arrows[name] - above - {name}]
                best[name] = [name, *max(ways, key=len, default=[])]
            return best[name]

        return max((chain(name, frozenset()) for name in self.modules), key=len)

    @property
    def homonyms(self) -> dict[str, list[str]]:
        """Public classes of one name in one top package -> where they are."""
        found: dict[tuple[str, str], list[str]] = {}
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    top = module.name.partition(".")[0]
                    found.setdefault((top, node.name), []).append(module.name)
        return {f"{top}: {name}": places for (top, name), places in found.items() if len(places) > 1}

    def figures(self) -> Iterator[tuple[str, str]]:
        """What is printed."""
        lines = {name: module.lines for name, module in self.modules.items()}
        longest = max(lines, key=lambda name: lines[name])
        functions = {
            (module.name, name): length for module in self.modules.values() for name, length in module.functions
        }
        worst = max(functions, key=lambda key: functions[key])
        single = [name for name, importers in self.importers.items() if len(importers) == 1]
        own = [name for name in single if next(iter(self.importers[name])).startswith(name.rpartition(".")[0])]
        yield "files", str(len(lines))
        yield "lines", str(sum(lines.values()))
        yield "file, median", f"{statistics.median(lines.values()):g} lines"
        yield "file, longest", f"{lines[longest]} lines ({longest})"
        yield "files over 500 lines", str(sum(length > 500 for length in lines.values()))
        yield "function, median", f"{statistics.median(functions.values()):g} lines"
        yield "function, longest", f"{functions[worst]} lines ({worst[0]}.{worst[1]})"
        yield "functions over 60 lines", str(sum(length > 60 for length in functions.values()))
        yield "modules with one importer", f"{len(single)} ({len(own)} of them in its own package)"
        small = [name for name in own if lines[name] < 40]
        yield "  of these under 40 lines", f"{len(small)} {' '.join(sorted(small))}".strip()
        yield "longest import chain", f"{len(self.longest_chain)} modules"
        yield "circles", str(len(self.circles)) + "".join(f"\n    {' '.join(group)}" for group in self.circles)
        yield (
            "classes of one name in one package",
            str(len(self.homonyms))
            + "".join(f"\n    {name}: {' '.join(places)}" for name, places in sorted(self.homonyms.items())),
        )


def main() -> None:
    """Prints the figures of a checkout."""
    roots = [word for word in sys.argv[1:] if word != "--request"]
    for name, value in House(Path(roots[0]).resolve() if roots else ROOT).figures():
        print(f"{name:36} {value}")
    if "--request" in sys.argv:
        command = [sys.executable, "-m", "tests.support.modules_reached"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        print(f"{'modules reached by one request':36} {done.stdout.splitlines()[-1]}")


if __name__ == "__main__":
    main()
