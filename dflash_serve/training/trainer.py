"""The training loop: blocks of the step -> drafter -> loss -> update, with validation and checkpoints.

A resumed run ends bit-equal to an uninterrupted one: a checkpoint holds the weights, the optimiser's state and the
counters, and no random state is needed, because what a step trains on is a function of seed and step (`blocks`).

Validation makes every position of a held-out answer an anchor once. `simulated_tau` is the mean acceptance length over
all of them. `replayed_tau` walks from an answer's first token as decoding does, from one anchor to the next not yet
accepted: the acceptance length that a lossless loop would measure on these answers, but for their last block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_serve.common.documents import DATA, read_bytes
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import ResultFolders, difference, digest
from dflash_serve.errors import UserError
from dflash_serve.models.attention import PackedCausalAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.training.blocks import Blocks, SlotForward, Teacher, draw_anchors, lay_out, step_sequences
from dflash_serve.training.loss import SlotLoss, SlotScores, Weighting, confidence_loss, joined
from dflash_serve.training.other_target import OtherTarget
from dflash_serve.training.parallel import ALONE, Processes
from dflash_serve.training.recipe import TrainingRecipe, TrainingSection
from dflash_serve.training.shards import Example, seen_vocabulary

CHECKPOINT, PROGRESS = "checkpoint", "progress.json"
HEADS = ("markov_head.", "confidence_head.")
"""Name prefixes of tables and single rows, to which Muon's equal steps in all directions do not fit."""
ANSWERS_AT_ONCE = 4
PAUSE = 30.0  # seconds: more than this between two steps is a process that was stopped, and is not counted


class Best(Frozen):
    """The step with the highest `replayed_tau` on held-out answers."""

    step: int
    replayed_tau: float
    scores: dict[str, float | list[float]]


class Progress(Frozen):
    """State of a run beside its tensors."""

    made_by: dict[str, Any]  # the settings that a resumed run must share: the recipe without its budgets
    step: int = 0
    seconds: float = 0.0  # time spent training; pauses are not counted
    best: Best | None = None  # none = nothing was validated yet


@dataclass
class Tick:
    """Figures of one step. `slot_hits` and `slots` [B-1] are counts; `context_tokens` the rows of features it used."""

    step: int
    lr: float
    loss: float  # loss of the slots
    confidence_loss: float | None  # None without a confidence head
    gradient_norm: float
    slot_hits: Tensor
    slots: Tensor
    simulated_tau: float
    context_tokens: int
    progress: float = 0.0  # share of the budget that is spent after the step
    seconds: float = 0.0  # seconds of training so far
    scores: Scores | None = None


@dataclass(frozen=True)
class Scores:
    """Means over a validation set. `survival`: share of replayed steps in which slot k (from 1) was accepted.

    `loss` is the weighted cross-entropy; `confidence_loss` is None without such a head.
    """

    loss: float
    slot_accuracy: tuple[float, ...]
    simulated_tau: float
    replayed_tau: float
    survival: tuple[float, ...]
    confidence_loss: float | None = None

    @classmethod
    def of(cls, valid: Tensor, counts: Sequence[int], slots: SlotScores, confidence: Tensor | None = None) -> Scores:
        """The means of blocks at all anchors of some sequences.

        Args:
            valid: [blocks, B-1] and counts, the blocks of each sequence: as in `Blocks`.
            confidence: as in `Predictions`.
        """
        valid = valid.to(slots.hit.device)
        hit, whole = slots.hit & valid, valid.all(1)
        accepted = hit.long().cumprod(1).sum(1)
        simulated, walked = accepted[whole].float() + 1, list[int]()
        for sequence, fits in zip(accepted.split(list(counts)), whole.split(list(counts)), strict=True):
            walked += walk(sequence.tolist(), fits.tolist())
        replayed = torch.tensor(walked, dtype=torch.float32)
        survival = [float((replayed > slot).sum()) / max(1, len(walked)) for slot in range(1, valid.shape[1] + 1)]
        return cls(
            loss=float((slots.cross_entropy * slots.weights).sum() / slots.weights.sum().clamp(min=1e-9)),
            slot_accuracy=tuple((hit.sum(0) / valid.sum(0).clamp(min=1)).tolist()),
            simulated_tau=float(simulated.mean()),  # NaN if no answer is as long as a block
            replayed_tau=float(replayed.mean()),
            survival=tuple(survival),
            confidence_loss=None if confidence is None else float(confidence_loss(confidence, slots)),
        )

    def as_json(self) -> dict[str, float | list[float]]:
        """Rounded for logs, without missing values."""
        raw = {key: value for key, value in asdict(self).items() if value is not None and value == value}  # no NaN
        return {key: [round(x, 4) for x in v] if isinstance(v, tuple) else round(v, 4) for key, v in raw.items()}


def walk(accepted: Sequence[int], fits: Sequence[bool]) -> list[int]:
    """Acceptance lengths (bonus token counted) of a decode that starts at the first anchor.

    Args:
        accepted: slots that would be accepted from each consecutive anchor.
        fits: True if the anchor's block lies wholly within the answer; the walk ends at the first that does not.
    """
    lengths, place = [], 0
    while place < len(accepted) and fits[place]:
        lengths.append(accepted[place] + 1)
        place += lengths[-1]
    return lengths


@torch.no_grad()
def target_features(
    target: TargetModel | OtherTarget, sequences: Sequence[Tensor], target_layer_ids: Sequence[int]
) -> list[Tensor]:
    """Computes the context features of whole sequences in the target's dtype.

    Args:
        sequences: token ids int64 [length] each, on the target's device.

    Returns:
        one [length, F*H] a sequence.
    """
    if isinstance(target, OtherTarget):
        return target.features(sequences, target_layer_ids)
    lengths, device = [len(s) for s in sequences], target.embedding.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    attention = PackedCausalAttention(lengths, target.config.layers, device)
    features = target.features(torch.cat(list(sequences)), positions, attention, target_layer_ids)
    return list(features.split(lengths))


class Trainer:
    """One training run. `target` is not packed yet; it is once the weights that are needed have been taken.

    Args:
        output: folder of the checkpoint.
        processes: each trains on its share of a step's sequences; the first one validates and writes.

    Raises:
        UserError: more processes than sequences in a step.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        target: TargetModel | OtherTarget,
        drafter: Drafter,
        training: Sequence[Example],
        validation: Sequence[Example],
        output: Path,
        processes: Processes = ALONE,
    ) -> None:
        if recipe.training.sequences < processes.count:
            what = f"{recipe.training.sequences} sequences a step do not reach {processes.count} processes"
            raise UserError(what, where="training.sequences", do="give the recipe more, or start fewer processes")
        if recipe.training.heads_only:
            for name, weight in drafter.named_parameters():
                weight.requires_grad_(name.startswith(HEADS))
        self.processes = processes
        self.recipe, self.settings = recipe, recipe.training
        self.target, self.drafter, self.output = target, drafter, output
        self.training, self.validation = training, validation
        self.head = target.get_parameter("head.weight").detach()
        self.teacher = Teacher(target, drafter.config, soft=self.settings.soft_labels > 0)
        dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        self.forward = SlotForward(drafter, target.embedding, dtype=dtype)
        alpha = self.settings.dpace_alpha if self.settings.weighting == "dpace" else None
        weighting, soft = Weighting(alpha, self.settings.decay_gamma), self.settings.soft_labels
        self.whole_loss = self.loss = SlotLoss(self.head, weighting, soft=soft, processes=processes)
        if self.settings.reduced_vocabulary:
            kept = seen_vocabulary(training, self.settings.seen_at_least).to(self.head.device)
            self.loss = SlotLoss(self.head, weighting, soft=soft, kept=kept, processes=processes)
        self.optimizer = Optimizer(drafter, self.settings)
        self.best: dict[str, Tensor] = {}  # weights of the best step; empty = nothing was validated yet
        made_by = recipe.model_dump(mode="json")
        made_by["training"] = {k: v for k, v in made_by["training"].items() if k not in ("steps", "minutes")}
        made_by["data"]["answers"]["max_minutes"] = None  # a training goes on with more answers than it began with
        self.progress, self.checkpoints = Progress(made_by=made_by), ResultFolders(output)
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
        """Trains until the budget is spent or `stopping` is set in any process; leaves a checkpoint."""
        self.processes.same(self.drafter.state_dict().values())
        saved = last = time.monotonic()
        while self._goes_on():
            tick = self._step()
            if self.processes.first and self.validation and tick.step % self.settings.validate_every == 0:
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

    def _goes_on(self) -> bool:
        # agreed at the same place by all processes: one that stopped alone would leave the others waiting
        seconds, stopping = self.processes.agree(self.progress.seconds, self.stopping)
        self.progress = self.progress.model_copy(update={"seconds": seconds})
        return self.fraction < 1 and not stopping

    def update(self) -> tuple[Blocks, SlotScores, tuple[float, Tensor, Tensor | None, Tensor]]:
        """One step: its blocks, their scores, and learning rate, loss, confidence head's loss and gradient's norm.

        Nothing is read from the device, so a GPU is still at work when this returns.
        """
        blocks, features = self._blocks(self.progress.step)
        features, labels = self.teacher(blocks, features)
        predictions = self.forward(blocks, features)
        loss, scores = self.loss(predictions, labels)
        sum_of_losses, of_confidence = loss, None
        if predictions.confidence is not None:
            of_confidence = confidence_loss(predictions.confidence, scores, self.processes)
            sum_of_losses = loss + self.settings.confidence_weight * of_confidence
        sum_of_losses.backward()
        self.processes.total_gradients(self.drafter.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip)
        lr = learning_rate(self.fraction, self.settings)
        self.optimizer.step(lr)
        return blocks, scores, (lr, loss.detach(), of_confidence, norm)

    def _step(self) -> Tick:
        # One vector of sums over all processes, read at once: every figure read from a GPU waits for it.
        blocks, scores, (lr, loss, of_confidence, norm) = self.update()
        valid, slots = blocks.valid.to(loss.device), blocks.valid.shape[1]
        whole = valid.all(1)
        accepted = ((scores.hit.long().cumprod(1).sum(1) + 1) * whole).sum()
        confidence = loss.new_zeros(()) if of_confidence is None else of_confidence.detach()
        figures = [loss, confidence, accepted, whole.sum(), loss.new_tensor(sum(blocks.contexts))]
        sums = torch.cat([torch.stack([f.double() for f in figures]), scores.hit.sum(0), valid.sum(0)])
        sums = torch.cat([self.processes.total(sums), norm.detach().double()[None]]).cpu()
        missing = self.drafter.config.block_size - 1 - slots
        hits, seen = (F.pad(part.long(), (0, missing)) for part in sums[len(figures) : -1].split(slots))
        total, of_head, length, blocks_seen, contexts = sums[: len(figures)].tolist()
        return Tick(
            step=self.progress.step + 1,
            lr=lr,
            loss=total,
            confidence_loss=None if of_confidence is None else of_head,
            gradient_norm=float(sums[-1]),
            slot_hits=hits,
            slots=seen,
            simulated_tau=length / blocks_seen if blocks_seen else 1.0,
            context_tokens=int(contexts),
        )

    def _blocks(self, step: int) -> tuple[Blocks, list[Tensor]]:  # a function of seed, step and budget alone
        seed, answers = self.recipe.seed, self.training
        indexes, anchors = [], []
        chosen = step_sequences(seed, step, len(answers), self.settings.sequences)
        for epoch, index in chosen[self.processes.rank :: self.processes.count]:
            first, length = answers[index].prompt_length, len(answers[index].tokens)
            indexes.append(index)
            anchors.append(draw_anchors(seed, epoch, index, first=first, length=length, count=self.settings.anchors))
        sequences = [answers[index].tokens.to(torch.int64) for index in indexes]
        config, short = self.drafter.config, self.settings.short_blocks
        size = config.block_size if short is None or self.fraction >= short.until else short.block_size
        blocks = lay_out(sequences, anchors, size, config.rows(size))
        blocks = replace(blocks, valid=blocks.valid & self.loss.knows(blocks.targets)).to(self.head.device)
        return blocks, self._features(sequences)

    def _features(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        own = [tokens.to(self.head.device) for tokens in sequences]
        return target_features(self.target, own, self.teacher.layer_ids)

    @torch.no_grad()
    def validate(self) -> Scores:
        """Scores on held-out answers by the whole head, every position an anchor."""
        config, device = self.drafter.config, self.head.device
        valid, counts, slots, confidence = list[Tensor](), list[int](), list[SlotScores](), list[Tensor]()
        for first in range(0, len(self.validation), ANSWERS_AT_ONCE):
            part = self.validation[first : first + ANSWERS_AT_ONCE]
            sequences = [answer.tokens.to(torch.int64) for answer in part]
            anchors = [torch.arange(a.prompt_length, len(a.tokens) - 1) for a in part]
            blocks = lay_out(sequences, anchors, config.block_size, config.rows()).to(device)
            features, labels = self.teacher(blocks, self._features(sequences))
            predictions = self.forward(blocks, features)
            valid.append(blocks.valid)
            counts += blocks.counts
            slots.append(self.whole_loss.scores(predictions, labels))
            if predictions.confidence is not None:
                confidence.append(predictions.confidence)
        return Scores.of(torch.cat(valid), counts, joined(slots), torch.cat(confidence) if confidence else None)

    @torch.no_grad()
    def likeliest(self) -> float:
        """Share of the first answers' tokens that the target itself finds likeliest; nearly all of greedy ones."""
        part, last = self.training[:ANSWERS_AT_ONCE], (self.target.config.num_layers - 1,)
        sequences = [answer.tokens.to(self.head.device, torch.int64) for answer in part]
        hits = list[Tensor]()
        for answer, tokens, rows in zip(part, sequences, target_features(self.target, sequences, last), strict=True):
            hidden = self.target.norm(rows[answer.prompt_length - 1 : -1])
            hits.append((hidden @ self.head.T).argmax(-1) == tokens[answer.prompt_length :])
        return float(torch.cat(hits).float().mean())

    def keep_best(self, step: int, scores: Scores) -> None:
        """Keeps the weights if they score better than those of every earlier step."""
        before = self.progress.best
        if math.isnan(scores.replayed_tau):  # no held-out answer is as long as a block
            return
        if before is not None and before.replayed_tau >= scores.replayed_tau:
            return
        best = Best(step=step, replayed_tau=scores.replayed_tau, scores=scores.as_json())
        self.progress = self.progress.model_copy(update={"best": best})
        self.best = {name: weight.detach().cpu().clone() for name, weight in self.drafter.state_dict().items()}

    def save(self) -> None:
        """Replaces the run's checkpoint, in the first process; a kill at any moment leaves the old or the new one."""
        if not self.processes.first:
            return
        groups = {"drafter": self.drafter.state_dict(), "optimizer": self.optimizer.tensors(), "best": self.best}
        with self.checkpoints.put(CHECKPOINT, digest(self.progress.made_by)) as scratch:
            for name, tensors in groups.items():
                own = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                save_file(own, scratch / f"{name}.safetensors")
            (scratch / PROGRESS).write_text(self.progress.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def resume(self) -> bool:
        """Goes back to the run's checkpoint; False if there is none under its settings.

        Raises:
            UserError: the checkpoint cannot be read.
        """
        folder = self.checkpoints.get(CHECKPOINT, digest(self.progress.made_by))
        if folder is None:
            return False
        try:
            self.progress = Progress.model_validate_json(read_bytes(folder / PROGRESS, DATA))
            groups = {path.stem: load_file(path) for path in folder.glob("*.safetensors")}
            self.drafter.load_state_dict(groups["drafter"])
            self.optimizer.load_tensors(groups["optimizer"])
            self.best = groups["best"]
        except (OSError, UserError, ValidationError, SafetensorError, KeyError, RuntimeError) as error:
            what = f"cannot be read ({str(error).splitlines()[0]})"
            raise UserError(what, where=str(folder), do="remove it and train again") from None
        return True

    def other_settings(self) -> str | None:
        """The settings in which the newest checkpoint under another key differs; None if there is none."""
        others = self.checkpoints.under_other_keys(CHECKPOINT, digest(self.progress.made_by))
        if not others:
            return None
        try:
            kept = Progress.model_validate_json(read_bytes(others[0] / PROGRESS, DATA))
        except (UserError, ValidationError):
            return "it is of another version of dflash-serve"
        return difference(self.progress.made_by, kept.made_by)


class Optimizer:
    """One or two PyTorch optimisers stepped together; weight decay on matrices only."""

    def __init__(self, module: nn.Module, settings: TrainingSection) -> None:
        matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
        vectors = [p for p in module.parameters() if p.dim() != 2]
        decay, self.parts = settings.weight_decay, list[torch.optim.Optimizer]()
        if settings.optimizer == "muon":
            by_muon = [matrices.pop(name) for name in list(matrices) if not name.startswith(HEADS)]
            muon = torch.optim.Muon(by_muon, lr=settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        groups: list[dict[str, Any]] = [{"params": list(matrices.values())}, {"params": vectors, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, weight_decay=decay, fused=True)
        self.parts.append(adamw)

    def step(self, lr: float) -> None:
        """Updates the weights and forgets the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state as named tensors: part.parameter.name."""
        return {
            f"{number}.{parameter}.{name}": value
            for number, part in enumerate(self.parts)
            for parameter, state in part.state_dict()["state"].items()
            for name, value in state.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for number, part in enumerate(self.parts):
            whole = part.state_dict()
            whole["state"] = {}
            for key, value in tensors.items():
                owner, parameter, name = key.split(".", 2)
                if int(owner) == number:
                    whole["state"].setdefault(int(parameter), {})[name] = value
            part.load_state_dict(whole)


def learning_rate(progress: float, settings: TrainingSection) -> float:
    """Linear warm-up over the first `warmup` share of the budget, then a cosine down to `final_lr` x `lr`."""
    peak, warmup, final = settings.lr, settings.warmup, settings.final_lr
    if progress < warmup:
        return peak * max(progress, 1e-3) / warmup  # never 0: the first step is part of the warm-up
    along = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along)))
