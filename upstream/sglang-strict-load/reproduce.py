"""A DFlash draft with a misnamed tensor loads. Exit code 1: it does; 0: it is refused.

Needs the sglang wheel, no GPU, no network.
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


logging = SimpleNamespace(getLogger=lambda _: None)
copied = {"default_weight_loader": lambda parameter, tensor: parameter.data.copy_(tensor), "logging": logging}
upstream = take("srt/models/dflash.py", "DFlashDraftModel.load_weights", **copied)


def load(*given: str) -> Exception | None:
    """The error with which a checkpoint of these tensors is refused."""
    parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in ("fc.weight", "norm.weight")}
    model = SimpleNamespace(
        named_parameters=lambda: parameters.items(),
        projector_type=None,
        is_nemotron_35_draft=False,
        num_context_features=1,
        config=SimpleNamespace(hidden_size=2),
    )
    try:
        upstream["load_weights"](model, [(name, torch.ones(2, 2)) for name in given])
    except Exception as error:
        return error
    return None


whole = load("fc.weight", "norm.weight", "layers.0.self_attn.rotary_emb.inv_freq")
assert whole is None, whole  # rotary caches are no weights
renamed = load("fc.weight_packed", "norm.weight")
print("fc.weight_packed instead of fc.weight:", renamed or "loaded, no error; fc is random")
absent = load("fc.weight")
print("norm.weight absent:", absent or "loaded, no error")
if renamed and absent:
    print("mended: unknown and missing tensors are refused")
    sys.exit(0)
print("fault: the draft serves with parameters that nobody loaded")
sys.exit(1)
