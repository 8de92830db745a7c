"""Published quantised drafters, made tiny: what public pages tell of their files is read, decoded and converted.

Told of each: its quantiser and storage, groups, and the modules that stay in bf16. Sizes are a tiny drafter's, groups
of 128 are of 32, and the weights are random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import checkpoint_verdict
from dflash_serve.checkpoint.config import ConvolutionConfig, DrafterConfig, MarkovConfig, SelectorConfig
from dflash_serve.checkpoint.formats import quantize, relative_error, stored_tensors
from dflash_serve.checkpoint.reader import Checkpoint, load_tensors, open_checkpoint
from dflash_serve.checkpoint.storage import Layout, Scheme
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from dflash_sglang.launch import SGLangLaunch
from tests.support.draft_layouts import write_nemotron
from tests.support.tiny import (
    edit_json,
    even_config,
    problems_of,
    random_tensors,
    tiny_drafter_config,
    write_in_layout,
)
from tests.support.tiny_target import write_tiny_target

CT: Layout = "compressed-tensors"
SINK = "layers.1.self_attn.attention_sink_bias"
QKV = ("q_proj", "k_proj", "v_proj")
NOT_QUANTISED = [
    *("candidate_selector.hidden_projection", "fc"),
    *(f"layers.{layer}.{part}.kernel_projection" for layer in range(2) for part in ("attention_conv", "mlp_conv")),
]
DFLASH2 = {"convolution": ConvolutionConfig(taps=2, group_size=16), "selector": SelectorConfig(rank=8, top_k=4)}


@dataclass(frozen=True)
class Quantised:
    """Facts of a published drafter's files."""

    scheme: Scheme
    dense: tuple[str, ...] = ()
    dflash2: bool = True
    config: Mapping[str, object] = field(default_factory=dict)  # keys of quantization_config that it has otherwise
    beside: Mapping[str, object] | None = None  # its hf_quant_config.json
    mislisted: tuple[str, ...] = ()

    @property
    def drafter(self) -> DrafterConfig:
        return even_config().model_copy(update=DFLASH2 if self.dflash2 else {})


WIDE = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}
PAGE = Path(__file__).parents[3] / "docs/quantised.md"
W4A16 = Scheme("w4a16", CT, "group", group=32)
PUBLISHED: Mapping[str, Quantised] = {
    "hamichok/Qwen3.8-27B-DFlash2-NVFP4-modelopt": Quantised(Scheme("nvfp4", static_inputs=True), QKV),
    "maurienne-ai/Qwen3.8-27B-DFlash2-NVFP4-RTNcal": Quantised(
        Scheme("nvfp4", static_inputs=True),
        beside={
            "producer": {"name": "modelopt", "version": "dflash2-nvfp4-rtn-calibrated-1.0"},
            "quantization": {
                **{"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
                "exclude_modules": NOT_QUANTISED,
            },
        },
    ),
    "syvai/Qwen3.8-27B-DFlash2-W4A16": Quantised(W4A16),
    "tcclaviger/Qwen3.8-27B-DFlash2-FP8": Quantised(Scheme("fp8", CT, "channel")),
    "blake-lucas/Qwen3.5-4B-DFlash-W4A16-MSE-G32-BF16-QKV": Quantised(W4A16, QKV, dflash2=False),
    "Naveen's W8A16 of Qwen3.5-4B-DFlash": Quantised(Scheme("w8a16", CT, "channel"), dflash2=False),
    "jschmied's W8A16 of Qwen3.8-27B-DFlash2": Quantised(Scheme("w8a16", CT, "group", group=32)),
    "FP8 by tensor of vllm#52816": Quantised(Scheme("fp8", CT, static_inputs=True)),
    "sapidlabs/Sparkulator-Laguna-S-2.1, without Laguna's parts": Quantised(W4A16, dflash2=False),
    "an exporter that lists modules by its wrapper's names": Quantised(
        Scheme("fp8", static_inputs=True),
        dflash2=False,
        config={"ignore": ["dflash_module.fc", "model*"]},
        beside={"quantization": {"quant_algo": "FP8", "exclude_modules": ["dflash_module.fc"]}},
        mislisted=("fc",),
    ),
}


def write(name: str, folder: Path) -> tuple[Path, Quantised]:
    published = PUBLISHED[name]
    write_in_layout(folder, published.scheme, published.drafter, dense=published.dense)
    if published.config:
        edit_json(folder / "config.json", {f"quantization_config.{key}": one for key, one in published.config.items()})
    if published.beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(published.beside))
        edit_json(folder / "config.json", {"quantization_config": None})
    return folder, published


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_and_every_engine_can_have_it(name: str, tmp_path: Path) -> None:
    folder, published = write(name, tmp_path / "d")
    checkpoint = open_checkpoint(folder)
    assert problems_of(folder) == []
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.format == published.scheme.format
    assert (len(checkpoint.quantised), tuple(checkpoint.mislisted)) == (
        14 - 2 * len(published.dense),
        published.mislisted,
    )
    original, read = random_tensors(published.drafter), load_tensors(checkpoint, torch.float32)
    assert max(relative_error(original[one], read[one]) for one in original) < 0.2
    for options in ([], ["--dequantise"]):
        out = tmp_path / f"out{len(options)}"
        result = CliRunner().invoke(app, ["convert", str(folder), str(out), *options])
        assert result.exit_code == 0, result.output
        assert "weights: " in result.output
        written = open_checkpoint(out)
        assert (problems_of(out), written.mislisted, written.unshared) == ([], [], [])
        assert (written.quantization is None) == bool(options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_its_verdicts(name: str, tmp_path: Path) -> None:
    """With sizes of whole tiles, as published drafters have; an exporter's list of modules has no row."""
    published = PUBLISHED[name]
    config = tiny_drafter_config(**WIDE).model_copy(update=DFLASH2 if published.dflash2 else {})
    folder = write_in_layout(tmp_path / "d", published.scheme, config, dense=published.dense)
    if open_checkpoint(folder).unshared:  # the pages do not tell that fused parts share their scales
        done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
        folder = tmp_path / "out"
    found = {engine: backend_verdict(engine, open_checkpoint(folder)) for engine in ("sglang", "vllm")}
    assert found == dict.fromkeys(found, "served")
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert [cells[2:] for cells in rows] in ([["served", "served"]], [])
    assert rows or name.startswith(("an exporter", "sapidlabs/"))


def test_nvidias_nemotron_is_served_once_it_is_converted(tmp_path: Path) -> None:
    """W4A16_NVFP4 of the MLPs, `fc` and the head's second matrix; sinks, and a copy of the target's embedding."""
    scheme, folder = Scheme("nvfp4"), tmp_path / "d"
    parts = {"markov": MarkovConfig(kind="vanilla", rank=16), "attention_sinks": True}
    config = even_config().model_copy(update=parts)
    write_in_layout(folder, scheme, config, dense=(*QKV, "o_proj"))
    state = load_file(folder / "model.safetensors")
    for module in ("fc", "markov_head.markov_w2"):
        weight = quantize(state.pop(f"{module}.weight"), "nvfp4")
        state |= {f"{module}.{leaf}": tensor for leaf, tensor in stored_tensors(scheme, weight).items()}
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    save_file({**state, "embed_tokens.weight": embedding}, folder / "model.safetensors")
    excluded = ["*embed_tokens*", "*markov_w1*", "*self_attn*"]
    edit_json(folder / "hf_quant_config.json", {"quantization.exclude_modules": excluded})
    edit_json(folder / "config.json", {"quantization_config": None, "dflash_config.causal": False})
    edit_json(folder / "config.json", {"has_embed_tokens": True, "train_embed_tokens": None})
    assert "an embedding of its own" in problems_of(folder)[0].what
    edit_json(folder / "config.json", {"has_embed_tokens": True, "train_embed_tokens": False})
    checkpoint = open_checkpoint(folder)
    assert (problems_of(folder), checkpoint.mislisted, len(checkpoint.quantised)) == ([], [], 8)
    engines = {name: backend(name) for name in ("sglang", "vllm", "torch", "tensorrt-llm")}
    before = {name: checkpoint_verdict(one, checkpoint, "qwen3").verdict for name, one in engines.items()}
    assert before == {
        **dict.fromkeys(("sglang", "vllm"), "after convert"),
        "torch": "refused",
        "tensorrt-llm": "refused",
    }
    options = ["--to", "deepspec", "--layout", "compressed-tensors", "--json"]
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out"), *options])
    assert json.loads(result.output)["weights"]["decoded"] == ["fc", "markov_head.markov_w2"]
    after = open_checkpoint(tmp_path / "out")
    assert [checkpoint_verdict(engines[name], after, "qwen3").verdict for name in ("sglang", "vllm")] == ["served"] * 2
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[SINK], state[SINK])


def nemotron(folder: Path, *, markov: bool, **more: object) -> SGLangLaunch:
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    edit_json(target / "config.json", {"hidden_size": 128})
    published = write_nemotron(folder, target, markov=markov)
    models = {"target": {"model": str(target)}, "drafter": {"model": str(published)}}
    return SGLangBackend().launch(Deployment.model_validate({**models, "speculation": {"block_size": 4}, **more}))


@pytest.mark.parametrize("markov", [True, False])
def test_sglang_is_given_nemotrons_own_folder_and_its_kernels_of_sinks(markov: bool, tmp_path: Path) -> None:
    launch = nemotron(tmp_path, markov=markov, hardware={"gpu": "b200"})
    assert (launch.problems, launch.is_as_published) == ([], True)
    argv = launch.command(tmp_path / "out").argv
    given = dict(pairwise(argv))
    assert given["--speculative-draft-model-path"] == str((tmp_path / "published").resolve())
    assert given["--speculative-draft-attention-backend"] == ("trtllm_mha" if markov else "fa4")
    assert given["--speculative-draft-model-quantization"] == "modelopt_fp4"
    assert not any(file.name.startswith("draft") for file in launch.files(tmp_path / "out"))
    launch.prepare(tmp_path / "out")
    assert not (tmp_path / "out" / "draft").exists()
    assert any("given the drafter's folder as it was published" in note for note in launch.notes)
    assert launch.checkpoint is not None
    assert launch.memory is not None
    assert launch.memory.drafter == sum(header.bytes for header in launch.checkpoint.headers.values())
    assert {name: backend_verdict(name, launch.checkpoint) for name in ("sglang", "vllm")} == {
        "sglang": "served",
        "vllm": "after convert" if markov else "served",
    }


def test_other_forms_and_other_gpus_need_the_conversion(tmp_path: Path) -> None:
    old = nemotron(tmp_path, markov=True, hardware={"gpu": "a100"})
    assert any("need SGLang's trtllm_mha, which" in problem.what for problem in old.problems), old.problems
    edit_json(tmp_path / "published" / "config.json", {"eagle_aux_hidden_state_layer_ids": [9, 9, 9]})
    other = SGLangBackend().launch(old.deployment)
    assert not other.is_as_published
    assert any("fc is quantised, and SGLang's is dense" in problem.what for problem in other.problems)


def backend_verdict(name: str, checkpoint: Checkpoint) -> str:
    return checkpoint_verdict(backend(name), checkpoint, "qwen3").verdict


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("GGUF's", {"quant_method": "gguf"}, "'gguf'"),
        ("AWQ with FP8 activations", {"quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        (
            "a mixed export",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "'MIXED_PRECISION' without quantized_layers",
        ),
    ],
)
def test_what_is_not_read_is_one_line(name: str, config: Mapping[str, object], words: str, tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("int8", CT, "channel"))
    edit_json(folder / "config.json", {"quantization_config": dict(config)})
    with pytest.raises(UserError) as caught:
        load_tensors(open_checkpoint(folder), torch.float32)
    assert f"quantised with {words} (config.json's quantization_config), which is not read" in str(caught.value), name
    assert "\n" not in str(caught.value)
