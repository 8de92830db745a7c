"""A worker process of TensorRT-LLM, which never sees --custom_module_dirs, gets our drafter all the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import Format
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.plugin import BUILT
from dflash_tensorrt_llm.upstream import Release
from tests.support.fake_tensorrt_llm import FOLDER
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter
from tests.unit.tensorrt_llm.conftest import tiny_deployment

ROOT = Path(__file__).parents[2]
SERVING = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])  # what --custom_module_dirs does: the parent folder, then the name
package = importlib.import_module("dflash_serve_drafter")
from tensorrt_llm._torch.models import modeling_utils as registry
print(json.dumps(registry.export_external_model_modules()))
"""
WORKER = """
import importlib, json, sys
from types import SimpleNamespace as Of
from safetensors.torch import load_file
from tensorrt_llm._torch.models import modeling_utils as registry
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode
from tensorrt_llm.inputs.registry import INPUT_PROCESSOR_REGISTRY
from dflash_serve.checkpoint.reader import read_config
from tests.support.fake_tensorrt_llm.drafting import Pretrained
declared, folder, race = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
if race == "before":
    importlib.import_module("tensorrt_llm._torch.models.modeling_zoo")
registry.register_external_model_modules(declared)
if race == "between":
    importlib.import_module("tensorrt_llm._torch.models.modeling_zoo")
target = registry.get_registered_model_class("Qwen3ForCausalLM")
builder = registry.get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH)
spec = Of(attention_backend="VANILLA", speculative_model=folder)
mapping = Of(enable_attention_dp=False, tp_size=1, tp_rank=0, rank=0)
draft = Of(pretrained_config=Pretrained(read_config(folder)[0]))
drafter = builder(Of(spec_config=spec, mapping=mapping), draft, None, None)
drafter.load_weights(load_file(folder + "/model.safetensors"))
pictures = INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type.get(target)
encoder = registry.MODEL_CLASS_VISION_ENCODER_MAPPING.get("Qwen3ForCausalLM")
print(json.dumps([target.__module__, target.__mro__[1].__name__, type(drafter).__name__,
                  pictures and pictures.__name__, encoder and encoder[0].__name__]))
"""


def attempt(code: str, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def run(code: str, *arguments: str, path: str) -> object:
    done = attempt(code, *arguments, path=path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def prepare(folder: Path, config: DrafterConfig, format: Format | None = None) -> Path:
    deployment = tiny_deployment(folder, config)
    if format:
        shutil.rmtree(folder / "drafter")
        write_quantized_drafter(folder / "drafter", format, config)
    TensorRTLLMBackend(Release.parse("1.4")).launch(deployment).prepare(folder / "out")
    return folder / "out"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A drafter that upstream would get wrong: its embeddings are scaled."""
    return prepare(tmp_path, tiny_drafter_config(embedding_scale=2.0))


BASE = os.pathsep.join(map(str, (ROOT, ROOT / "backends", FOLDER)))
DECLARED = {"Qwen3ForCausalLM": "dflash_serve_drafter", "DFlashDraftModel": "dflash_serve_drafter"}


def arguments(prepared: Path, declared: object, race: str = "none") -> tuple[str, str, str]:
    return json.dumps(declared), str(prepared / "draft"), race


def with_ours(prepared: Path) -> str:
    """PYTHONPATH, as `command` sets it."""
    return os.pathsep.join((BASE, str(prepared)))


@pytest.mark.parametrize("race", ["none", "before"])
def test_the_worker_builds_our_drafter_and_says_so(prepared: Path, race: str) -> None:
    declared = run(SERVING, str(prepared), path=BASE)
    assert declared == DECLARED
    done = attempt(WORKER, *arguments(prepared, declared, race), path=with_ours(prepared))
    assert done.returncode == 0, done.stderr
    module, base, drafter, *pictures = json.loads(done.stdout.splitlines()[-1])
    assert (module, base, drafter) == ("dflash_serve_drafter", "Qwen3ForCausalLM", "PlugInDrafter")
    if race == "none":
        assert pictures == ["PictureProcessor", "VisionEncoder"], "kept by its class, and ours is another class"
    assert f"{BUILT} 0 (ours)" in done.stderr


def test_a_target_imported_too_early_stops_the_worker_instead_of_accepting_nothing(prepared: Path) -> None:
    """Between declaration and look-up the built-in module takes the slot, and our package is never imported for it."""
    done = attempt(WORKER, *arguments(prepared, DECLARED, "between"), path=with_ours(prepared))
    assert done.returncode != 0
    assert "TensorRT-LLM's own drafter was chosen on this rank" in done.stderr


def test_a_quantised_drafter_is_upstreams_with_a_context_of_ours(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, tiny_drafter_config(intermediate_size=64, head_dim=16), "fp8")
    found = run(WORKER, *arguments(prepared, DECLARED), path=with_ours(prepared))
    assert isinstance(found, list)
    assert found[2] == "DequantisedDFlash"
