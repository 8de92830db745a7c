"""The parts of the plug-in that need no vLLM: accounting for tensors, widths, and what a step tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_serve.adapter.last_run import LastRun
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.variables import COST_TABLE
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import Pace, Step, WidthPolicy
from dflash_serve.speculation.width import AutoWidth
from dflash_vllm.facts import GUESSED_COSTS
from dflash_vllm.plugin.guards import LOADER
from dflash_vllm.plugin.widths import observed, send_pace, taken_pace, width_policy

PARAMETERS = [
    *("model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding", "model.fc.weight", "model.norm.weight"),
    *("model.hidden_norm.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
    *("model.layers.0.self_attn.k_norm.weight", "draft_id_to_target_id"),
]
TENSORS = [
    *("fc.weight", "norm.weight", "hidden_norm.weight", "layers.0.self_attn.k_norm.weight"),
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")),
]
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
WHOLE = [
    *(name for name in TENSORS if "_proj." not in name),
    *("layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight"),
]


@pytest.mark.parametrize(
    "names",
    [
        TENSORS,
        [f"model.{name}" for name in TENSORS],
        [RENAMED.get(name, name) for name in TENSORS],
        WHOLE,  # vLLM's loader takes fused tensors as they are
        [*TENSORS, "lm_head.weight", "d2t", "t2d", "layers.0.rotary_emb.inv_freq"],
    ],
)
def test_a_drafter_that_fits_is_accounted_for_under_any_of_its_names(names: list[str]) -> None:
    assert list(LOADER.problems(names, PARAMETERS)) == []


@pytest.mark.parametrize("name", TENSORS)
def test_every_missing_tensor_is_named(name: str) -> None:
    (problem,) = LOADER.problems([other for other in TENSORS if other != name], PARAMETERS)
    assert problem.what.endswith(f"config.json: missing: {name}")


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.bias", "layers.7.mlp.up_proj.weight", "markov_head.weight"]
)
def test_every_tensor_that_goes_nowhere_is_named(name: str) -> None:
    (problem,) = LOADER.problems([*TENSORS, name], PARAMETERS)
    assert problem.what.endswith(f"config.json: unknown tensors: {name}")


@pytest.mark.parametrize(
    ("rows", "drafts", "clean"),
    [
        ({"a": 4, "b": 4}, 3, True),
        ({"a": 1, "b": 1}, 0, True),
        ({"a": 1, "b": 1}, 3, False),  # the first blocks are drafted: no price of a step without speculation
        ({"a": 4, "b": 4}, 0, False),  # the last ones are verified: none of a step with it
        ({"a": 4, "b": 4}, 1, False),
        ({"a": 4, "b": 1}, 3, False),
        ({"a": 4, "b": 4, "ended": 4}, 3, False),
        ({"a": 4, "b": 4, "prompt": 9}, 3, False),
        ({"a": 4, "b": 4, "short prompt": 1}, 3, False),
    ],
)
def test_a_step_tells_of_requests_that_decoded_and_its_time_where_it_verified_as_much_as_it_drafted(
    rows: dict[str, int], drafts: int, clean: bool
) -> None:
    prompts, accepted = [name for name in rows if "prompt" in name], min(2, rows["a"] - 1)
    output = SimpleNamespace(
        num_scheduled_tokens=rows,
        scheduled_spec_decode_tokens={name: [0] * (count - 1) for name, count in rows.items() if name not in prompts},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in prompts],
        num_spec_tokens_to_schedule=drafts,
    )
    tokens = {"a": [5] * (accepted + 1), "b": [5], "short prompt": [5]}
    result = SimpleNamespace(req_ids=list(rows), sampled_token_ids=[tokens.get(name, []) for name in rows])
    step = observed(output, result, 0.5, 7)
    assert step == Step(["a", "b"], [rows["a"], rows["b"]], [accepted, 0], 0.5 if clean else None, 7)


GUESS = CostModel(target={1: 1e-3, 8: 1e-3, 64: 8e-3}, draft={1: 1e-4, 64: 8e-4})
SLOWER = 4.0
"""Times as long that steps take: the guess reads weights as fast as the device could."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LastRun:
    """No run before this one."""
    monkeypatch.setattr("dflash_serve.adapter.last_run.cache_home", lambda: tmp_path / "cache")
    return LastRun(tmp_path, Model(model="target"))


def guessed(run: LastRun) -> WidthPolicy:
    return width_policy(8, [2, 4, 8], run, {GUESSED_COSTS: GUESS.model_dump_json()})


def serve(
    policy: WidthPolicy, requests: int, steps: int, *, accepts: int, clean: bool = True, draft_factor: float = 1.0
) -> list[int]:
    """The widths of some steps in which every request's first drafted tokens are right.

    Args:
        clean: the times of steps are known.
        draft_factor: of the time of steps with a draft, over the guess.
    """
    ids, chosen = [f"{requests}-{i}" for i in range(requests)], []
    for _ in range(steps):
        width = max(policy.widths(ids, 100))
        chosen.append(width)
        seconds = SLOWER * GUESS.step_seconds([width] * requests) * (draft_factor if width > 1 else 1.0)
        accepted = [min(accepts, width - 1)] * requests
        policy.observe(Step(ids, [width] * requests, accepted, seconds if clean else None, 100))
    for request_id in ids:
        policy.forget(request_id)
    return chosen


@pytest.mark.parametrize("clean", [True, False])
def test_widths_follow_the_load_from_a_guess_that_is_too_fast(clean: bool, run: LastRun) -> None:
    policy = guessed(run)
    assert set(serve(policy, 1, 40, accepts=7, clean=clean)[-20:]) == {8}
    assert sorted(serve(policy, 64, 60, accepts=0, clean=clean))[30] == 1
    assert sorted(serve(policy, 1, 60, accepts=7, clean=clean))[30] == 8


def test_many_requests_in_the_first_steps_do_not_keep_one_stream_from_drafting(run: LastRun) -> None:
    policy = guessed(run)
    serve(policy, 12, 12, accepts=2)
    assert sorted(serve(policy, 1, 60, accepts=3))[30] >= 4


def test_a_cost_table_that_was_measured_is_believed(run: LastRun, tmp_path: Path) -> None:
    """Off from the first step of a crowd on, whatever steps take."""
    (tmp_path / "cost.json").write_text(GUESS.model_dump_json())
    policy = width_policy(8, [2, 4, 8], run, {COST_TABLE: str(tmp_path / "cost.json")})
    assert set(serve(policy, 1, 60, accepts=7)[-40:]) == {8}
    assert set(serve(policy, 64, 20, accepts=0, draft_factor=1e-6)[-10:]) == {1}


def test_without_costs_and_without_a_guess_nothing_starts(run: LastRun) -> None:
    with pytest.raises(UserError, match="start it by `dflash-serve serve`"):
        width_policy(8, [2, 4, 8], run, {})


def test_what_the_last_run_learnt_of_a_guess_spares_the_next_one_finding_out(run: LastRun) -> None:
    """On a machine where steps with a draft take twice the guess, which makes them a loss."""
    first = AutoWidth(GUESS, 8, [2, 4, 8], learnt=LearntCosts.of_unit(SLOWER))
    tried = serve(first, 4, 100, accepts=1, draft_factor=2.5)
    run.keep([], first.times.learnt)
    again = serve(guessed(run), 4, 100, accepts=1, draft_factor=2.5)
    assert sum(width > 1 for width in again) < sum(width > 1 for width in tried) / 2


def test_the_pace_goes_to_the_process_of_the_metrics_beside_vllms_own_numbers_and_leaves_none() -> None:
    stats, pace = SimpleNamespace(num_kv_fetch_reqs_by_stage={"in_progress": 2}), Pace()
    assert taken_pace(stats) is None
    pace.gained, pace.expected = 90.4, 120.0
    send_pace(stats, pace)
    assert taken_pace(stats) == (90, 120)
    assert stats.num_kv_fetch_reqs_by_stage == {"in_progress": 2}
