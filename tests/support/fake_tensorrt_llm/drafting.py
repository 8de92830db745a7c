"""One way to draft by the worker and one by the core: the same prompts, steps and features, for comparing logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from tests.support.fake_tensorrt_llm.worker import Worker

PROMPTS = [3, 17, 9, 1, 24, 5, 12, 8]
"""Ragged contexts; a batch of n takes the first n."""
ACCEPTED = [1, 4, 2, 3, 1, 4, 1, 2]


def attention() -> Any:
    """flash-attn's entry point, as the fake has it."""
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


class Pretrained:
    """The drafter's config.json as transformers hands it to TensorRT-LLM: everything by name."""

    model_type = "qwen3"

    def __init__(self, config: DrafterConfig, dtype: str = "float32") -> None:
        self.config, self.torch_dtype = config, dtype
        self.architectures = ["DFlashDraftModel"]
        self.num_hidden_layers = config.num_layers
        self.dflash_config = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


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
def by_worker(drafter: Any, batch: int, dtype: torch.dtype, original: DrafterConfig | None = None) -> Tensor:
    """Prompts, then two steps; the second step's logits. `original` has the order of the layers in training."""
    config = original or drafter.config
    worker = Worker(drafter, max_batch=batch, max_seq_len=64, max_draft_len=config.block_size - 1)
    entries = list(reversed(range(batch)))
    for index, entry in enumerate(entries):
        rows = captured(features(config, index, PROMPTS[index]), config).to(dtype)
        worker.prefill(entry, rows[:2])  # in two chunks
        if len(rows) > 2:
            worker.prefill(entry, rows[2:])
    logits = torch.empty(0)
    for step in range(2):
        rows = captured(features(config, 100 + step, batch, config.block_size), config).to(dtype)
        logits = worker.draft(entries, torch.tensor(ACCEPTED[:batch]), rows, torch.arange(batch) + 20 + step)
    return logits


class CoreWorker:
    """Drives the core's drafter over its own cache, with the steps of `Worker`.

    Args:
        drafter: the core's.
        requests: in the batch.
        dtype: of the context K/V.
    """

    def __init__(self, drafter: Drafter, requests: int, dtype: torch.dtype) -> None:
        config = drafter.config
        self.drafter, self.lengths = drafter, [0] * requests
        self.cache = KVCache(
            layers=config.num_layers, entries=requests, kv_heads=config.num_key_value_heads, capacity=80,
            head_dim=config.head_dim, dtype=dtype,
        )  # fmt: skip

    def prefill(self, entry: int, rows: Tensor) -> None:
        """A chunk of a prompt: features [tokens, F*H]."""
        self._keep(entry, self.drafter.project_context(rows), len(rows))

    def draft(self, accepted: list[int], rows: Tensor, bonus: Tensor, embedding: Tensor) -> Tensor:
        """One step from features [requests, B, F*H]: hidden states [requests, B, H] of the next blocks."""
        config, requests = self.drafter.config, len(rows)
        projected = self.drafter.project_context(rows.flatten(0, 1)).view(requests, config.block_size, -1)
        for entry in range(requests):
            self._keep(entry, projected[entry], accepted[entry])
        spans = [Span(entry, self.lengths[entry], config.block_size) for entry in range(requests)]
        attend = RaggedAttention(self.cache, spans, config.layers, config.num_attention_heads)
        hidden: Tensor = self.drafter(self.drafter.noise(bonus, embedding), span_positions(spans), attend)
        return hidden.view(requests, config.block_size, -1)

    def _keep(self, entry: int, context: Tensor, kept: int) -> None:
        """Keeps the first `kept` of the projected rows: like the worker, which projects all B and masks."""
        k, v = self.drafter.context_kv(context, self.lengths[entry] + torch.arange(len(context)))
        self.cache.write_all([Span(entry, self.lengths[entry], kept)], k[:kept], v[:kept])
        self.lengths[entry] += kept


@torch.inference_mode()
def by_core(
    config: DrafterConfig,
    weights: dict[str, Tensor],
    batch: int,
    dtype: torch.dtype,
    target: FakeTarget,
) -> Tensor:
    """The same drafts by the core's drafter."""
    drafter = Drafter(config)
    # Not `drafter.to(dtype)`: rotary frequencies stay in fp32.
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    worker = CoreWorker(drafter, batch, dtype)
    for index in range(batch):
        rows = features(config, index, PROMPTS[index]).flatten(-2).to(dtype)
        for part in (rows[:2], rows[2:]):
            if len(part):
                worker.prefill(index, part)
    hidden = torch.empty(0)
    for step in range(2):
        rows = features(config, 100 + step, batch, config.block_size).flatten(-2).to(dtype)
        bonus = torch.arange(batch) + 20 + step
        hidden = worker.draft(ACCEPTED, rows, bonus, target.model.embed_tokens.weight)
    return drafter.adjust_logits(target.lm_head(hidden[:, 1:]))
