"""A miss of the drafter's K/V vetoes an external prefix hit. Exit code 1: it does; 0: it does not.

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


CHUNK = 16
lookup = take(
    "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
    "OffloadingConnectorScheduler._lookup_complete_chunks",
    logger=MagicMock(),
    cdiv=lambda a, b: -(-a // b),
    round_down=lambda a, b: a // b * b,
)["_lookup_complete_chunks"]


def hits(target_chunks: int, drafter_chunks: int) -> int:
    """Tokens that are loaded of a prompt of six chunks, where the store has that many chunks of each group."""
    stored = (target_chunks, drafter_chunks)
    groups = [
        SimpleNamespace(
            group_idx=index,
            tokens_per_chunk=CHUNK,
            is_eagle_group=bool(index),
            sliding_window_size_in_chunks=None,
            load_window_size_in_chunks=lambda _: None,
        )
        for index in (0, 1)
    ]
    scheduler = MagicMock(_sliding_window_groups=(), _lookup_groups=(0, 1), _chunks_being_loaded=None)
    scheduler.config.kv_group_configs = groups
    scheduler._maximal_prefix_lookup = lambda keys, _, __, group, start: min(len(keys), stored[group.group_idx])
    state = SimpleNamespace(offload_keys=[object()] * 6)
    request = MagicMock(num_locally_computed_tokens=0, max_load_tokens=None, group_states=[state, state])
    request.req.num_tokens = 6 * CHUNK
    return lookup(scheduler, request)


assert hits(6, 6) > 0, "the lookup has another form by now"
found = hits(6, 0)
print("chunks in the store, target 6, drafter 6:", hits(6, 6), "tokens loaded; target 6, drafter 0:", found)
if found > 0:
    print("mended: the target's hit counts")
    sys.exit(0)
print("fault: none of the target's stored K/V is used, since the drafter's is absent")
sys.exit(1)
