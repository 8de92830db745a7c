"""`inspect` says what a drafter is and all that is wrong with it; `convert` changes its dialect and nothing else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_serve.adapter.checks import pairing_notes
from dflash_serve.adapter.registry import installed
from dflash_serve.checkpoint.formats import Format
from dflash_serve.checkpoint.reader import DIALECTS, read_config
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.checkpoint.target import TargetShape
from dflash_serve.cli.drafters import Precisions, To
from dflash_serve.cli.main import app
from dflash_serve.common import progress
from dflash_serve.errors import Problem, UserError
from dflash_serve.models.loader import head_weight, load_drafter
from tests.support.tiny import (
    FULL,
    SLIDING,
    edit_json,
    tiny_drafter_config,
    write_in_layout,
    write_quantized_drafter,
    write_tiny_drafter,
)

WEIGHTS = "model.safetensors"


def run(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_tiny_drafter(tmp_path / "drafter", dtype=torch.bfloat16)


def write_target(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    described = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8, "model_type": "llama", **sizes}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("config", "dialect", "words"),
    [
        (
            {"layers": (SLIDING, FULL)},
            "zlab",
            [
                *("zlab", "4 (the anchor and 3 masked slots)", "token 7", "1, 3, 5 of 8", "4 heads, 2 K/V heads"),
                *("window of 6, causal in the block", "full attention, bidirectional in the block", "theta 10000"),
            ],
        ),
        (
            {"markov": {"kind": "gated", "rank": 6}, "slots": "anchor-first"},
            "deepspec",
            [
                "DSpark: gated Markov head of rank 6, anchor-first slots",
                "4 (the anchor and 3 drafted slots; block_size 3 in config.json)",
            ],
        ),
    ],
)
def test_it_describes_the_drafter(config: dict[str, Any], dialect: str, words: list[str], tmp_path: Path) -> None:
    described = tiny_drafter_config(**config)
    folder = write_tiny_drafter(tmp_path / "drafter", described, dtype=torch.bfloat16, dialect=dialect)
    result = run("inspect", folder)
    assert result.exit_code == 0
    assert [word for word in (*words, str(folder), "no problems found") if word not in result.output] == []
    report = json.loads(run("inspect", folder, "--json").output)
    assert (report["dialect"], report["problems"]) == (dialect, [])
    assert report["config"] == described.model_dump(mode="json")
    assert report["bytes"] == 2 * report["parameters"]


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_sound_quantised_drafter_has_no_problems_and_says_how_it_is_quantised(format: Format, tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "drafter", format)
    result = run("inspect", folder)
    assert result.exit_code == 0
    assert re.search(rf"quantisation +{format.upper()}; fc in bf16", result.output)
    report = json.loads(run("inspect", folder, "--json").output)
    assert report["quantization"] == {"format": format, "layout": "modelopt", "excluded": ["fc"], "kv_cache": None}
    plain = write_tiny_drafter(tmp_path / "plain", tiny_drafter_config(intermediate_size=64))
    assert report["parameters"] == json.loads(run("inspect", plain, "--json").output)["parameters"]


def nan_and_renamed(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["norm.weight"][0] = torch.nan
    tensors["extra"] = tensors.pop("fc.weight").clone()
    save_file(tensors, folder / WEIGHTS)


def zeros(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / WEIGHTS)


def another_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", {"architectures": ["DFlash2DraftModel"]})


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


FAULTS: dict[Callable[[Path], None], tuple[str, ...]] = {
    nan_and_renamed: ("tensor fc.weight [32, 96] is missing", "tensor extra [32, 96]", "norm.weight has 1 values that"),
    zeros: ("nothing but zeros",),
    another_architecture: ("DFlash2",),
    without_weights: ("no model.safetensors",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_finds_every_problem_and_exits_with_1(fault: Callable[[Path], None], drafter: Path) -> None:
    fault(drafter)
    result = run("inspect", drafter)
    assert result.exit_code == 1
    assert [word for word in FAULTS[fault] if word not in result.output] == []
    assert "no problems" not in result.output
    report = json.loads(run("inspect", drafter, "--json").output)
    assert report["problems"]
    assert {each["verdict"] for each in report["engines"].values()} == {"refused"}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, []),
        ({"num_hidden_layers": 4, "hidden_size": 64}, ["hidden_size is 32, the target's is 64", "name [5]"]),
    ],
)
def test_it_checks_the_drafter_against_a_target(
    sizes: dict[str, int], words: list[str], drafter: Path, tmp_path: Path
) -> None:
    result = run("inspect", drafter, "--target", write_target(tmp_path / "target", **sizes))
    assert result.exit_code == (1 if words else 0)
    assert [word for word in words if word not in result.output] == []
    verdict = "refused: hidden_size is 32" if words else "served"
    assert result.output.count(f"   {verdict}") == len(installed())


def test_a_padded_vocabulary_is_served_after_convert(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(vocab_size=128))
    told = json.loads(run("inspect", folder, "--target", write_target(tmp_path / "target"), "--json").output)
    assert {each["verdict"] for each in told["engines"].values()} == {"after convert"}


def test_a_head_that_is_no_copy_of_the_targets_is_a_problem(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(), dialect="deepspec")
    target, head = write_target(tmp_path / "target"), torch.randn(96, 32)
    save_file({"model.embed_tokens.weight": head}, target / WEIGHTS)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "lm_head.weight": head.clone()}, folder / WEIGHTS)
    assert run("inspect", folder, "--target", target).exit_code == 0
    head[[4, 9]] *= 1.5
    save_file({**tensors, "lm_head.weight": head}, folder / WEIGHTS)
    result = run("inspect", folder, "--target", target)
    assert result.exit_code == 1
    assert "2 of 96 rows of its lm_head are not the target's" in result.output


def test_a_rope_base_unlike_the_targets_is_noted(drafter: Path) -> None:
    config, _ = read_config(drafter)
    target = TargetShape("t", "qwen3", 96, 32, 8, 128, rope_theta=config.rope.theta * 10)
    (note,) = pairing_notes(config, target)
    assert "RoPE base" in note
    assert pairing_notes(config, TargetShape("t", "qwen3", 96, 32, 8, 128, rope_theta=config.rope.theta)) == []


def test_problems_with_the_bundled_target_name_it_and_not_where_it_lies(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_target(tmp_path / "cache", num_hidden_layers=4, hidden_size=64)
    monkeypatch.setattr("dflash_serve.checkpoint.source.smollm2_folder", lambda: cache)
    result = run("inspect", drafter, "--target", "smollm2")
    assert "drafter for smollm2: hidden_size is 32" in result.output
    assert str(cache) not in result.output


def test_reading_the_weights_is_shown_as_all_long_work_is(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the log here, for stderr is no terminal; nothing with --quiet or --json."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)

    told = threading.Event()

    def line(works: list[progress.Work]) -> str:
        told.set()
        return ", ".join(map(str, works))

    def slow(checkpoint: Any) -> list[Problem]:
        assert told.wait(60)
        return []

    monkeypatch.setattr(progress, "_line", line)
    monkeypatch.setattr("dflash_serve.cli.drafters.weight_problems", slow)
    shown = run("inspect", drafter)
    assert (f"reading the weights of {drafter}" in shown.stderr, "reading the weights" in shown.stdout) == (True, False)
    for silent in ("--quiet", "--json"):
        assert "reading the weights" not in run("inspect", drafter, silent).stderr


def test_every_dialect_is_offered() -> None:
    assert {to.value for to in To} == set(DIALECTS)


@pytest.mark.parametrize("to", [to for to in To if to not in (To.specforge, To.k3_dspark)])
def test_a_converted_drafter_stays_the_same(to: To, drafter: Path, tmp_path: Path) -> None:
    result = run("convert", drafter, tmp_path / "b", "--to", to.value, "--json")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert (report["from"], report["to"], report["tensors"]) == ("zlab", to.value, 25)
    config, written = read_config(tmp_path / "b")
    assert (config, written.dialect) == (tiny_drafter_config(), DIALECTS[to.value])
    before, after = load_drafter(drafter).state_dict(), load_drafter(tmp_path / "b").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_target_is_named_and_gives_the_depth_that_zlabs_code_needs(tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a", tiny_drafter_config(num_target_layers=None))
    target = write_target(tmp_path / "target")
    assert "num_target_layers is not known" in run("convert", source, tmp_path / "b", "--to", "zlab").output
    known = run("convert", source, tmp_path / "c", "--to", "zlab", "--target", target)
    assert "note" not in known.output
    assert read_config(tmp_path / "c")[0].num_target_layers == 8
    run("convert", source, tmp_path / "d", "--to", "speculators", "--target", target)
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == str(target)


def test_a_drafter_that_vllm_would_misread_in_speculators_words_is_noted(tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a", tiny_drafter_config(layers=(FULL, SLIDING)))
    result = run("convert", source, tmp_path / "b", "--to", "speculators")
    assert "note: vLLM 0.32 and 0.33 would make every layer causal" in result.output


@pytest.mark.parametrize("place", ["b", "drafter"])
def test_a_destination_is_kept_unless_given_up_the_drafters_own_folder_too(
    place: str, drafter: Path, tmp_path: Path
) -> None:
    taken = write_tiny_drafter(tmp_path / place, dialect="modelopt") if place == "b" else drafter
    before, words = read_config(taken), ("convert", drafter, taken, "--to", "speculators")
    tensors = {name: tensor.clone() for name, tensor in load_drafter(drafter).state_dict().items()}
    assert isinstance(run(*words).exception, UserError)
    assert read_config(taken) == before
    assert run(*words, "--overwrite").exit_code == 0
    assert read_config(taken)[1].dialect is DIALECTS["speculators"]
    after = load_drafter(taken).state_dict()
    assert all(torch.equal(tensors[name], after[name]) for name in tensors)


REFUSED = {
    "no folder": ("inspect {tmp}/nothing", "nothing"),
    "a revision of a folder": ("inspect {drafter} --revision main", "a folder has no revision main"),
    "a revision of a folder to convert": (
        "convert {drafter} {tmp}/b --to zlab --revision main",
        "a folder has no revision main",
    ),
    "another target's drafter": ("convert {drafter} {tmp}/b --to zlab --target {tmp}/deep", "layers"),
    "no weights": ("convert {tmp}/empty {tmp}/b --to zlab", "safetensors"),
    "a place that cannot be written": ("convert {drafter} /proc/x --to speculators", "/proc/x: cannot be written"),
    "training in such a place": ("train {examples}/training.yaml --output /proc/x", "cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(case: str, drafter: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "deep", num_hidden_layers=9)
    (write_tiny_drafter(tmp_path / "empty") / WEIGHTS).unlink()
    places = {"tmp": tmp_path, "drafter": drafter, "examples": Path("examples").resolve()}
    words, said = REFUSED[case]
    error = run(*words.format(**places).split()).exception
    assert isinstance(error, UserError)
    assert said in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "b").exists()


def test_inspect_shows_what_it_read_although_the_target_cannot_be_read(
    tmp_path: Path,
) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    for name, text in (("absent", None), ("broken", "{"), ("empty", "{}")):
        target = tmp_path / name
        if text is not None:
            target.mkdir()
            (target / "config.json").write_text(text)
        result = CliRunner().invoke(app, ["inspect", str(folder), "--target", str(target)])
        assert result.exit_code == 1
        assert "block size" in result.output
        assert f"problem  {target}" in result.output


def test_the_head_of_a_hub_target_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"lm_head.weight": torch.ones(4, 2)}, tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text("{}")
    stored = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": stored}))
    asked: list[str] = []

    def fetch(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert head_weight("someone/model").shape == (4, 2)
    assert [name for name in asked if name.endswith("safetensors")] == ["b.safetensors"]


def test_inspect_has_a_verdict_of_every_engine(drafter: Path, tmp_path: Path) -> None:
    quantised = write_in_layout(tmp_path / "mxfp4", Scheme("mxfp4", "compressed-tensors"))
    target = write_target(tmp_path / "target", hidden_size=64)
    report = json.loads(run("inspect", quantised, "--target", target, "--json").output)
    verdicts = {name: each["verdict"] for name, each in report["engines"].items()}
    assert verdicts == {"sglang": "after convert", "tensorrt-llm": "after convert", "torch": "served", "vllm": "served"}
    lines = run("inspect", quantised, "--target", target).output.splitlines()
    assert "vllm           served" in lines
    assert "made beside    not known; this target has bf16 weights" in lines
    (sglang,) = [line for line in lines if line.startswith("sglang")]
    assert sglang.startswith("sglang         after `convert`: SGLang has no MXFP4 product")
    assert "dflash-serve convert --dequantise" in sglang
    assert "vllm" not in run("inspect", drafter, "--quiet").output


def test_inspect_knows_the_target_of_a_published_drafter() -> None:
    report = json.loads(run("inspect", "smollm2", "--json").output)
    assert {each["verdict"] for each in report["engines"].values()} == {"served"}


def test_inspect_says_for_which_precision_of_its_target_a_published_drafter_was_made() -> None:
    assert Precisions("nvfp4", "fp8").words == "a target with nvfp4 weights, and this target has fp8"
    assert Precisions("nvfp4", "nvfp4").words == "a target with nvfp4 weights, as this target has"
    assert Precisions("nvfp4", None).words == "a target with nvfp4 weights"
    assert Precisions(None, None).words is None
