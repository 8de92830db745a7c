"""`engine_args.sglang`, the keys of `serving` and copies of the model, on SGLang's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_sglang import SGLangBackend
from tests.support.paper_models import write_paper_drafter, write_paper_target


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def command(fields: dict[str, Any], **more: Any) -> str:
    deployment = Deployment.model_validate({**fields, **more})
    assert SGLangBackend().check(deployment) == []
    return " ".join(SGLangBackend().command(deployment, Path("/prepared")).argv)


def problems(fields: dict[str, Any], **more: Any) -> list[str]:
    return [str(problem) for problem in SGLangBackend().check(Deployment.model_validate({**fields, **more}))]


def test_arguments_are_handed_on_as_they_are(fields: dict[str, Any]) -> None:
    given = {"mem-fraction-static": 0.9, "enable-mixed-chunk": True, "cuda_graph_bs_decode": [1, 2, 4]}
    said = command(fields, engine_args={"sglang": given, "tensorrt-llm": {"nonsense": 1}})
    assert "--mem-fraction-static 0.9 --enable-mixed-chunk --cuda-graph-bs-decode 1 2 4" in said
    assert "nonsense" not in said, "another engine's are none of its business"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tp-size", "parallel.tensor"),
        ("tensor-parallel-size", "parallel.tensor"),
        ("dp-size", "parallel.data"),
        ("max-running-requests", "limits.max_batch_size"),
        ("context-length", "limits.max_model_len"),
        ("api-key", "serving.api_key_file"),
        ("served-model-name", "serving.served_model_name"),
        ("reasoning-parser", "serving.reasoning_parser"),
        ("speculative-num-draft-tokens", "speculation.block_size"),
        ("config", "engine_args"),
    ],
)
def test_one_that_we_set_is_refused_with_the_key_that_sets_it(fields: dict[str, Any], name: str, key: str) -> None:
    (said,) = problems(fields, engine_args={"sglang": {name: 2}})
    assert said.startswith(f"engine_args.sglang.{name}: --")
    assert key in said


def test_every_flag_that_we_write_is_one_that_we_claim(fields: dict[str, Any]) -> None:
    """Else the user's would stand beside ours, and the last one would win silently."""
    said = command(
        fields,
        parallel={"data": 2},
        hardware={"gpu": "b200", "count": 2},
        limits={"max_batch_size": 4, "max_model_len": 128, "max_num_tokens": 64},
        kv_cache={"dtype": "fp8", "block_reuse": False, "memory_fraction": 0.5},
        serving={"served_model_name": "x", "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"},
        speculation={"draft_window": 64},
    ).split()
    ours = {word[2:] for word in said if word.startswith("--")} - {
        "attention-backend",
        "speculative-draft-attention-backend",
        "speculative-draft-kv-cache-dtype",
    }
    for name in ours:
        given = {"kv_cache": {"memory_fraction": 0.5}, "engine_args": {"sglang": {name: "1"}}}
        assert "dflash-serve sets itself" in problems(fields, **given)[0], name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention-backend", "flashinfer"),
        ("speculative-draft-attention-backend", "flashinfer"),
        ("speculative-draft-kv-cache-dtype", "fp8_e4m3"),
    ],
)
def test_the_users_kernels_and_formats_take_the_place_of_ours(fields: dict[str, Any], name: str, value: str) -> None:
    given = {"hardware": {"gpu": "b200"}, "engine_args": {"sglang": {name: value}}}
    assert problems(fields, **given) == []
    said = f" {command(fields, **given)} "
    assert said.count(f" --{name} ") == 1
    assert f" --{name} {value} " in said


def test_the_memory_fraction_is_the_users_unless_a_key_gives_it(fields: dict[str, Any]) -> None:
    given = {"engine_args": {"sglang": {"mem-fraction-static": 0.9}}, "hardware": {"gpu": "b200"}}
    assert problems(fields, **given) == []
    assert "set kv_cache.memory_fraction" in problems(fields, **given, kv_cache={"memory_fraction": 0.5})[0]


def test_parsers_are_named_by_family_and_translated(fields: dict[str, Any]) -> None:
    said = command(fields, serving={"reasoning_parser": "qwen3", "tool_call_parser": "qwen3"})
    assert "--reasoning-parser qwen3 --tool-call-parser qwen " in said
    (wrong,) = problems(fields, serving={"tool_call_parser": "qwen3_codr"})
    assert wrong == (
        "serving.tool_call_parser: SGLang 0.5.23 has no tool call parser 'qwen3_codr'; did you mean qwen3_coder?"
    )


@pytest.mark.parametrize(("text", "said"), [("one\ntwo\n", "has 2 keys"), ("# none\n", "has no key"), (None, "read")])
def test_a_file_of_keys_that_sglang_cannot_take_is_a_problem(
    fields: dict[str, Any], tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    (found,) = problems(fields, serving={"api_key_file": str(file)})
    assert found.startswith("serving.api_key_file")
    assert said in found


def test_copies_of_the_model_are_sglangs_data_parallelism(fields: dict[str, Any]) -> None:
    said = command(fields, parallel={"data": 4, "tensor": 2}, hardware={"gpu": "b200", "count": 8})
    assert "--tp-size 2 --dp-size 4" in said


def test_copies_go_with_one_node_and_whole_attention(fields: dict[str, Any]) -> None:
    over = {"data": 2, "tensor": 8, "nodes": 2}
    assert any("one node" in said for said in problems(fields, parallel=over, hardware={"count": 16}))
    mixed = {"data": 2, "tensor": 2, "attention_data": True}
    assert any("exclude each other" in said for said in problems(fields, parallel=mixed, hardware={"count": 4}))


def test_a_model_that_does_not_fit_a_gpu_is_advised_to_be_split(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "head_dim": 1024}
    target = write_paper_target(tmp_path / "large", **sizes)
    (said, *_) = problems({"target": {"model": str(target)}}, hardware={"gpu": "b200", "count": 8})
    assert "set parallel.tensor to 8" in said
    assert "parallel.data to" not in said


def test_where_no_number_is_given_it_is_sglangs_own(fields: dict[str, Any], tmp_path: Path) -> None:
    assert "--max-running-requests" not in command(fields)
    deployment = Deployment.model_validate(fields)
    chosen = {choice.key: choice for choice in SGLangBackend().preview(deployment, tmp_path).choices}
    assert chosen["limits.max_batch_size"].value == "48"
    assert "SGLang's own number" in chosen["limits.max_batch_size"].why
