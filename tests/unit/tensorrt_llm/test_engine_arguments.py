"""`engine_args.tensorrt-llm`: options of trtllm-serve and keys of config.yaml; the keys of `serving`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from tests.support.tiny import tiny_drafter_config
from tests.unit.tensorrt_llm.conftest import PREPARED, backend, changed, configuration, tiny_deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return tiny_deployment(tmp_path, tiny_drafter_config())


def given(deployment: Deployment, **arguments: Any) -> Deployment:
    return changed(deployment, engine_args={"tensorrt-llm": arguments})


def test_options_go_to_the_command_line_and_keys_into_config_yaml(deployment: Deployment) -> None:
    arguments: dict[str, Any] = {"trust_remote_code": True, "log-level": "warning", "stream_interval": 4}
    asked = given(deployment, **arguments, kv_cache_config={"tokens_per_block": 64})
    assert backend().launch(asked).command(PREPARED).argv[-2:] == ("--log_level", "warning")
    written = configuration(asked)
    assert written["stream_interval"] == 4
    assert written["trust_remote_code"] is True, "an option, too, but Dynamo reads config.yaml alone"
    kv_cache = written["kv_cache_config"]
    assert (kv_cache["tokens_per_block"], kv_cache["enable_block_reuse"]) == (64, False), "merged, not replaced"


def test_a_null_turns_cuda_graphs_off(deployment: Deployment, tmp_path: Path) -> None:
    """`cuda_graph_config: null` is TensorRT-LLM's own switch."""
    path = tmp_path / "deployment.yaml"
    asked = given(deployment, cuda_graph_config=None).model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(asked))
    assert configuration(load_deployment(path))["cuda_graph_config"] is None


def test_a_null_cannot_leave_out_the_drafter_or_keys_that_we_set(deployment: Deployment) -> None:
    (problem,) = backend().launch(given(deployment, speculative_config=None)).problems
    assert "null would leave the drafter out" in str(problem)
    assert "kv_cache_config" in str(backend().launch(given(deployment, kv_cache_config=None)).problems)


UNCHECKED: dict[str, Any] = {
    "attention_dp_config": {"enable_balance": True},
    "kv_cache_config": {"host_cache_size": 1 << 30, "mamba_ssm_cache_dtype": "float32"},
    "cuda_graph_config": {"mode": "decode"},
    "speculative_config": {"load_format": "auto"},
}


def test_keys_that_the_mirror_does_not_check_are_written_beside_ours(deployment: Deployment) -> None:
    """llm_args.py @0004396; what they may be is TensorRT-LLM's to say."""
    ours, written = configuration(deployment), configuration(given(deployment, **UNCHECKED))
    for section, keys in UNCHECKED.items():
        assert written[section] == {**ours.get(section, {}), **keys}
    graphs = configuration(given(deployment, cuda_graph_config={"batch_sizes": [1, 8]}))["cuda_graph_config"]
    assert graphs == {"enable_padding": True, "batch_sizes": [1, 8]}, "upstream takes the largest of them"
    misspelt = given(deployment, kv_cache_config={"host_cache": 1})
    assert "unknown key kv_cache_config.host_cache" in backend().launch(misspelt).problems[0].what


@pytest.mark.parametrize(
    ("arguments", "release", "said"),
    [
        ({"enable_attention_dp": True}, "1.4", "set parallel.attention_data"),
        ({"tool_parser": "qwen3"}, "1.4", "set serving.tool_call_parser"),
        ({"kv_cache_dtype": "fp8"}, "1.4", "set kv_cache.dtype"),
        ({"speculative_config": {"context_recompute_tail": 64}}, "1.3.0rc27", "has no speculative_config.context_rec"),
    ],
)
def test_an_argument_that_is_not_the_users_to_give_is_refused(
    deployment: Deployment, arguments: dict[str, Any], release: str, said: str
) -> None:
    (problem,) = backend(release).launch(given(deployment, **arguments)).problems
    assert said in str(problem)


def test_every_key_that_we_write_is_one_that_we_claim(deployment: Deployment) -> None:
    for name, value in configuration(deployment).items():
        leaves = {name: value} if not isinstance(value, dict) else {f"{name}.{key}": {key: value[key]} for key in value}
        for path, leaf in leaves.items():
            if path != "cuda_graph_config.enable_padding":  # padding may be turned off
                (problem,) = backend().launch(given(deployment, **{name: leaf})).problems
                assert "dflash-serve sets itself" in str(problem), path


REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "unknown key": {"speculative_config": {"eagle_choices": 8}},
    "exclude each other": {"speculative_config": {"max_concurrency": 8, "draft_len_schedule": {8: 3}}},
    "must begin with": {"speculative_config": {"draft_len_schedule": {4: 2, 8: 3}}},
    "goes beyond": {"speculative_config": {"draft_len_schedule": {4: 3, 8: 7}}},
    "less than or equal": {"speculative_config": {"acceptance_rate_threshold": 1.5}},
    "beam search": {"max_beam_width": 4},
    "sampling and guided": {
        "speculative_config": {"use_rejection_sampling": True}, "guided_decoding_backend": "xgrammar",
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED_VALUES)
def test_a_value_that_trtllm_serve_would_refuse_is_refused_before_it_starts(
    reason: str, deployment: Deployment
) -> None:
    limited = changed(deployment, limits={"max_batch_size": 64}, speculation={"width": 4})
    (problem,) = backend().launch(given(limited, **REFUSED_VALUES[reason])).problems
    assert (reason in problem.what, problem.where) == (True, "configuration for TensorRT-LLM 1.4")


INSTALLED = """
from pydantic import BaseModel, ConfigDict
class TorchLlmArgs(BaseModel):
    model_config = ConfigDict(extra="allow")
    guided_decoding_backend: str
"""


@pytest.mark.parametrize(
    ("release", "guided", "imports", "said"),
    [
        ("1.4.0rc4", "NEW_IN_THIS_RELEASE", True, None),
        ("1.4.0rc4", 7, True, "guided_decoding_backend: Input should be a valid string"),
        ("1.4.0rc4", "NEW_IN_THIS_RELEASE", False, "cannot be imported here (ImportError: libcuda.so.1)"),
        ("1.4", "NEW_IN_THIS_RELEASE", True, "'xgrammar' or 'llguidance'"),
    ],
    ids=["accepted", "refused", "does not import", "another release"],
)
def test_the_installed_release_is_asked_before_our_mirror(
    release: str, guided: object, imports: bool, said: str | None,
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    package, metadata = tmp_path / "site/tensorrt_llm/llmapi", tmp_path / "site/tensorrt_llm-1.4.0rc4.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "llm_args.py").write_text(INSTALLED if imports else "raise ImportError('libcuda.so.1')")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.4.0rc4\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    problems = backend(release).launch(given(deployment, guided_decoding_backend=guided)).problems
    assert problems == [] if said is None else said in problems[0].what, problems


def test_parsers_and_name_are_options_of_trtllm_serve(deployment: Deployment) -> None:
    serving = {"served_model_name": "tiny", "reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
    said = " ".join(backend().launch(changed(deployment, serving=serving)).command(PREPARED).argv)
    assert said.endswith("--served_model_name tiny --reasoning_parser qwen3 --tool_parser qwen3")


def test_keys_of_serving_that_it_does_not_have_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    (problem,) = backend().launch(changed(deployment, serving={"api_key_file": str(tmp_path / "keys")})).problems
    assert (problem.where, problem.do) == ("serving.api_key_file", "leave it out, and check keys in a gateway")
    (problem,) = backend().launch(changed(deployment, serving={"tool_call_parser": "hermes"})).problems
    assert "no tool call parser 'hermes'" in str(problem)
    (problem,) = backend().launch(changed(deployment, serving={"reasoning_parser": "deepseek-r2"})).problems
    assert problem.do.startswith("there are: ")  # another version is no spelling
    assert "deepseek-r1" in problem.do
    assert backend().launch(changed(deployment, serving={"tool_call_parser": "glm47"})).problems == []


@pytest.mark.usefixtures("hub")
def test_where_no_number_is_given_the_drafters_context_decides() -> None:
    fields = {"target": {"model": "Qwen/Qwen3-8B"}, "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"}}
    fields["kv_cache"] = {"dtype": "fp8"}  # with K/V in 16 bits the context has no arena of its own
    short = Deployment.model_validate({**fields, "hardware": {"gpu": "b200"}, "limits": {"max_model_len": 4096}})
    long = changed(short, limits={"max_model_len": 40960})
    assert [configuration(each)["max_batch_size"] for each in (short, long)] == [256, 64]
    chosen = {choice.key: choice for choice in backend().launch(long).choices}
    assert chosen["limits.max_batch_size"].value == "64"
    assert "GiB" in chosen["limits.max_batch_size"].why
    off = Deployment.model_validate({**fields, "speculation": {"width": "off"}})
    assert "max_batch_size" not in configuration(off), "without a drafter, upstream's own"


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_another_method_of_speculation_is_shown_without_a_drafters_context(gpu: str, deployment: Deployment) -> None:
    """On a GPU on which a drafter's context would have an arena, and on one on which it would not."""
    fields = deployment.model_dump(exclude_unset=True, exclude={"drafter"})
    mtp = {"tensorrt-llm": {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 1}}}
    alone = Deployment.model_validate({**fields, "hardware": {"gpu": gpu}, "engine_args": mtp})
    chosen = {choice.key: choice for choice in backend().launch(alone).choices}
    assert chosen["limits.max_batch_size"].value == "256"
    assert "drafter" not in chosen["limits.max_batch_size"].why
