"""Which GPTQ, AWQ, MXFP8 and mixed drafters SGLang and vLLM load is asked of their own classes.

What is served is prepared as `serve` does it. What is not is given to the engine as it was published, without our
plug-in's checks: it fails, or multiplies with other numbers. What `convert` then makes of it is served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from dflash_serve.adapter.launch import DRAFT
from dflash_serve.adapter.registry import server_backend
from dflash_serve.adapter.verdicts import checkpoint_verdict
from dflash_serve.checkpoint.catalogue import EngineVerdict
from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.checkpoint.reader import open_checkpoint
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from tests.support.draft_layouts import LAYOUTS, PLAIN, PUBLISHED, whole_blocks
from tests.support.draft_layouts import write as write_listed
from tests.support.other_formats import FORMATS, write
from tests.support.tiny import edit_json
from tests.support.tiny_target import write_tiny_target

ENGINE = next((name for name in ("sglang", "vllm") if find_spec(name)), "")
pytestmark = pytest.mark.skipif(not ENGINE, reason="neither SGLang nor vLLM is installed")
CLOSE, WRONG = 0.01, 0.1  # relative errors of products in bfloat16, and of products with other numbers
OTHER_NUMBERS = "it is loaded, and its products are wrong"
NO_ORDER = "no longer supported"
REFUSED: Mapping[str, Mapping[str, str]] = {
    "sglang": {
        "GPTQ by activations, with zero points": "Unknown quantization method: gptq",
        "GPTQ's second form": "Unknown quantization method: gptq",
        "MXFP8": OTHER_NUMBERS,
        "MXFP8 of compressed-tensors": "No compressed-tensors compatible scheme",
        "a mixture": "AssertionError",
        "mxfp4": "No compressed-tensors compatible scheme",
        "modelopt fp8 blocks": "ModelOptFp8Config only supports regular FP8 quantization",
    },
    "vllm": {
        "GPTQ by activations": NO_ORDER,
        "GPTQ by activations, with zero points": NO_ORDER,
        "GPTQ's second form": "Unsupported quantization config: bits=4, sym=False",
        "a mixture": "There is no module or parameter named",
        "modelopt fp8 blocks": "Dimension out of range",
    },
}
"""Engine -> format that it does not load as it was published -> words of its own error."""
LISTED = [name for name in REFUSED.get(ENGINE, ()) if name in LAYOUTS]  # of test_layouts.py, where our plug-in refuses


def prepared(target: Path, drafter: Path, folder: Path) -> Path:
    """The drafter as `serve` hands it to the engine."""
    fields = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    launch = server_backend(ENGINE).launch(Deployment.model_validate(fields))
    assert launch.problems == []
    launch.prepare(folder)
    return folder / DRAFT


def verdict_on(drafter: Path) -> EngineVerdict:
    return checkpoint_verdict(server_backend(ENGINE), open_checkpoint(drafter), "qwen3")


def vllm_release() -> tuple[int, ...] | None:
    from dflash_vllm.facts import RELEASES

    return RELEASES.numbers(version("vllm"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and in a folder for each format the published drafter; with its plain numbers, and again converted."""
    folder = tmp_path_factory.mktemp("formats")
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    edit_json(target / "config.json", {"hidden_size": 128})  # whole tiles; of the target no weight is loaded
    for name in FORMATS:
        plain = write(name, folder / name / PUBLISHED, whole_blocks(target, layers=(AttentionKind(),)))
        save_file({key: one.float().contiguous() for key, one in plain.items()}, folder / name / PLAIN)
    for name in LISTED:
        write_listed(folder / name, whole_blocks(target), LAYOUTS[name])
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Any]:
    """Path below the folder -> the engine's result: what is handed over, or the published and the converted drafter."""
    target, drafts = folder / "target", [folder / name / PUBLISHED for name in LISTED]
    for name in FORMATS:
        published = folder / name / PUBLISHED
        verdict = verdict_on(published)
        if verdict.verdict == "served":
            drafts.append(prepared(target, published, folder / name))
            continue
        options = ["--dequantise"] if "--dequantise" in str(verdict.why) else []
        converted = CliRunner().invoke(app, ["convert", str(published), str(folder / name / "converted"), *options])
        assert converted.exit_code == 0, converted.output
        drafts += [published, prepared(target, folder / name / "converted", folder / name)]
    command = [sys.executable, "-m", "tests.support.format_kernels", str(target), *map(str, drafts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {str(draft.relative_to(folder)): found[str(draft)] for draft in drafts}


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_multiplies_with_the_numbers_of_what_it_is_handed(name: str, loaded: dict[str, Any]) -> None:
    found = loaded[f"{name}/{DRAFT}"]
    assert "error" not in found, found
    assert max(found["errors"].values()) < CLOSE, found


@pytest.mark.parametrize("name", [*FORMATS, *LISTED])
def test_what_the_table_does_not_serve_the_engine_does_not_load(
    name: str, folder: Path, loaded: dict[str, Any]
) -> None:
    said, verdict = REFUSED[ENGINE].get(name), verdict_on(folder / name / PUBLISHED)
    assert (said is None) is (verdict.verdict == "served"), verdict
    if said is None:
        assert f"{name}/{PUBLISHED}" not in loaded
        return
    assert "dflash-serve convert" in str(verdict.why)
    found = loaded[f"{name}/{PUBLISHED}"]
    if name == "a mixture" and ENGINE == "vllm" and vllm_release() == (0, 33):  # convert it for 0.32, too
        assert max(found["errors"].values()) < CLOSE, found
    elif said == OTHER_NUMBERS:
        assert max(found["errors"].values()) > WRONG, found
    else:
        assert said in found["error"]
