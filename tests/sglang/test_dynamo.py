"""Our guide and example for NVIDIA Dynamo, held against Dynamo's own package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry, Counter

from dflash_sglang.facts import RELEASES as SGLANG
from dflash_sglang.plugin import dynamo as hooked
from dflash_tensorrt_llm.upstream import NEWEST, OLDEST, Release
from dflash_vllm.facts import RELEASES as VLLM
from tests.support.dynamo import DYNAMO, ROOT, dynamo_folders
from tests.support.paper_models import write_paper_target
from tests.support.sglang_server import ENVIRONMENT, PATIENCE

EXAMPLE = list(yaml.safe_load_all((ROOT / "examples" / "deploy" / "dynamo.yaml").read_text()))[1]["spec"]["components"]
GUIDE = (ROOT / "deploy" / "README.md").read_text()
ENGINES = ("sglang", "vllm", "tensorrt-llm")
"""In the order of the guide's columns."""


def container(component: int) -> dict[str, Any]:
    found: dict[str, Any] = EXAMPLE[component]["podTemplate"]["spec"]["containers"][0]
    return found


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Dynamo makes of the example's worker and frontend, its target replaced by a small one of this machine."""
    target = str(write_paper_target(tmp_path_factory.mktemp("models") / "target"))
    words = container(1)["args"]
    words[words.index("--model-path") + 1] = target
    asked = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    told = {entry["name"]: entry["value"] for entry in container(0)["env"]}
    folders = [ROOT, ROOT / "backends", *dynamo_folders()]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "DYN_FILE_KV": str(target)}
    env = {**os.environ, **ENVIRONMENT, **told, **paths, "ASKED": json.dumps(asked)}
    argv = [sys.executable, "-m", "tests.support.dynamo", *words, "--discovery-backend", "file"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "words": words}


def test_dynamos_own_parser_takes_every_word_of_the_example(parsed: dict[str, Any]) -> None:
    server, words = parsed["server"], parsed["words"]
    assert parsed["worker"] == {"use_kv_events": True, "mode": "agg"}
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = server[word.removeprefix("--").replace("-", "_")]
            assert value is True or str(value) == words[at + 1], word
    assert parsed["frontend"] == {"router_mode": "kv", "migration_limit": 3}


def test_the_guide_says_which_engines_dynamo_brings_and_which_of_them_we_serve() -> None:
    (metadata,) = Path(dynamo_folders()[0]).glob("*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    brought = {one.name: str(one.specifier).removeprefix("==") for one in map(Requirement, needed) if one.marker}
    served = {
        "sglang": SGLANG.supports(brought["sglang"]),
        "vllm": VLLM.supports(brought["vllm"]),
        "tensorrt-llm": OLDEST <= Release.parse(brought["tensorrt-llm"]) <= NEWEST,
    }
    row = next(line for line in GUIDE.splitlines() if line.startswith("|") and f", {DYNAMO.version} |" in line)
    instead = {"sglang": str(SGLANG), "vllm": str(VLLM)}
    cells = [f"{brought[engine]} ({'yes' if served[engine] else f'no: {instead[engine]}'})" for engine in ENGINES]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == cells


def test_the_example_is_built_with_the_release_that_was_parsed() -> None:
    assert f"--build-arg DYNAMO={DYNAMO.version} " in (ROOT / "examples" / "deploy" / "dynamo.yaml").read_text()
    assert {component["runtimeVersionOverride"] for component in EXAMPLE} == {DYNAMO.version}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has Dynamo's modules, as a worker's has."""
    for folder in dynamo_folders():
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, hooked.WORKER, sys)


@pytest.mark.usefixtures("worker")
def test_a_workers_page_hands_on_our_counters() -> None:
    (path,) = [path for path, hook in hooked.hooks().items() if hook is hooked.with_our_counters]
    registry, pages = CollectorRegistry(), list[Any]()
    for name in ("sglang:generation_tokens", "dflash_serve:steps", "python_info"):
        Counter(name, "About it.", registry=registry).inc()
    metrics = SimpleNamespace(
        register_prometheus_expfmt_callback=pages.append, register_prometheus_typed_callback=lambda _: None
    )
    endpoint = SimpleNamespace(metrics=metrics)
    for filters in (["sglang:"], ["vllm:"], None):
        hooked.with_our_counters(
            resolve_name(path), endpoint=endpoint, registry=registry, metric_prefix_filters=filters
        )
    ours = [[name in page() for name in ("sglang:generation", "dflash_serve:steps", "python_info")] for page in pages]
    assert ours == [[True, True, False], [False, False, False], [True, True, True]]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("width", "drafted"), [(None, 7), ("auto", 7), ("4", 3)])
def test_dynamos_planner_is_told_the_drafted_tokens_of_a_step(
    monkeypatch: pytest.MonkeyPatch, width: str | None, drafted: int
) -> None:
    (path,) = [path for path, hook in hooked.hooks().items() if hook is hooked.with_drafted_tokens]
    told, block = resolve_name(path), SimpleNamespace(speculative_num_steps=1, speculative_num_draft_tokens=8)
    if width is not None:
        monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", width)
    assert told(block)["nextn"] == 1, "Dynamo alone"
    mended = hooked.with_drafted_tokens(told, block)
    assert mended is not None
    assert mended["nextn"] == drafted
    assert hooked.with_drafted_tokens(told, SimpleNamespace(speculative_num_draft_tokens=None)) is None


def test_where_dynamo_is_not_nothing_of_it_is_hooked() -> None:
    assert hooked.hooks() == {}
