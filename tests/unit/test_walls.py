"""Who may import whom (docs/architecture.md), read from the source by `tests/house.py`: no exemption, no circle."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import ROOT, House, Module

HOUSE = House()
BACKENDS = {path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists()}
SPECULATION = "dflash_serve.speculation"
WIDTH_OFF = {"DFLASH_SERVE_SPECULATION__WIDTH": "off"}


def top(name: str) -> str:
    return name.partition(".")[0]


def is_verb(name: str) -> bool:
    return name == "dflash_serve.cli" or name.startswith("dflash_serve.cli.")


def violations(inside: Callable[[str], bool], allowed: Callable[[str], bool]) -> list[str]:
    """Imports of ours, from modules inside, of what is not allowed; names in strings count as imports."""
    ours = {"dflash_serve", "dflash_engines", *BACKENDS}
    return [
        f"{module.name} imports {name}"
        for module in HOUSE.modules.values()
        if inside(module.name)
        for name in (*module.imports, *module.named)
        if top(name) in ours and not allowed(name)
    ]


def test_the_core_never_looks_up_and_its_rooms_know_no_verb() -> None:
    """Verbs included: backends and the build's verb are found by their entry points."""
    assert violations(lambda name: top(name) == "dflash_serve", lambda name: top(name) == "dflash_serve") == []

    def room(name: str) -> bool:
        return top(name) == "dflash_serve" and not is_verb(name) and name != "dflash_serve.__main__"

    assert violations(room, room) == []


def test_a_module_that_is_named_in_a_command_counts_as_imported(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(
        '''"""See dflash_serve.cli.main."""\nRUN = ("-c", "from dflash_serve.cli.doctor import doctor; doctor()")\n'''
    )
    assert [*Module("room", tmp_path / "room.py").named] == ["dflash_serve.cli.doctor"]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_never_looks_sideways(backend: str) -> None:
    def allowed(name: str) -> bool:
        return top(name) in (backend, "dflash_serve") and not is_verb(name)

    assert violations(lambda name: top(name) == backend, allowed) == []


def test_engines_look_only_to_the_core() -> None:
    def allowed(name: str) -> bool:
        return top(name) in ("dflash_engines", "dflash_serve") and not is_verb(name)

    assert violations(lambda name: top(name) == "dflash_engines", allowed) == []


def test_no_module_reaches_a_package_of_ours_by_a_constructed_name() -> None:
    """Lazy exports and optional packages of others are imported by name; ours are not."""
    found = [
        f"{module.name}: {line.strip()}"
        for module in HOUSE.modules.values()
        for line in module.text.splitlines()
        if "import_module(f" in line and module.name not in ("dflash_serve", "dflash_tensorrt_llm.plugin")
    ]
    assert found == []


def test_speculation_imports_nothing_of_ours_but_itself() -> None:
    assert violations(lambda name: name.startswith(SPECULATION), lambda name: name.startswith(SPECULATION)) == []


def test_there_is_no_circle_type_hints_counted() -> None:
    assert HOUSE.circles == []


def test_no_two_public_classes_of_one_package_have_one_name() -> None:
    assert HOUSE.homonyms == {}


def test_files_have_500_lines_at_most_and_functions_60() -> None:
    assert {m.name: m.lines for m in HOUSE.modules.values() if m.lines > 500} == {}
    long = {f"{m.name}.{name}": n for m in HOUSE.modules.values() for name, n in m.functions if n > 60}
    assert long == {}


@pytest.mark.parametrize(
    "module", ["dflash_serve", "dflash_serve.cli.main", "dflash_serve.deployment.layers", "dflash_torch"]
)
def test_importing_costs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", [("--help",), ("--version",)])
def test_the_command_line_answers_at_once(words: tuple[str, ...]) -> None:
    """No verb is imported, and none of the libraries that take longest to import."""
    code = f"import sys; sys.argv = ['dflash-serve', *{words}]\nfrom dflash_serve.cli.main import app\n"
    code += "try:\n    app()\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert {"pydantic", "rich", "yaml", "numpy", "dflash_serve.cli.options"} & imported == set()


def test_the_help_of_serve_reads_no_model_of_a_deployment() -> None:
    """typer brings pydantic; what takes long is to make our models of it, and every verb would pay for it."""
    code = "import sys; sys.argv = ['dflash-serve', 'serve', '--help']\nfrom dflash_serve.cli.main import app\n"
    code += "try:\n    app()\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert {"yaml", "rich", "numpy", "dflash_serve.common.settings"} & imported == set()
    assert {name for name in imported if name.startswith("dflash_serve.deployment.")} == set()


def test_completion_knows_verbs_and_their_options(tmp_path: Path) -> None:
    words = {
        "": ("serve", "certify", "build"),
        "serve --dr": ("--dry-run",),
        "top --u": ("--url",),
        "ins": ("inspect",),
    }
    for typed, expected in words.items():
        line = f"dflash-serve {typed}"
        place = str(len(line.split()) - (0 if line.endswith(" ") else 1))
        asked = {"_DFLASH_SERVE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": place}
        command = [sys.executable, "-m", "dflash_serve"]
        done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
        assert (set(expected) <= set(done.stdout.split()), done.stderr) == (True, ""), (typed, done.stdout)


def test_variables_are_read_by_pydantic_settings_where_one_is_set_alone() -> None:
    code = "import sys; from dflash_serve.deployment.layers import load_deployment as load\n"
    code += "load(None, {'target': {'model': 'smollm2'}}); sys.exit('pydantic_settings' in sys.modules)"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_SERVE_")}
    done = [subprocess.run([sys.executable, "-c", code], env={**bare, **more}, check=False) for more in ({}, WIDTH_OFF)]
    assert [one.returncode for one in done] == [0, 1]


def test_every_public_name_can_be_imported() -> None:
    import dflash_serve

    assert [name for name in dflash_serve.__all__ if getattr(dflash_serve, name).__name__ != name] == []


def test_nothing_unpickles_or_trusts_remote_code() -> None:
    forbidden = ("pickle", "dill")
    found = [f"{m.name} imports {name}" for m in HOUSE.modules.values() for name in m.imports if top(name) in forbidden]
    found += [m.name for m in HOUSE.modules.values() if "trust_remote_code=True" in m.text]
    assert found == []
