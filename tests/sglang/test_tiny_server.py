"""The real server with a tiny Qwen3 pair: whatever is asked for, speculation changes no token and leaks no slot."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from tests.support.sglang_server import Server, serving
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter
from tests.support.tiny_target import SPECIALS, write_tiny_target

PROMPTS = [
    "the quick brown fox",
    '{"name": [1',
    "over the lazy dog jumps",
    "fox fox fox",
    "true false",
    "a",
    "dog",
    "[",
]
LONG = "the quick brown fox jumps over the lazy dog " * 4
BLOCK = 8


def pair(folder: Path) -> tuple[Path, Path]:
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    config = tiny_drafter_config(
        block_size=BLOCK,
        num_target_layers=4,
        target_layer_ids=(0, 1, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=vocab_size,
        max_position_embeddings=512,
    )
    return target, write_tiny_drafter(folder / "drafter", config)


def deployment(models: tuple[Path, Path], **speculation: Any) -> Deployment:
    target, drafter = map(str, models)
    fields = {"target": {"model": target}, "drafter": {"model": drafter}, "limits": {"max_batch_size": 8}}
    return Deployment.model_validate({**fields, "speculation": speculation})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def truth(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same server answers without speculation."""
    with serving(deployment(models, width="off"), tmp_path_factory.mktemp("plain")) as server:
        logprobs = server.generate(PROMPTS[0], return_logprob=True)["meta_info"]["output_token_logprobs"]
        return {
            "tokens": server.tokens(PROMPTS, streams=8),
            "long": server.generate(LONG)["output_ids"],
            "logprobs": [entry[0] for entry in logprobs],
            "schema": server.generate(PROMPTS[1], 40, json_schema=SCHEMA, ignore_eos=False)["text"],
        }


SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]})
FULL = ("--page-size", "4", "--chunked-prefill-size", "8", "--enable-mixed-chunk")
IN_STEP = "--disable-overlap-schedule"
SERVERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "DFLASH": ({"width": BLOCK}, ()),
    "DFLASH, paged, windowed, chunked, in step": ({"width": BLOCK, "draft_window": 16}, (*FULL, IN_STEP)),
    "automatic, paged, windowed, chunked": ({"width": "auto", "draft_window": 16}, FULL),
    "narrow, paged, windowed, chunked, in step": ({"width": 3, "draft_window": 16}, (*FULL, IN_STEP)),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    speculation, flags = SERVERS[request.param]
    with serving(deployment(models, **speculation), tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


def test_greedy_answers_are_those_without_speculation(server: Server, truth: dict[str, Any]) -> None:
    assert server.tokens(PROMPTS) == truth["tokens"]


def test_eight_streams_at_once_change_nothing(server: Server, truth: dict[str, Any]) -> None:
    assert server.tokens(PROMPTS, streams=8) == truth["tokens"]


def test_a_prefix_from_the_cache_changes_nothing(server: Server, truth: dict[str, Any]) -> None:
    server.generate(LONG)
    again = server.generate(LONG)
    assert again["output_ids"] == truth["long"]
    assert again["meta_info"]["cached_tokens"] > 0


def test_logprobs_are_those_without_speculation(server: Server, truth: dict[str, Any]) -> None:
    answer = server.generate(PROMPTS[0], return_logprob=True)
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(truth["logprobs"], abs=1e-4)


def test_a_json_schema_is_kept_to(server: Server, truth: dict[str, Any]) -> None:
    answer = server.generate(PROMPTS[1], 40, json_schema=SCHEMA, ignore_eos=False)
    assert answer["text"] == truth["schema"]


def test_sampled_requests_are_refused_where_they_would_be_answered_greedily(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate("the", temperature=0.8)
    assert refused.value.code == 400
    assert "would answer greedily without saying so" in refused.value.read().decode()


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"min_new_tokens": 4}])
def test_penalised_requests_are_refused(asked: dict[str, Any], server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate("the", **asked)
    assert refused.value.code == 400
    assert f"does not count the tokens of DFlash steps for {next(iter(asked))}" in refused.value.read().decode()


def assert_nothing_leaks(server: Server) -> None:
    """Every K/V slot is free, or kept for prefixes (/get_server_info has no usage in 0.5.23, /metrics has)."""
    assert server.settled("sglang:num_running_reqs", 0)
    assert server.settled("sglang:kv_used_tokens", 0)
    free = server.metric("sglang:kv_available_tokens") + server.metric("sglang:kv_evictable_tokens")
    assert free == server.metric("sglang:max_total_num_tokens")


def test_aborted_in_mid_stream_nothing_leaks(server: Server, truth: dict[str, Any]) -> None:
    answer = server.stream(LONG, 300, rid="doomed")
    next(answer)
    server.post("/abort_request", {"rid": "doomed"})
    last = list(answer)[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert 0 < last["completion_tokens"] < 300
    assert server.tokens(PROMPTS[:3]) == truth["tokens"][:3]
    assert_nothing_leaks(server)


def test_a_client_that_hangs_up_leaks_nothing(server: Server, truth: dict[str, Any]) -> None:
    answers = [server.stream(LONG + prompt, 300) for prompt in PROMPTS[:4]]
    for answer in answers:
        next(answer)
    for answer in answers:
        answer.close()  # type: ignore[attr-defined]
    assert server.tokens(PROMPTS, streams=8) == truth["tokens"]
    assert_nothing_leaks(server)


def test_what_sglang_reports_is_what_we_count(server: Server) -> None:
    def ours() -> tuple[float, float]:
        return server.metric("dflash_serve:steps_total"), server.metric("dflash_serve:slots_accepted_total")

    before = ours()
    answers = [server.generate(prompt)["meta_info"] for prompt in PROMPTS[:4]]
    steps, accepted = (now - then for now, then in zip(ours(), before, strict=True))
    assert steps == sum(answer["spec_verify_ct"] for answer in answers)
    assert accepted == sum(answer["spec_num_correct_drafts"] for answer in answers)


def test_the_drafters_time_is_measured(server: Server) -> None:
    assert server.metric("dflash_serve:draft_seconds_sum") > 0
