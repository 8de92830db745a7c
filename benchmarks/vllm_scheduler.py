"""CPU time that our plug-in adds to each step of vLLM: `.venv-vllm/bin/python -m benchmarks.vllm_scheduler`.

vLLM's scheduler and its statistics are stand-ins, so only our code is measured, in microseconds of thread time. Blocks
have 8 slots; drafts are accepted as the bundled drafter's are; requests stay.
"""

from __future__ import annotations

import os
from random import Random
from statistics import mean, quantiles
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from vllm.v1.core.sched.scheduler import Scheduler

from dflash_serve.speculation.costs import CostModel
from dflash_vllm.facts import GUESSED_COSTS
from dflash_vllm.plugin import metrics, scheduler

BLOCK, STEPS = 8, 2000
SURVIVAL = (0.627, 0.347, 0.202, 0.119, 0.093, 0.073, 0.052)
GUESS = CostModel(target={1: 5e-3, 256: 5e-3, 2048: 4e-2}, draft={1: 1e-3, 32: 1e-3, 256: 8e-3})


def begin(host: Any) -> None:
    """Takes the place of `Scheduler.__init__`."""
    host.dynamic_sd_lookup, host.num_spec_tokens, host.vllm_config = [0, BLOCK - 1, 3, 1, 0], BLOCK - 1, None
    host.scheduler_config = SimpleNamespace(async_scheduling=False)


def measure(requests: int) -> tuple[list[float], list[float]]:
    """Microseconds of each step in our scheduler and in our stat logger."""
    random, ids = Random(requests), [f"cmpl-{number:032x}-0" for number in range(requests)]
    ours: Any = scheduler.WidthScheduler()
    ours.running = [SimpleNamespace(request_id=one, num_computed_tokens=1000) for one in ids]
    asked = Mock(method="dflash", num_speculative_tokens=BLOCK - 1, **{"draft_model_config.architectures": []})
    config = Mock(speculative_config=asked)
    logger = metrics.SpeculationMetrics(config, requests)
    choosing, logging, now = [], [], 0.0
    setattr(scheduler, "perf_counter", lambda: now)  # noqa: B010  # not exported
    for _ in range(STEPS):
        begun = thread_time_ns()
        ours.schedule()
        drafted = ours.dynamic_sd_lookup[requests]
        chosen = thread_time_ns()
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(ids, drafted + 1),
            scheduled_spec_decode_tokens=dict.fromkeys(ids, [0] * drafted) if drafted else {},
            scheduled_new_reqs=[],
            finished_req_ids=set(),
            num_spec_tokens_to_schedule=drafted,
        )
        slots = SURVIVAL[:drafted]
        draws = [random.random() for _ in ids]
        accepted = {one: sum(draw < share for share in slots) for one, draw in zip(ids, draws, strict=True)}
        tokens = [[0] * (count + 1) for count in accepted.values()]
        result = SimpleNamespace(req_ids=ids, sampled_token_ids=tokens)
        now += GUESS.step_seconds([drafted + 1] * requests) * random.uniform(1.1, 1.2)
        drafting = SimpleNamespace(
            num_drafts=requests,
            num_draft_tokens_per_pos=[requests] * drafted + [0] * (BLOCK - 1 - drafted),
            num_accepted_tokens_per_pos=[sum(count > slot for count in accepted.values()) for slot in range(BLOCK - 1)],
        )
        statistics = SimpleNamespace(spec_decoding_stats=drafting if drafted else None)
        iteration = SimpleNamespace(inter_token_latencies_iter=[0.01] * requests)
        resumed = thread_time_ns()
        ours.update_from_output(output, result)
        answered = thread_time_ns()
        logger.record(statistics, iteration)
        choosing.append((chosen - begun + answered - resumed) / 1e3)
        logging.append((thread_time_ns() - answered) / 1e3)
    return choosing, logging


def main() -> None:
    """Prints one line for each number of requests."""
    os.environ[GUESSED_COSTS] = GUESS.model_dump_json()
    run = Mock(**{"costs.return_value": None, "survival.return_value": SURVIVAL})
    for owner, name, stand_in in (
        (Scheduler, "__init__", begin),
        (Scheduler, "schedule", lambda _: None),
        (Scheduler, "update_from_output", lambda *_: None),
        (scheduler, "proof", lambda: None),
        (scheduler, "_last_run", lambda _: run),
        (metrics, "proof", lambda: None),
    ):
        setattr(owner, name, stand_in)
    print("requests  scheduler mean  p99  stat logger mean  p99 (microseconds)")
    for requests in (1, 16, 64, 256):
        times = [(mean(one), quantiles(one, n=100)[-1]) for one in measure(requests)]
        print(f"{requests:8d} " + " ".join(f"{value:9.0f}" for pair in times for value in pair))


if __name__ == "__main__":
    main()
