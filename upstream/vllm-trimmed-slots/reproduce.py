"""Drafts that adaptive verification left out count as verified. Exit code 1: they do; 0: they do not.

Needs the vllm wheel, no GPU, no network.
"""

import ast
import contextlib
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
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


K = 7
# One step: 7 drafts were scheduled, 2 of them verified, 1 accepted. `num_rejected` is counted from
# the rows that ran (`post_update`'s logits less the sampled tokens), so the runner knows.
sampler_output = MagicMock(
    sampled_token_ids=torch.arange(K + 1).view(1, -1),
    logprobs_tensors=None,
    num_nans=None,
    sampling_mask_tensors=None,
    num_sampled=torch.tensor([2]),
    num_rejected=torch.tensor([1]),
)
result = take("v1/outputs.py", "ModelRunnerOutput", dataclass=dataclass, field=field)["ModelRunnerOutput"]
AsyncOutput = take(
    "v1/worker/gpu/async_utils.py",
    "AsyncOutput",
    AsyncModelRunnerOutput=object,
    async_copy_to_np=lambda x: x.numpy(),
    stream=lambda *_: contextlib.nullcontext(),
    envs=MagicMock(),
    np=MagicMock(),
)["AsyncOutput"]
torch.cuda.Event = MagicMock
output = AsyncOutput(
    model_runner_output=result(req_ids=["a"], req_id_to_index={"a": 0}),
    sampler_output=sampler_output,
    num_sampled_tokens=sampler_output.num_sampled,
    main_stream=MagicMock(),
    copy_stream=MagicMock(),
    check_ep_fault=False,
    pending_aux_output=None,
).get_output()
assert output.sampled_token_ids == [[0, 1]]

# What the scheduler makes of it.
stats = take("v1/spec_decode/metrics.py", "SpecDecodingStats", dataclass=dataclass, field=field)["SpecDecodingStats"]
methods = take(
    "v1/core/sched/scheduler.py",
    "Scheduler.update_from_output",
    "Scheduler.make_spec_decoding_stats",
    SpecDecodingStats=stats,
    time=MagicMock(),
    logger=MagicMock(),
    defaultdict=MagicMock(),
)
scheduler = MagicMock(num_spec_tokens=K, num_sampled_tokens_per_step=1, log_stats=True, defer_block_free=False)
request = MagicMock(
    num_computed_tokens=100, num_output_placeholders=0, num_stale_output_tokens=0, num_in_flight_tokens=9
)
request.is_finished.return_value = False
scheduler.requests = {"a": request}
counted: list[object] = []


def make(*args: object, **kwargs: object) -> object:
    counted.append(methods["make_spec_decoding_stats"](scheduler, *args, **kwargs))
    raise StopIteration  # the rest of the step is about other things


scheduler.make_spec_decoding_stats = make
scheduled = MagicMock(num_scheduled_tokens={"a": K + 1}, scheduled_spec_decode_tokens={"a": [-1] * K})
scheduled.num_invalid_spec_tokens = None
with contextlib.suppress(StopIteration):
    methods["update_from_output"](scheduler, scheduled, output)
(found,) = counted
assert found.num_accepted_tokens == 1
assert request.num_computed_tokens == 100 - (K - 1)  # the rollback is by what was scheduled, and right
print(
    "scheduled 7, verified 2, accepted 1; counted as drafted:", found.num_draft_tokens, found.num_draft_tokens_per_pos
)
if found.num_draft_tokens == 2:
    print("mended: what was left out is not counted")
    sys.exit(0)
assert found.num_draft_tokens == K
print("fault: an acceptance rate of 1/7 is reported for 1/2")
sys.exit(1)
