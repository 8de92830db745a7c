"""`engine_args.tensorrt-llm`: options of trtllm-serve and keys of config.yaml; the keys of `serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.deployment import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.releases import Release
from tests.support.tiny import tiny_drafter_config
from tests.unit.tensorrt_llm.conftest import tiny_deployment

BACKEND = TensorRTLLMBackend(Release.parse("1.4"))


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return tiny_deployment(tmp_path, tiny_drafter_config())


def with_(deployment: Deployment, **sections: Any) -> Deployment:
    return Deployment.model_validate({**deployment.model_dump(exclude_unset=True), **sections})


def configuration(deployment: Deployment) -> dict[str, Any]:
    assert BACKEND.check(deployment) == []
    found: dict[str, Any] = yaml.safe_load(BACKEND.yaml(BACKEND.resolve(deployment), Path("/prepared")))
    return found


def test_options_go_to_the_command_line_and_keys_into_config_yaml(deployment: Deployment) -> None:
    given = {
        "trust_remote_code": True,
        "log-level": "warning",
        "stream_interval": 4,
        "moe_config": {"backend": "CUTLASS"},
    }
    asked = with_(deployment, engine_args={"tensorrt-llm": given, "sglang": {"nonsense": 1}})
    said = " ".join(BACKEND.command(asked, Path("/prepared")).argv)
    assert said.endswith("config.yaml --log_level warning")
    written = configuration(asked)
    assert written["stream_interval"] == 4
    assert written["trust_remote_code"] is True, "an option, too, but Dynamo reads config.yaml alone"
    assert written["moe_config"] == {"backend": "CUTLASS"}
    assert "nonsense" not in said + str(written)


def test_a_section_of_ours_is_merged_not_replaced(deployment: Deployment) -> None:
    written = configuration(
        with_(deployment, engine_args={"tensorrt-llm": {"kv_cache_config": {"tokens_per_block": 64}}})
    )
    assert written["kv_cache_config"]["tokens_per_block"] == 64
    assert written["kv_cache_config"]["enable_block_reuse"] is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_batch_size": 4}, "set limits.max_batch_size"),
        ({"tp_size": 4}, "set parallel.tensor"),
        ({"config": "x.yaml"}, "engine_args take the place of a file"),
        ({"kv_cache_config": {"enable_block_reuse": True}}, "set kv_cache.block_reuse"),
        ({"speculative_config": {"max_draft_len": 3}}, "set speculation.block_size"),
        ({"enable_attention_dp": True}, "set parallel.attention_data"),
        ({"stream_intervall": 4}, "did you mean stream_interval?"),
        ({"tool_parser": "qwen3"}, "set serving.tool_call_parser"),
        ({"log_level": "loud"}, "invalid choice: 'loud'"),
    ],
)
def test_what_is_not_the_users_to_give_is_refused(deployment: Deployment, given: dict[str, Any], said: str) -> None:
    (problem,) = BACKEND.check(with_(deployment, engine_args={"tensorrt-llm": given}))
    assert said in str(problem)


def test_every_key_that_we_write_is_one_that_we_claim(deployment: Deployment) -> None:
    for name, value in configuration(deployment).items():
        leaves = {name: value} if not isinstance(value, dict) else {f"{name}.{key}": {key: value[key]} for key in value}
        for path, leaf in leaves.items():
            if path in ("cuda_graph_config.enable_padding",):
                continue  # no contradiction: padding may be turned off
            given = {"tensorrt-llm": {name: leaf}}
            assert "dflash-serve sets itself" in str(BACKEND.check(with_(deployment, engine_args=given))[0]), path


def test_parsers_and_name_are_options_of_trtllm_serve(deployment: Deployment) -> None:
    serving = {"served_model_name": "tiny", "reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
    said = " ".join(BACKEND.command(with_(deployment, serving=serving), Path("/prepared")).argv)
    assert said.endswith("--served_model_name tiny --reasoning_parser qwen3 --tool_parser qwen3")
    (wrong,) = BACKEND.check(with_(deployment, serving={"tool_call_parser": "hermes"}))
    assert "no tool call parser 'hermes'" in str(wrong)


def test_a_key_is_refused_for_trtllm_serve_checks_none(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    (problem,) = BACKEND.check(with_(deployment, serving={"api_key_file": str(tmp_path / "keys")}))
    assert (problem.where, problem.do) == ("serving.api_key_file", "leave it out, and check keys in a gateway")


def test_where_no_number_is_given_the_drafters_context_decides(hub: Path) -> None:
    fields = {"target": {"model": "Qwen/Qwen3-8B"}, "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"}}
    fields["kv_cache"] = {"dtype": "fp8"}  # with K/V in 16 bits the context has no arena of its own
    short = Deployment.model_validate({**fields, "hardware": {"gpu": "b200"}, "limits": {"max_model_len": 4096}})
    long = Deployment.model_validate({**fields, "hardware": {"gpu": "b200"}, "limits": {"max_model_len": 40960}})
    batches = [configuration(each)["max_batch_size"] for each in (short, long)]
    assert batches == [256, 64]
    chosen = {choice.key: choice for choice in BACKEND.preview(long, Path("/prepared")).choices}
    assert chosen["limits.max_batch_size"].value == "64"
    assert "GiB" in chosen["limits.max_batch_size"].why
    off = Deployment.model_validate({**fields, "speculation": {"width": "off"}})
    assert "max_batch_size" not in configuration(off), "without a drafter, upstream's own"


def test_copies_of_the_model_are_replicas(deployment: Deployment) -> None:
    (problem,) = BACKEND.check(with_(deployment, parallel={"data": 8}, hardware={"gpu": "h200", "count": 8}))
    assert problem.where == "parallel.data"
    assert "`dflash-serve deploy` makes 8 replicas" in problem.do
