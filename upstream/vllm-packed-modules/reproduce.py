"""Fused layers of a quantised draft get no scheme. Exit code 1: they get none; 0: they do.

Needs the vllm wheel, no GPU, no network.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch


def take(file: str, *wanted: str, **given: object) -> dict:
    """Functions, classes and methods (`Class.method`) of a file of the wheel, with what they use of that file.

    The file's imports are left out, since they take a minute and a GPU's libraries; `given` has what is needed of them.
    """
    (root,) = find_spec("vllm").submodule_search_locations
    known = {}
    for node in ast.parse((Path(root) / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            known |= {f"{node.name}.{one.name}": one for one in node.body if hasattr(one, "decorator_list")}
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            known[getattr(target, "id", getattr(target, "name", None))] = node
    chosen, left = {}, list(wanted)
    while left:
        name = left.pop()
        node = known[name]
        if "." in name:
            node.decorator_list = []
        if name not in chosen:
            chosen[name] = node
            parts = [(one, getattr(one, "annotation", None), getattr(one, "returns", None)) for one in ast.walk(node)]
            hints = {id(name) for _, *hints in parts for hint in hints if hint for name in ast.walk(hint)}
            used = {one.id for one, *_ in parts if isinstance(one, ast.Name) and id(one) not in hints}
            left += sorted(used & known.keys() - given.keys() - chosen.keys())
    future = ast.parse("from __future__ import annotations").body
    body = future + sorted(chosen.values(), key=lambda node: node.lineno)
    names = {"torch": torch, **given}
    exec(compile(ast.Module(body, []), file, "exec"), names)
    return names


# A quantisation config as it is after reading the draft's file: its mapping of fused layers is empty.
quantisation = SimpleNamespace(packed_modules_mapping={}, apply_vllm_mapper=lambda _: None)
vllm_config = SimpleNamespace(
    speculative_config=SimpleNamespace(draft_model_config=MagicMock(architectures=["DFlashDraftModel"])),
    load_config=None,
)
config_class = SimpleNamespace(get_quantization_config=lambda *_: quantisation)
utils = take("model_executor/models/utils.py", "get_draft_quant_config", VllmConfig=config_class)
found = utils["get_draft_quant_config"](vllm_config)
# Or where the draft model takes it over.
(root,) = find_spec("vllm").submodule_search_locations
model = (Path(root) / "model_executor/models/qwen3_dflash.py").read_text()
elsewhere = "packed_modules_mapping" in model or "configure_quant_config" in model
print("packed_modules_mapping of the draft's config:", found.packed_modules_mapping)
if found.packed_modules_mapping or elsewhere:
    print("mended: fused layers are known to the draft's quantisation")
    sys.exit(0)
print("fault: qkv_proj and gate_up_proj of the draft are built without a scheme")
sys.exit(1)
