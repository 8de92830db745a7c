"""Calibration data: the target's own answers, and the largest activations of the drafter on them.

Post-training quantisation is calibrated on text that the model will see: prompts followed by the target's greedy
answers. Without a file of prompts the target answers a few built-in openers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.engine import Engine, Prompt, RequestOutput
from dflash_serve.answers.evaluation import answer_all
from dflash_serve.answers.prompts import jsonl_prompts
from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.formats import FP8_MAX
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.deployment.description import Deployment, Model, Speculation
from dflash_serve.errors import UserError
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.loader import load_drafter, load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.params import SamplingParams

from .pipeline import Measured, Work
from .recipe import Prompts

OPENERS = (
    "Write a Python function that checks whether a number is prime.",
    "Explain in three sentences how a refrigerator works.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Reason step by step.",
    "List five tips for sleeping better.",
    "Summarize the plot of Romeo and Juliet.",
    "Write a short e-mail that asks a colleague to review a document.",
    "What is the difference between a list and a tuple in Python?",
    "Give me a recipe for a simple vegetable soup.",
)
ANSWERS = "answers.jsonl"
AMAX = "amax.safetensors"  # module name -> its largest absolute input
BLOCKS = 4  # taken from each answer


def answer(work: Work, deployment: Deployment, wanted: Prompts) -> Measured:
    """Step `answers`: prompts with the target's greedy answers, as token ids."""
    given = work.inputs.get("calibration prompts")
    prompts = (jsonl_prompts(given) if given else list(OPENERS))[: wanted.count]
    outputs = greedy_answers(embedded_engine(deployment, work.inputs["target"]), prompts, wanted.max_tokens)
    lines = [json.dumps({"prompt": output.prompt_token_ids, "answer": output.token_ids}) for output in outputs]
    (work.folder / ANSWERS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    tokens = sum(len(output.token_ids) for output in outputs)
    return {"prompts": len(prompts), "answer_tokens": tokens, "openers": given is None}


def greedy_answers(engine: Engine, prompts: Sequence[str], max_tokens: int) -> list[RequestOutput]:
    """The engine's greedy answers, each prompt as the one message of a chat."""
    asked: list[Prompt] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return answer_all(engine, asked, SamplingParams(temperature=0, max_tokens=max_tokens))


def embedded_engine(deployment: Deployment, target: Path, drafter: Path | None = None) -> Engine:
    """The embedded backend's engine of a deployment with these folders; without a drafter it does not speculate."""
    folders: dict[str, object] = {"target": Model(model=str(target)), "drafter": None, "speculation": Speculation()}
    if drafter is not None:
        folders |= {"drafter": Model(model=str(drafter)), "speculation": deployment.speculation}
    return embedded_backend().engine(deployment.model_copy(update=folders))


def read_answers(folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of each prompt and its answer, as the step `answers` wrote them."""
    for line in (folder / ANSWERS).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        yield entry["prompt"], entry["answer"]


@torch.inference_mode()
def drafter_ranges(work: Work) -> Measured:
    """Step `drafter-ranges`: the largest input of each of the drafter's products on real features and blocks."""
    drafter = load_drafter(work.inputs["drafter"], dtype=torch.float32)
    if drafter.config.words:
        what = f"the drafter has {drafter.config.words}; only plain DFlash drafters are built"
        raise UserError(what, where=str(work.inputs["drafter"]), do="serve it as it is")
    target = load_target(str(work.inputs["target"]), dtype=torch.float32)
    amax: dict[str, Tensor] = {}
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_recorder(name, amax))
    blocks = sum(_draft_over(drafter, target, *answer) for answer in read_answers(work.inputs["answers"]))
    save_file(amax, work.folder / AMAX)
    largest = max(amax, key=lambda name: float(amax[name]))
    return {"blocks": blocks, "largest": {largest: float(amax[largest])}}


def free_ranges(work: Work) -> Measured:
    """Step `drafter-ranges` without data: one range for all products."""
    config, _ = read_config(work.inputs["drafter"])
    products = [name.removesuffix(".weight") for name in expected_tensors(config) if name.endswith("_proj.weight")]
    save_file({name: torch.tensor(FP8_MAX) for name in products}, work.folder / AMAX)
    return {"calibration": "none: every activation range is 448"}


def _recorder(name: str, amax: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found = arguments[0].abs().max()
        amax[name] = torch.maximum(amax.get(name, found), found)

    return record


def _draft_over(drafter: Drafter, target: TargetModel, prompt: list[int], reply: list[int]) -> int:
    # Each block sees the context features of all tokens before it. Returns the number of blocks.
    config, ids = drafter.config, torch.tensor(prompt + reply)
    features = _features(target, ids, config.target_layer_ids)
    anchors = torch.linspace(len(prompt), len(ids) - 1, BLOCKS).long().unique()
    k, v = drafter.context_kv(drafter.project_context(features), torch.arange(len(ids)))
    cache = KVCache.of(config, len(anchors), len(ids) + config.block_size, features.dtype)
    for entry, anchor in enumerate(anchors.tolist()):
        cache.write_all([Span(entry, 0, anchor)], k[:anchor], v[:anchor])
    spans = [Span(entry, anchor, config.block_size) for entry, anchor in enumerate(anchors.tolist())]
    attend = RaggedAttention(cache, spans, config.layers, config.num_attention_heads)
    drafter(drafter.noise(ids[anchors], target.embedding), span_positions(spans), attend)
    return len(anchors)


def _features(target: TargetModel, ids: Tensor, target_layer_ids: Sequence[int]) -> Tensor:
    # Context features [tokens, F*H] of one text, by one pass of the target.
    spans, config = [Span(0, 0, len(ids))], target.config
    attend = RaggedAttention(target.new_cache(1, len(ids)), spans, config.layers, config.num_attention_heads)
    features: Tensor | None = target(ids, span_positions(spans), attend, target_layer_ids).features
    assert features is not None
    return features
