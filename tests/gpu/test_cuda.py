"""What only a GPU can show of the embedded backend and of training: `pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention import FlashInferAttention, RaggedAttention
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.training.blocks import SlotForward, lay_out
from dflash_torch.engine import gpu_operators
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.tiny import tiny_drafter_config
from tests.support.tiny_target import write_tiny_pair
from tests.unit.training.test_attention import ANCHORS, inputs, random_drafter

Folders = tuple[Path, Path]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_change_no_token(folders: Folders, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    captured = tiny_engine(folders, device="cuda")
    found = []
    for engine in (
        tiny_engine(folders, device="cpu"),
        with_passes(tiny_engine(folders, device="cuda"), static=False),
        captured,
    ):
        found.append([output.token_ids for output in answers(engine, PROMPTS, params)])
    assert found[0] == found[1] == found[2]
    assert any(work.graph is not None for work in captured.scheduler.target_runner.captured.values())


def test_all_graphs_are_captured_ahead(folders: Folders) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = tiny_engine(folders, device="cuda", reuse_prefixes=False)
    engine.scheduler.prepare()
    passes = engine.scheduler.target_runner.captured
    ahead, prompts = set(passes), [[*range(n, n + 10)] for n in range(5)]  # of more rows than a block
    found = [output.token_ids for output in answers(engine, prompts, params)]
    expected = answers(tiny_engine(folders, device="cpu"), prompts, params)
    assert found == [output.token_ids for output in expected]
    assert set(passes) == ahead
    assert all(work.graph is not None for work in passes.values())


def test_engines_in_turns_answer_as_each_does_alone(folders: Folders) -> None:
    full = tiny_engine(folders, device="cuda", reuse_prefixes=False)
    full.scheduler.prepare()
    engines = [full, full.plain(), full.fixed(4), full.fixed(4, fault="features zeroed")]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    streams = [engine.stream(PROMPTS, [params] * len(PROMPTS)) for engine in engines]
    for _ in zip_longest(*streams):
        pass
    expected = [output.token_ids for output in answers(tiny_engine(folders, device="cpu"), PROMPTS, params)]
    assert [[output.token_ids for output in stream.outputs()] for stream in streams] == [expected] * len(engines)


def test_one_request_that_needs_the_host_changes_no_token(folders: Folders) -> None:
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    params = [
        plain,
        plain.model_copy(update={"logprobs": 1}),
        plain,
        plain.model_copy(update={"temperature": 0.8, "seed": 3}),
    ]
    found = [answers(tiny_engine(folders, device=device), PROMPTS[:4], params) for device in ("cpu", "cuda")]
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_triton_kernels_give_pytorchs_results(dim: int, dtype: torch.dtype) -> None:
    from dflash_serve.models.triton_kernels import difference  # imported here: it needs Triton

    sizes = {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_key_value_heads": 8}
    assert difference(tiny_drafter_config(**sizes, head_dim=dim), dtype, torch.device("cuda")) is None


def test_triton_kernels_change_no_token(folders: Folders) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = tiny_engine(folders, device="cuda")
    speculator = engine.scheduler.speculator
    assert speculator is not None
    target, drafter, device = engine.scheduler.target, speculator.drafter, torch.device("cuda")
    target.pack(operators=gpu_operators(target.config, torch.float32, device))
    speculator.drafter = FusedDrafter(drafter, operators=gpu_operators(drafter.config, torch.float32, device))
    assert [model.operators.name for model in (speculator.target, speculator.drafter)] == ["triton"] * 2
    found = [output.token_ids for output in answers(engine, PROMPTS, params)]
    assert found == [output.token_ids for output in answers(tiny_engine(folders, device="cpu"), PROMPTS, params)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 32])
def test_flashinfer_attends_as_we_do(causal: bool, window: int | None) -> None:
    pytest.importorskip("flashinfer", reason="the extra [cuda] is not installed")
    kind, spans = AttentionKind(causal=causal, window=window), [Span(2, 40, 3), Span(0, 0, 9), Span(3, 251, 1)]
    q, k, v = (torch.randn(13, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (6, 2, 2))
    outs = []
    for make in (RaggedAttention, FlashInferAttention):
        torch.manual_seed(0)
        cache = KVCache(layers=1, entries=4, kv_heads=2, capacity=300, head_dim=64, dtype=torch.bfloat16, device="cuda")
        cache.keys.normal_()
        cache.values.normal_()
        outs.append(make(cache, spans, [kind], 6)(0, q, k, v))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [AttentionKind(), AttentionKind(window=6, causal=True)], ids=str)
def test_training_through_flex_attention_is_training_on_a_cpu(kind: AttentionKind) -> None:
    losses, gradients = [], []
    for device in ("cpu", "cuda"):
        drafter = random_drafter(kind).to(device)
        sequences, features, embedding = inputs(drafter.config)
        anchors = [torch.tensor(places) for places in ANCHORS]
        blocks = lay_out(sequences, anchors, drafter.config.block_size).to(torch.device(device))
        forward = SlotForward(drafter, embedding.to(device), dtype=torch.float32)
        loss = forward(blocks, [f.to(device) for f in features]).hidden.square().mean()
        loss.backward()
        losses.append(loss.item())
        assert drafter.fc.weight.grad is not None
        gradients.append(drafter.fc.weight.grad.cpu())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-3)
