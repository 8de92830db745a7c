"""Every engine's metrics are read into one definition; unknown values stay None."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_serve.client.metrics import read_acceptance, reading_of, recognised
from dflash_serve.common.prometheus import Scrape
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

OURS = """# HELP dflash:generation_tokens_total Tokens generated.
# TYPE dflash:generation_tokens_total counter
dflash:generation_tokens_total{model_name="tiny"} 160.0
# TYPE dflash:num_requests_waiting gauge
dflash:num_requests_waiting{model_name="tiny"} 0.0
# TYPE dflash:spec_decode_num_drafts_total counter
dflash:spec_decode_num_drafts_total{model_name="tiny"} 50.0
# TYPE dflash:spec_decode_num_draft_tokens_total counter
dflash:spec_decode_num_draft_tokens_total{model_name="tiny"} 130.0
# TYPE dflash:spec_decode_num_accepted_tokens_total counter
dflash:spec_decode_num_accepted_tokens_total{model_name="tiny"} 45.0
# TYPE dflash:spec_decode_acceptance_length gauge
dflash:spec_decode_acceptance_length{model_name="tiny"} 1.9
# TYPE dflash:spec_decode_num_accepted_tokens_per_pos_total counter
dflash:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"} 30.0
dflash:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 10.0
dflash:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="2"} 5.0
dflash:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="3"} 0.0
# TYPE dflash:spec_decode_survival gauge
dflash:spec_decode_survival{model_name="tiny",slot="1"} 0.6
# TYPE dflash:spec_decode_width_total counter
dflash:spec_decode_width_total{model_name="tiny",width="1"} 148.0
dflash:spec_decode_width_total{model_name="tiny",width="2"} 10.0
dflash:spec_decode_width_total{model_name="tiny",width="4"} 40.0
"""
"""As a server of ours prints it (dflash-serve 0.1.0), the numbers made to fit together."""

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="Qwen/Qwen3-8B"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="Qwen/Qwen3-8B"} 40.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="Qwen/Qwen3-8B"} 1.7567367987338e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 180.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 120.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="Qwen/Qwen3-8B",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="Qwen/Qwen3-8B",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="Qwen/Qwen3-8B",position="2"} 20.0
"""
"""vLLM 0.1x with data parallelism: the form of its pull request 24049."""

SGLANG = """# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="Qwen/Qwen3-8B",tp_rank="0"} 3.5
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens{engine_type="unified",model_name="Qwen/Qwen3-8B",tp_rank="0"} 16.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="Qwen/Qwen3-8B"} 700.0
sglang:generation_tokens_total{is_streaming="false",model_name="Qwen/Qwen3-8B"} 110.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="Qwen/Qwen3-8B"} 200.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="Qwen/Qwen3-8B"} 8.0
sglang:num_requests_total{is_streaming="false",model_name="Qwen/Qwen3-8B"} 2.0
"""
"""SGLang 0.5.23, names of its metrics collector; block of 16 slots."""

PLUG_IN = """# TYPE dflash_serve:steps_total counter
dflash_serve:steps_total{model_name="m",width="1"} 100.0
dflash_serve:steps_total{model_name="m",width="3"} 50.0
# TYPE dflash_serve:slots_offered_total counter
dflash_serve:slots_offered_total{model_name="m",slot="1"} 50.0
dflash_serve:slots_offered_total{model_name="m",slot="2"} 50.0
# TYPE dflash_serve:slots_accepted_total counter
dflash_serve:slots_accepted_total{model_name="m",slot="1"} 40.0
dflash_serve:slots_accepted_total{model_name="m",slot="2"} 10.0
"""

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

TENSORRT_LLM = """# TYPE trtllm_spec_decode_drafted_tokens_total counter
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="0"} 30.0
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="1"} 30.0
trtllm_spec_decode_drafted_tokens_total{engine_type="trtllm",model_name="m",token_position="2"} 20.0
# TYPE trtllm_spec_decode_accepted_tokens_total counter
trtllm_spec_decode_accepted_tokens_total{engine_type="trtllm",model_name="m",token_position="0"} 24.0
trtllm_spec_decode_accepted_tokens_total{engine_type="trtllm",model_name="m",token_position="1"} 6.0
"""
"""TensorRT-LLM 1.3 with perf metrics on: names of its pull request 12636."""

TENSORRT_LLM_TOTALS = """# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{engine_type="trtllm",model_name="m"} 70.0
# TYPE trtllm_spec_decode_num_accepted_tokens_total counter
trtllm_spec_decode_num_accepted_tokens_total{engine_type="trtllm",model_name="m"} 20.0
# TYPE trtllm_spec_decode_acceptance_length gauge
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


def read_pages(pages: Mapping[str, str]) -> AcceptanceStatistics:
    return recognised(Scrape(pages.get))


def read_text(text: str) -> AcceptanceStatistics:
    return read_pages({"/metrics": text})


def known(read: AcceptanceStatistics) -> tuple[Any, ...]:
    """Engine, counts and quotients; survival is [] where it is unknown."""
    return read.engine, read.verifications, read.drafted, read.accepted, read.acceptance_length, read.survival()


def test_ours() -> None:
    survival = pytest.approx([30 / 50, 10 / 40, 5 / 40])  # slot 1 was in the steps of width 2 too; slot 4 in none
    assert known(read_text(OURS)) == ("dflash-serve", 50, 130, 45, pytest.approx(1.9), survival)
    assert read_text(OURS).widths == {1: 148, 2: 10, 4: 40}


def test_vllm_sums_its_ranks_and_counts_the_bonus_token() -> None:
    assert known(read_text(VLLM)) == ("vLLM", 100, 300, 150, 2.5, pytest.approx([0.8, 0.5, 0.2]))


def test_vllm_by_slot_is_unknown_where_drafts_were_of_different_lengths() -> None:
    shorter = VLLM.replace(
        'draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 120',
        'draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 40',
    )
    reading = read_text(shorter)
    assert (reading.survival(), reading.acceptance_length) == ([], 2.5)


def test_vllm_by_slot_stays_unknown_over_a_span_of_which_one_end_is() -> None:
    shorter = read_text(
        VLLM.replace(
            'draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 120',
            'draft_tokens_total{engine="1",model_name="Qwen/Qwen3-8B"} 40',
        ).replace("60.0", "50.0")
    )
    between = read_text(VLLM).since(shorter)
    assert (between.verifications, between.survival()) == (10, [])


def test_vllm_before_its_first_draft_is_the_beginning() -> None:
    """It has no counters by position then."""
    first = "".join(f"{line.rsplit(' ')[0]} 0.0\n" for line in VLLM.splitlines() if "num_drafts_total{" in line)
    assert known(read_text(VLLM).since(read_text(first))) == known(read_text(VLLM))


def test_sglang_leaves_first_tokens_out_for_they_come_from_prefills() -> None:
    # 810 tokens of 10 requests: 800 from 200 verifications; a block of 16 drafts 15.
    assert known(read_text(SGLANG)) == ("SGLang", 200, 3000, 600, 4.0, [])


def test_sglang_with_our_plug_in_is_read_by_the_plug_ins_finer_counters() -> None:
    reading = read_text(PLUG_IN + SGLANG)
    assert known(reading) == ("SGLang with dflash-serve", 50, 100, 50, 2.0, [0.8, 0.2])


def test_sglangs_own_counters_and_our_plug_ins_agree_on_a_real_server() -> None:
    plug_in = read_text(SCRAPED)
    alone = read_text("".join(line + "\n" for line in SCRAPED.splitlines() if line.startswith("sglang:")))
    assert (plug_in.engine, alone.engine) == ("SGLang with dflash-serve", "SGLang")
    assert (
        (plug_in.verifications, plug_in.acceptance_length)
        == (alone.verifications, alone.acceptance_length)
        == (99, 1.0)
    )
    assert plug_in.survival() == [0.0, 0.0, 0.0]


def test_a_gauge_is_all_that_an_sglang_without_counters_has() -> None:
    gauge = "\n".join(SGLANG.splitlines()[:3]) + "\n"
    reading = read_text(gauge)
    assert known(reading.since(reading)) == ("SGLang", None, None, None, 3.5, [])


def test_a_gauge_of_zero_is_unknown() -> None:
    gauge = "\n".join(SGLANG.splitlines()[:3]).replace(" 3.5", " 0.0") + "\n"
    assert read_text(gauge).acceptance_length is None


VLLM_PLAIN = 'vllm:generation_tokens_total{model_name="m"} 12.0\n'
SGLANG_PLAIN = """sglang:generation_tokens_total{model_name="m"} 12.0
sglang:num_requests_total{model_name="m"} 1.0
sglang:spec_accept_length{model_name="m"} 0.0
"""


@pytest.mark.parametrize(
    ("text", "speculates"),
    [(VLLM_PLAIN, False), (SGLANG_PLAIN, False), (VLLM, True), (SGLANG, True), (PLUG_IN, True), (OURS, True)],
)
def test_a_plain_server_is_told_from_one_that_speculates(text: str, speculates: bool) -> None:
    assert read_text(text).speculates is speculates


def test_an_sglang_that_has_answered_nothing_yet_does_not_tell_whether_it_speculates() -> None:
    assert read_text('sglang:num_queue_reqs{model_name="m"} 0.0\n').speculates is None


LOAD = """{0}{1}{{rank="0"}} 3.0
{0}{1}{{rank="1"}} 2.0
{0}{2}{{rank="0"}} 7.0
{0}{3}{{rank="0"}} 0.2
{0}{3}{{rank="1"}} 0.4
{0}generation_tokens_total{{rank="0"}} 90.0
"""


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (LOAD.format("vllm:", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), "vLLM"),
        (LOAD.format("sglang:", "num_running_reqs", "num_queue_reqs", "token_usage"), "SGLang"),
    ],
)
def test_any_engines_load_is_read_with_its_acceptance(text: str, engine: str) -> None:
    found = reading_of(Scrape({"/metrics": text}.get))
    assert (found.engine, found.running, found.queued, found.generated) == (engine, 5, 7, 90)
    assert found.kv_cache_usage == pytest.approx(0.3)  # the mean over ranks


def test_the_load_of_a_stranger_is_unknown() -> None:
    found = reading_of(Scrape({"/metrics": "go_goroutines 7\n"}.get))
    assert (found.engine, found.running, found.generated) == (None, None, None)


def test_tensorrt_llm_by_position() -> None:
    reading = read_text(TENSORRT_LLM)
    assert known(reading) == ("TensorRT-LLM", 30, 80, 30, 2.0, pytest.approx([0.8, 0.2, 0.0]))


def test_tensorrt_llms_totals_without_verifications_give_no_length_but_the_gauges() -> None:
    reading = read_text(TENSORRT_LLM_TOTALS)
    assert known(reading) == ("TensorRT-LLM", None, 70, 20, 2.5, [])
    assert known(reading.since(reading)) == ("TensorRT-LLM", None, 0, 0, 2.5, [])


def test_tensorrt_llms_iterations_are_a_span_not_a_counter() -> None:
    reading = read_pages({"/metrics": json.dumps(ITERATIONS)})
    assert known(reading) == ("TensorRT-LLM", 6, 42, 12, 3.0, [])
    assert reading.since(reading) == reading


def test_since_is_what_happened_in_between() -> None:
    later = (
        OURS.replace('num_drafts_total{model_name="tiny"} 50', 'num_drafts_total{model_name="tiny"} 60')
        .replace('draft_tokens_total{model_name="tiny"} 130', 'draft_tokens_total{model_name="tiny"} 160')
        .replace('accepted_tokens_total{model_name="tiny"} 45', 'accepted_tokens_total{model_name="tiny"} 57')
        .replace('position="0"} 30', 'position="0"} 38')
        .replace('position="1"} 10', 'position="1"} 14')
        .replace('width="4"} 40', 'width="4"} 50')
    )
    between = read_text(later).since(read_text(OURS))
    assert known(between) == ("dflash-serve", 10, 30, 12, 2.2, [0.8, 0.4, 0.0])
    assert between.widths == {4: 10}


def test_since_the_very_beginning_is_everything() -> None:
    assert known(read_text(VLLM).since(AcceptanceStatistics.unknown())) == known(read_text(VLLM))


def test_counters_that_went_backwards_say_nothing() -> None:
    restarted = read_text(
        OURS.replace('num_drafts_total{model_name="tiny"} 50', 'num_drafts_total{model_name="tiny"} 1')
    )
    assert known(restarted.since(read_text(OURS))) == ("dflash-serve", None, None, None, None, [])


def test_a_slot_that_went_backwards_is_a_restart_too() -> None:
    restarted = read_text(OURS.replace('position="1"} 10', 'position="1"} 9'))
    assert known(restarted.since(read_text(OURS))) == ("dflash-serve", None, None, None, None, [])


def test_no_speculation_is_zero_steps_and_no_length() -> None:
    nothing = OURS.replace('_total{model_name="tiny"} 50', '_total{model_name="tiny"} 0').replace("} 45.0", "} 0.0")
    reading = read_text(nothing)
    assert (reading.verifications, reading.accepted, reading.acceptance_length) == (0, 0, None)


@pytest.mark.parametrize("text", ["", "# TYPE up gauge\nup 1\n", "go_goroutines 7\n"])
def test_metrics_of_strangers_are_all_unknown(text: str) -> None:
    assert read_text(text) == AcceptanceStatistics.unknown()


@pytest.mark.parametrize("text", ["<html>a login page</html>\n", "[cut off"])
def test_what_is_not_prometheus_text_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="not Prometheus text"):
        read_text(text)


def test_spans_add_up() -> None:
    both = total([read_text(OURS), read_text(OURS)])
    assert known(both)[1:5] == (100, 260, 90, pytest.approx(1.9))
    assert (both.survival(), both.widths) == (read_text(OURS).survival(), {1: 296, 2: 20, 4: 80})


def test_spans_of_which_one_is_unknown_keep_only_a_mean_length() -> None:
    gauge = AcceptanceStatistics.unknown("SGLang", 3.0)
    assert known(total([gauge, AcceptanceStatistics.unknown(None, 2.0)])) == ("SGLang", None, None, None, 2.5, [])


def test_the_definition_is_the_one_of_our_own_statistics() -> None:
    statistics = AcceptanceStatistics()
    for width, accepted, steps in ((1, 0, 148), (2, 0, 6), (2, 1, 4), (4, 0, 14), (4, 1, 16), (4, 2, 5), (4, 3, 5)):
        statistics.record(width, accepted, steps)
    reading = read_text(OURS)
    assert reading.acceptance_length == pytest.approx(statistics.acceptance_length)
    assert reading.survival() == pytest.approx(statistics.survival())


@contextmanager
def site(pages: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = pages.get(self.path, (404, "no such page"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("tail", ["", "/", "/v1"])
def test_a_server_is_asked_where_its_metrics_are(tail: str) -> None:
    with site({"/metrics": (200, VLLM)}) as url:
        assert read_acceptance(url + tail).verifications == 100


def test_tensorrt_llms_prometheus_page_is_preferred_where_it_knows_slots() -> None:
    pages = {"/metrics": (200, json.dumps(ITERATIONS)), "/prometheus/metrics": (200, TENSORRT_LLM)}
    with site(pages) as url:
        assert read_acceptance(url).survival()


def test_tensorrt_llms_iterations_are_read_where_its_prometheus_page_knows_less() -> None:
    for other in ({}, {"/prometheus/metrics": (200, TENSORRT_LLM_TOTALS)}):
        with site({"/metrics": (200, json.dumps(ITERATIONS)), **other}) as url:
            assert known(read_acceptance(url))[:2] == ("TensorRT-LLM", 6)


def test_a_server_without_metrics_leaves_all_unknown() -> None:
    with site({}) as url:
        assert read_acceptance(url) == AcceptanceStatistics.unknown()


def test_a_locked_door_and_a_missing_server_are_one_clear_line() -> None:
    with (
        site({"/metrics": (401, "")}) as url,
        pytest.raises(UserError, match=r"HTTP 401.*give its key in --api-key-file"),
    ):
        read_acceptance(url)
    with pytest.raises(UserError, match=r"no answer .*check the address"):
        read_acceptance(url, timeout=5)
