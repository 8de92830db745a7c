"""Our drafter behind TensorRT-LLM's worker drafts what the core drafts, whole or cut over ranks, plain or quantised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import Format, dequantized, quantize
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.errors import UserError
from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from dflash_tensorrt_llm.plugin.weights import Layout
from tests.support.fake_tensorrt_llm import FOLDER, MIRRORED
from tests.support.fake_tensorrt_llm.drafting import FakeTarget, attention, by_core, by_worker, plug_in
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, random_tensors, tiny_drafter_config

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "windowed": {"layers": (SLIDING, SLIDING)},
    "windowed, then full": {"layers": (SLIDING, FULL)},
    "windowed both ways": {"layers": (SLIDING_BOTH_WAYS, FULL)},
    "biases": {"attention_bias": True},
    "features out of order": {"target_layer_ids": (5, 1, 3)},
    "scaled": {"embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcap": 5.0},
    "a mask embedding": {"has_mask_embedding": True, "mask_token_id": None},
}


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_drafts_what_the_core_drafts_in_fp32(shape: str, batch: int) -> None:
    config = tiny_drafter_config(**SHAPES[shape])
    weights, target = random_tensors(config), FakeTarget(config, torch.float32)
    ours = by_worker(plug_in(config, weights, torch.float32, target), batch, torch.float32)
    core = by_core(config, weights, batch, torch.float32, target)
    # Not bit for bit: some CPUs' libraries sum products of other row counts, and of columns, in another order.
    torch.testing.assert_close(ours, core, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("batch", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_it_stays_within_a_thousandth_in_bf16(shape: str, batch: int) -> None:
    config = tiny_drafter_config(**SHAPES[shape])
    weights, target = random_tensors(config, dtype=torch.bfloat16), FakeTarget(config, torch.bfloat16)
    ours = by_worker(plug_in(config, weights, torch.bfloat16, target), batch, torch.bfloat16)
    core = by_core(config, weights, batch, torch.bfloat16, target)
    assert relative(ours, core) < 1e-3


@pytest.mark.parametrize("input_scale", [None, 0.2])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_quantised_weights_keep_their_scales_in_the_fused_product(format: Format, input_scale: float | None) -> None:
    config = tiny_drafter_config(intermediate_size=64, layers=(SLIDING, FULL))
    original, state = random_tensors(config), dict[str, Tensor]()
    scale = None if input_scale is None else torch.tensor(input_scale)
    for name, tensor in original.items():
        module = name.removesuffix(".weight")
        # Layers and projections get very different scales: one scale for all of them would be far off.
        grown = tensor * (4.0 if "v_proj" in name else 1.0) * (3.0 if ".1." in name else 1.0)
        state |= quantize(grown, format, scale).state(module) if "_proj" in name else {name: tensor}
    target = FakeTarget(config, torch.float32)
    ours = by_worker(plug_in(config, state, torch.float32, target, format=format), 3, torch.float32)
    weights = dequantized(assemble(state, config, format), torch.float32)
    rounded = input_scale if format == "fp8" else None  # NVFP4 is decoded and multiplied plainly
    core = by_core(config, weights, 3, torch.float32, target, rounded)
    assert relative(ours, core) < (5e-3 if rounded else 1e-5)  # a last bit decides how a value in between is rounded


@pytest.mark.parametrize("drop", ["layers.1.self_attn.k_norm.weight", "fc.weight", "norm.weight"])
def test_a_missing_tensor_is_an_error_and_not_a_poor_draft(drop: str) -> None:
    config = tiny_drafter_config()
    weights = random_tensors(config)
    del weights[drop]
    with pytest.raises(UserError, match=rf"{drop} \[.*\] is missing"):
        PlugInDrafter(config, attention=attention()).load_weights(weights)


def test_a_name_it_does_not_know_is_an_error() -> None:
    config = tiny_drafter_config()
    with pytest.raises(UserError, match="not part of a DFlash drafter"):
        PlugInDrafter(config, attention=attention()).load_weights({**random_tensors(config), "extra": torch.zeros(1)})


def test_prefixed_and_fused_names_are_understood() -> None:
    config = tiny_drafter_config()
    plain = random_tensors(config)
    fused = {f"model.{name}": tensor for name, tensor in plain.items() if "self_attn" not in name or "norm" in name}
    for index in range(config.num_layers):
        room = f"layers.{index}.self_attn"
        fused[f"{room}.qkv_proj.weight"] = torch.cat([plain[f"{room}.{n}_proj.weight"] for n in "qkv"])
        fused[f"{room}.o_proj.weight"] = plain[f"{room}.o_proj.weight"]
    target = FakeTarget(config, torch.float32)
    both = [by_worker(plug_in(config, w, torch.float32, target), 2, torch.float32) for w in (plain, fused)]
    assert torch.equal(*both)


def _rank(rank: int, size: int, port: int, queue: Any) -> None:
    """One rank's drafts in all formats, in a process of its own."""
    sys.path.insert(0, str(FOLDER))
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    from tensorrt_llm._torch.distributed import AllReduce

    found = []
    for format in FORMATS:
        config, weights = sharded_case(format)
        drafter = plug_in(
            config, weights, torch.float32, FakeTarget(config, torch.float32), format=format, layout=Layout(rank, size),
            reduce=AllReduce(mapping=SimpleNamespace(tp_size=size, tp_rank=rank)),
        )  # fmt: skip
        found.append(by_worker(drafter, 4, torch.float32).numpy())
    queue.put((rank, found))
    torch.distributed.destroy_process_group()


FORMATS: list[Format | None] = [None, "fp8", "nvfp4"]


def sharded_case(format: Format | None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """4 heads and 2 K/V heads: on 4 ranks, K/V heads are shared by neighbours."""
    config = tiny_drafter_config(intermediate_size=64, layers=(SLIDING, FULL), attention_bias=True)
    state: dict[str, Tensor] = {}
    for name, tensor in random_tensors(config).items():
        module = name.removesuffix(".weight")
        state |= quantize(tensor, format).state(module) if format and module.endswith("_proj") else {name: tensor}
    return config, state


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_over_ranks_equals_unsharded(size: int) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, size, port, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    for index, format in enumerate(FORMATS):
        config, weights = sharded_case(format)
        target = FakeTarget(config, torch.float32)
        whole = by_worker(plug_in(config, weights, torch.float32, target, format=format), 4, torch.float32)
        for rank in range(size):
            torch.testing.assert_close(torch.from_numpy(found[rank][index]), whole, rtol=1e-5, atol=2e-5)


def test_what_does_not_split_is_refused() -> None:
    with pytest.raises(UserError, match="over 3 devices"):
        PlugInDrafter(tiny_drafter_config(), attention=attention(), layout=Layout(0, 3))


def test_the_fake_says_what_it_mirrors() -> None:
    assert MIRRORED == {"worker": "00679c6", "registry": "e27249f", "attention": "0352547", "draft model": "009d8fa"}
