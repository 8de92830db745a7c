"""The command, its environment and the draft folder that the SGLang backend writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from tests.support.paper_models import write_paper_drafter, write_paper_target


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def flags(fields: dict[str, Any], folder: Path, **more: Any) -> dict[str, str]:
    """Flag -> value; "" where it takes none."""
    argv = SGLangBackend().command(Deployment.model_validate({**fields, **more}), folder).argv[3:]
    after = [*argv[1:], "--"]
    return {
        word: "" if next_word.startswith("--") else next_word
        for word, next_word in zip(argv, after, strict=True)
        if word.startswith("--")
    }


def test_block_size_is_the_number_sglang_wants_too(fields: dict[str, Any], tmp_path: Path) -> None:
    assert flags(fields, tmp_path)["--speculative-num-draft-tokens"] == "8"
    assert flags(fields, tmp_path, speculation={"block_size": 4})["--speculative-num-draft-tokens"] == "4"


@pytest.mark.parametrize(
    ("width", "algorithm"), [("auto", "DFLASH"), (4, "DFLASH"), (8, "DFLASH"), ("off", None), (1, None)]
)
def test_sglangs_own_algorithm_is_told_the_width(
    fields: dict[str, Any], tmp_path: Path, width: object, algorithm: str | None
) -> None:
    deployment = Deployment.model_validate({**fields, "speculation": {"width": width}})
    assert flags(fields, tmp_path, speculation={"width": width}).get("--speculative-algorithm") == algorithm
    expected = {"DFLASH_SERVE_SPECULATION__WIDTH": str(width)} if algorithm else {}
    assert SGLangBackend().command(deployment, tmp_path).env == expected


def test_half_of_a_pair_runs_sglangs_own_algorithm(fields: dict[str, Any], tmp_path: Path) -> None:
    found = flags(fields, tmp_path, role="decode")
    assert found["--disaggregation-mode"] == "decode"
    assert found["--speculative-algorithm"] == "DFLASH"


def test_a_draft_never_inherits_the_targets_quantisation(fields: dict[str, Any], tmp_path: Path) -> None:
    fields["target"]["quantization"] = "fp8"
    found = flags(fields, tmp_path, kv_cache={"dtype": "fp8"})
    assert found["--quantization"] == "fp8"
    assert found["--speculative-draft-model-quantization"] == "unquant"
    assert found["--kv-cache-dtype"] == "fp8_e4m3"
    assert found["--speculative-draft-kv-cache-dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("penalty", "width", "expected"), [(1.05, 8, "openai"), (1.0, 8, None), (1.05, "off", None), (1.05, "auto", None)]
)
def test_a_models_own_penalties_are_not_asked_for_where_they_cannot_be_counted(
    penalty: float, width: object, expected: str | None, fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty}))
    assert flags(fields, tmp_path, speculation={"width": width}).get("--sampling-defaults") == expected


def test_on_several_nodes_the_environment_says_which(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = {"parallel": {"tensor": 16, "nodes": 2}, "hardware": {"count": 16}}
    with pytest.raises(UserError, match="LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX is not set"):
        flags(fields, tmp_path, **parallel)
    for name, value in {"LEADER_ADDRESS": "pod-0.pods", "GROUP_SIZE": "2", "WORKER_INDEX": "1"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)
    found = flags(fields, tmp_path, **parallel)
    assert (found["--nnodes"], found["--node-rank"]) == ("2", "1")
    assert found["--dist-init-addr"] == "pod-0.pods:20000"
    monkeypatch.setenv("LWS_GROUP_SIZE", "3")
    with pytest.raises(UserError, match="2 nodes, but LWS_GROUP_SIZE is 3"):
        flags(fields, tmp_path, **parallel)
