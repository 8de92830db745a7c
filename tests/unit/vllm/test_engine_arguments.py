"""`engine_args.vllm`, the keys of `serving` and copies of the model, on vLLM's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_vllm import VLLMBackend
from dflash_vllm.engine_arguments import _parser
from tests.support.paper_models import write_paper_drafter, write_paper_target

CHOSEN_BY_US = {"enforce-eager"}
"""Flags that the user's own take the place of."""


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def command(fields: dict[str, Any], **more: Any) -> str:
    deployment = Deployment.model_validate({**fields, **more})
    assert VLLMBackend().check(deployment) == []
    return " ".join(VLLMBackend().command(deployment, Path("/prepared")).argv)


def problems(fields: dict[str, Any], **more: Any) -> list[str]:
    return [str(problem) for problem in VLLMBackend().check(Deployment.model_validate({**fields, **more}))]


def test_arguments_are_handed_on_as_they_are(fields: dict[str, Any]) -> None:
    given = {
        "gpu-memory-utilization": 0.9,
        "enable_lora": True,
        "enable-log-requests": False,
        "compilation-config": {"cudagraph_mode": "PIECEWISE"},
        "allowed-media-domains": ["a.example", "b.example"],
    }
    said = command(fields, engine_args={"vllm": given, "sglang": {"nonsense": 1}})
    assert "--gpu-memory-utilization 0.9 --enable-lora --no-enable-log-requests" in said
    assert '--compilation-config {"cudagraph_mode": "PIECEWISE"} --allowed-media-domains a.example b.example' in said
    assert "nonsense" not in said, "another engine's are none of its business"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tensor-parallel-size", "parallel.tensor"),
        ("tensor_parallel_size", "parallel.tensor"),
        ("data-parallel-size", "parallel.data"),
        ("max-num-seqs", "limits.max_batch_size"),
        ("max-model-len", "limits.max_model_len"),
        ("api-key", "serving.api_key_file"),
        ("served-model-name", "serving.served_model_name"),
        ("reasoning-parser", "serving.reasoning_parser"),
        ("speculative-config", "say how it drafts"),
        ("spec-tokens", "speculation.block_size"),
        ("api-server-count", "one front-end counts the steps"),
        ("scheduler-cls", "speculation.width"),
        ("disable-log-stats", "metrics are always on"),
        ("config", "engine_args"),
    ],
)
def test_one_that_we_set_is_refused_with_the_key_that_sets_it(fields: dict[str, Any], name: str, key: str) -> None:
    (said,) = problems(fields, engine_args={"vllm": {name: 2}})
    assert said.startswith(f"engine_args.vllm.{name}: --")
    assert key in said


def test_every_flag_that_we_write_is_one_that_we_claim(fields: dict[str, Any]) -> None:
    """Else the user's would stand beside ours, and the last one would win silently."""
    more: dict[str, Any] = {
        "parallel": {"tensor": 2},
        "hardware": {"gpu": "b200", "count": 2},
        "limits": {"max_batch_size": 4, "max_model_len": 128, "max_num_tokens": 64},
        "kv_cache": {"dtype": "fp8", "block_reuse": False, "memory_fraction": 0.5},
        "serving": {"served_model_name": "x", "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"},
        "target": {**fields["target"], "revision": "0" * 40, "quantization": "fp8"},
    }
    words = f"{command({**fields, **more})} {command(fields, hardware={'gpu': 'none'})}".split()
    for name in {word[2:] for word in words if word.startswith("--")} - CHOSEN_BY_US:
        given = {"kv_cache": {"memory_fraction": 0.5}, "engine_args": {"vllm": {name: "1"}}}
        assert any("dflash-serve sets itself" in said for said in problems(fields, **given)), name


def test_a_schedule_of_ones_own_goes_with_a_width_that_is_fixed(fields: dict[str, Any]) -> None:
    given = {"engine_args": {"vllm": {"async-scheduling": False}}}
    assert "--no-async-scheduling" in command(fields, speculation={"width": 8}, **given)
    assert "speculation.width `auto` needs ours" in problems(fields, **given)[0]


def test_a_cpu_compiles_where_the_user_wants_it(fields: dict[str, Any]) -> None:
    said = command(fields, hardware={"gpu": "none"}, engine_args={"vllm": {"enforce-eager": False}})
    assert "--no-enforce-eager" in said
    assert "--enforce-eager" not in said.replace("--no-enforce-eager", "")


def test_the_memory_fraction_is_the_users_unless_a_key_gives_it(fields: dict[str, Any]) -> None:
    given = {"engine_args": {"vllm": {"gpu-memory-utilization": 0.9}}, "hardware": {"gpu": "b200"}}
    assert problems(fields, **given) == []
    assert "set kv_cache.memory_fraction" in problems(fields, **given, kv_cache={"memory_fraction": 0.5})[0]


def test_one_that_vllm_has_not_is_refused_with_its_neighbour(fields: dict[str, Any]) -> None:
    (said,) = problems(fields, engine_args={"vllm": {"gpu-memory-utilisation": 0.9}})
    assert "has no such argument" in said
    assert "did you mean gpu-memory-utilization?" in said
    (said,) = problems(fields, engine_args={"vllm": {"gpu-memory-utilization": "much"}})
    assert "invalid float value" in said


def test_beside_a_release_that_is_not_supported_arguments_are_held_against_the_pinned_list(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its parser stands is not known; that the release is not supported is what there is to say."""
    monkeypatch.setattr("dflash_serve.backend.version", lambda _: "0.34.0")
    _parser.cache_clear()
    found = problems(fields, engine_args={"vllm": {"enable-lora": True}}, serving={"reasoning_parser": "qwen3"})
    _parser.cache_clear()
    assert found == ["vllm: vLLM 0.34.0 is not supported, tested 0.32-0.33; pip install 'vllm==0.33.*'"]


def test_parsers_are_named_by_family_and_translated(fields: dict[str, Any]) -> None:
    said = command(fields, serving={"reasoning_parser": "gpt-oss", "tool_call_parser": "qwen3"})
    assert "--reasoning-parser openai_gptoss --enable-auto-tool-choice --tool-call-parser hermes " in said
    (wrong,) = problems(fields, serving={"tool_call_parser": "qwen3_codr"})
    assert "has no tool call parser 'qwen3_codr'; did you mean qwen3_coder?" in wrong
    plugged = {"engine_args": {"vllm": {"tool-parser-plugin": "mine.py"}}, "serving": {"tool_call_parser": "mine"}}
    assert problems(fields, **plugged) == []


@pytest.mark.parametrize(
    ("text", "said"), [("# none\n", "has no key"), (None, "read"), ("sound\n-odd\n", "a key that begins with -")]
)
def test_a_file_of_keys_that_vllm_cannot_take_is_a_problem(
    fields: dict[str, Any], tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    (found,) = problems(fields, serving={"api_key_file": str(file)})
    assert found.startswith("serving.api_key_file")
    assert said in found
    assert "odd" not in found
    with pytest.raises(UserError, match="keys"):
        VLLMBackend().prepare(
            Deployment.model_validate({**fields, "serving": {"api_key_file": str(file)}}), tmp_path / "prepared"
        )
    assert not (tmp_path / "prepared" / "secrets.yaml").exists()


def test_a_preview_says_what_is_chosen_and_what_follows(fields: dict[str, Any], tmp_path: Path) -> None:
    told = VLLMBackend().preview(Deployment.model_validate(fields), tmp_path)
    chosen = {choice.key: choice for choice in told.choices}
    assert chosen["limits.max_batch_size"].value == "256"
    assert "our scheduler inside vLLM chooses 1, 2, 4, 8" in chosen["speculation.width"].why
    assert [file.name for file in told.files] == ["draft/config.json", "draft/model.safetensors"]
    assert any("min_p" in note for note in told.notes)
    plain = VLLMBackend().preview(Deployment.model_validate({**fields, "speculation": {"width": "off"}}), tmp_path)
    assert (plain.files, plain.notes) == ([], [])
