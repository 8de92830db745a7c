"""Every engine's metrics are read into one definition; unknown values stay None."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_serve.client.metrics import PICKED, LiveFigures, MetricsSource, ServerReading, read_acceptance, reading_of
from dflash_serve.common.prometheus import Scrape
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.site import site

OURS = """# HELP dflash:generation_tokens_total Tokens generated.
# TYPE dflash:generation_tokens_total counter
dflash:generation_tokens_total{model_name="tiny"} 160.0
# TYPE dflash:num_requests_waiting gauge
dflash:num_requests_waiting{model_name="tiny"} 0.0
# TYPE dflash:spec_decode_acceptance_length gauge
dflash:spec_decode_acceptance_length{model_name="tiny"} 1.9
# TYPE dflash_serve:steps_total counter
dflash_serve:steps_total{model_name="tiny",width="1"} 148.0
dflash_serve:steps_total{model_name="tiny",width="2"} 10.0
dflash_serve:steps_total{model_name="tiny",width="4"} 40.0
# TYPE dflash_serve:slots_offered_total counter
dflash_serve:slots_offered_total{model_name="tiny",slot="1"} 50.0
dflash_serve:slots_offered_total{model_name="tiny",slot="2"} 40.0
dflash_serve:slots_offered_total{model_name="tiny",slot="3"} 40.0
# TYPE dflash_serve:slots_accepted_total counter
dflash_serve:slots_accepted_total{model_name="tiny",slot="1"} 30.0
dflash_serve:slots_accepted_total{model_name="tiny",slot="2"} 10.0
dflash_serve:slots_accepted_total{model_name="tiny",slot="3"} 5.0
"""
"""As a server of ours prints it, the numbers made to fit together."""

VLLM = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="Qwen/Qwen3-8B"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="Qwen/Qwen3-8B"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="Qwen/Qwen3-8B"} 1.7567367987338e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 180.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="Qwen/Qwen3-8B",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="Qwen/Qwen3-8B",position="2"} 20.0
"""
"""vLLM 0.1x with data parallelism: the form of its pull request 24049."""

SGLANG = """\
sglang:spec_accept_length{engine_type="unified",model_name="Qwen/Qwen3-8B",tp_rank="0"} 3.5
sglang:spec_num_draft_tokens{engine_type="unified",model_name="Qwen/Qwen3-8B",tp_rank="0"} 16.0
sglang:generation_tokens_total{is_streaming="true",model_name="Qwen/Qwen3-8B"} 700.0
sglang:generation_tokens_total{is_streaming="false",model_name="Qwen/Qwen3-8B"} 110.0
sglang:spec_verify_calls_total{model_name="Qwen/Qwen3-8B"} 200.0
sglang:num_requests_total{is_streaming="true",model_name="Qwen/Qwen3-8B"} 8.0
sglang:num_requests_total{is_streaming="false",model_name="Qwen/Qwen3-8B"} 2.0
"""
"""SGLang 0.5.23, names of its metrics collector; block of 16 slots."""

PLUG_IN = """\
dflash_serve:steps_total{model_name="m",width="1"} 100.0
dflash_serve:steps_total{model_name="m",width="3"} 50.0
dflash_serve:slots_offered_total{model_name="m",slot="1"} 50.0
dflash_serve:slots_offered_total{model_name="m",slot="2"} 50.0
dflash_serve:slots_accepted_total{model_name="m",slot="1"} 40.0
dflash_serve:slots_accepted_total{model_name="m",slot="2"} 10.0
"""

TRIMMED = """\
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 700.0
dflash_serve:steps_total{engine="0",model_name="m",width="1"} 20.0
dflash_serve:steps_total{engine="0",model_name="m",width="trimmed"} 100.0
dflash_serve:slots_accepted_total{engine="0",model_name="m",slot="1"} 80.0
dflash_serve:slots_accepted_total{engine="0",model_name="m",slot="2"} 20.0
"""
"""vLLM 0.33 with adaptive verification: 100 blocks of 8, of which it verified unknown parts."""

SCRAPED = """sglang:spec_accept_length{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:spec_num_draft_tokens{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 104.0
sglang:spec_verify_calls_total{engine_type="unified",model_name="m"} 99.0
sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="m"} 5.0
dflash_serve:steps_total{model_name="m",width="8"} 99.0
dflash_serve:slots_offered_total{model_name="m",slot="1"} 99.0
dflash_serve:slots_offered_total{model_name="m",slot="2"} 99.0
dflash_serve:slots_offered_total{model_name="m",slot="3"} 99.0
dflash_serve:slots_accepted_total{model_name="m",slot="1"} 0.0
dflash_serve:slots_accepted_total{model_name="m",slot="2"} 0.0
dflash_serve:slots_accepted_total{model_name="m",slot="3"} 0.0
"""
"""Scraped from SGLang 0.5.23 with our plug-in: a random drafter, five requests, each token one verification. (Slots 4
to 7, the same, are left out.)"""

TENSORRT_LLM = """\
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="0"} 30.0
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="1"} 30.0
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="2"} 20.0
trtllm_spec_decode_accepted_tokens_total{engine_type="trtllm",model_name="m",token_position="0"} 24.0
trtllm_spec_decode_accepted_tokens_total{engine_type="trtllm",model_name="m",token_position="1"} 6.0
"""
"""TensorRT-LLM 1.3 with perf metrics on: names of its pull request 12636."""

TENSORRT_LLM_TOTALS = """\
trtllm_spec_decode_num_draft_tokens_total{engine_type="trtllm",model_name="m"} 70.0
trtllm_spec_decode_num_accepted_tokens_total{engine_type="trtllm",model_name="m"} 20.0
trtllm_spec_decode_acceptance_length{engine_type="trtllm",model_name="m"} 2.5
"""
"""Its pull request 12545: no count of verifications."""

ITERATIONS = [
    {"iter": 1, "specDecodingStats": {"numDraftTokens": 0, "numAcceptedTokens": 0, "numRequestsWithDraftTokens": 0}},
    {
        "iter": 2,
        "iterLatencyMS": 12.5,
        "specDecodingStats": {
            "numDraftTokens": 28,
            "numAcceptedTokens": 10,
            "numRequestsWithDraftTokens": 4,
            "acceptanceLength": 3.5,
            "iterLatencyMS": 0.0,
            "draftOverhead": 0.0,
        },
    },
    {"iter": 3, "specDecodingStats": {"numDraftTokens": 14, "numAcceptedTokens": 2, "numRequestsWithDraftTokens": 2}},
]
"""TensorRT-LLM's JSON: names of its SpecDecodingStats."""


def read(text: str, **pages: str) -> AcceptanceStatistics:
    return reading_of(Scrape({"/metrics": text, **pages}.get)).acceptance


def known(read: AcceptanceStatistics) -> tuple[Any, ...]:
    """Engine, counts and quotients; survival is [] where it is unknown."""
    return read.engine, read.verifications, read.drafted, read.accepted, read.acceptance_length, read.survival()


SHORTER = VLLM.replace(
    'draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 120', 'draft_tokens_total{engine="1"} 40'
)
GAUGE = SGLANG.splitlines()[0] + "\n"
IDLE = 'dflash:num_requests_waiting{model_name="tiny"} 0.0\ndflash_serve:steps_total{model_name="tiny",width="1"} 7.0\n'
SCRAPED_ALONE = "".join(line + "\n" for line in SCRAPED.splitlines() if line.startswith("sglang:"))
READINGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    # Slot 1 was in the steps of width 2 too; slot 4 in none.
    "ours": (OURS, ("dflash-serve", 50, 130, 45, 1.9, [30 / 50, 10 / 40, 5 / 40])),
    "ours without speculation": (IDLE, ("dflash-serve", 0, 0, 0, None, [])),
    "vLLM sums its ranks and counts the bonus token": (VLLM, ("vLLM", 100, 300, 150, 2.5, [0.8, 0.5, 0.2])),
    "vLLM has no slots where drafts differ in length": (SHORTER, ("vLLM", 100, 220, 150, 2.5, [])),
    # 810 tokens of 10 requests: 800 from 200 verifications; a block of 16 drafts 15.
    "SGLang counts no tokens of prefills": (SGLANG, ("SGLang", 200, 3000, 600, 4.0, [])),
    "SGLang without counters": (GAUGE, ("SGLang", None, None, None, 3.5, [])),
    "SGLang's gauge of zero is unknown": (GAUGE.replace(" 3.5", " 0.0"), ("SGLang", None, None, None, None, [])),
    "our plug-in": (PLUG_IN + SGLANG, ("SGLang with dflash-serve", 50, 100, 50, 2.0, [0.8, 0.2])),
    "our plug-in, on vLLM's page": (PLUG_IN + VLLM, ("vLLM with dflash-serve", 50, 100, 50, 2.0, [0.8, 0.2])),
    "blocks that vLLM trimmed": (TRIMMED, ("vLLM with dflash-serve", 100, None, 100, 2.0, [])),
    "our plug-in, scraped": (SCRAPED, ("SGLang with dflash-serve", 99, 297, 0, 1.0, [0.0, 0.0, 0.0])),
    "the same without our plug-in": (SCRAPED_ALONE, ("SGLang", 99, 693, 0, 1.0, [])),
    "TensorRT-LLM by position": (TENSORRT_LLM, ("TensorRT-LLM", 30, 80, 30, 2.0, [0.8, 0.2, 0.0])),
    "TensorRT-LLM's totals and its gauge": (TENSORRT_LLM_TOTALS, ("TensorRT-LLM", None, 70, 20, 2.5, [])),
    "TensorRT-LLM's iterations": (json.dumps(ITERATIONS), ("TensorRT-LLM", 6, 42, 12, 3.0, [])),
    "nothing": ("", (None, None, None, None, None, [])),
    "a stranger": ("# TYPE up gauge\nup 1\ngo_goroutines 7\n", (None, None, None, None, None, [])),
}


def close(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return (
        found[:4] == expected[:4] and found[4] == pytest.approx(expected[4]) and found[5] == pytest.approx(expected[5])
    )


@pytest.mark.parametrize("case", READINGS)
def test_every_engines_counters_are_read_into_one_definition(case: str) -> None:
    text, expected = READINGS[case]
    assert close(known(read(text)), expected)


def test_the_definition_is_the_one_of_our_own_statistics() -> None:
    statistics = AcceptanceStatistics()
    for width, accepted, steps in ((1, 0, 148), (2, 0, 6), (2, 1, 4), (4, 0, 14), (4, 1, 16), (4, 2, 5), (4, 3, 5)):
        statistics.record(width, accepted, steps)
    reading = read(OURS)
    assert reading.widths == {1: 148, 2: 10, 4: 40}
    assert reading.acceptance_length == pytest.approx(statistics.acceptance_length)
    assert reading.survival() == pytest.approx(statistics.survival())


VLLM_PLAIN = 'vllm:generation_tokens_total{model_name="m"} 12.0\n'
SGLANG_PLAIN = """sglang:generation_tokens_total{model_name="m"} 12.0
sglang:num_requests_total{model_name="m"} 1.0
sglang:spec_accept_length{model_name="m"} 0.0
"""


@pytest.mark.parametrize(
    ("text", "speculates"),
    [
        *((VLLM_PLAIN, False), (SGLANG_PLAIN, False), (VLLM, True), (SGLANG, True), (SCRAPED, True), (OURS, True)),
        ('sglang:num_queue_reqs{model_name="m"} 0.0\n', None),  # it has answered nothing yet
    ],
)
def test_a_plain_server_is_told_from_one_that_speculates(text: str, speculates: bool | None) -> None:
    assert read(text).speculates is speculates


LOAD = """{0}{1}{{rank="0"}} 3.0
{0}{1}{{rank="1"}} 2.0
{0}{2}{{rank="0"}} 7.0
{0}{3}{{rank="0"}} 0.2
{0}{3}{{rank="1"}} 0.4
{0}generation_tokens_total{{rank="0"}} 90.0
"""


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (
            LOAD.format("vllm:", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
            ("vLLM", 5, 7, 90, pytest.approx(0.3)),  # the mean over ranks
        ),
        (
            LOAD.format("sglang:", "num_running_reqs", "num_queue_reqs", "token_usage"),
            ("SGLang", 5, 7, 90, pytest.approx(0.3)),
        ),
        ("go_goroutines 7\n", (None, None, None, None, None)),
    ],
)
def test_any_engines_load_is_read_with_its_acceptance(text: str, load: tuple[Any, ...]) -> None:
    found = reading_of(Scrape({"/metrics": text}.get))
    assert (found.engine, found.running, found.queued, found.generated, found.kv_cache_usage) == load


def test_sglangs_requests_and_pool_are_counted_once_whatever_their_priority_and_ranks() -> None:
    text = """\
sglang:num_running_reqs{dp_rank="0",priority="",tp_rank="0",moe_ep_rank="0"} 5.0
sglang:num_running_reqs{dp_rank="0",priority="",tp_rank="1",moe_ep_rank="1"} 5.0
sglang:num_running_reqs{dp_rank="0",priority="1"} 3.0
sglang:num_running_reqs{dp_rank="0",priority="2"} 2.0
sglang:num_queue_reqs{dp_rank="0",priority=""} 4.0
sglang:num_queue_reqs{dp_rank="1",priority=""} 1.0
sglang:num_queue_reqs{dp_rank="1",priority="None"} 1.0
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0",moe_ep_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="0",tp_rank="1",moe_ep_rank="1"} 1000.0
sglang:max_total_num_tokens{dp_rank="1",tp_rank="0",moe_ep_rank="0"} 900.0
"""
    found = reading_of(Scrape({"/metrics": text}.get))
    assert (found.running, found.queued, found.kv_pool) == (5, 5, 1900)


LATER = OURS
for old, new in {
    'width="4"} 40': 'width="4"} 50', 'slot="1"} 50': 'slot="1"} 60', 'slot="2"} 40': 'slot="2"} 50',
    'slot="3"} 40': 'slot="3"} 50', 'slot="1"} 30': 'slot="1"} 38', 'slot="2"} 10': 'slot="2"} 14',
}.items():  # fmt: skip
    LATER = LATER.replace(old, new)
RESTARTED = OURS.replace('width="4"} 40', 'width="4"} 1')
FIRST = "".join(f"{line.rsplit(' ')[0]} 0.0\n" for line in VLLM.splitlines() if "num_drafts_total{" in line)
NOTHING_KNOWN: tuple[Any, ...] = ("dflash-serve", None, None, None, None, [])
SPANS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "what happened in between": (OURS, LATER, ("dflash-serve", 10, 30, 12, 2.2, [0.8, 0.4, 0.0])),
    "since the beginning": ("", VLLM, ("vLLM", 100, 300, 150, 2.5, [0.8, 0.5, 0.2])),
    "vLLM before its first draft, without slots": (FIRST, VLLM, ("vLLM", 100, 300, 150, 2.5, [0.8, 0.5, 0.2])),
    "vLLM with one end without slots": (SHORTER.replace("60.0", "50.0"), VLLM, ("vLLM", 10, 80, 0, 1.0, [])),
    "a restart": (OURS, RESTARTED, NOTHING_KNOWN),
    "a slot that went backwards": (OURS, OURS.replace('slot="2"} 10', 'slot="2"} 9'), NOTHING_KNOWN),
    "a gauge": (GAUGE, GAUGE, ("SGLang", None, None, None, 3.5, [])),
    "TensorRT-LLM's totals": (TENSORRT_LLM_TOTALS, TENSORRT_LLM_TOTALS, ("TensorRT-LLM", None, 0, 0, 2.5, [])),
    "TensorRT-LLM's iterations are a span": (
        *(json.dumps(ITERATIONS), json.dumps(ITERATIONS)),
        ("TensorRT-LLM", 6, 42, 12, 3.0, []),
    ),
}


@pytest.mark.parametrize("case", SPANS)
def test_a_span_is_the_difference_of_two_readings_and_never_a_wrong_one(case: str) -> None:
    before, now, expected = SPANS[case]
    assert close(known(read(now).since(read(before))), expected)


def test_spans_add_up() -> None:
    both = total([read(OURS), read(OURS)])
    assert known(both)[1:5] == (100, 260, 90, pytest.approx(1.9))
    assert (both.survival(), both.widths) == (read(OURS).survival(), {1: 296, 2: 20, 4: 80})
    assert read(LATER).since(read(OURS)).widths == {4: 10}
    gauges = [AcceptanceStatistics.unknown("SGLang", 3.0), AcceptanceStatistics.unknown(None, 2.0)]
    assert known(total(gauges)) == ("SGLang", None, None, None, 2.5, []), "only a mean length is known"


def test_live_figures_say_that_blocks_were_trimmed() -> None:
    later = TRIMMED.replace("100.0", "150.0").replace("80.0", "105.0")
    before, now = (reading_of(Scrape({"/metrics": text}.get)) for text in (TRIMMED, later))
    found = LiveFigures.between(before, now)
    assert (found.trimmed, found.acceptance_length, found.survival, found.widths) == (True, 1.5, [], None)


def test_live_figures_are_of_the_time_between_two_readings_and_unknown_after_a_restart() -> None:
    counts = AcceptanceStatistics(9, 20, 9, [9], [9], {2: 9})
    before = ServerReading(0.0, counts, "x", generated=100)
    more = ServerReading(2.0, AcceptanceStatistics(19, 40, 14, [19], [14], {2: 19}), "x", generated=130, running=3)
    found = LiveFigures.between(before, more)
    assert (found.tokens_per_second, found.tokens_per_second_per_user) == (15, 5)
    assert (found.acceptance_length, found.widths) == (1.5, {2: 1.0})
    restarted = ServerReading(2.0, AcceptanceStatistics(1, 2, 1, [1], [1], {2: 1}), "x", generated=5, running=2)
    found = LiveFigures.between(before, restarted)
    assert (found.tokens_per_second, found.acceptance_length, found.widths) == (None, None, None)


def test_the_headroom_is_of_the_time_between_two_readings_and_of_all_workers() -> None:
    def reading(seconds: float, *paces: tuple[float, float]) -> ServerReading:
        each = [ServerReading(seconds, AcceptanceStatistics.unknown(), "x", pace=pace) for pace in paces]
        return ServerReading.of_workers({f"http://{number}": one for number, one in enumerate(each)})

    found = LiveFigures.between(reading(0.0, (10, 10), (100, 100)), reading(1.0, (50, 60), (120, 150)))
    assert found.headroom == (40 + 20) / (50 + 50)
    assert found.workers is not None
    assert found.workers["http://0"].headroom == 40 / 50
    assert LiveFigures.between(reading(0.0, (10, 10)), reading(1.0, (10, 10))).headroom is None, "idle"
    assert LiveFigures.between(reading(0.0, (10, 10)), reading(1.0, (1, 9))).headroom is None, "started anew"


def test_rates_of_all_workers_are_unknown_where_one_of_them_began_anew() -> None:
    def reading(seconds: float, *made: float) -> ServerReading:
        each = [ServerReading(seconds, AcceptanceStatistics.unknown(), "x", one, pace=(one, one)) for one in made]
        workers = ServerReading.of_workers({f"http://{number}": one for number, one in enumerate(each)})
        return replace(workers, seconds=seconds)

    sound = LiveFigures.between(reading(0.0, 1000, 200), reading(1.0, 2000, 300))
    assert (sound.tokens_per_second, sound.headroom) == (1100, 1)
    found = LiveFigures.between(reading(0.0, 1000, 200), reading(1.0, 2000, 50))
    assert (found.tokens_per_second, found.headroom) == (None, None)
    assert found.workers is not None
    assert [one.tokens_per_second for one in found.workers.values()] == [1000, None]


@pytest.mark.parametrize("text", ["<html>a login page</html>\n", "[cut off"])
def test_what_is_not_prometheus_text_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="not Prometheus text"):
        read(text)


BEHIND_A_ROUTER = """\
# HELP dflash_serve_steps_total Decoding steps of one request, by width (the anchor counted; 1 = no draft).
# TYPE dflash_serve_steps_total counter
dflash_serve_steps_total{model_name="m",width="3",worker_addr="http://10.0.0.1:30000"} 50
dflash_serve_steps_total{model_name="m",width="3",worker_addr="http://10.0.0.2:30000"} 10

# TYPE dflash_serve_slots_offered_total counter
dflash_serve_slots_offered_total{model_name="m",slot="1",worker_addr="http://10.0.0.1:30000"} 50
dflash_serve_slots_offered_total{model_name="m",slot="2",worker_addr="http://10.0.0.1:30000"} 50
dflash_serve_slots_offered_total{model_name="m",slot="1",worker_addr="http://10.0.0.2:30000"} 10
dflash_serve_slots_offered_total{model_name="m",slot="2",worker_addr="http://10.0.0.2:30000"} 10

# TYPE dflash_serve_slots_accepted_total counter
dflash_serve_slots_accepted_total{model_name="m",slot="1",worker_addr="http://10.0.0.1:30000"} 40
dflash_serve_slots_accepted_total{model_name="m",slot="2",worker_addr="http://10.0.0.1:30000"} 10
dflash_serve_slots_accepted_total{model_name="m",slot="1",worker_addr="http://10.0.0.2:30000"} 8
dflash_serve_slots_accepted_total{model_name="m",slot="2",worker_addr="http://10.0.0.2:30000"} 2

# TYPE sglang_num_running_reqs gauge
sglang_num_running_reqs{model_name="m",worker_addr="http://10.0.0.1:30000"} 3
sglang_num_running_reqs{model_name="m",worker_addr="http://10.0.0.2:30000"} 1

# TYPE sglang_token_usage gauge
sglang_token_usage{model_name="m",worker_addr="http://10.0.0.1:30000"} 0.5
sglang_token_usage{model_name="m",worker_addr="http://10.0.0.2:30000"} 0.1

# TYPE sglang_generation_tokens_total counter
sglang_generation_tokens_total{model_name="m",worker_addr="http://10.0.0.1:30000"} 110
sglang_generation_tokens_total{model_name="m",worker_addr="http://10.0.0.2:30000"} 30
"""
"""/engine_metrics of sglang-router 0.3.2 before two workers with our plug-in: its names, labels and numbers."""
OLD_SGLANG = "".join(
    f'sglang_{name}{{worker_addr="http://w"}} {count}\n'
    for name, count in (("generation_tokens_total", 104), ("spec_verify_calls_total", 44), ("num_requests_total", 5))
)


def test_the_router_page_of_sglang_is_read_by_worker_and_summed() -> None:
    with site(lambda path, *_: (200, BEHIND_A_ROUTER) if path == "/engine_metrics" else (404, "")) as url:
        found = MetricsSource(url).require()
    assert known(found.acceptance) == ("SGLang with dflash-serve", 60, 120, 60, 2.0, [0.8, 0.2])
    assert (found.engine, found.running, found.generated, found.queued) == ("SGLang with dflash-serve", 4, 140, None)
    assert found.kv_cache_usage == pytest.approx(0.3)
    assert [one.running for one in (found.workers or {}).values()] == [3, 1]


def test_sglangs_own_counters_are_read_from_the_page_of_its_router_too() -> None:
    with site(lambda path, *_: (200, OLD_SGLANG) if path == "/engine_metrics" else (404, "")) as url:
        assert known(read_acceptance(url))[:5] == ("SGLang", 44, None, 55, 2.25)


@pytest.mark.parametrize("tail", ["", "/", "/metrics", "/metrics/"])
def test_addresses_of_metrics_may_be_those_of_their_pages_and_each_counts_once(tail: str) -> None:
    front = site(lambda path, *_: (200, "dynamo_frontend_requests_total 1\n") if path == "/metrics" else (404, ""))
    pages = {"/metrics": SCRAPED}
    worker = site(lambda path, *_: (200, pages[path]) if path in pages else (404, ""))
    with front as url, worker as one, site(lambda *_: (200, VLLM)) as two:
        found = MetricsSource(url, (one + tail, two + tail, one)).require()
        assert MetricsSource(url).read().engine is None
    assert (found.acceptance.verifications, list(found.workers or ())) == (99 + 100, [one, two])


def worker(tokens: int, drafts: int) -> ServerReading:
    counts = AcceptanceStatistics(drafts, drafts, 0, [drafts], [0], {2: drafts}, "x")
    return ServerReading(0.0, counts, "x", generated=tokens)


IDLE_WORKER = ServerReading(0.0, AcceptanceStatistics.unknown("x"), "x")  # SGLang has no counter before its first event
FLEETS: dict[str, tuple[dict[str, ServerReading], dict[str, ServerReading], float | None]] = {
    "two workers": ({"a": worker(9, 5), "b": worker(9, 5)}, {"a": worker(12, 8), "b": worker(11, 7)}, 5),
    # The sum has grown all the same.
    "a restart of one": ({"a": worker(9, 5), "b": worker(9, 5)}, {"a": worker(1, 1), "b": worker(99, 95)}, None),
    "a restart without a request since": (
        {"a": worker(9, 5), "b": worker(9, 5)},
        {"a": worker(12, 8), "b": IDLE_WORKER},
        None,
    ),
    "a worker that came": ({"a": worker(9, 5)}, {"a": worker(12, 8), "b": worker(11, 7)}, None),
    "a worker that went": ({"a": worker(9, 5), "b": worker(1, 1)}, {"a": worker(12, 8)}, None),
    "a worker without requests": ({"a": worker(9, 5), "b": IDLE_WORKER}, {"a": worker(12, 8), "b": IDLE_WORKER}, 3),
    "a worker's first requests": ({"a": worker(9, 5), "b": IDLE_WORKER}, {"a": worker(12, 8), "b": worker(4, 4)}, 7),
    "workers without requests": ({"a": IDLE_WORKER}, {"a": IDLE_WORKER}, None),
}


@pytest.mark.parametrize("case", FLEETS)
def test_counts_of_several_workers_are_of_those_that_ran_all_the_time_or_unknown(case: str) -> None:
    before, now, drafts = FLEETS[case]
    between = ServerReading.of_workers(now).since(ServerReading.of_workers(before))
    assert (between.verifications, between.engine) == (drafts, "x")


@pytest.mark.parametrize("answer", [(404, ""), (200, ""), (500, "All backend requests failed")])
def test_a_router_that_shows_no_metrics_of_its_workers_asks_for_their_addresses(answer: tuple[int, str]) -> None:
    """The last one is what sglang-router 0.3.2 answers where it was started with --dp-aware."""
    with (
        site(lambda path, *_: answer if path == "/engine_metrics" else (404, "")) as url,
        pytest.raises(UserError, match=r"shows no metrics .* give --metrics-url for each worker"),
    ):
        MetricsSource(url).require()


def test_a_worker_without_metrics_is_named_with_the_option_that_takes_its_address() -> None:
    with site(lambda *_: (200, SCRAPED)) as one, site(lambda *_: (200, "up 1\n")) as two:
        with pytest.raises(UserError, match=r"--enable-metrics.* --metrics-url .*DYN_SYSTEM_PORT") as caught:
            MetricsSource("http://127.0.0.1:9", (one, two)).require("--metrics-url")
        assert caught.value.where == two
    with pytest.raises(UserError, match="not an address"):
        MetricsSource("http://127.0.0.1:9", ("worker:9090",))


def test_the_page_of_an_inference_gateway_is_that_of_one_server_and_is_refused() -> None:
    pages = {"/metrics": SCRAPED, "/v1/models": "{}"}
    with site(lambda path, *_: (200, pages[path]) if path in pages else (404, ""), {PICKED: "true"}) as url:
        assert MetricsSource(url).read().engine is None
        with pytest.raises(UserError, match=r"picks one of its servers .*give --metrics-url for each of its servers"):
            MetricsSource(url).require()


PROMETHEUS = "/prometheus/metrics"


@pytest.mark.parametrize(
    ("pages", "tail", "engine", "slots"),
    [
        ({"/metrics": VLLM}, "", "vLLM", 3),
        ({"/metrics": VLLM}, "/", "vLLM", 3),
        ({"/metrics": VLLM}, "/v1", "vLLM", 3),
        ({"/metrics": json.dumps(ITERATIONS), PROMETHEUS: TENSORRT_LLM}, "", "TensorRT-LLM", 3),
        ({"/metrics": json.dumps(ITERATIONS), PROMETHEUS: TENSORRT_LLM_TOTALS}, "", "TensorRT-LLM", 0),
        ({"/metrics": json.dumps(ITERATIONS)}, "", "TensorRT-LLM", 0),
        ({}, "", None, 0),
    ],
)
def test_a_server_is_asked_where_its_metrics_are(
    pages: dict[str, str], tail: str, engine: str | None, slots: int
) -> None:
    with site(lambda path, *_: (200, pages[path]) if path in pages else (404, "no such page")) as url:
        found = read_acceptance(url + tail)
    assert (found.engine, len(found.survival()), bool(found.verifications)) == (engine, slots, engine is not None)


def test_a_locked_door_and_a_missing_server_are_one_clear_line() -> None:
    with (
        site(lambda *_: (401, "")) as url,
        pytest.raises(UserError, match=r"HTTP 401.*give its key in --api-key-file"),
    ):
        read_acceptance(url)
    with pytest.raises(UserError, match=r"no answer .*check the address"):
        read_acceptance(url, timeout=5)
