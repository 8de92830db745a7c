"""Our drafter behind TensorRT-LLM's worker drafts what the core drafts, whole or cut over ranks, plain or quantised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import FP8_MAX, Format, dequantized, quantize
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.errors import UserError
from dflash_serve.models.attention.ragged import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from dflash_tensorrt_llm.plugin.layout import Layout
from tests.support.fake_tensorrt_llm import FOLDER, MIRRORED
from tests.support.fake_tensorrt_llm.worker import Worker
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, random_tensors, tiny_drafter_config

PROMPTS = [3, 17, 9, 1, 24, 5, 12, 8]
"""Ragged contexts; a batch of n takes the first n."""
ACCEPTED = [1, 4, 2, 3, 1, 4, 1, 2]
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


def attention() -> Any:
    from tests.support.fake_tensorrt_llm.tensorrt_llm._torch.speculative.dflash_attention import flash_attn_with_kvcache

    return flash_attn_with_kvcache


class FakeTarget(nn.Module):
    """An embedding and a head, where the worker and the drafter look for them."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        table = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype)
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding.from_pretrained(table)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.lm_head.weight = nn.Parameter(table.flip(0), requires_grad=False)


def logits_processor(hidden: Tensor, head: nn.Module, *_: object) -> Tensor:
    out: Tensor = head(hidden)
    return out


def plug_in(
    config: DrafterConfig, weights: dict[str, Tensor], dtype: torch.dtype, target: FakeTarget, **options: Any
) -> PlugInDrafter:
    drafter = PlugInDrafter(config, attention=attention(), dtype=dtype, **options)
    drafter.load_weights(weights)
    drafter.load_weights_from_target_model(target)
    drafter.logits_processor = logits_processor
    return drafter


def features(config: DrafterConfig, seed: int, *shape: int) -> Tensor:
    """[..., F, H], in the order of the drafter's own target_layer_ids."""
    size = (*shape, len(config.target_layer_ids), config.hidden_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def captured(rows: Tensor, config: DrafterConfig) -> Tensor:
    """As TensorRT-LLM hands them over: layers ascending."""
    order = sorted(range(len(config.target_layer_ids)), key=lambda index: config.target_layer_ids[index])
    return rows[..., order, :].flatten(-2)


@torch.inference_mode()
def by_worker(drafter: PlugInDrafter, batch: int, dtype: torch.dtype) -> Tensor:
    """Prompts, then two steps; the second step's logits."""
    config = drafter.config
    worker = Worker(drafter, max_batch=batch, max_seq_len=64, max_draft_len=config.block_size - 1)
    slots = list(reversed(range(batch)))
    for index, slot in enumerate(slots):
        rows = captured(features(config, index, PROMPTS[index]), config).to(dtype)
        worker.prefill(slot, rows[:2])  # in two chunks
        if len(rows) > 2:
            worker.prefill(slot, rows[2:])
    logits = torch.empty(0)
    for step in range(2):
        rows = captured(features(config, 100 + step, batch, config.block_size), config).to(dtype)
        logits = worker.draft(slots, torch.tensor(ACCEPTED[:batch]), rows, torch.arange(batch) + 20 + step)
    return logits


@torch.inference_mode()
def by_core(
    config: DrafterConfig,
    weights: dict[str, Tensor],
    batch: int,
    dtype: torch.dtype,
    target: FakeTarget,
    input_scale: float | None = None,
) -> Tensor:
    """The same with the core drafter and its own store; with an input scale, products see activations as FP8."""
    drafter = Drafter(config)
    if input_scale is not None:
        for name, module in drafter.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, given: (as_fp8(given[0], input_scale),))
    # Not `drafter.to(dtype)`: rotary frequencies stay in fp32.
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    store = KVCache(
        layers=config.num_layers, entries=batch, kv_heads=config.num_key_value_heads, capacity=80,
        head_dim=config.head_dim, dtype=dtype,
    )  # fmt: skip
    lengths = [0] * batch

    def inject(slot: int, rows: Tensor, context: Tensor) -> None:
        """Keeps the first `len(rows)` of the projected rows: like the worker, which projects all B and masks."""
        span = [Span(slot, lengths[slot], len(rows))]
        k, v = drafter.context_kv(context, lengths[slot] + torch.arange(len(context)))
        store.write_all(span, k[: len(rows)], v[: len(rows)])
        lengths[slot] += len(rows)

    for index in range(batch):
        rows = features(config, index, PROMPTS[index]).flatten(-2).to(dtype)
        for part in (slice(0, 2), slice(2, None)):
            if len(rows[part]):
                inject(index, rows[part], drafter.project_context(rows[part]))
    hidden = torch.empty(0)
    for step in range(2):
        rows = features(config, 100 + step, batch, config.block_size).flatten(-2).to(dtype)
        projected = drafter.project_context(rows.flatten(0, 1)).view(batch, config.block_size, -1)
        for index in range(batch):
            inject(index, rows[index, : ACCEPTED[index]], projected[index])
        spans = [Span(index, lengths[index], config.block_size) for index in range(batch)]
        attend = RaggedAttention(store, spans, config.layers, config.num_attention_heads)
        noise = drafter.noise(torch.arange(batch) + 20 + step, target.model.embed_tokens.weight)
        hidden = drafter(noise, span_positions(spans), attend)
    slots = hidden.view(batch, config.block_size, -1)[:, 1:]
    return drafter.adjust_logits(target.lm_head(slots))


def as_fp8(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_drafts_what_the_core_drafts_in_fp32(shape: str, batch: int) -> None:
    config = tiny_drafter_config(**SHAPES[shape])
    weights, target = random_tensors(config), FakeTarget(config, torch.float32)
    ours = by_worker(plug_in(config, weights, torch.float32, target), batch, torch.float32)
    core = by_core(config, weights, batch, torch.float32, target)
    if shape == "features out of order":  # fc's columns are summed in another order
        torch.testing.assert_close(ours, core, rtol=1e-5, atol=2e-5)
    else:
        assert torch.equal(ours, core)


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
