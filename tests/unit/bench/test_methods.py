"""EAGLE-3 and MTP as variants: their words, what is refused before anything starts, and the three engines' commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.backend import ServerBackend, backend
from dflash_serve.bench.report import ReportData
from dflash_serve.bench.settings import deployed_variants
from dflash_serve.common.provenance import Environment
from dflash_serve.deployment import Deployment
from dflash_serve.draft_method import DraftMethod, parse_method
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.releases import Release
from dflash_vllm import VLLMBackend
from tests.support.eagle3 import write_eagle3_config
from tests.support.paper_models import write_paper_drafter, write_paper_target

ENGINES: dict[str, ServerBackend] = {
    "sglang": SGLangBackend(),
    "vllm": VLLMBackend(),
    "tensorrt-llm": TensorRTLLMBackend(Release.parse("1.4")),
}


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "hardware": {"gpu": "b200"}}


@pytest.fixture
def head(tmp_path: Path, fields: dict[str, Any]) -> Path:
    target = json.loads(Path(fields["target"]["model"], "config.json").read_text())
    return write_eagle3_config(tmp_path / "head", target)


def with_mtp(fields: dict[str, Any], architecture: str = "Qwen3_5ForCausalLM", family: str = "qwen3_5") -> Deployment:
    """The deployment, its target as one that brings an MTP layer."""
    path = Path(fields["target"]["model"], "config.json")
    raw = json.loads(path.read_text())
    raw |= {"architectures": [architecture], "model_type": family, "mtp_num_hidden_layers": 1}
    path.write_text(json.dumps(raw))
    return Deployment.model_validate(fields)


def variant(deployment: Deployment, word: str, engine: str) -> Deployment:
    (found,) = deployed_variants(deployment, [word], ENGINES[engine]).values()
    assert ENGINES[engine].check(found) == []
    return found


def command(deployment: Deployment, engine: str) -> str:
    return shlex.join(ENGINES[engine].command(deployment, Path("/prepared")).argv)


@pytest.mark.parametrize(
    ("word", "method"),
    [
        ("eagle3:org/head", DraftMethod("eagle3", "org/head", 3)),
        ("eagle3:/a/head:7", DraftMethod("eagle3", "/a/head", 7)),
        ("mtp", DraftMethod("mtp", "", 3)),
        ("mtp:1", DraftMethod("mtp", "", 1)),
        ("auto", None),
        ("8", None),
    ],
)
def test_a_word_names_a_method_its_checkpoint_and_its_drafts(word: str, method: DraftMethod | None) -> None:
    assert parse_method(word) == method


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("eagle3", "no checkpoint is named"),
        ("eagle3:5", "no checkpoint is named"),
        ("eagle3:org/head:0", "no token is drafted"),
        ("mtp:org/head", "MTP layers are the target's own"),
    ],
)
def test_a_word_that_names_none_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=f"--variants {word}: {said}"):
        parse_method(word)


def test_the_embedded_engine_refuses_them_by_name(fields: dict[str, Any], head: Path) -> None:
    for word in (f"eagle3:{head}", "mtp"):
        with pytest.raises(UserError, match="drafts with DFlash alone") as refused:
            deployed_variants(Deployment.model_validate(fields), ["off", word], backend("torch"))
        assert str(refused.value).count("\n") == 0


def test_sglang_is_told_to_draft_with_an_eagle3_head(fields: dict[str, Any], head: Path) -> None:
    said = command(variant(Deployment.model_validate(fields), f"eagle3:{head}:5", "sglang"), "sglang")
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {head}" in said
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in said
    assert "--speculative-draft-model-quantization unquant" in said
    assert "DFLASH" not in said


def test_sglang_is_told_to_draft_with_the_targets_mtp_layer(fields: dict[str, Any]) -> None:
    said = command(variant(with_mtp(fields), "mtp", "sglang"), "sglang")
    assert "--speculative-algorithm NEXTN --speculative-num-steps 3" in said
    assert "--speculative-draft-model-path" not in said


def test_vllm_is_told(fields: dict[str, Any], head: Path) -> None:
    def config(deployment: Deployment) -> Any:
        words = ENGINES["vllm"].command(deployment, Path("/prepared")).argv
        return json.loads(words[words.index("--speculative-config") + 1])

    found = config(variant(Deployment.model_validate(fields), f"eagle3:{head}", "vllm"))
    assert found == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    assert config(variant(with_mtp(fields), "mtp:1", "vllm")) == {"method": "mtp", "num_speculative_tokens": 1}


def test_tensorrt_llm_is_told(fields: dict[str, Any], head: Path, tmp_path: Path) -> None:
    def config(deployment: Deployment, name: str) -> Any:
        ENGINES["tensorrt-llm"].prepare(deployment, tmp_path / name)
        return yaml.safe_load((tmp_path / name / "config.yaml").read_text())

    found = config(variant(Deployment.model_validate(fields), f"eagle3:{head}", "tensorrt-llm"), "eagle3")
    wanted = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(head)}
    assert found["speculative_config"] == wanted
    assert found["kv_cache_config"]["enable_block_reuse"] is False  # as with a DFlash drafter
    assert found["max_batch_size"] == 256
    found = config(variant(with_mtp(fields), "mtp:2", "tensorrt-llm"), "mtp")
    assert found["speculative_config"] == {"decoding_type": "MTP", "max_draft_len": 2}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_variant_is_the_plain_deployment_and_nothing_of_our_drafter(
    engine: str, fields: dict[str, Any], head: Path
) -> None:
    given = Deployment.model_validate({**fields, "speculation": {"block_size": 4, "draft_window": 64}})
    found = variant(given, f"eagle3:{head}", engine)
    assert found.drafter is None
    assert found.model_copy(update={"engine_args": {}}).target == given.target
    assert ENGINES[engine].command(found, Path("/prepared")).env.get("DFLASH_SERVE_SPECULATION__WIDTH") is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 48}, "its hidden_size is 48"),
        ({"vocab_size": 32000}, "its vocab_size is 32000"),
        ({"architectures": ["DFlashDraftModel"]}, "no EAGLE-3 head's"),
        ({"hidden_size": "large"}, "hidden_size is 'large'"),
    ],
)
def test_a_head_that_is_none_or_another_targets_is_refused(
    engine: str, change: dict[str, Any], said: str, fields: dict[str, Any], head: Path
) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=said):
        deployed_variants(Deployment.model_validate(fields), [f"eagle3:{head}"], ENGINES[engine])


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_description_is_refused(text: str | None, fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    if text is not None:
        (tmp_path / "empty" / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        deployed_variants(Deployment.model_validate(fields), [f"eagle3:{tmp_path / 'empty'}"], ENGINES["sglang"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_without_mtp_layers_is_refused(engine: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no MTP layers"):
        deployed_variants(Deployment.model_validate(fields), ["mtp"], ENGINES[engine])


@pytest.mark.parametrize(
    ("engine", "said"), [("sglang", "no MTP drafter for UnheardOf"), ("vllm", "no MTP drafter for 'unheard'")]
)
def test_a_target_whose_mtp_layers_an_engine_does_not_know_is_refused(
    engine: str, said: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=said):
        deployed_variants(with_mtp(fields, "UnheardOf", "unheard"), ["mtp"], ENGINES[engine])


def test_a_head_that_sglang_would_load_as_something_else_is_refused(fields: dict[str, Any], head: Path) -> None:
    """vLLM takes SafeAILab's own heads by their plain name, SGLang would build a whole Llama."""
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    deployment = Deployment.model_validate(fields)
    with pytest.raises(UserError, match="SGLang has no EAGLE-3 model for LlamaForCausalLM"):
        deployed_variants(deployment, [f"eagle3:{head}"], ENGINES["sglang"])
    assert variant(deployment, f"eagle3:{head}", "vllm")


def test_mtp_on_a_tensorrt_llm_that_was_not_read_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"1\.3\.0rc20 may take max_draft_len otherwise"):
        deployed_variants(with_mtp(fields), ["mtp"], TensorRTLLMBackend(Release.parse("1.3.0rc20")))


def test_engine_arguments_that_would_make_off_draft_are_refused(fields: dict[str, Any]) -> None:
    own = {"sglang": {"speculative-algorithm": "NGRAM"}}
    deployment = Deployment.model_validate({"target": fields["target"], "engine_args": own})
    with pytest.raises(UserError, match=r"engine_args\.sglang\.speculative-algorithm: the variants say how it drafts"):
        deployed_variants(deployment, ["off"], ENGINES["sglang"])


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("sglang", {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "/head"}),
        ("vllm", {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}),
        ("tensorrt-llm", {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 1}}),
    ],
)
def test_a_server_may_be_given_them_too_but_not_beside_a_drafter_of_ours(
    engine: str, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    both = Deployment.model_validate({**fields, "engine_args": {engine: given}})
    assert "dflash-serve sets itself" in str(ENGINES[engine].check(both)[0])
    assert ENGINES[engine].check(both.model_copy(update={"drafter": None})) == []


def test_the_headline_tells_of_every_method() -> None:
    names = ["off", "fixed 8", "auto", "eagle3:org/head", "mtp:1"]
    report = ReportData.__new__(ReportData)
    report.__dict__.update(
        settings=type("Asked", (), {"baseline": None, "interactivity": None})(),
        variants=dict.fromkeys(names, "http://x"),
        environment=Environment,
        loads={name: [] for name in names[1:]},
        comparison=None,
    )
    assert [name for name in names if f"“{name}” against" in report.sentence] == ["auto", "eagle3:org/head", "mtp:1"]
