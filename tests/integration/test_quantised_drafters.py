"""SmolLM2's drafter, quantised, on the embedded engine: the tokens of plain decoding, nearly the same acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.cli.main import app
from dflash_serve.speculation.statistics import total
from tests.support.embedded import answers
from tests.support.prompts import word_problems
from tests.support.tiny import write_in_layout

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=48)
LOSS = {"int8": 0.05, "fp8": 0.05, "w4a16": 0.15}
"""Largest loss of acceptance length on these few prompts."""


def built(folder: Path, format: str) -> Path:
    """By `build`, from the recipe of the bundled pair."""
    recipe = folder / "recipe.yaml"
    deployment = {"target": {"model": "smollm2"}, "drafter": {"model": "smollm2"}, "hardware": {"gpu": "none"}}
    recipe.write_text(json.dumps({"deployment": deployment, "build": {"drafter": [format]}}))
    result = CliRunner().invoke(app, ["build", str(recipe), "--output", str(folder / "out")])
    assert result.exit_code == 0, result.output + str(result.exception)
    text = (folder / "out" / f"serve-{format}.yaml").read_text()
    assert text.startswith("# Engines that load this drafter: ")
    assert "torch" in text.splitlines()[0]
    assert f"quantization: {format}" in text
    return folder / "out" / f"drafter-{format}"


def rounded(folder: Path, format: str) -> Path:
    """In ModelOpt's FP8, without ModelOpt."""
    checkpoint = open_checkpoint("smollm2")
    tensors, config = load_tensors(checkpoint), checkpoint.config
    return write_in_layout(folder / format, Scheme("fp8"), config, tensors=tensors)


MAKERS: Mapping[str, Callable[[Path, str], Path]] = {"int8": built, "w4a16": built, "fp8": rounded}
PROMPTS = word_problems(6)


def run(drafter: str) -> tuple[list[list[int]], list[list[int]], float]:
    """(tokens, tokens of plain decoding, acceptance length) at the whole block."""
    llm = LLM("smollm2", drafter, width=8, dtype="float32", max_model_len=512, max_batch_size=6)
    prompts = [llm.engine.tokenize(prompt) for prompt in PROMPTS]
    outputs = llm.generate(prompts, GREEDY)
    plain = [output.token_ids for output in answers(llm.engine.plain(), prompts, GREEDY)]
    length = total(output.statistics for output in outputs).acceptance_length
    assert length is not None
    return [output.token_ids for output in outputs], plain, length


@pytest.fixture(scope="module")
def unquantised() -> float:
    return run("smollm2")[2]


@pytest.mark.parametrize("format", ["int8", "fp8", pytest.param("w4a16", marks=pytest.mark.thorough)])
def test_a_quantised_drafter_changes_no_token_and_little_acceptance(
    format: str, unquantised: float, tmp_path: Path
) -> None:
    folder = MAKERS[format](tmp_path, format)
    found = open_checkpoint(folder)
    assert (found.problems, found.mislisted, found.quantization and found.quantization.format) == ([], [], format)
    result = CliRunner().invoke(
        app, ["serve", "--target", "smollm2", "--drafter", str(folder), "--backend", "torch", "--dry-run"]
    )
    assert f"the drafter's weights are {format.upper()}" in " ".join(result.output.split())
    tokens, plain, length = run(str(folder))
    assert tokens == plain
    assert length > unquantised * (1 - LOSS[format])
    assert 1.3 < length < unquantised * 1.1
