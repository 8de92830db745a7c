"""The training loop: blocks of the step -> drafter -> loss -> update, with checkpoints that resume exactly.

A checkpoint is weights and optimiser as safetensors and counters as JSON, whole or absent. No random state is kept
because there is none: what a step trains on is a function of seed and step (`blocks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.common.files import mend_folder, whole_folder
from dflash_serve.common.settings import Frozen
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.training.blocks import Blocks, draw_anchors, lay_out, step_sequences
from dflash_serve.training.dataset import Example, Features, seen_vocabulary
from dflash_serve.training.loss import SlotLoss, SlotScores, Weighting, confidence_loss
from dflash_serve.training.optimizer import Average, Optimizer, learning_rate
from dflash_serve.training.recipe import Recipe
from dflash_serve.training.slots import SlotForward, Teacher
from dflash_serve.training.validation import Scores, held_out_scores

CURRENT = "checkpoint"
PAUSE = 30.0
"""Seconds: more than this between two steps is a process that was stopped, and is not counted."""


class Best(Frozen):
    """The step whose weights did best on held-out answers: by the acceptance length when those are decoded anew."""

    step: int
    replayed_tau: float
    scores: dict[str, float | list[float]]


class Progress(Frozen):
    """Where a run stands."""

    recipe_sha256: str
    step: int = 0
    seconds: float = 0.0
    """Time spent training; pauses are not counted."""
    best: Best | None = None
    """None = nothing was validated yet."""


@dataclass
class Tick:
    """What one step reports. `slot_hits` and `slots` [B-1] are counts; `context_tokens` rows of features it used."""

    step: int
    lr: float
    loss: float
    """Of the slots."""
    confidence_loss: float | None
    """None = no such head."""
    gradient_norm: float
    slot_hits: Tensor
    slots: Tensor
    simulated_tau: float
    context_tokens: int
    anchors: int
    progress: float = 0.0
    """Share of the budget that is spent after it."""
    seconds: float = 0.0
    """Seconds of training so far."""
    scores: Scores | None = None


class Trainer:
    """One training run. `target` is not packed yet; it is once the weights that are needed have been taken.

    Args:
        recipe_hash: what a checkpoint must match to be resumed.
        feature_layers: of the features that come with the answers.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetModel,
        drafter: Drafter,
        training: Sequence[Example],
        validation: Sequence[Example],
        output: Path,
        recipe_hash: str,
        feature_layers: Sequence[int] = (),
    ) -> None:
        self.recipe, self.settings = recipe, recipe.training
        self.target, self.drafter, self.validation, self.output = target, drafter, validation, output
        self.head = target.get_parameter("head.weight").detach()
        self.teacher = Teacher(target, drafter.config, soft=self.settings.soft_labels > 0)
        room = self.settings.feature_cache_gib
        self.features = Features(target, training, self.teacher.layer_ids, room, feature_layers)
        dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        self.forward = SlotForward(drafter, target.embedding, dtype=dtype)
        alpha = self.settings.dpace_alpha if self.settings.weighting == "dpace" else None
        weighting = Weighting(alpha, self.settings.decay_gamma)
        least = self.settings.seen_at_least
        kept = seen_vocabulary(training, least).to(self.head.device) if self.settings.reduced_vocabulary else None
        soft, kind = self.settings.soft_labels, self.settings.soft_loss
        new_loss = partial(SlotLoss, self.head, weighting, soft=soft, soft_loss=kind)
        self.whole_loss = new_loss()
        self.loss = self.whole_loss if kept is None else new_loss(kept=kept)
        self.optimizer = Optimizer(drafter, self.settings)
        self.average = Average(drafter, self.settings.ema)
        self.best: dict[str, Tensor] = {}
        """Weights of the best step; empty = nothing was validated yet."""
        self.progress = Progress(recipe_sha256=recipe_hash)
        self.stopping = False
        target.pack()

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent."""
        if self.settings.steps is not None:
            return self.progress.step / self.settings.steps
        assert self.settings.minutes is not None
        return self.progress.seconds / (self.settings.minutes * 60)

    def run(self, on_tick: Callable[[Tick], None]) -> None:
        """Trains until the budget is spent or `stopping` is set; leaves a checkpoint."""
        saved = last = time.monotonic()
        while self.fraction < 1 and not self.stopping:
            tick = self._step()
            if self.validation and tick.step % self.settings.validate_every == 0:
                tick.scores = self.validate()
                self.keep_best(tick.step, tick.scores)
            now = time.monotonic()
            seconds = self.progress.seconds + min(now - last, PAUSE)
            self.progress = self.progress.model_copy(update={"step": tick.step, "seconds": seconds})
            last = now
            tick.seconds, tick.progress = seconds, self.fraction
            on_tick(tick)
            if now - saved > self.settings.checkpoint_minutes * 60:
                self.save()
                saved = time.monotonic()
        self.save()

    def _step(self) -> Tick:
        blocks, features = self._blocks(self.progress.step)
        features, labels = self.teacher(blocks, features)
        predictions = self.forward(blocks, features)
        loss, scores = self.loss(predictions, labels)
        whole, of_confidence = loss, None
        if predictions.confidence is not None:
            of_confidence = confidence_loss(predictions.confidence, scores)
            whole = loss + self.settings.confidence_weight * of_confidence
        whole.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip)
        lr = learning_rate(self.fraction, self.settings)
        self.optimizer.step(lr)
        self.average.update()
        losses = float(loss.detach()), None if of_confidence is None else float(of_confidence.detach())
        return self._tick(blocks, scores, lr, losses, float(norm))

    def _blocks(self, step: int) -> tuple[Blocks, list[Tensor]]:
        """What a step trains on: a function of seed, step and budget alone."""
        seed, answers = self.recipe.seed, self.features.answers
        indexes, anchors = [], []
        for epoch, index in step_sequences(seed, step, len(answers), self.settings.sequences):
            first, length = answers[index].prompt_length, len(answers[index].tokens)
            drawn = draw_anchors(seed, epoch, index, first=first, length=length, count=self.settings.anchors)
            indexes.append(index)
            anchors.append(drawn.to(self.head.device))
        sequences = [self.features.token_ids(index) for index in indexes]
        config, says = self.drafter.config, [answers[index].says for index in indexes]
        short = self.settings.short_blocks
        size = config.block_size if short is None or self.fraction >= short.until else short.block_size
        blocks = lay_out(sequences, anchors, size, config.rows(size), says=says)
        return replace(blocks, valid=blocks.valid & self.loss.knows(blocks.targets)), self.features.of(indexes)

    def _tick(
        self, blocks: Blocks, scores: SlotScores, lr: float, losses: tuple[float, float | None], norm: float
    ) -> Tick:
        whole, missing = blocks.valid.all(1), self.drafter.config.block_size - 1 - blocks.valid.shape[1]
        accepted = scores.hit[whole].long().cumprod(1).sum(1).float() + 1
        return Tick(
            step=self.progress.step + 1,
            lr=lr,
            loss=losses[0],
            confidence_loss=losses[1],
            gradient_norm=norm,
            slot_hits=F.pad(scores.hit.sum(0), (0, missing)).cpu(),
            slots=F.pad(blocks.valid.sum(0), (0, missing)).cpu(),
            simulated_tau=float(accepted.mean()) if len(accepted) else 1.0,
            context_tokens=sum(blocks.contexts),
            anchors=len(blocks.anchors),
        )

    def validate(self) -> Scores:
        """Scores of the weights to be published, on all held-out answers."""
        with self.average.in_place():
            return held_out_scores(self.validation, self.teacher, self.drafter.config, self.forward, self.whole_loss)

    def keep_best(self, step: int, scores: Scores) -> None:
        """Keeps the weights to be published where they do better than those of every step before."""
        before = self.progress.best
        if isnan(scores.replayed_tau):  # no held-out answer is as long as a block
            return
        if before is not None and before.replayed_tau >= scores.replayed_tau:
            return
        best = Best(step=step, replayed_tau=scores.replayed_tau, scores=scores.as_json())
        self.progress = self.progress.model_copy(update={"best": best})
        self.best = {name: weight.detach().cpu().clone() for name, weight in self.average.published().items()}

    def save(self) -> None:
        """Writes a checkpoint to resume from."""
        groups = {"drafter": dict(self.drafter.state_dict()), "optimizer": self.optimizer.tensors()}
        if self.average.tensors:
            groups["average"] = self.average.tensors
        if self.best:
            groups["best"] = self.best
        save_state(self.output, self.progress, groups)

    def resume(self) -> bool:
        """Goes back to the last checkpoint; False if there is none.

        Raises:
            UserError: the checkpoint is of another recipe, or broken.
        """
        state = load_state(self.output)
        if state is None:
            return False
        progress, groups = state
        if progress.recipe_sha256 != self.progress.recipe_sha256:
            what = "its checkpoint is of another recipe or other data"
            raise UserError(what, where=str(self.output), do="give another --output, or train without --resume")
        self.drafter.load_state_dict(groups["drafter"])
        self.optimizer.load_tensors(groups["optimizer"])
        if self.average.tensors:
            self.average.load(groups["average"])
        self.progress, self.best = progress, groups.get("best", {})
        return True


def save_state(output: Path, progress: Progress, groups: dict[str, dict[str, Tensor]]) -> None:
    """Replaces the checkpoint under `output`; a kill at any moment leaves the old or the new one."""
    mend_folder(output / CURRENT)
    with whole_folder(output / CURRENT) as scratch:
        for name, tensors in groups.items():
            own = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(own, scratch / f"{name}.safetensors")
        (scratch / "progress.json").write_text(progress.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_state(output: Path) -> tuple[Progress, dict[str, dict[str, Tensor]]] | None:
    """The last checkpoint under `output`, None if there is none.

    Raises:
        UserError: it cannot be read.
    """
    folder = output / CURRENT
    mend_folder(folder)
    if not folder.exists():
        return None
    try:
        progress = Progress.model_validate_json((folder / "progress.json").read_bytes())
        groups = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except (OSError, ValidationError, SafetensorError) as error:
        what = f"cannot be read ({str(error).splitlines()[0]})"
        raise UserError(what, where=str(folder), do="remove it and train again") from None
    return progress, groups
