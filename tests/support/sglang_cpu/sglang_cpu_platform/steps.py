"""Host time and operators of decoding steps, SGLang's own beside ours, measured when a server has started.

The two models' passes are left out: their outputs are those of a first step. What remains is Python, and small
operators, each of which is a launch on a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
OUTPUT = "SGLANG_CPU_STEPS"
"""File to write: {requests: {part: [microseconds, operators]}}."""
REQUESTS, WIDTH, REPETITIONS, CONTEXT = (1, 16, 64), 4, 100, 64
ACCEPTED = 2  # drafts of each block: what the policy learns from


def install() -> None:
    """Does nothing unless the variable names a file."""
    if OUTPUT in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CREATE_WORKER, _measuring, HookType.AROUND)


def _measuring(create: Any, *args: Any) -> Any:
    from dflash_sglang.plugin.worker import WidthWorker

    start = WidthWorker.init_cuda_graphs

    def started(worker: Any) -> None:
        start(worker)
        most = int(worker.model_runner.max_running_requests)
        found = {requests: _of(worker, requests) for requests in REQUESTS if requests <= most}
        Path(os.environ[OUTPUT]).write_text(json.dumps(found))

    setattr(WidthWorker, "init_cuda_graphs", started)  # noqa: B010
    return create(*args)


def _of(worker: Any, requests: int) -> dict[str, list[float]]:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from dflash_sglang.plugin.startup import made_up_batch

    ways: dict[str, Callable[[Any], Any]] = {
        "native": lambda batch: DFlashWorkerV2.forward_batch_generation(worker, batch),
        f"width {WIDTH}": lambda batch: worker._step(batch, WIDTH),
    }
    with made_up_batch(worker, requests, CONTEXT) as batch:
        with _models_left_out(worker):
            found = {name: _measured(batch, step) for name, step in ways.items()}
        decision, result = _policy(worker, batch)
    return {**found, "decision": [decision, 0], "result": [result, 0]}


def _measured(batch: Any, step: Callable[[Any], Any]) -> list[float]:
    """Median time of a step, and its operators."""
    fresh, times = dict(vars(batch)), []
    step(batch)  # its outputs of the models serve all others
    vars(batch).update(fresh)
    with _Operators() as operators:  # type: ignore[no-untyped-call]
        step(batch)
    for _ in range(REPETITIONS):
        vars(batch).update(fresh)
        began = thread_time()
        step(batch)
        times.append(thread_time() - began)
    vars(batch).update(fresh)
    return [1e6 * median(times), operators.count]


def _policy(worker: Any, batch: Any) -> tuple[float, float]:
    """Mean times of a decision before a launch, and of reading a result, the policy's and the metrics' part."""
    from dflash_sglang.plugin.results import RESULTS

    before = after = 0.0
    for _ in range(REPETITIONS):
        began = thread_time()
        width = worker._decided(batch, CONTEXT * len(batch.reqs))
        before += thread_time() - began
        accepted = [min(ACCEPTED, width - 1)] * len(batch.reqs)
        result = SimpleNamespace(speculative_num_draft_tokens=width, num_correct_drafts_per_req_cpu=accepted)
        RESULTS.launched(result, context_tokens=CONTEXT * len(batch.reqs))
        began = thread_time()
        RESULTS.on_result(lambda *_: None, None, batch, result)
        after += thread_time() - began
    return 1e6 * before / REPETITIONS, 1e6 * after / REPETITIONS


class _Operators(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@contextmanager
def _models_left_out(worker: Any) -> Iterator[None]:
    target, drafter = worker.target_worker, worker.draft_model_runner
    verify, draft = target.forward_batch_generation, drafter.forward
    target.forward_batch_generation, drafter.forward = _once(verify), _once(draft)
    try:
        yield
    finally:
        target.forward_batch_generation, drafter.forward = verify, draft


def _once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The first output of each number of rows, again and again; the caller may change what it gets."""
    known: dict[int, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        rows = len((kwargs.get("forward_batch") or args[0]).input_ids)
        if rows not in known:
            output = known[rows] = forward(*args, **kwargs)
            output.logits_output = copy(output.logits_output)
        output = copy(known[rows])
        output.logits_output = copy(output.logits_output)
        return output

    return call
