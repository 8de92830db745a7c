"""Imports of the two halves of the backend: the adapter needs no SGLang, and neither half needs torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import dflash_sglang.plugin

PLUGIN = Path(dflash_sglang.plugin.__file__).parent
ROOT = Path(__file__).parents[3]


def test_the_adapter_needs_neither_sglang_nor_the_plug_in() -> None:
    for path in PLUGIN.parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [node for node in imported if (node.module or "").startswith(("sglang", "plugin"))], path.name


def test_importing_either_half_needs_neither_torch_nor_sglang() -> None:
    heavy = "{'torch', 'sglang', 'transformers'}"
    code = f"import sys, dflash_sglang.plugin; sys.exit(bool({heavy} & set(sys.modules)))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": path}).returncode == 0
