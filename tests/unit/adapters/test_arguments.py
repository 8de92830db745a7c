"""`engine_args` and `serving` on each engine's command line: handed on, or refused with the key that sets them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.arguments import pinned_parser
from dflash_serve.adapter.registry import server_backend
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from tests.support.tiny import edit_json

EVERYTHING: dict[str, Any] = {
    "parallel": {"tensor": 2},
    "hardware": {"gpu": "b200", "count": 2},
    "limits": {"max_batch_size": 4, "max_model_len": 128, "max_num_tokens": 64},
    "kv_cache": {"dtype": "fp8", "block_reuse": False, "memory_fraction": 0.5},
    "serving": {"served_model_name": "x", "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"},
}
OURS_UNLESS_GIVEN = {
    *("attention-backend", "speculative-draft-attention-backend", "speculative-draft-kv-cache-dtype"),
    "enforce-eager",
}
"""Flags that the user's own take the place of."""
FRACTION = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}
both = pytest.mark.parametrize("engine", FRACTION)


def command(engine: str, fields: dict[str, Any], **more: Any) -> str:
    launch = server_backend(engine).launch(Deployment.model_validate({**fields, **more}))
    assert launch.problems == []
    return " ".join(launch.command(Path("/prepared")).argv)


def problems(engine: str, fields: dict[str, Any], **more: Any) -> list[str]:
    launch = server_backend(engine).launch(Deployment.model_validate({**fields, **more}))
    return [str(problem) for problem in launch.problems]


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        (
            "sglang",
            {"mem-fraction-static": 0.9, "enable-mixed-chunk": True, "cuda_graph_bs_decode": [1, 2, 4]},
            "--mem-fraction-static 0.9 --enable-mixed-chunk --cuda-graph-bs-decode 1 2 4",
        ),
        (
            "vllm",
            {"gpu-memory-utilization": 0.9, "enable_lora": True, "enable-log-requests": False},
            "--gpu-memory-utilization 0.9 --enable-lora --no-enable-log-requests",
        ),
        (
            "vllm",
            {
                "compilation-config": {"cudagraph_mode": "PIECEWISE"},
                "allowed-media-domains": ["a.example", "b.example"],
            },
            '--compilation-config {"cudagraph_mode": "PIECEWISE"} --allowed-media-domains a.example b.example',
        ),
    ],
)
def test_arguments_are_handed_on_as_they_are(
    engine: str, given: dict[str, Any], words: str, fields: dict[str, Any]
) -> None:
    said = command(engine, fields, engine_args={engine: given, "torch": {"nonsense": 1}})
    assert words in said
    assert "nonsense" not in said, "another engine's are none of its business"


@pytest.mark.parametrize(
    ("engine", "name", "value", "said"),
    [
        ("sglang", "tp-size", 2, "set parallel.tensor"),
        ("sglang", "tensor-parallel-size", 2, "set parallel.tensor"),
        ("sglang", "max-running-requests", 2, "set limits.max_batch_size"),
        ("sglang", "speculative-num-draft-tokens", 2, "set speculation.block_size"),
        ("sglang", "config", "x", "engine_args"),
        ("sglang", "nonsense", 1, "has no such argument"),
        ("vllm", "tensor_parallel_size", 2, "set parallel.tensor"),
        ("vllm", "max-num-seqs", 2, "set limits.max_batch_size"),
        ("vllm", "speculative-config", "{}", "say how it drafts"),
        ("sglang", "json-model-override-args", '{"rope_theta": 1}', "config.json: change it there"),
        ("sglang", "decrypted-config-file", "x.json", "config.json: change it there"),
        ("sglang", "context-length", 99, "set limits.max_model_len"),
        ("vllm", "hf-overrides", '{"rope_theta": 1}', "config.json: change it there"),
        ("vllm", "config-format", "mistral", "config.json: change it there"),
        ("vllm", "override-generation-config", "{}", "requests alone say how they are sampled"),
        ("vllm", "max-model-len", 99, "set limits.max_model_len"),
        ("tensorrt-llm", "max_seq_len", 99, "set limits.max_model_len"),
        ("tensorrt-llm", "model_kwargs", {"rope_theta": 1}, "no such option or key of config.yaml"),
        ("vllm", "spec-tokens", 2, "set speculation.block_size"),
        ("vllm", "api-server-count", 2, "one front-end counts the steps"),
        ("vllm", "scheduler-cls", "x", "`width: auto` needs our scheduler"),
        ("vllm", "config", "x", "engine_args"),
        ("vllm", "gpu-memory-utilisation", 0.9, "did you mean gpu-memory-utilization?"),
        ("vllm", "gpu-memory-utilization", "much", "invalid float value"),
        ("tensorrt-llm", "tp_size", 4, "set parallel.tensor"),
        ("tensorrt-llm", "max_batch_size", 4, "set limits.max_batch_size"),
        ("tensorrt-llm", "kv_cache_config", {"enable_block_reuse": True}, "set kv_cache.block_reuse"),
        ("tensorrt-llm", "speculative_config", {"max_draft_len": 3}, "set speculation.block_size"),
        ("tensorrt-llm", "config", "x.yaml", "engine_args take the place of a file"),
        ("tensorrt-llm", "stream_intervall", 4, "did you mean stream_interval?"),
        ("tensorrt-llm", "log_level", "loud", "invalid choice: 'loud'"),
        ("tensorrt-llm", "server_role", "context", "halves of a disaggregated pair are not covered"),
    ],
)
def test_an_argument_that_is_not_the_users_to_give_is_refused(
    engine: str, name: str, value: object, said: str, fields: dict[str, Any]
) -> None:
    (found,) = problems(engine, fields, engine_args={engine: {name: value}})
    assert found.startswith(f"engine_args.{engine}")
    assert said in found


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("sglang", {"tokenizer-path": None}),
        ("vllm", {"tokenizer": None}),
        ("vllm", {"allowed-media-domains": ["a", None]}),
        ("tensorrt-llm", {"log_level": None}),
    ],
)
def test_a_null_that_a_command_line_cannot_hold_is_refused_by_its_name(
    engine: str, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    (problem,) = problems(engine, fields, engine_args={engine: given})
    assert problem.startswith(f"engine_args.{engine}.{next(iter(given))}: null is no value")


def test_a_null_inside_an_argument_of_json_is_handed_on(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(json.dumps({**fields, "engine_args": {"vllm": {"additional-config": {"a": None, "b": {}}}}}))
    words = server_backend("vllm").launch(load_deployment(path)).command(Path("/prepared")).argv
    assert words[words.index("--additional-config") + 1] == '{"a": null, "b": {}}'


@pytest.mark.parametrize("package", ["dflash_sglang", "dflash_vllm", "dflash_tensorrt_llm"])
def test_every_choice_of_a_pinned_list_is_taken(package: str) -> None:
    pinned = Path(import_module(package).__file__ or "").with_name("flags.json")
    parser = pinned_parser(pinned)
    for row in json.loads(pinned.read_text()):
        for choice in row.get("choices", []):
            assert parser.complaint([row["names"][0], str(choice)]) is None, (row["names"], choice)


@both
def test_every_flag_that_we_write_is_one_that_we_claim(engine: str, fields: dict[str, Any]) -> None:
    """Else the user's would stand beside ours, and the last one would win silently."""
    for name in {word[2:] for word in command(engine, {**fields, **EVERYTHING}).split() if word.startswith("--")}:
        given = {"kv_cache": {"memory_fraction": 0.5}, "engine_args": {engine: {name: "1"}}}
        claimed = any("dflash-serve sets itself" in said for said in problems(engine, fields, **given))
        assert claimed is (name not in OURS_UNLESS_GIVEN), name


@both
def test_the_memory_fraction_is_the_users_unless_a_key_gives_it(engine: str, fields: dict[str, Any]) -> None:
    given = {"engine_args": {engine: {FRACTION[engine]: 0.9}}}
    assert problems(engine, fields, **given) == []
    assert "set kv_cache.memory_fraction" in problems(engine, fields, **given, kv_cache={"memory_fraction": 0.5})[0]


@pytest.mark.parametrize(
    ("engine", "reasoning", "tool_call", "words"),
    [
        ("sglang", "qwen3", "qwen3", "--reasoning-parser qwen3 --tool-call-parser qwen "),
        (
            "vllm",
            "gpt-oss",
            "qwen3",
            "--reasoning-parser openai_gptoss --enable-auto-tool-choice --tool-call-parser hermes ",
        ),
        ("tensorrt-llm", "qwen3", "qwen25", "--reasoning_parser qwen3 --tool_parser qwen3"),
    ],
)
def test_parsers_are_named_by_family_and_translated(
    engine: str, reasoning: str, tool_call: str, words: str, fields: dict[str, Any]
) -> None:
    assert words in command(engine, fields, serving={"reasoning_parser": reasoning, "tool_call_parser": tool_call})
    (wrong,) = problems(engine, fields, serving={"tool_call_parser": "qwen3_codr"})
    assert "has no tool call parser 'qwen3_codr'; " in wrong


@both
@pytest.mark.parametrize(("text", "said"), [("# none\n", "has no key"), (None, "read")])
def test_a_file_of_keys_that_cannot_be_used_is_a_problem(
    engine: str, text: str | None, said: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    (found,) = problems(engine, fields, serving={"api_key_file": str(tmp_path / "keys")})
    assert found.startswith("serving.api_key_file")
    assert said in found


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt-llm"])
def test_rope_by_layer_type_is_written_as_every_engine_reads_it(
    engine: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4}
    nested = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    changes = {"rope_parameters": nested, "rope_scaling": None, "rope_theta": 1e4}
    edit_json(Path(fields["drafter"]["model"], "config.json"), changes)
    launch = server_backend(engine).launch(Deployment.model_validate(fields))
    (text,) = [file.text for file in launch.files(tmp_path) if file.name == "draft/config.json"]
    written = json.loads(text or "")
    assert (written["rope_theta"], written["rope_scaling"]) == (1e4, {"rope_type": "yarn", "factor": 8.0})
    assert "rope_parameters" not in written
