"""Would a confidence head make the widths better? Measured on real drafts, in a simulator of their steps.

    python -m benchmarks.confidence --work FOLDER [--output benchmarks/results/confidence.json]

SmolLM2 answers some prompts; the bundled drafter drafts behind every token of every answer. A confidence head
(DSpark's, without Markov embeddings) is trained on half of the answers to say of each slot whether it will be accepted.
On the other half four policies serve the same answers with the same luck: `auto` as it is, whose widths follow what was
accepted before; `auto` whose widths, once there is a draft, follow the head; the same with the drafter's own
probability of each token for a head; and one that knows how far every block will be accepted, which no head beats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.simulator import Surface, surfaces
from dflash_serve.checkpoint.config import ConfidenceConfig
from dflash_serve.common.provenance import commit, now
from dflash_serve.models.drafter_heads import ConfidenceHead
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.speculation.allocation import Choices
from dflash_serve.speculation.belief import Matrix
from dflash_serve.speculation.costs import Context
from dflash_serve.speculation.policy import Step
from dflash_serve.speculation.width import AutoWidth
from dflash_serve.training.answers import make_data
from dflash_serve.training.blocks import lay_out
from dflash_serve.training.dataset import Example, load_answers, target_features
from dflash_serve.training.recipe import Recipe
from dflash_serve.training.slots import SlotForward

Integers = NDArray[np.int64]
OPENERS = ("", "", "What is", "How", "Why", "Explain", "Write a Python function that", "List", "Tell me about")
CONTEXT, STEPS = 512, 500


@dataclass(frozen=True)
class Answer:
    """What drafts behind each of its n tokens come to."""

    accepted: Integers
    """[n] drafted tokens of a whole block that are accepted."""
    head: Matrix
    """[n, B-1] survival of slots by the confidence head."""
    own: Matrix
    """The same by the drafter's own probabilities, fitted to what was accepted."""


class Confident(AutoWidth):
    """Widths that follow a survival of each slot of this very block, once history says that a draft pays."""

    def trimmed(self, widths: list[int], survival: Matrix, context_tokens: int) -> list[int]:
        """The draft is paid for: widths of the drafted requests that give the most tokens per second now."""
        drafted = np.flatnonzero(np.array(widths) > 1)
        choices = Choices.ragged(survival[drafted])
        rows = choices.rows + len(widths) - len(drafted)
        seconds = self.costs.of_steps(rows, np.full(len(rows), len(drafted)), Context(context_tokens, len(widths)))
        tokens = choices.tokens(survival[drafted]) + len(widths) - len(drafted)
        chosen = np.ones(len(widths), np.int64)
        chosen[drafted] = choices.widths(int(np.argmax(tokens / seconds)))
        return [int(width) for width in chosen]


def recipe(count: int) -> Recipe:
    """Prompts that the target makes up itself, and its greedy answers."""
    prompts = [{"kind": "synthesised", "name": "own", "count": count, "openers": OPENERS, "max_new_tokens": 48}]
    answers = {"max_new_tokens": 128, "max_batch_size": 64, "sampled_share": 0.0}
    fields = {"target": {"model": "smollm2"}, "data": {"prompts": prompts, "answers": answers}}
    return Recipe.model_validate({**fields, "drafter": {"mask_token_id": 16}, "training": {"steps": 1}})


@torch.no_grad()
def drafts(examples: list[Example]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each answer: hidden states [n, B-1, H] of drafts, their own probabilities and hits [n, B-1]."""
    target, drafter = load_target("smollm2"), load_drafter("smollm2", dtype=torch.float32)
    config, head = drafter.config, target.get_parameter("head.weight")
    forward, found = SlotForward(drafter, target.embedding, dtype=torch.float32), []
    for example in examples:
        tokens = example.tokens.to(torch.int64)
        anchors = torch.arange(example.prompt_length, len(tokens) - config.block_size)
        if not len(anchors):
            continue
        blocks = lay_out([tokens], [anchors], config.block_size)
        hidden = forward(blocks, target_features(target, [tokens], config.target_layer_ids)).hidden
        best = [(part @ head.t()).softmax(-1).max(-1) for part in hidden.split(32)]
        own, chosen = (torch.cat([getattr(each, name) for each in best]) for name in ("values", "indices"))
        found.append((hidden, own, chosen == blocks.targets))
    return found


def fitted(inputs: Tensor, hits: Tensor) -> ConfidenceHead:
    """A head trained on drafts [n, B-1, H], each slot after those that were accepted."""
    reached = torch.cat([torch.ones_like(hits[:, :1]), hits[:, :-1].long().cumprod(1).bool()], dim=1)
    mean, spread = inputs[reached].mean(0), inputs[reached].std(0) + 1e-6
    head = ConfidenceHead(ConfidenceConfig(with_markov=False), inputs.shape[-1], 0)
    torch.nn.init.zeros_(head.proj.weight)
    torch.nn.init.zeros_(head.proj.bias)
    rows, labels = (inputs[reached] - mean) / spread, hits[reached].float()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.05)
    order = torch.Generator().manual_seed(0)
    for _ in range(600):
        batch = torch.randint(len(rows), (1024,), generator=order)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(rows[batch], None), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # the scale of the inputs becomes part of the head
        head.proj.weight.div_(spread)
        head.proj.bias.sub_((head.proj.weight * mean).sum())
    return head


def with_slot(values: Tensor) -> Tensor:
    """[n, B-1, H] and which slot each is, one of B-1: what a head of its own could learn from the hidden state."""
    which = torch.eye(values.shape[1]).expand(len(values), -1, -1)
    return torch.cat([values, which], dim=-1)


@torch.no_grad()
def survival(head: ConfidenceHead, inputs: Tensor) -> Matrix:
    """[n, B-1]."""
    return np.asarray(head(inputs, None).sigmoid().cumprod(1).double())


def measured(examples: list[Example]) -> tuple[list[Answer], dict[str, float]]:
    """The second half of the answers, and how well each kind orders accepted and rejected first slots."""
    found = drafts(examples)
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    hidden, own, hits = (torch.cat(part) for part in zip(*first, strict=True))

    def odds(values: Tensor) -> Tensor:
        return with_slot(values.clamp(1e-4, 1 - 1e-4).logit()[..., None])

    head, of_own = fitted(hidden, hits), fitted(odds(own), hits)
    answers = [
        Answer(np.asarray(hit.long().cumprod(1).sum(1)), survival(head, states), survival(of_own, odds(likely)))
        for states, likely, hit in second
    ]
    shares = {name: _auc(np.concatenate([getattr(a, name)[:, 0] for a in answers]),
                         np.concatenate([a.accepted > 0 for a in answers])) for name in ("head", "own")}  # fmt: skip
    return answers, shares


def _auc(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Share of pairs of an accepted and a rejected first slot that stand in the right order."""
    ranks = scores.argsort().argsort() + 1
    hits = int(right.sum())
    return float((ranks[right].sum() - hits * (hits + 1) / 2) / (hits * (len(right) - hits)))


def serve(surface: Surface, lanes: int, answers: list[Answer], kind: str, seed: int) -> float:
    """Tokens per second of STEPS steps; lanes answer one after another."""
    chance = np.random.default_rng(seed)
    policy = Confident(surface.measured(lanes, np.random.default_rng(seed + 77)), surface.block_size)
    work = [answers[chance.integers(len(answers))] for _ in range(lanes)]
    ids, place, tokens, seconds = list(range(lanes)), [0] * lanes, 0, 0.0
    context = lanes * CONTEXT
    for _ in range(STEPS):
        widths = policy.widths(ids, context)
        drafted = sum(width > 1 for width in widths)
        if kind != "auto" and drafted:
            widths = policy.trimmed(widths, _survival(work, place, kind), context)
        accepted = [min(int(one.accepted[at]), width - 1) for one, at, width in zip(work, place, widths, strict=True)]
        took = float(surface.of_steps(np.array([sum(widths)]), np.array([drafted]), lanes, context)[0])
        policy.observe(Step(ids, widths, accepted, None, context))
        policy.costs.observe(
            sum(widths), drafted, Context(context, lanes), took
        )  # a draft costs what it costs, trimmed or not
        tokens, seconds = tokens + sum(accepted) + lanes, seconds + took
        for lane, gained in enumerate(accepted):
            place[lane] += gained + 1
            if place[lane] >= len(work[lane].accepted):
                policy.forget(ids[lane])
                work[lane], ids[lane], place[lane] = answers[chance.integers(len(answers))], max(ids) + 1, 0
    return tokens / seconds


def _survival(work: list[Answer], place: list[int], kind: str) -> Matrix:
    if kind == "known":
        slots = np.arange(work[0].head.shape[1])
        return np.array([slots < one.accepted[at] for one, at in zip(work, place, strict=True)], dtype=np.float64)
    return np.array([getattr(one, kind)[at] for one, at in zip(work, place, strict=True)])


def main(
    work: Annotated[Path, typer.Option(help="Folder for the answers.")],
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON.")] = None,
    count: Annotated[int, typer.Option(help="Prompts.")] = 90,
    answers_used: Annotated[int, typer.Option(help="Answers to them that are drafted for, the first ones.")] = 70,
    seeds: Annotated[int, typer.Option(help="Runs of each cell.")] = 2,
) -> None:
    """Prints tokens per second by those of `auto` as it is."""
    asked = recipe(count)
    manifest = make_data(asked, load_target("smollm2"), load_tokenizer("smollm2"), work, lambda *_: None)
    examples, _ = load_answers(work, manifest, validation_share=0.0, seed=0)
    answers, shares = measured(examples[:answers_used])
    kinds, rows = ("head", "own", "known"), []
    table = Table("surface", "requests", *kinds)
    for surface in (replace(each, block_size=8) for each in surfaces()):
        for lanes in (1, 8, 32):
            of = {kind: float(np.mean([serve(surface, lanes, answers, kind, seed) for seed in range(seeds)]))
                  for kind in ("auto", *kinds)}  # fmt: skip
            ratios = {kind: of[kind] / of["auto"] for kind in kinds}
            rows.append({"surface": surface.name, "requests": lanes, **ratios})
            table.add_row(surface.name, str(lanes), *(f"{ratio:.3f}" for ratio in ratios.values()))
    Console().print(table, f"first slots in the right order: {shares}")
    if output is not None:
        told = {"commit": commit(), "made": now(), "answers": len(answers), "order": shares, "ratios": rows}
        output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
