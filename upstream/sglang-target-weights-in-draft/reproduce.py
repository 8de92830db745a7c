"""A weight update of the target overwrites the DFLASH draft. Exit code 1: it does; 0: it does not.

Needs the sglang wheel, no GPU, no network.
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
load_weights = take("srt/models/dflash.py", "DFlashDraftModel.load_weights", **copied)["load_weights"]
UPDATER, manager = "srt/managers/scheduler_components/weight_updater.py", "SchedulerWeightUpdaterManager"
message = lambda **fields: SimpleNamespace(**fields)  # noqa: E731 - the reply, as the manager fills it
methods = take(
    UPDATER,
    f"{manager}.update_weights_from_tensor",
    f"{manager}._select_runners",
    UpdateWeightsFromTensorReqOutput=message,
    msgspec=MagicMock(),
    logger=MagicMock(),
)


def flag(file: str, name: str) -> dict[str, bool]:
    """A true or false that a worker's class states in its body, if it does."""
    (root,) = find_spec("sglang").submodule_search_locations
    return {
        target.id: node.value.value
        for part in ast.parse((Path(root) / file).read_text()).body
        if getattr(part, "name", None) == name
        for node in part.body
        if isinstance(node, ast.Assign) and isinstance(getattr(node.value, "value", None), bool)
        for target in node.targets
    }


# Names as in published checkpoints: the target's layers have the prefix "model.", the draft's have none.
parameters = {"layers.0.mlp.down_proj.weight": torch.nn.Parameter(torch.ones(2, 2))}
draft = SimpleNamespace(named_parameters=lambda: parameters.items(), projector_type=None, is_nemotron_35_draft=False)
updates: list[str] = []


class Updater:
    """A model runner's updater; `load` is the model's own `load_weights`."""

    def __init__(self, role: str, load: object) -> None:
        self.role, self.load = role, load

    def update_weights_from_tensor(self, named_tensors: list, load_format: str | None) -> tuple[bool, str]:
        updates.append(self.role)
        self.load(named_tensors)
        return True, "Success"


target_runner = SimpleNamespace(weight_updater=Updater("target", lambda _: None))
draft_runner = SimpleNamespace(weight_updater=Updater("draft", lambda given: load_weights(draft, given)))
flags = flag("srt/speculative/base_spec_worker.py", "BaseSpecWorker") | flag(
    "srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2"
)
worker = SimpleNamespace(**flags, weight_update_runners=lambda: [("draft", draft_runner)])
updater = MagicMock(draft_worker=worker)
updater.tp_worker.weight_update_runners = lambda: [("target", target_runner)]
updater.tp_worker.deserialize_own_rank = lambda _: [("model.layers.0.mlp.down_proj.weight", torch.full((2, 2), 7.0))]
updater.flush_cache_after_weight_update = lambda _, success, text: (success, text)
updater._select_runners = lambda selector="all": methods["_select_runners"](updater, selector)
torch.distributed.barrier = lambda **_: None
told = methods["update_weights_from_tensor"](updater, MagicMock(selector="all", load_format=None))
assert told.success is True, told
assert "target" in updates, updates
found = parameters["layers.0.mlp.down_proj.weight"].detach().unique().tolist()
print("update of the target's layer 0 to 7.0, default selector: runners", updates, "- the draft's layer 0 is", found)
if found == [1.0]:
    print("mended: the draft keeps its weights")
    sys.exit(0)
assert found == [7.0]
print("fault: the draft's layer has the target's weights")
sys.exit(1)
