"""Our guide and example for NVIDIA Dynamo, held against Dynamo's own package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from dflash_sglang.facts import RELEASES as SGLANG
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
