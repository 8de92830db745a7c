"""min_p is dropped in speculative steps. Exit code 1: it is; 0: it is applied.

Needs the sglang wheel, no GPU, no network.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional


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


build = take("srt/speculative/dflash_utils.py", "build_speculative_verify_target_probs", F=functional)

# Two requests, two verified slots each, four tokens. min_p = 0.5 keeps what has half the best token's probability.
probs = torch.tensor([0.6, 0.35, 0.04, 0.01])
asked = SimpleNamespace(
    temperatures=torch.ones(2, 1),
    top_ks=torch.full((2,), 4, dtype=torch.int32),
    top_ps=torch.ones(2),
    min_ps=torch.tensor([0.5, 0.0]),
    need_top_k_sampling=False,
    need_top_p_sampling=False,
    need_min_p_sampling=True,
)
found = build["build_speculative_verify_target_probs"](
    next_token_logits=probs.log().repeat(4, 1), sampling_info=asked, draft_token_num=2, bs=2
)
kept = probs * (probs >= 0.3)
wanted = torch.stack([(kept / kept.sum()).repeat(2, 1), probs.repeat(2, 1)])
print("request with min_p=0.5:", found[0, 0].tolist())
print("without speculation:   ", wanted[0, 0].tolist())
if torch.allclose(found, wanted, atol=1e-6):
    print("mended: the verified distribution respects min_p")
    sys.exit(0)
assert torch.allclose(found, probs.expand(2, 2, 4), atol=1e-6), "neither with nor without min_p"
print("fault: the verified distribution ignores min_p")
sys.exit(1)
