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

    def __init__(self, config: DrafterConfig) -> None:
        self.config, self.torch_dtype = config, "float32"
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


@torch.inference_mode()
def by_core(
    config: DrafterConfig, weights: dict[str, Tensor], batch: int, dtype: torch.dtype, target: FakeTarget
) -> Tensor:
    """Logits [batch, B - 1, V] of the core's drafter, given each request's whole context at once."""
    drafter = Drafter(config)
    # Not `drafter.to(dtype)`: rotary frequencies stay in fp32.
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    cache = KVCache.of(config, batch, 80, dtype)
    spans = []
    steps = [features(config, 100 + step, batch, config.block_size) for step in range(2)]
    for index in range(batch):
        kept = [step[index, : ACCEPTED[index]] for step in steps]
        rows = torch.cat([features(config, index, PROMPTS[index]), *kept]).flatten(-2).to(dtype)
        k, v = drafter.context_kv(drafter.project_context(rows), torch.arange(len(rows)))
        cache.write_all([Span(index, 0, len(rows))], k, v)
        spans.append(Span(index, len(rows), config.block_size))
    attend = RaggedAttention(cache, spans, config.layers, config.num_attention_heads)
    noise = drafter.noise(torch.arange(batch) + 21, target.model.embed_tokens.weight)
    hidden = drafter(noise, span_positions(spans), attend).view(batch, config.block_size, -1)
    return drafter.adjust_logits(target.lm_head(hidden[:, 1:]))
