"""A worker process of TensorRT-LLM, which never sees --custom_module_dirs, gets our drafter all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_serve.deployment import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from tests.support.fake_tensorrt_llm import FOLDER
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

ROOT = Path(__file__).parents[2]
SERVING = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])  # what --custom_module_dirs does: the parent folder, then the name
package = importlib.import_module("dflash_serve_drafter")
from tensorrt_llm._torch.models import modeling_utils as registry
print(json.dumps(registry.export_external_model_modules()))
"""
WORKER = """
import json, sys
from types import SimpleNamespace as Of
from tensorrt_llm._torch.models import modeling_utils as registry
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode
registry.register_external_model_modules(json.loads(sys.argv[1]))
target = registry.get_registered_model_class("Qwen3ForCausalLM")
builder = registry.get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH)
spec = Of(attention_backend="VANILLA", speculative_model=sys.argv[2])
mapping = Of(enable_attention_dp=False, tp_size=1, tp_rank=0)
draft = Of(pretrained_config=Of(torch_dtype="bfloat16"))
drafter = builder(Of(spec_config=spec, mapping=mapping), draft, None, None)
if drafter != "built-in":
    from safetensors.torch import load_file
    drafter.load_weights(load_file(sys.argv[2] + "/model.safetensors"))
ids = str(getattr(drafter, "target_layer_ids", ""))
print(json.dumps([target.__module__, target.__mro__[1].__name__, type(drafter).__name__, ids]))
"""


def run(code: str, *arguments: str, path: str) -> object:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A drafter that upstream would get wrong: its features are out of order."""
    write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(target_layer_ids=(5, 1, 3)))
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4}
    (tmp_path / "target").mkdir()
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
    (tmp_path / "target" / "config.json").write_text(json.dumps(raw))
    deployment = Deployment.model_validate({
        "target": {"model": str(tmp_path / "target")}, "drafter": {"model": str(tmp_path / "drafter")},
        "limits": {"max_model_len": 128}, "hardware": {"gpu": "h200"},
    })  # fmt: skip
    TensorRTLLMBackend(Release.parse("1.4")).prepare(deployment, tmp_path / "out")
    return tmp_path / "out"


BASE = os.pathsep.join(map(str, (ROOT, ROOT / "backends", FOLDER)))


def test_the_worker_builds_our_drafter(prepared: Path) -> None:
    declared = run(SERVING, str(prepared), path=BASE)
    assert declared == {"Qwen3ForCausalLM": "dflash_serve_drafter"}
    with_env = os.pathsep.join((BASE, str(prepared)))  # PYTHONPATH, as `command` sets it
    found = run(WORKER, json.dumps(declared), str(prepared / "draft"), path=with_env)
    assert found == ["dflash_serve_drafter", "Qwen3ForCausalLM", "PlugInDrafter", "[5, 1, 3]"]


def test_without_it_the_worker_silently_builds_upstreams(prepared: Path) -> None:
    """Why the target is registered too: what workers are told does not include drafters."""
    found = run(WORKER, "{}", str(prepared / "draft"), path=BASE)
    assert found == ["tensorrt_llm._torch.models.modeling_zoo", "object", "str", ""]
