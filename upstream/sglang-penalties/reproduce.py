"""Penalties never see the tokens of DFLASH steps. Exit code 1: they do not; 0: they do.

Needs the sglang wheel, no GPU, no network.
"""

import ast
import contextlib
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
    (root,) = find_spec("sglang").submodule_search_locations
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


# The preparation of a decoding step of a request with a penalty; the K/V bookkeeping is a mock.
off = SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False))
counted: list[str] = []
batch = MagicMock()
batch.spec_algorithm.is_dflash_family.return_value = True
batch.sampling_info.penalizer_orchestrator.is_required = True
batch.cumulate_penalty_output_tokens = lambda: counted.append("before the step")
take("srt/speculative/spec_utils.py", "spec_prepare_for_decode", get_exec=lambda: off)["spec_prepare_for_decode"](batch)
assert batch.spec_info.prepare_for_decode.called

# The same request in an EAGLE step, which stops at the allocator that is not here.
eagle = take("srt/speculative/eagle_utils.py", "eagle_prepare_for_decode")
eagle_counted: list[str] = []
batch.cumulate_penalty_output_tokens = lambda: eagle_counted.append("before the step")
with contextlib.suppress(NameError):
    eagle["eagle_prepare_for_decode"](batch)
assert eagle_counted, "EAGLE counts elsewhere by now"

# Or anywhere else on DFLASH's way.
(root,) = find_spec("sglang").submodule_search_locations
for file in sorted((Path(root) / "srt/speculative").glob("dflash*.py")):
    if "cumulate" in file.read_text():
        counted.append(file.name)
print("tokens are counted for penalties, EAGLE:", *eagle_counted, "- DFLASH:", *(counted or ["nowhere"]))
if counted:
    print("mended: the tokens of DFLASH steps are counted")
    sys.exit(0)
print("fault: a request is answered as if it had no penalty")
sys.exit(1)
