"""DFlash drops the last block of every reused prefix. Exit code 1: it does; 0: it does not.

Needs the vllm wheel, no GPU, no network.
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


config = "config/speculative.py", "SpeculativeConfig.use_eagle_block_drop", "SpeculativeConfig.use_eagle"
utils = take(
    "v1/core/kv_cache_utils.py",
    "_annotate_eagle_groups",
    "_uses_trailing_mtp_layers",
    iter_layer_specs=lambda spec: [spec],
    next=next,
)
coordinator = take(
    "v1/core/kv_cache_coordinator.py", "KVCacheCoordinator.__init__", BlockPool=MagicMock(), logger=MagicMock()
)


def dropping(method: str) -> list[str]:
    """Groups of which a reused prefix loses its last block; the drafter's layer is the last one."""
    speculation = SimpleNamespace(method=method, disable_eagle_block_drop=False)
    methods = take(*config)
    for name in ("use_eagle", "use_eagle_block_drop"):
        setattr(speculation, name, lambda name=name: methods[name](speculation))
    layers = {"target attention": "full", "target mamba": "mamba", "draft attention": "full"}
    spec = {name: SimpleNamespace(block_size=16, kind=kind) for name, kind in layers.items()}
    groups = [SimpleNamespace(layer_names=[name], kv_cache_spec=spec[name], is_eagle_group=False) for name in spec]
    vllm_config = SimpleNamespace(speculative_config=speculation, model_config=None)
    trailing = utils["_uses_trailing_mtp_layers"](vllm_config)
    utils["_annotate_eagle_groups"](vllm_config, spec, groups, use_trailing_layer_fallback=trailing)
    cache = MagicMock()
    given = SimpleNamespace(kv_cache_groups=groups, num_blocks=8)
    with contextlib.suppress(NameError):  # the groups are known by then; the rest needs the managers
        coordinator["__init__"](
            cache,
            given,
            64,
            64,
            use_eagle=speculation.use_eagle_block_drop(),
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=16,
            hash_block_size=16,
        )
    return [groups[i].layer_names[0] for i in sorted(cache.eagle_group_ids)]


assert dropping("mtp") == ["draft attention"], dropping("mtp")
assert dropping("ngram") == []
found = dropping("dflash")
print("groups that lose the last block of a reused prefix, mtp:", dropping("mtp"), "- dflash:", found)
if not found or found == ["draft attention"]:
    print("mended: the target's groups keep it")
    sys.exit(0)
print("fault: with dflash every group is treated as the drafter's, Mamba's and the target's included")
sys.exit(1)
