"""The catalogue of published drafters: listed offline, and `drafter: auto` chosen from it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_serve.adapter.checks import precision_notes
from dflash_serve.adapter.protocol import Backend
from dflash_serve.adapter.registry import backend, choose_drafter, installed
from dflash_serve.adapter.verdicts import verdict
from dflash_serve.checkpoint.catalogue import (
    CataloguedDrafter,
    able_drafters,
    catalogue,
    catalogued_drafter,
    drafters_of,
)
from dflash_serve.checkpoint.config import Heads
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_torch.facts import FACTS
from tests.unit.tensorrt_llm.published_targets import TARGETS


class Picky:
    """A backend that serves every drafter, or none."""

    name, facts, releases, untried = "picky", FACTS, "1.0", ()

    def __init__(self, *refusals: str) -> None:
        self.refusals = refusals

    def check(self, deployment: Deployment) -> list[Problem]:
        return []

    def head_problems(self, heads: Heads) -> list[Problem]:
        return [Problem(refusal) for refusal in self.refusals]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)


def auto(target: str) -> Deployment:
    return Deployment.model_validate({"target": {"model": target}, "drafter": {"model": "auto"}})


def test_what_is_said_of_the_bundled_drafters_was_measured() -> None:
    report = Path(__file__).parents[2] / "benchmarks" / "results" / "acceptance-smollm2-dspark.json"
    measured = json.loads(report.read_text())["drafters"]
    tables = {"smollm2": measured["without a head"], "smollm2-dspark": measured["rank 8"]}
    for drafter in drafters_of("smollm2"):
        lengths = [each["acceptance_length"] for each in tables[drafter.repository].values()]
        assert [one.value for one in drafter.acceptance_length] == [round(one, 2) for one in lengths]


def test_every_backend_can_tell_and_a_target_is_found_by_its_id_in_any_case_and_by_its_name() -> None:
    assert all(isinstance(backend(name), Backend) for name in installed())
    wanted = {drafter.repository for drafter in drafters_of("Qwen/Qwen3-8B")}
    assert {"z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7"} <= wanted
    assert {one.repository for one in drafters_of("qwen3-8b")} == wanted


@pytest.mark.parametrize(
    ("target", "engine", "repository"),
    [
        ("Qwen/Qwen3-4B", "torch", "mgoin/Qwen3-4B-speculator.dflash2"),
        ("Qwen/Qwen3-4B", "sglang", "mgoin/Qwen3-4B-speculator.dflash2"),
        ("Qwen/Qwen3-8B", "tensorrt-llm", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "vllm", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "sglang", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3.8-27B", "sglang", "z-lab/Qwen3.8-27B-DFlash2"),
        ("Qwen/Qwen3-14B", "sglang", "deepseek-ai/dspark_qwen3_14b_block7"),
        ("smollm2", "torch", "smollm2-dspark"),
    ],
)
def test_auto_takes_the_best_that_the_backend_serves(target: str, engine: str, repository: str) -> None:
    found = choose_drafter(auto(target), backend(engine))[0].drafter
    assert found is not None
    assert found.model == repository


def test_what_auto_took_is_said_with_its_revision_or_that_it_has_none() -> None:
    found, told = choose_drafter(auto("Qwen/Qwen3-4B"), Picky())
    assert found.drafter is not None
    assert found.drafter.revision == "e3e7a18e4f541fa3841c2fb0666a7759079ab6fd"
    assert "mgoin/Qwen3-4B-speculator.dflash2 at e3e7a18e" in str(told)
    assert "its revision is not pinned" in str(choose_drafter(auto("zai-org/GLM-5.2"), Picky())[1])
    named = Deployment.model_validate({"target": {"model": "Qwen/Qwen3-4B"}, "drafter": {"model": "a/b"}})
    assert choose_drafter(named, Picky()) == (named, None)


def test_auto_says_why_it_took_one_and_what_it_passed_over() -> None:
    """RedHatAI's DFlash2 of Qwen3-8B has neither a commit that is known nor a figure; z-lab's DFlash has both."""
    found, told = choose_drafter(auto("Qwen/Qwen3-8B"), backend("sglang"))
    assert found.drafter is not None
    assert found.drafter.revision == "9b41424b7109f9c5413454f481b09a82b85333f4"
    assert "published acceptance 6.54 GSM8K, 7.87 MATH-500" in str(told)
    assert (
        "RedHatAI/Qwen3-8B-speculator.dflash2 (DFlash2) is passed over, since it lacks a published acceptance"
        in str(told)
    )


def serves(_: CataloguedDrafter) -> bool:
    return True


def test_auto_never_takes_a_restricted_licence_a_gated_one_nor_what_nothing_runs() -> None:
    assert drafters_of("zai-org/GLM-5.3-Flash")[0].is_restricted
    assert [one.is_restricted for one in drafters_of("MiniMaxAI/MiniMax-M2.7")] == [True, False]
    able = [one.repository for one in able_drafters("zai-org/GLM-5.3-Flash", lambda one: one.unread is None)]
    assert able[0] == "local-inference-lab/GLM-5.3-Flash-DFlash2-MXFP8"
    assert able_drafters("MiniMaxAI/MiniMax-M2.7", serves) == [], "z-lab's is gated"
    with pytest.raises(UserError, match="no drafter of deepseek-ai/DeepSeek-V4-Flash is served by this backend"):
        choose_drafter(auto("deepseek-ai/DeepSeek-V4-Flash"), backend("sglang"))


def test_auto_takes_no_drafter_that_was_made_for_another_precision_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = catalogue().drafters[0]
    made = plain.model_copy(update={"repository": "a/nvfp4", "target_precision": "nvfp4"})
    both = catalogue().model_copy(update={"drafters": (made, plain)})
    monkeypatch.setattr("dflash_serve.checkpoint.catalogue.catalogue", lambda: both)
    found = {each: able_drafters(plain.target, serves, precision=each)[0] for each in ("none", "nvfp4", "fp8")}
    assert found == {"none": made, "nvfp4": made, "fp8": plain}


def test_the_embedded_engine_is_not_listed_for_targets_that_it_does_not_run() -> None:
    told = CliRunner().invoke(app, ["drafters", "openai/gpt-oss-120b"]).output
    assert "served by sglang, tensorrt-llm, vllm" in told
    assert "not by torch: the embedded engine runs no gpt_oss targets" in told


def test_what_an_engine_serves_and_we_do_not_read_is_said_and_never_taken() -> None:
    target = "poolside/Laguna-S-2.1"
    told = CliRunner().invoke(app, ["drafters", target]).output
    assert "by the engine's own command, not through dflash-serve, sglang: SGLang 0.5.23 has its class" in told
    nemotron = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
    told = CliRunner().invoke(app, ["drafters", nemotron]).output
    assert "served by sglang" in told
    assert "made for the target in nvfp4" in told
    found = choose_drafter(auto(nemotron), backend("sglang"))[0].drafter
    assert found is not None
    assert found.model == f"{nemotron}-DSpark"
    kimi = json.loads(CliRunner().invoke(app, ["drafters", "moonshotai/Kimi-K3", "--json"]).output)["drafters"]
    mla = next(row for row in kimi if row["repository"] == "Inferact/Kimi-K3-DSpark")
    assert mla["engines"]["tensorrt-llm"]["verdict"] == "engine alone"
    with pytest.raises(UserError, match="is served by this backend"):
        choose_drafter(auto(target), backend("sglang"))


@pytest.mark.parametrize(("precision", "warned"), [("nvfp4", False), ("fp8", True), (None, True)])
def test_a_target_in_another_precision_than_the_drafters_is_told(precision: str | None, warned: bool) -> None:
    """A card reports 0 % beside the FP8 target for a drafter that was made for the NVFP4 one."""
    told = list(precision_notes("poolside/Laguna-S-2.1-DFlash-NVFP4", "poolside/Laguna-S-2.1-FP8", precision))
    assert [f"has {precision or 'bf16'}: it may accept nothing, without an error" in note for note in told] == [
        True
    ] * warned
    assert list(precision_notes("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", precision)) == []
    assert list(precision_notes("/a/folder", "Qwen/Qwen3-8B", precision)) == []


def test_a_dry_run_and_inspect_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = catalogue().drafters[0].model_copy(update={"repository": "smollm2", "target_precision": "nvfp4"})
    only = catalogue().model_copy(update={"drafters": (made,)})
    monkeypatch.setattr("dflash_serve.checkpoint.catalogue.catalogue", lambda: only)
    config = {**TARGETS["smollm2"], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = ("--target", str(tmp_path), "--drafter", "smollm2")
    dry = CliRunner().invoke(app, ["serve", *pair, "--backend", "sglang", "--dry-run", "--json"])
    words = f"{tmp_path} has fp8: it may accept nothing, without an error"
    assert any(words in note for note in json.loads(dry.stdout)["notes"])
    seen = CliRunner().invoke(app, ["inspect", "smollm2", "--target", str(tmp_path), "--json"])
    assert any(words in note for note in json.loads(seen.stdout)["notes"])


def test_a_row_is_judged_by_its_quantiser() -> None:
    """ModelOpt's MXFP8 and compressed-tensors' differ on SGLang, and so do NVFP4's on TensorRT-LLM."""
    published = catalogued_drafter("curvedinf/Qwen3.8-27B-DFlash2-GPTQ-INT8-W8A8-GS128")
    assert published is not None
    assert (published.weights, published.layout) == ("w8a16", "gptq")
    assert verdict(backend("sglang"), published).verdict == "served"
    other = published.model_copy(update={"weights": "mxfp8", "layout": "compressed-tensors"})
    assert "no MXFP8 product of compressed-tensors" in str(verdict(backend("sglang"), other).why)
    nvfp4 = published.model_copy(update={"weights": "nvfp4", "layout": "compressed-tensors"})
    assert "reads ModelOpt's layout alone" in str(verdict(backend("tensorrt-llm"), nvfp4).why)


def test_what_is_not_known_is_shown_as_such() -> None:
    told = CliRunner().invoke(app, ["drafters", "Qwen/Qwen3.8-Flash-Next"]).output
    assert "DFlash2, block size not known" in told
    assert "revision not pinned; licence not known" in told
    assert "not known: format of its weights, precision of its target, thinking, gate" in told
    assert "not known of sglang: its config.json is not known" in told


@pytest.mark.parametrize(
    ("target", "refusals", "words"),
    [
        ("Qwen/Qwen3-8", (), "did you mean Qwen/Qwen3-8B?"),
        ("Qwen/Qwen3-Coder-30B-A3B", (), "did you mean Qwen/Qwen3-Coder-30B-A3B-Instruct?"),
        ("no/such", (), "no published drafter of it is known"),
        ("Qwen/Qwen3-8B", ("no",), "no drafter of Qwen/Qwen3-8B is served by this backend"),
    ],
)
def test_auto_without_an_answer_is_one_line(target: str, refusals: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_drafter(auto(target), Picky(*refusals))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_verb_lists_all_or_a_targets_with_reasons() -> None:
    everything = json.loads(CliRunner().invoke(app, ["drafters", "--json"]).output)
    assert len(everything["drafters"]) == len(catalogue().drafters)
    text = CliRunner().invoke(app, ["drafters", "Qwen/Qwen3-8B"]).output
    assert "deepseek-ai/dspark_qwen3_8b_block7  for Qwen/Qwen3-8B" in text
    assert "DSpark (vanilla Markov head of rank 256, confidence head, anchor-first slots), block size 8" in text
    assert "after `convert` by sglang: a reduced draft vocabulary" in text
    assert "7.87 MATH-500 (greedy, B 16; arXiv 2602.06036, table 1)" in text
    names = CliRunner().invoke(app, ["drafters", "Qwen/Qwen3-8B", "-q"]).output.split()
    assert names == [drafter.repository for drafter in drafters_of("Qwen/Qwen3-8B")]


def test_heads_in_words() -> None:
    assert Heads().words == ""
    heads = Heads.model_validate(
        {"slots": "anchor-first", "draft_vocabulary": 32000, "markov": {"kind": "rnn", "rank": 8}}
    )
    assert heads.words == "rnn Markov head of rank 8, 32,000 tokens, anchor-first slots"
