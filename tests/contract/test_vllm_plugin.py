"""Our plug-in inside servers that are not ours, beside releases that we do not know, and with a policy that fails."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from logging import LogRecord
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.adapter.counters import ACCEPTED, OFFERED, STEPS
from dflash_serve.common.prometheus import Scrape
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import Pace
from dflash_serve.speculation.width import AutoWidth
from dflash_vllm.facts import FACTS, GUESSED_COSTS
from dflash_vllm.plugin.widths import send_pace, taken_pace

pytest.importorskip("vllm")

OURS = "dflash_vllm.plugin.scheduler.AsyncWidthScheduler"


def server(method: str | None, scheduler: object = None, drafter: str = "DFlashDraftModel") -> Any:
    """What a stat logger reads of vLLM's configuration."""
    draft = SimpleNamespace(architectures=[drafter])
    speculative = SimpleNamespace(method=method, draft_model_config=draft, num_speculative_tokens=4)
    return SimpleNamespace(
        speculative_config=speculative if method else None,
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        model_config=SimpleNamespace(served_model_name="m"),
    )


def our_lines(caplog: pytest.LogCaptureFixture) -> list[LogRecord]:
    return [record for record in caplog.records if record.name.startswith("dflash_")]


@pytest.fixture
def without_our_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's registry as it is where our plug-in took no effect."""
    from dflash_vllm.plugin import STRICT
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", {k: v for k, v in ModelRegistry.models.items() if k not in STRICT})


@pytest.fixture
def beside_an_unknown_release(without_our_classes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_serve.adapter.facts.version", lambda _: "0.34.0")


def logger_class() -> Callable[..., Any]:
    """Ours, found as vLLM finds it."""
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    (ours,) = [one for one in load_stat_logger_plugin_factories() if one.__module__ == "dflash_vllm.plugin.metrics"]
    return ours  # type: ignore[no-any-return]


@pytest.mark.usefixtures("beside_an_unknown_release")
@pytest.mark.parametrize("method", [None, "mtp", "eagle3", "dflash"])
def test_beside_an_unknown_release_nothing_is_done_but_one_line_of_log(
    method: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    from dflash_vllm.plugin import STRICT, register
    from vllm import ModelRegistry

    register()
    assert not STRICT.keys() & ModelRegistry.models.keys()
    made = logger_class()(server(method), 0)
    made.record(None, SimpleNamespace(), None, 0)
    assert [record.levelname for record in our_lines(caplog)] == ["WARNING"]
    assert "vLLM 0.34.0 is not supported" in caplog.text


@pytest.mark.usefixtures("beside_an_unknown_release")
def test_what_a_later_release_asks_more_of_stat_loggers_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics import loggers

    class Later(loggers.StatLoggerBase):  # type: ignore[misc]
        @abstractmethod
        def record_something_new(self) -> None: ...

    import_module("dflash_vllm.plugin.metrics")
    monkeypatch.delitem(sys.modules, "dflash_vllm.plugin.metrics")
    monkeypatch.setattr(loggers, "StatLoggerBase", Later)
    made = logger_class()(server("mtp"), 0)
    made.record(None, SimpleNamespace(), None, 0, "an argument that is new")
    made.record_something_new()


@pytest.mark.usefixtures("without_our_classes")
@pytest.mark.parametrize("method", [None, "mtp", "eagle3", "ngram"])
def test_a_server_that_drafts_otherwise_is_left_alone(method: str | None, caplog: pytest.LogCaptureFixture) -> None:
    made = logger_class()(server(method), 0)
    made.record(SimpleNamespace(spec_decoding_stats="nothing that could be counted"), SimpleNamespace())
    assert our_lines(caplog) == []


@pytest.mark.usefixtures("without_our_classes")
@pytest.mark.parametrize("ours", [server("dflash"), server("dspark"), server("eagle3", OURS)])
def test_a_server_of_ours_without_our_classes_does_not_start(ours: Any) -> None:
    with pytest.raises(ValueError, match="the plug-in dflash_serve was not loaded"):
        logger_class()(ours, 0)


@pytest.mark.parametrize(
    ("drafter", "checked"),
    [("DFlashDraftModel", True), ("DFlash2DraftModel", True), ("DFlashMuseGlimmerAssistantModel", True),
     ("DFlashLagunaForCausalLM", False), ("Qwen3DSparkModel", False)],
)  # fmt: skip
def test_every_drafter_that_vllm_loads_is_checked_or_the_log_says_that_it_is_not(
    drafter: str, checked: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_vllm.plugin import register
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    register()
    assert (ModelRegistry.models[drafter].module_name == "dflash_vllm.plugin.model") is checked
    logger_class()(server("dflash", drafter=drafter), 0)
    told = [record.getMessage() for record in our_lines(caplog) if record.name == "dflash_vllm.plugin.metrics"]
    assert [line.endswith(str([drafter])) for line in told] == ([] if checked else [True])


def test_our_scheduler_is_known_as_text_and_as_a_class() -> None:
    from dflash_vllm.plugin import is_ours
    from dflash_vllm.plugin.scheduler import AsyncWidthScheduler

    assert is_ours(server("eagle3", AsyncWidthScheduler))
    assert is_ours(server("eagle3", OURS))
    assert not is_ours(server("eagle3", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours over vLLM's own class, of which only what is called of it is left; blocks of 8 slots, two requests."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from dflash_vllm.plugin import scheduler as module

    def begin(host: Any) -> None:
        host.dynamic_sd_lookup, host.num_spec_tokens = [0, 7, 3, 1], 7
        host.scheduler_config = SimpleNamespace(async_scheduling=False)
        host.vllm_config = SimpleNamespace(speculative_config=None)
        host.running = [
            SimpleNamespace(request_id=name, num_computed_tokens=9, sampling_params=None, spec_token_ids=[])
            for name in ("a", "b")
        ]

    run = SimpleNamespace(costs=lambda: None, survival=lambda: None, drafter=None, keep=lambda *_: None)
    guess = CostModel(target={1: 1.0, 64: 1.0}, draft={1: 0.1, 64: 0.1})
    monkeypatch.setenv(GUESSED_COSTS, guess.model_dump_json())
    monkeypatch.setattr("dflash_serve.adapter.last_run.recorded_survival", lambda _: None)
    monkeypatch.setattr(module, "_last_run", lambda _: run)
    monkeypatch.setattr(module, "proof", lambda: None)
    monkeypatch.setattr(Scheduler, "__init__", begin)
    monkeypatch.setattr(Scheduler, "schedule", lambda _: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: "vLLM's answer")
    return module.WidthScheduler()


def step(scheduler: Any) -> int:
    """A step of both requests through vLLM's table and back; its drafted tokens."""
    drafted: int = scheduler.dynamic_sd_lookup[2]
    output = SimpleNamespace(
        num_scheduled_tokens={"a": drafted + 1, "b": drafted + 1},
        scheduled_spec_decode_tokens={name: [0] * drafted for name in ("a", "b") if drafted},
        scheduled_new_reqs=[],
        finished_req_ids={"one that ended"},
        num_spec_tokens_to_schedule=drafted,
    )
    result = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[5], [5]])
    assert scheduler.update_from_output(output, result) == "vLLM's answer"
    return drafted


def test_a_steps_time_is_from_the_last_result_or_from_its_scheduling_after_an_idle_time(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(40):
        step(scheduler)
    times: list[float | None] = []
    now, requests = SimpleNamespace(seconds=0.0), scheduler.running
    monkeypatch.setattr("dflash_vllm.plugin.scheduler.perf_counter", lambda: now.seconds)
    monkeypatch.setattr(AutoWidth, "widths", lambda *_: [1, 1])
    monkeypatch.setattr(AutoWidth, "observe", lambda _, step: times.append(step.seconds))
    for begun, answered, busy in [
        (0, 9, False),
        (10, 12, True),
        (12.5, 15, False),
        (100, 101, True),
        (100.5, 103, True),
    ]:
        now.seconds = begun
        scheduler.schedule()
        now.seconds, scheduler.running = answered, requests if busy else []
        step(scheduler)
    assert times[1:] == [2, 3, 1, 2]  # the third began after a pause; the fourth was scheduled while it computed


def test_a_requests_own_width_bounds_its_drafts_and_those_of_others_stay(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def eight(_: object, ids: list[str], context: int, undraftable: Any = ()) -> list[int]:
        asked.append(list(undraftable))
        return [8] * len(ids)

    monkeypatch.setattr(AutoWidth, "widths", eight)
    first, second = scheduler.running
    for own, (most, left, drafted) in {
        None: (None, 7, 7),
        "off": ("a", 0, 7),
        3: (None, 2, 7),
    }.items():
        first.sampling_params = SimpleNamespace(extra_args={"speculative": own} if own else None)
        first.spec_token_ids = second.spec_token_ids = list(range(7))
        assert scheduler.dynamic_sd_lookup[2] == drafted
        scheduler.schedule()
        assert (len(first.spec_token_ids), len(second.spec_token_ids)) == (left, 7)
        assert asked.pop() == ([most] if most else [])
    first.sampling_params = second.sampling_params = SimpleNamespace(extra_args={"speculative": "off"})
    assert scheduler.dynamic_sd_lookup[2] == 0


@pytest.mark.parametrize(
    ("given", "method", "ours", "said"),
    [
        ("off", "dflash", True, None),
        ("auto", "dflash", False, None),
        (None, "dspark", False, None),
        (5, "dflash", True, None),
        ("off", "dflash", False, "vllm_xargs.speculative asks for a width of this request alone"),
        (2, "dspark", False, "serve with speculation.width: auto"),
        (6, "dflash", True, "vllm_xargs.speculative: 6 is neither auto, off nor a number of slots from 1 to 5"),
        ("no", "dflash", False, "'no' is neither auto, off"),
        ("off", "eagle3", False, None),
    ],
)
def test_a_width_that_cannot_be_the_requests_own_is_refused_by_vllms_own_check(
    given: Any, method: str, ours: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from dflash_vllm.plugin import register
    from vllm import ModelRegistry, SamplingParams

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setattr(InputProcessor, "_validate_params", lambda *_: "vLLM's answer")
    register()
    register()  # each process may do so more than once
    processor = SimpleNamespace(vllm_config=server(method, OURS if ours else None))
    params = SamplingParams(extra_args={"speculative": given} if given else None)
    if said is None:
        assert InputProcessor._validate_params(processor, params, ()) == "vLLM's answer"
        return
    with pytest.raises(VLLMValidationError, match=re.escape(said)):
        InputProcessor._validate_params(processor, params, ())


def test_steps_and_slots_are_counted_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    made_by = logger_class()
    monkeypatch.setattr(sys.modules[made_by.__module__], "proof", lambda: None)
    made = made_by(server("dflash"), 7)
    drafting = SimpleNamespace(
        num_drafts=5, num_draft_tokens_per_pos=[5, 5, 2, 0], num_accepted_tokens_per_pos=[4, 2, 1, 0]
    )
    iteration = SimpleNamespace(inter_token_latencies_iter=[0.1] * 8)
    for drafts, decoded in ((drafting, iteration), (None, iteration), (None, None)):
        made.record(SimpleNamespace(spec_decoding_stats=drafts), decoded)

    def counted(name: str, label: str, *values: int) -> list[float | None]:
        labels = {"model_name": "m", "engine": "7"}
        return [REGISTRY.get_sample_value(f"{name}_total", {**labels, label: str(value)}) for value in values]

    assert counted(STEPS, "width", 1, 2, 3, 4) == [3 + 8, None, 3, 2]
    assert counted("dflash_vllm:steps", "width", 1, 2, 3, 4) == [3 + 8, None, 3, 2]  # its name in release 0.2
    assert counted(OFFERED, "slot", 1, 2, 3, 4) == [5, 5, 2, 0]
    assert counted(ACCEPTED, "slot", 1, 2, 3, 4) == [4, 2, 1, 0]


def test_of_trimmed_blocks_no_slot_is_called_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler is not told what its runner verified: of 3 drafts of 4 slots, 5 slots in all."""
    from prometheus_client import REGISTRY, generate_latest
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    made_by, config = logger_class(), server("dflash")
    monkeypatch.setattr(sys.modules[made_by.__module__], "proof", lambda: None)
    config.speculative_config.enable_adaptive_verification = True
    drafting = SpecDecodingStats.new(4)
    for accepted in (2, 1, 0):
        drafting.observe_draft(4, accepted)
    made_by(config, 9).record(
        SimpleNamespace(spec_decoding_stats=drafting), SimpleNamespace(inter_token_latencies_iter=[0.1] * 5)
    )
    text = generate_latest(REGISTRY).decode()
    ours = "\n".join(line for line in text.splitlines() if 'engine="9"' in line)
    read = FACTS.read_acceptance(Scrape({"/metrics": ours + "\nvllm:num_requests_waiting 0.0\n"}.get))
    assert read is not None
    assert (read.trimmed, read.verifications, read.accepted) == (True, 3, 3)
    assert (read.drafted, read.offered_by_slot, read.widths, read.survival()) == (None, None, None, [])


def test_every_decoded_step_has_one_width_and_is_counted_by_one_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may leave nothing of a draft. Of several API servers one is told the engine's drafts, and only one."""
    from prometheus_client import REGISTRY

    made_by = logger_class()
    monkeypatch.setattr(sys.modules[made_by.__module__], "proof", lambda: None)
    made, iteration = made_by(server("dflash"), 8), SimpleNamespace(inter_token_latencies_iter=[0.1] * 8)
    drafting = SimpleNamespace(
        num_drafts=5, num_draft_tokens_per_pos=[4, 3, 0, 0], num_accepted_tokens_per_pos=[1, 0, 0, 0]
    )
    made.record(SimpleNamespace(spec_decoding_stats=drafting), iteration)
    made.record(None, iteration)
    labels = {"model_name": "m", "engine": "8"}
    found = [REGISTRY.get_sample_value(f"{STEPS}_total", {**labels, "width": str(width)}) for width in (1, 2, 3, 4, 5)]
    assert found == [4, 1, 3, None, 0]


@pytest.mark.parametrize(
    "failing",
    [
        *("dflash_serve.speculation.width.AutoWidth." + method for method in ("widths", "observe", "forget")),
        "dflash_vllm.plugin.scheduler.observed",
        "a request without a length",
    ],
)
def test_a_choice_of_widths_that_fails_is_logged_once_and_blocks_are_whole_from_then_on(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    for _ in range(40):
        step(scheduler)
    if failing == "a request without a length":
        scheduler.running = [SimpleNamespace(request_id="a")]
    else:
        monkeypatch.setattr(failing, lambda *_: 1 / 0)
    step(scheduler)
    assert [step(scheduler) for _ in range(5)] == [7] * 5
    (failed,) = our_lines(caplog)
    assert "whole blocks are verified from now on" in failed.getMessage()
    assert failed.exc_info is not None


def test_vllms_statistics_carry_our_pace_to_another_process() -> None:
    """Encoded and decoded as vLLM does it, by the declared type of the message."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    stats, pace = SchedulerStats(), Pace()
    pace.gained, pace.expected = 90.0, 120.0
    send_pace(stats, pace)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert taken_pace(received) == (90, 120)
    assert received.num_kv_fetch_reqs_by_stage == {}


def test_no_engine_of_vllm_takes_weights_of_a_drafter_from_a_folder() -> None:
    """All copy between GPUs, which is why `swap` refuses vLLM; another one is to be looked at."""
    factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    assert {*factory._registry} == {"nccl", "ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress"}
    paths = {route.path for route in import_module("vllm.entrypoints.rl.online.api_router").router.routes}
    assert {path for path in paths if "draft" in path or "disk" in path} == {"/start_draft_weight_update"}
    assert FACTS.no_swap is not None
