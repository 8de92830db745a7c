"""Who may import whom (the design's walls), read from the source: cli -> backends, engines -> the core."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = {path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists()}
ENGINES = {"dflash_engines"}
CORE = ROOT / "dflash_serve"


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def violations(folder: Path, forbidden: set[str], *, below: str = "") -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in folder.rglob("*.py")
        if not below or below not in path.parts
        for name in imports(path)
        if any(name == wall or name.startswith(wall + ".") for wall in forbidden)
    ]


def test_the_core_never_looks_up() -> None:
    assert violations(CORE, BACKENDS | ENGINES, below="cli") == []
    assert [v for v in violations(CORE, {"dflash_serve.cli"}) if "dflash_serve/cli/" not in v] == []


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_never_looks_sideways(backend: str) -> None:
    assert violations(ROOT / "backends" / backend, (BACKENDS - {backend}) | ENGINES | {"dflash_serve.cli"}) == []


def test_engines_look_only_to_the_core() -> None:
    assert violations(ROOT / "engines", BACKENDS | {"dflash_serve.cli"}) == []


def test_speculation_imports_nothing_of_ours_but_itself() -> None:
    ours = {f"dflash_serve.{path.stem}" for path in CORE.iterdir()} - {"dflash_serve.speculation"}
    assert violations(CORE / "speculation", ours | BACKENDS | ENGINES) == []


@pytest.mark.parametrize("module", ["dflash_serve", "dflash_serve.cli.main", "dflash_serve.deployment", "dflash_torch"])
def test_importing_costs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_unpickles_or_trusts_remote_code() -> None:
    sources = [path for folder in ("dflash_serve", "backends", "engines") for path in (ROOT / folder).rglob("*.py")]
    found = [f"{path.name} imports {name}" for path in sources for name in imports(path) if name in ("pickle", "dill")]
    found += [path.name for path in sources if "trust_remote_code=True" in path.read_text()]
    assert found == []
