"""Overlays of a deployment as variants: EAGLE-3 and MTP by the files in examples/bench."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.adapter.registry import backend
from dflash_serve.bench.results import ReportData
from dflash_serve.bench.settings import deployed_variants, overlay_variants
from dflash_serve.common.provenance import Environment
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from dflash_vllm import VLLMBackend
from tests.support.bench_sites import settings
from tests.support.paper_models import write_paper_drafter, write_paper_target

EXAMPLES = Path(__file__).parents[3] / "examples" / "bench"
ENGINES: dict[str, ServerBackend] = {
    "sglang": SGLangBackend(),
    "vllm": VLLMBackend(),
    "tensorrt-llm": TensorRTLLMBackend(Release.parse("1.4")),
}


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """With a drafter, and settings that need one."""
    monkeypatch.setenv("HEAD", "org/head")
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    models = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    return Deployment.model_validate({**models, "hardware": {"gpu": "b200"}, "speculation": {"block_size": 4}})


def overlaid(deployment: Deployment, method: str, engine: str) -> Deployment:
    (found,) = overlay_variants(deployment, [f"{method}={EXAMPLES / method}.yaml"], ENGINES[engine]).values()
    assert ENGINES[engine].launch(found).problems == []
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_an_example_is_the_deployment_without_our_drafter(engine: str, method: str, deployment: Deployment) -> None:
    found = overlaid(deployment, method, engine)
    assert found.drafter is None
    assert (found.target, found.hardware) == (deployment.target, deployment.hardware)
    command = ENGINES[engine].launch(found).command(Path("/prepared"))
    assert "DFLASH" not in shlex.join(command.argv)
    assert "DFLASH_SERVE_SPECULATION__WIDTH" not in command.env


def test_each_engine_is_told_in_its_own_words(deployment: Deployment, tmp_path: Path) -> None:
    said = shlex.join(ENGINES["sglang"].launch(overlaid(deployment, "eagle3", "sglang")).command(tmp_path).argv)
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head" in said
    said = shlex.join(ENGINES["sglang"].launch(overlaid(deployment, "mtp", "sglang")).command(tmp_path).argv)
    assert "--speculative-algorithm NEXTN --speculative-num-steps 3" in said
    words = ENGINES["vllm"].launch(overlaid(deployment, "eagle3", "vllm")).command(tmp_path).argv
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}
    ENGINES["tensorrt-llm"].launch(overlaid(deployment, "mtp", "tensorrt-llm")).prepare(tmp_path / "prepared")
    written = yaml.safe_load((tmp_path / "prepared" / "config.yaml").read_text())
    assert written["speculative_config"] == {"decoding_type": "MTP", "max_draft_len": 3}
    assert written["kv_cache_config"]["enable_block_reuse"] is False  # as with a DFlash drafter
    assert written["max_batch_size"] == 256


def test_the_embedded_engine_refuses_an_overlay_of_other_engines(deployment: Deployment) -> None:
    with pytest.raises(UserError, match="arguments of sglang, vllm, tensorrt-llm, and none of torch"):
        overlay_variants(deployment, [f"mtp={EXAMPLES / 'mtp.yaml'}"], backend("torch"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a list", "not a mapping"),
        ("speculation: {widht: 3}", "unknown key speculation.widht; did you mean speculation.width"),
        ("target: null", "target is missing"),
        ("drafter: {model: '${UNHEARD_OF}'}", "is not set"),
    ],
)
def test_a_file_that_is_no_overlay_is_one_line(text: str, said: str, deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        overlay_variants(deployment, [f"mine={tmp_path / 'over.yaml'}"], ENGINES["vllm"])
    assert said in str(refused.value)
    assert "over.yaml" in str(refused.value)


def test_any_key_may_be_overlaid_and_others_stay(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text("speculation: {width: 3}\nkv_cache: {dtype: fp8}")
    found = overlay_variants(deployment, [f"narrow={tmp_path / 'over.yaml'}"], ENGINES["vllm"])["narrow"]
    assert (found.speculation.width, found.speculation.block_size, found.kv_cache.dtype) == (3, 4, "fp8")
    assert found.drafter == deployment.drafter


def test_a_drafter_of_an_overlay_is_found_beside_it(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "over.yaml").write_text("drafter: {model: ./other}")
    found = overlay_variants(deployment, [f"other={tmp_path / 'over.yaml'}"], ENGINES["vllm"])["other"]
    assert found.drafter is not None
    assert found.drafter.model == str(tmp_path / "other")


@pytest.mark.parametrize("words", [["mtp"], ["=a.yaml"], ["a=over.yaml", "a=over.yaml"]])
def test_names_are_given_once_with_a_file(
    words: list[str], deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "over.yaml").write_text("speculation: {width: 3}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"not NAME=FILE|two variants are called 'a'"):
        overlay_variants(deployment, words, ENGINES["vllm"])


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("sglang", {"speculative-algorithm": "NGRAM"}),
        ("vllm", {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}),
        ("tensorrt-llm", {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 1}}),
    ],
)
def test_arguments_that_make_an_engine_draft_belong_into_an_overlay(
    engine: str, given: dict[str, Any], deployment: Deployment
) -> None:
    both = Deployment.model_validate({**deployment.model_dump(exclude_unset=True), "engine_args": {engine: given}})
    assert "dflash-serve sets itself" in str(ENGINES[engine].launch(both).problems[0])
    with pytest.raises(UserError, match="the variants say how it drafts"):
        deployed_variants(both, ["off"], ENGINES[engine])


def test_the_headline_tells_of_every_overlay() -> None:
    names = ["off", "fixed 8", "auto", "eagle3", "mtp"]
    report = ReportData.__new__(ReportData)
    report.__dict__.update(
        settings=settings(variant=("eagle3=a.yaml", "mtp=b.yaml")),
        variants=dict.fromkeys(names, "http://x"),
        environment=Environment,
        loads={name: [] for name in names[1:]},
        comparison=None,
    )
    assert [name for name in names if f"“{name}” against" in report.sentence] == ["auto", "eagle3", "mtp"]
