"""Layers are captured in another order than asked. Exit code 1: they are; 0: in that order, or refused.

Needs the vllm wheel, no GPU, no network.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

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


mixin = "EagleModelMixin."
methods = take(
    "model_executor/models/interfaces.py", mixin + "_set_aux_hidden_state_layers", mixin + "_maybe_add_hidden_state"
)


def captured(layers: tuple[int, ...]) -> list[int] | str:
    """Layers whose outputs the draft's `fc` gets, in the order of its columns; each output is the layer's number."""
    model = SimpleNamespace(_cache_aux_pp_layout=lambda: None)
    try:
        methods["_set_aux_hidden_state_layers"](model, layers)
    except ValueError as error:
        return f"refused: {error}"
    states: list[torch.Tensor] = []
    for layer in range(6):
        states = methods["_maybe_add_hidden_state"](model, states, layer, torch.tensor([float(layer)]), None)
    return [int(state) for state in states]


assert captured((1, 3, 5)) == [1, 3, 5]
answers = {asked: captured(asked) for asked in ((5, 1, 3), (1, 3, 3))}
for asked, found in answers.items():
    print("target_layer_ids", list(asked), "- columns of fc:", found)
if all(found == list(asked) or str(found).startswith("refused") for asked, found in answers.items()):
    print("mended: the order that the draft asks for is kept, or refused")
    sys.exit(0)
print("fault: the draft's fc multiplies each layer by the columns of another one")
sys.exit(1)
