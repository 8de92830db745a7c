"""A DFlash draft without one of its tensors loads. Exit code 1: it does; 0: it is refused.

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


class Loader:
    """Stands in for AutoWeightsLoader: loads what there is, and returns the names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def load_weights(self, weights: object, mapper: object = None) -> set[str]:
        names = {name for name, _ in weights}
        assert names <= {name for name, _ in self.model.named_parameters()}, names
        return names


draft = take(
    "model_executor/models/qwen3_dflash.py",
    "DFlashQwen3ForCausalLM.load_weights",
    AutoWeightsLoader=Loader,
    WeightsMapper=MagicMock(),
    process_eagle_weight=lambda *_: None,
)["load_weights"]
default = take(
    "model_executor/model_loader/default_loader.py",
    "DefaultModelLoader.load_weights",
    "DefaultModelLoader.track_weights_loading",
    instrument=lambda **_: lambda f: f,
    logger=MagicMock(),
    time=MagicMock(),
    BaseKVCacheMethod=type(None),
    get_quant_config=None,
    torchao_version_at_least=None,
)


class Draft(torch.nn.Module):
    """A draft's parameters; the embedding and the head are the target's, as in published drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = torch.nn.Module(), torch.nn.Linear(2, 4, bias=False)
        self.model.fc, self.model.norm = torch.nn.Linear(2, 2, bias=False), torch.nn.RMSNorm(2)
        self.model.embed_tokens = torch.nn.Embedding(4, 2)
        self.model.use_aux_hidden_state, self.model.has_separate_mask_embedding = True, False
        self.model._build_fused_kv_buffers = lambda: None
        self.draft_id_to_target_id = self._read_mask_embedding = None

    def load_weights(self, weights: object) -> object:
        self._read_mask_embedding = lambda: None
        return draft(self, weights)


def load(*given: str) -> Exception | None:
    """The error with which a checkpoint of these tensors is refused."""
    loader = MagicMock(enable_weights_track=None)
    loader.get_all_weights = lambda *_: [(name, torch.ones(2)) for name in given]
    loader.track_weights_loading = lambda *a, **k: default["track_weights_loading"](loader, *a, **k)
    try:
        default["load_weights"](loader, Draft(), SimpleNamespace(quantization=None))
    except ValueError as error:
        return error
    return None


assert load("fc.weight", "norm.weight") is None, load("fc.weight", "norm.weight")
absent = load("norm.weight")
print("fc.weight absent:", absent or "loaded, no error; fc is uninitialised memory")
if absent:
    print("mended: a missing tensor is refused")
    sys.exit(0)
print("fault: the draft serves with a parameter that nobody loaded")
sys.exit(1)
