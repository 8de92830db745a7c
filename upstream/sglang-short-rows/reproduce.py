"""A request at the end of its context writes into another one's row. Exit code 1: it does; 0: rows are long enough.

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


BLOCK, CONTEXT = 16, 64
algorithm = SimpleNamespace(is_uno=lambda: False, has_draft_kv=lambda: True, is_dflash_family=lambda: True)
# The sizing functions import this one by its name.
sys.modules["sglang.srt.speculative.spec_info"] = SimpleNamespace(
    SpeculativeAlgorithm=MagicMock(from_string=lambda _: algorithm)
)
spec = SimpleNamespace(speculative_algorithm="DFLASH", speculative_num_steps=1, speculative_eagle_topk=1)
sizing = take(
    "srt/mem_cache/allocation_sizing.py",
    "get_req_to_token_extra_context_len",
    "get_alloc_reserve_per_decode",
    get_spec=lambda: spec,
    get_alloc_page_size=lambda: 1,
    max_speculative_num_draft_tokens=lambda: BLOCK,
)
width = CONTEXT + sizing["get_req_to_token_extra_context_len"]()
reserve = sizing["get_alloc_reserve_per_decode"]()
assert reserve == 2 * BLOCK, reserve  # as DFlashDraftInputV2.prepare_for_decode reserves

table = torch.zeros(2, width, dtype=torch.long)  # req_to_token, the row of each request
committed = CONTEXT - 1
table.view(-1)[committed : committed + reserve] = 1  # request 0 reserves its next entries
spilled = int(table[1].sum())
print(f"pages of one token, blocks of {BLOCK}: rows have {width - CONTEXT} entries beyond the context, a step reserves")
print(f"{reserve}; entries of request 0 in the row of request 1: {spilled}")
if spilled == 0:
    print("mended: the row holds what a step reserves")
    sys.exit(0)
print("fault: the other request reads K/V of this one, and these entries are never freed")
sys.exit(1)
