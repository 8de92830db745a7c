"""The plug-in without SGLang: refused drafts and requests, results that are counted, and widths of a batch."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dflash_sglang.plugin
from dflash_serve.adapter.last_run import KeptWidth, LastRun
from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.deployment.description import Model
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth, GuardedPolicy, Step, WidthPolicy
from dflash_serve.speculation.width import AutoWidth
from dflash_sglang.plugin import in_rows_of_the_buffer
from dflash_sglang.plugin.refusals import LOADER, NEUTRAL, StrictLoad, draft_problems, guarded, refusal
from dflash_sglang.plugin.results import BatchWidths, Results, SpeculationMetrics
from dflash_sglang.settings import AUTO, WIDTH_VARIABLE, asked_width, narrow_widths
from tests.support.heads import HEADS
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter, write_tiny_drafter

PLUGIN = Path(dflash_sglang.plugin.__file__).parent
ROOT = Path(__file__).parents[3]
TENSORS = list(expected_tensors(tiny_drafter_config()))
WHOLE = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
PARAMETERS = sorted(
    {".".join(WHOLE.get(part, part) for part in name.split(".")) for name in TENSORS if ".up_proj." not in name}
)
"""As SGLang's class has them: q, k and v are one parameter, gate and up another."""
CODEBOOK = "candidate_selector.predecessor_codebook"


def test_the_adapter_needs_neither_sglang_nor_the_plug_in_and_neither_half_needs_torch() -> None:
    for path in PLUGIN.parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [node for node in imported if (node.module or "").startswith(("sglang", "plugin"))], path.name
    code = "import sys, dflash_sglang.plugin; sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


@pytest.mark.parametrize(
    ("names", "more", "unknown", "missing"),
    [
        (TENSORS, [], [], []),
        ([f"model.{name}" for name in TENSORS], [], [], []),
        ([*TENSORS, "layers.0.self_attn.rotary_emb.inv_freq"], [], [], []),
        ([*TENSORS, "embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.k_scale"], [], [], []),
        ([n for n in TENSORS if n != "layers.1.self_attn.k_proj.weight"], [], [], ["layers.1.self_attn.k_proj.weight"]),
        ([n for n in TENSORS if n != "layers.0.mlp.up_proj.weight"], [], [], ["layers.0.mlp.up_proj.weight"]),
        ([n.replace("fc.weight", "fc.weight_packed") for n in TENSORS], [], ["fc.weight_packed"], ["fc.weight"]),
        (TENSORS, [CODEBOOK], [], [CODEBOOK]),
        (["encoder.fc.weight" if n == "fc.weight" else n for n in TENSORS], [], [], []),
        (
            ["model.encoder.fc.weight" if n == "fc.weight" else n for n in TENSORS],
            [],
            ["model.encoder.fc.weight"],
            ["fc.weight"],
        ),
        ([*TENSORS, f"{CODEBOOK}.weight"], [CODEBOOK], [f"{CODEBOOK}.weight"], [CODEBOOK]),
        (TENSORS, ["layers.0.attention_conv.base_kernel"], [], ["layers.0.attention_conv.base_kernel"]),
        (TENSORS, ["layers.0.self_attn.o_proj.weight_scale"], [], ["layers.0.self_attn.o_proj.weight_scale"]),
        (TENSORS, ["layers.0.self_attn.attn.k_scale"], [], []),  # of quantised keys and values, which are optional
    ],
)
def test_every_tensor_and_parameter_is_accounted_for(
    names: list[str], more: list[str], unknown: list[str], missing: list[str]
) -> None:
    found = [problem.what for problem in LOADER.problems(names, [*PARAMETERS, *more])]
    parts = [f"unknown tensors: {', '.join(unknown)}"] if unknown else []
    parts += [f"missing: {', '.join(missing)}"] if missing else []
    assert found == ([f"the drafter does not fit its config.json: {'; '.join(parts)}"] if parts else [])


def test_a_broken_draft_is_not_loaded_and_later_updates_touch_only_the_drafts_own_tensors() -> None:
    model = SimpleNamespace(named_parameters=lambda: [(name, None) for name in PARAMETERS], modules=list)
    weights: list[tuple[str, Any]] = [(name, None) for name in TENSORS]
    strict = StrictLoad()
    with pytest.raises(ValueError, match=r"missing: layers\.1\.input_layernorm\.weight, "):
        strict(lambda _, given: list(given), model, [one for one in weights if not one[0].startswith("layers.1.")])
    strict(lambda _, given: list(given), model, weights)
    strict.is_built = True  # from then on weights come in parts, the target's among them
    of_target: list[tuple[str, Any]] = [(f"model.{name}", None) for name, _ in weights if name.startswith("layers.")]
    assert of_target
    assert strict(lambda _, given: list(given), model, [*of_target, *weights[:3]]) == weights[:3]
    of_dummy = StrictLoad()  # with `--load-format dummy` no tensor is loaded before
    of_dummy.is_built = True
    assert of_dummy(lambda _, given: list(given), model, of_target) == of_target


def server_args(folder: Path, block_size: int | None = None) -> Any:
    return SimpleNamespace(
        speculative_draft_model_path=str(folder),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=block_size,
        speculative_dflash_block_size=None,
    )


SLIDING = {"layers": [{"window": 6, "causal": True}] * 2}


@pytest.mark.parametrize(
    ("changes", "dialect", "block", "message"),
    [
        ({}, "zlab", 8, None),
        ({}, "zlab", 16, "block size 16 is larger"),
        ({}, "speculators", None, "speculators' dialect, SGLang reads z-lab's"),
        (SLIDING, "modelopt", None, "written as ModelOpt does"),
        (HEADS["anchor-first"], "modelopt", None, "anchor-first slots without a Markov head"),
        ({}, "fp8", None, None),
    ],
)
def test_drafts_that_sglang_would_read_wrongly_are_found(
    tmp_path: Path, changes: dict[str, Any], dialect: str, block: int | None, message: str | None
) -> None:
    if dialect == "fp8":
        folder = write_quantized_drafter(tmp_path / "draft", "fp8")
    else:
        folder = write_tiny_drafter(tmp_path / "draft", tiny_drafter_config(block_size=8, **changes), dialect=dialect)
    found = [problem.what for problem in draft_problems(server_args(folder, block))]
    assert any(message in what for what in found) if message else found == []


def test_a_draft_that_only_sglang_can_find_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert draft_problems(server_args(tmp_path / "elsewhere")) == []
    assert "only the names of the drafter's tensors are checked" in caplog.text


GREEDY = SimpleNamespace(top_k=1, min_p=0.0, **NEUTRAL)
SAMPLED = SimpleNamespace(**{**vars(GREEDY), "top_k": 50})


def test_requests_that_dflash_would_answer_otherwise_are_refused() -> None:
    assert refusal(GREEDY, can_sample=False, counts_penalties=False) is None
    assert refusal(SAMPLED, can_sample=True, counts_penalties=False) is None
    assert "would answer greedily" in str(refusal(SAMPLED, can_sample=False, counts_penalties=True))
    with_min_p = SimpleNamespace(**{**vars(SAMPLED), "min_p": 0.1})
    for asked, takes, said in ((with_min_p, False, "without min_p"), (with_min_p, True, None), (SAMPLED, False, None)):
        found = refusal(asked, can_sample=True, counts_penalties=False, takes_min_p=takes)
        assert found is None if said is None else said in str(found)
    for name in NEUTRAL:
        penalised = SimpleNamespace(**{**vars(GREEDY), name: 1.5})
        found = refusal(penalised, can_sample=True, counts_penalties=False)
        assert f"does not count the tokens of DFlash steps for {name}" in str(found)
        assert refusal(penalised, can_sample=True, counts_penalties=True) is None


def test_without_speculation_nothing_is_asked_of_a_request() -> None:
    taken: list[Any] = []
    guarded(lambda _, request, retracted: taken.append((request, retracted)), SimpleNamespace(draft_worker=None), 1)
    assert taken == [(1, False)]


def request(rid: str, finished: bool = False, retracted: bool = False) -> Any:
    return SimpleNamespace(rid=rid, finished=lambda: finished, is_retracted=retracted)


def result(width: int, *accepted: int) -> Any:
    return SimpleNamespace(speculative_num_draft_tokens=width, num_correct_drafts_per_req_cpu=list(accepted))


def test_a_result_has_the_requests_that_sglang_counts_and_a_time_where_the_step_was_theirs_alone() -> None:
    results, heard, going_on = Results(), list[Step](), list[list[str]]()
    results.listeners = [lambda step, _: heard.append(step), lambda _, running: going_on.append(running)]
    alone, mixed = [request("a")], [request("a"), request("b", finished=True), request("c", retracted=True)]
    first, second, third, fourth = result(4, 1), result(4, 2), result(4, 2, 3, 1), result(4, 0)

    def read(found: Any, reqs: list[Any], process: Any = lambda *_: None) -> None:
        results.on_result(process, None, SimpleNamespace(reqs=reqs), found)

    results.launched(first, context_tokens=7)
    results.launched(second)  # launched before the first one's result is read, as with overlapped scheduling
    read(first, alone)
    read(second, alone)
    results.launched(third)
    read(third, mixed)
    results.launched()  # a prefill
    results.launched(fourth)
    read(fourth, alone, lambda _, batch, __: setattr(batch.reqs[0], "finished", lambda: True))
    assert [(step.request_ids, step.widths, step.accepted) for step in heard] == [
        (["a"], [4], [count]) for count in (1, 2, 2, 0)
    ]
    assert going_on == [["a"], ["a"], ["a"], []], "what ends with this step is counted, and not decided for"
    assert [step.seconds is None for step in heard] == [True, False, True, True]
    assert [step.context_tokens for step in heard] == [7, 0, 0, 0]


def asking(own: object) -> Any:
    params = SimpleNamespace(**{**vars(GREEDY), "custom_params": None if own is None else {"speculative": own}})
    return SimpleNamespace(rid=str(own), sampling_params=params, to_finish=None, is_retracted=False, said=[])


def asked_of(worker: Any, own: object, *, dspark: bool = False) -> Any:
    """A request with a width of its own, after our check."""
    one = asking(own)
    one.set_finish_with_abort, one.finished = one.said.append, lambda: False
    algorithm = SimpleNamespace(is_dspark=lambda: dspark)
    guarded(lambda *_: None, SimpleNamespace(draft_worker=worker, spec_algorithm=algorithm), one)
    return one


@pytest.fixture
def sampling_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(is_dflash_sampling_verify_available=lambda: True)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.dflash_utils", found)


AUTOMATIC = SimpleNamespace(block_size=8, widths=BatchWidths(FixedWidth(8), [1, 4, 8]))


@pytest.mark.usefixtures("sampling_kernel")
@pytest.mark.parametrize(
    ("worker", "own", "said"),
    [
        (AUTOMATIC, 9, "9 is neither auto, off nor a number of slots from 1 to 8"),
        (AUTOMATIC, "no", "'no' is neither auto"),
        (SimpleNamespace(block_size=8, widths=BatchWidths(FixedWidth(4), [4])), "off", r"one width \(width 4\)"),
        (SimpleNamespace(block_size=8), "off", r"one width \(whole blocks\); leave it out, or serve with speculation"),
        (SimpleNamespace(block_size=8, widths=None), 3, "custom_params.speculative asks for a width of this request"),
    ],
)
def test_a_width_that_cannot_be_the_requests_own_is_refused(worker: Any, own: object, said: str) -> None:
    (reason,) = asked_of(worker, own).said
    assert re.search(said, reason)
    (reason,) = asked_of(SimpleNamespace(), "off", dspark=True).said
    assert "one width (DSPARK)" in reason
    assert asked_of(worker, None).said == asked_of(worker, "auto").said == []


@pytest.mark.usefixtures("sampling_kernel")
def test_own_widths_bound_the_step_and_are_what_is_counted() -> None:
    off, two, free = (asked_of(AUTOMATIC, own) for own in ("off", 2, None))
    widths, most = BatchWidths(FixedWidth(8), [1, 4, 8]), {"off": 1, "2": 2}
    assert widths.choose(["off"], 0, most) == 1
    assert widths.choose(["off", "2"], 0, most) == 4, "the next wider one that is offered"
    assert widths.choose(["off", "2", "None"], 0, most) == 8
    results, heard = Results(), list[Step]()
    results.listeners = [lambda step, _: heard.append(step)]
    for reqs, accepted in (([off, two, free], (0, 1, 5)), ([free], (5,)), ([free], (5,))):
        found = result(8, *accepted)
        results.launched(found)
        results.on_result(lambda *_: None, None, SimpleNamespace(reqs=reqs), found)
    assert [step.widths for step in heard] == [[1, 2, 8], [8], [8]]
    assert [step.seconds is None for step in heard][1:] == [False, False]
    assert heard[0].seconds is None, "its rows are more than those that are counted"


def test_metrics_count_every_slot_of_every_request_and_the_headroom_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cost = CostModel(target={1: 1.0, 16: 1.1}, draft={1: 0.1})
    policies: list[WidthPolicy] = [FixedWidth(4)]
    metrics = SpeculationMetrics("m", 4, lambda: policies[-1])

    def pace() -> list[float]:
        of = prometheus.REGISTRY.get_sample_value
        return [of(f"dflash_serve:tokens_{name}_total", {"model_name": "m"}) for name in ("gained", "expected")]

    def read(name: str, label: str, *values: int) -> list[float]:
        of = prometheus.REGISTRY.get_sample_value
        return [of(f"dflash_serve:{name}_total", {"model_name": "m", label: str(value)}) for value in values]

    assert read("steps", "width", 4) + read("slots_offered", "slot", 1, 2, 3) == [0] * 4, "0 before the first step"
    metrics.verified(Step(["a", "b", "c"], [4] * 3, [0, 1, 3]), ["a", "b", "c"])
    assert read("steps", "width", 4) == [0]
    metrics.verified(Step(["a"], [2], [1]), [])
    assert read("steps", "width", 2, 4) == [1, 3], "the counts are written when an answer ends"
    assert read("slots_offered", "slot", 1, 2, 3) == [4, 3, 3]
    assert read("slots_accepted", "slot", 1, 2, 3) == [3, 1, 1]
    for _ in range(16):
        metrics.verified(Step(["a"], [1], [0]), ["a"])
    assert read("steps", "width", 1) == [16]
    assert pace() == [0, 0], "a fixed width expects nothing"
    kept = KeptWidth(cost, 4, LastRun(tmp_path, Model(model="target")))
    policies.append(GuardedPolicy(kept, 4))
    for kept.pace.gained, kept.pace.expected in ((6.0, 8.0), (7.0, 8.0)):
        metrics.verified(Step(["a"], [4], [1]), [])
    assert pace() == [7, 8]


def test_a_narrow_step_costs_what_its_batch_says() -> None:
    flat_then_steep = CostModel(target={1: 1.0, 8: 1.0, 128: 16.0}, draft={1: 0.1, 16: 0.1})
    policy = AutoWidth(flat_then_steep, 8, [1, 2, 4, 8])
    widths = BatchWidths(policy, [1, 2, 4, 8])
    for _ in range(40):  # a drafter that is right three times in a row
        alone = widths.choose(["a"])
        policy.observe(Step(["a"], [alone], [min(3, alone - 1)]))
    many = [str(i) for i in range(16)]
    narrow = [widths.choose(many) for _ in range(20)]
    assert alone >= 4
    assert sorted(narrow)[10] < alone


def test_requests_that_have_left_the_batch_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Any] = []
    monkeypatch.setattr(FixedWidth, "forget", lambda _, request_id: forgotten.append(request_id))
    widths = BatchWidths(FixedWidth(2), [1, 4, 8])
    assert widths.choose(["a", "b"]) == 4, "the next wider one that is offered"
    widths.choose(["b", "c"])
    assert forgotten == ["a"]


def test_a_launch_takes_the_decision_that_was_made_when_the_last_result_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def four(_: object, ids: list[str], *more: int) -> list[int]:
        asked.append((ids, *more))
        return [4]

    monkeypatch.setattr(FixedWidth, "widths", four)
    widths = BatchWidths(FixedWidth(4), [1, 4, 8])
    widths.observe(Step(["a", "b", "c"], [4] * 3, [1, 2, 0], None, 90), ["a", "b"])
    assert asked.pop() == (["a", "b"], 90)
    assert (widths.choose(["a", "b"], 93), asked) == (4, []), "nothing is worked out between two launches"
    for ids in (["a", "b"], ["a", "b", "c"]):  # it is taken once, and by its own requests only
        assert widths.choose(ids) == 4
        assert asked.pop()[0] == ids
        widths.observe(Step(["a", "b"], [4, 4], [1, 2]), ["a", "b"])
        asked.clear()


def test_states_of_mamba2s_slots_are_written_into_the_row_of_their_request_at_every_width() -> None:
    states = np.zeros((3, 8, 2))  # [requests, slots of a whole block, state]

    def update(width: int, *, intermediate_states_buffer: Any, cache_steps: int) -> None:  # as SGLang 0.5.23's kernel
        flat = intermediate_states_buffer.reshape(-1, 2)
        for request, slot in itertools.product(range(3), range(width)):
            flat[request * cache_steps + slot] = request, slot

    for width in (1, 3, 8):
        in_rows_of_the_buffer(update, width, intermediate_states_buffer=states, cache_steps=width)
        assert all(tuple(states[i, slot]) == (i, slot) for i in range(3) for slot in range(width))
    assert in_rows_of_the_buffer(lambda **kwargs: kwargs, cache_steps=None) == {"cache_steps": None}


@pytest.mark.parametrize(("text", "width"), [(None, None), ("auto", AUTO), ("4", 4)])
def test_the_width_is_read_from_the_environment(text: str | None, width: int | None) -> None:
    assert asked_width({} if text is None else {WIDTH_VARIABLE: text}) == width


def test_widths_are_few_and_end_with_the_block() -> None:
    assert narrow_widths(8) == [1, 2, 4]
    assert narrow_widths(10) == [1, 2, 4, 8]
    with pytest.raises(UserError, match="neither a number of slots nor auto"):
        asked_width({WIDTH_VARIABLE: "wide"})
