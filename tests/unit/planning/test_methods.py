"""`plan --methods`: methods side by side at published acceptance, and the command that measures them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter.registry import server_backend
from dflash_serve.bench.settings import overlay_variants
from dflash_serve.checkpoint.other_methods import other_methods
from dflash_serve.cli.main import app
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.planning import step_times
from dflash_serve.planning.methods import METHODS, overlay_of
from tests.house import ROOT
from tests.support.golden_deployments import hub

__all__ = ["hub"]
pytestmark = pytest.mark.usefixtures("hub")
PAIR = ("--target", "Qwen/Qwen3-8B", "--drafter", "z-lab/Qwen3-8B-DFlash-b16", "--gpu", "b200")


@pytest.fixture(autouse=True)
def by_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "tables_installed", lambda: False)


def plan(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *PAIR, *words, "--output", str(folder), "--overwrite"])


def methods(folder: Path, *words: str) -> dict[str, Any]:
    done = plan(folder, *words, "--json")
    assert done.exception is None, done.exception
    return {each["method"]: each for each in json.loads(done.stdout)["methods"]}


def test_each_method_is_priced_at_its_published_acceptance_or_says_why_not(tmp_path: Path) -> None:
    found = methods(tmp_path, "--task", "mt-bench", "--methods", ",".join(METHODS))
    assert list(found) == list(METHODS)
    dflash, eagle3 = found["dflash"], found["eagle3"]
    assert dflash["points"][0]["acceptance_length"] == pytest.approx(4.24)
    assert eagle3["points"][0]["acceptance_length"] == pytest.approx(2.83)
    assert "AngelSlim/Qwen3-8B_eagle3" in eagle3["acceptance"]
    assert "arXiv 2602.06036, table 1" in eagle3["acceptance"]
    assert {each["times_off"] for each in found["off"]["points"]} == {1}
    for one, other in zip(dflash["points"], eagle3["points"], strict=True):
        assert one["batch"] == other["batch"]
        assert one["times_off"] > other["times_off"], "15 passes for fewer tokens"
    assert found["mtp"]["points"] == []
    assert found["mtp"]["why_not"] == "no acceptance of MTP with this target is known"


def test_of_several_heads_the_faster_is_taken(tmp_path: Path) -> None:
    found = methods(tmp_path, "--task", "gsm8k", "--methods", "eagle3")["eagle3"]
    assert found["drafter"] == "EAGLE-3: deepseek-ai/eagle3_qwen3_8b_block7"
    assert found["points"][0]["width"] == 8


def test_without_a_task_it_says_which_were_published(tmp_path: Path) -> None:
    found = methods(tmp_path, "--acceptance-length", "5", "--methods", "dflash,eagle3")
    assert found["dflash"]["points"][0]["acceptance_length"] == pytest.approx(5)
    assert found["eagle3"]["why_not"].startswith(
        "give --task instead of the acceptance that was given: EAGLE-3 has published figures at aime25, gsm8k,"
    )
    assumed = ["plan", *PAIR[:2], *PAIR[4:], "--acceptance-length", "5", "--methods", "dflash", "--json"]
    done = CliRunner().invoke(app, [*assumed, "--output", str(tmp_path / "assumed")])
    (_, dflash) = json.loads(done.stdout)["methods"]
    assert dflash["drafter"] == "an assumed drafter"
    assert dflash["points"][0]["acceptance_length"] == pytest.approx(5)


def test_the_next_line_measures_them_on_the_engine(tmp_path: Path) -> None:
    done = plan(tmp_path, "--task", "gsm8k", "--methods", "off,dflash,eagle3")
    assert done.exception is None, done.exception
    (command,) = re.findall(r"^next: dflash-serve (bench .*--variant .*)$", done.stdout, re.MULTILINE)
    words = shlex.split(command)
    variant = words[words.index("--variant") + 1]
    assert variant == f"eagle3={tmp_path}/eagle3.yaml"
    backend = server_backend("sglang")
    deployment = load_deployment(tmp_path / "deployment.yaml")
    made = overlay_variants(deployment, [variant], backend)["eagle3"]
    assert made.drafter is None
    assert made.engine_args["sglang"]["speculative-num-draft-tokens"] == 8
    plan(tmp_path, "--task", "gsm8k")
    assert not (tmp_path / "eagle3.yaml").exists(), "it was of the plan that is replaced"


@pytest.mark.parametrize("method", ["EAGLE-3", "MTP"])
@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt-llm"])
def test_overlays_have_the_words_of_the_examples(method: str, engine: str) -> None:
    name = "eagle3" if method == "EAGLE-3" else "mtp"
    example = yaml.safe_load((ROOT / "examples" / "bench" / f"{name}.yaml").read_text())
    row = next(one for one in other_methods(None) if one.method == method)
    made = overlay_of(row.model_copy(update={"drafted": 3, "head": None}), engine)
    assert made["engine_args"][engine] == example["engine_args"][engine]
    assert (made["drafter"], made["speculation"]) == (None, None)


def test_an_unknown_method_is_one_line(tmp_path: Path) -> None:
    done = plan(tmp_path, "--methods", "eagle")
    assert done.exit_code != 0
    assert "did you mean eagle3" in str(done.exception)
    assert not (tmp_path / "plan.json").exists()


def test_drafters_lists_other_methods_of_the_target_with_their_sources() -> None:
    done = CliRunner().invoke(app, ["drafters", "Qwen/Qwen3.5-9B"])
    assert "MTP: the target's own layers  for Qwen/Qwen3.5-9B" in done.stdout
    assert "bench --variant mtp=examples/bench/mtp.yaml" in done.stdout
    assert "6.7 MATH-500 (SGLang, one B200, 8 users; 15 drafted are assumed; DFlash paper" in done.stdout
    told = json.loads(CliRunner().invoke(app, ["drafters", "qwen3-8b", "--json"]).stdout)
    assert {one["method"] for one in told["other_methods"]} == {"EAGLE-3"}
