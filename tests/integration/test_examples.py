"""The examples run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_serve.answers.prompts import jsonl_prompts
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.training.recipe import load_recipe
from tests.house import ROOT
from tests.support.embedded import tiny_engine
from tests.support.serving import running
from tests.support.tiny_target import write_tiny_pair

EXAMPLES = ROOT / "examples"


@pytest.mark.model
def test_the_python_api_streams_an_answer() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "generate.py")], capture_output=True, text=True, check=True)
    assert "acceptance length" in done.stdout


def test_the_openai_client_streams_from_our_server(tmp_path: Path) -> None:
    with running(tiny_engine(write_tiny_pair(tmp_path))) as server:
        for url in (server.url, f"{server.url}/v1/"):
            command = [sys.executable, str(EXAMPLES / "openai_client.py"), url]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            assert done.stdout.strip()


@pytest.mark.parametrize("file", sorted((EXAMPLES / "deployments").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_deployment_is_one(file: Path) -> None:
    assert load_deployment(file).drafter is not None
    assert f"{file.name}" in file.read_text().splitlines()[0]
    assert yaml.safe_load(file.read_text())["target"]


def test_functions_of_a_package_become_prompts(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "function_stubs.py")]
    subprocess.run([*script, str(tmp_path / "stubs.jsonl"), "asyncio", "json", "no_such_package"], check=True)
    prompts = jsonl_prompts(tmp_path / "stubs.jsonl")
    assert len(prompts) > 50
    assert all('    """' in prompt and "def " in prompt and "(self" not in prompt for prompt in prompts)


def test_the_training_recipe_is_one() -> None:
    assert load_recipe(EXAMPLES / "training.yaml").target.model == "smollm2"
