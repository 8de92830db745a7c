"""What the two halves of the backend import: the adapter no SGLang, the plug-in nothing that is not looked up first."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import dflash_sglang.plugin
from dflash_sglang import contract

PLUGIN = Path(dflash_sglang.plugin.__file__).parent
ROOT = Path(__file__).parents[3]


def names_imported_from_sglang(folder: Path) -> set[str]:
    """In any file of the folder, wherever in it."""
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")]
    return {f"{node.module}.{name.name}" for node in froms for name in node.names}


def test_every_name_of_sglang_that_is_imported_is_looked_up_first() -> None:
    assert (
        names_imported_from_sglang(PLUGIN) - {name.path for name in (*contract.OF_MAIN, *contract.OF_SCHEDULER)}
        == set()
    )


def test_the_adapter_needs_neither_sglang_nor_the_plug_in() -> None:
    assert names_imported_from_sglang(PLUGIN.parent) == set()
    assert [path.name for path in PLUGIN.parent.glob("*.py") if "from .plugin" in path.read_text()] == []


def test_a_name_that_has_gone_changed_or_gives_another_tuple_is_a_breach() -> None:
    assert contract.Foreign("os.path.join").breach() is None
    assert contract.Foreign("os.path.gone").breach() == "os.path.gone is gone (AttributeError)"
    assert contract.Foreign("json.dumps", ("obj", "colour")).breach() == "json.dumps takes no colour"
    assert contract.Foreign("ast.walk", returns=5).breach() == "ast.walk no longer returns 5 values"


def test_importing_either_half_needs_neither_torch_nor_sglang() -> None:
    heavy = "{'torch', 'sglang', 'transformers'}"
    code = f"import sys, dflash_sglang.plugin; sys.exit(bool({heavy} & set(sys.modules)))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": path}).returncode == 0
