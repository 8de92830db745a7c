"""A whole run: data, then training with a display and a log, then the finished drafter with its provenance."""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.source import PROVENANCE, drafter_folder, target_folder
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.provenance import argv, commit, now, processor, versions
from dflash_serve.common.store import digest
from dflash_serve.errors import UserError
from dflash_serve.models.hot_tokens import takes_hot_tokens, write_hot_tokens
from dflash_serve.models.loader import load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.models.target_config import read_target_config
from dflash_serve.training.answers import answer_engine, make_data
from dflash_serve.training.data import MANIFEST, DataManifest, load_answers, totals
from dflash_serve.training.initialise import FRESH, check_drafter, drafter_config, new_drafter
from dflash_serve.training.recipe import Recipe
from dflash_serve.training.trainer import CHECKPOINT, Tick, Trainer

DRAFTER = "drafter"


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU if there is one.

    Raises:
        UserError: a GPU is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise UserError(f"{name!r} is asked for, but PyTorch sees no GPU", where="--device", do="use auto or cpu")
    try:
        return torch.device(("cuda" if available else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise UserError(f"no device {name!r}", where="--device", do="use auto, cpu or cuda") from None


def run(
    recipe: Recipe,
    output: Path,
    *,
    device: torch.device | str = "cpu",
    resume: bool = False,
    data_only: bool = False,
    quiet: bool = False,
) -> bool:
    """Makes the data, trains on it and writes output/drafter.

    Args:
        resume: go on where a run with the same settings stopped.
        data_only: end when the answers are there.

    Returns:
        True if it did all that was asked; False if it was stopped, and --resume goes on.

    Raises:
        UserError: the output folder holds another run.
    """
    console, started, model = Console(stderr=True, quiet=quiet), now(), recipe.target
    if not data_only:
        refuse_another_run(output, resume=resume)
    # Before hours are spent on answers:
    check_drafter(recipe.drafter, read_target_config(target_folder(model.model, model.revision)))
    manifest = make_data(
        recipe,
        lambda: answer_engine(recipe, torch.device(device).type),
        output / "data",
        lambda what, count: console.print(f"{what}: {count}"),
    )
    answers, tokens, answer_tokens = totals(manifest.shards)
    console.print(f"data: {answers} answers, {tokens} tokens, {answer_tokens} of them answered")
    if data_only:
        return True
    # Never fp16: features reach 25,000, too near its end.
    target = load_target(model.model, dtype=torch.bfloat16, device=device, revision=model.revision)
    trainer = new_trainer(recipe, target, manifest, output)
    if resume:
        go_on(trainer, console)
    with Display(output / "log.jsonl", recipe.training.log_every, console) as display, _until_stopped(trainer, console):
        trainer.run(display)
    if trainer.fraction < 1:
        console.print(f"stopped at step {trainer.progress.step}; go on with --resume")
        return False
    publish(trainer, manifest, started)
    best = trainer.progress.best
    of = "" if best is None else f" (step {best.step}, the best on held-out answers)"
    console.print(f"drafter: {output / DRAFTER}{of}")
    return True


def go_on(trainer: Trainer, console: Console) -> None:
    """Resumes a run, or says why it starts anew.

    Raises:
        UserError: the folder holds a finished drafter of other settings.
    """
    if trainer.resume():
        console.print(f"resumed at step {trainer.progress.step}")
    elif other := trainer.other_settings():
        if (trainer.output / DRAFTER / PROVENANCE).is_file():
            what = f"it holds a finished run with other settings ({other})"
            raise UserError(what, where=str(trainer.output), do="give another --output")
        console.print(f"the checkpoint was made with other settings ({other}); training starts anew")


def refuse_another_run(output: Path, *, resume: bool) -> None:
    """Refuses to train over a run unless it is to be resumed.

    Raises:
        UserError: the folder holds a run, finished or not.
    """
    if not resume and any(output.glob(f"{CHECKPOINT}*")):
        finished = (output / DRAFTER / PROVENANCE).is_file()
        do = "give another --output" if finished else "add --resume, or give another --output"
        raise UserError(f"it holds {'a finished' if finished else 'an unfinished'} run", where=str(output), do=do)


def new_trainer(recipe: Recipe, target: TargetModel, manifest: DataManifest, output: Path) -> Trainer:
    """The trainer of a recipe on finished data, at step 0."""
    share = recipe.data.validation_share
    training, validation = load_answers(output / "data", manifest, validation_share=share, seed=recipe.seed)
    config = drafter_config(recipe.drafter, target.config)
    drafter = new_drafter(config, target, init=recipe.drafter.init, seed=recipe.seed)
    return Trainer(recipe, target, drafter, training, validation, output)


def publish(trainer: Trainer, manifest: DataManifest, started: str) -> None:
    """Validates a last time and writes the best held-out step in bf16, with all that is needed to make it again.

    Without held-out answers the last step's weights are written.
    """
    output, recipe, device = trainer.output, trainer.recipe, trainer.head.device
    if trainer.validation:
        trainer.keep_best(trainer.progress.step, trainer.validate())
    best = trainer.progress.best
    _write_weights(trainer)
    answers, _, answer_tokens = totals(manifest.shards)
    given = {} if recipe.drafter.init in FRESH else file_entries(drafter_folder(recipe.drafter.init))
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} x {processor()}"
    provenance = {
        "argv": argv(),
        "recipe_sha256": digest(recipe.model_dump(mode="json")),
        "data_sha256": sha256(output / "data" / MANIFEST),  # the manifest names every shard's
        "initial_sha256": {name: entry.sha256 for name, entry in given.items()} or None,  # None = fresh weights
        "seed": recipe.seed,
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "started": started,
        "ended": now(),
        "steps": trainer.progress.step,
        "training_seconds": round(trainer.progress.seconds, 1),
        "data_seconds": round(manifest.seconds, 1),
        "answers": answers,
        "answer_tokens": answer_tokens,
        "left_out": {"prompts": manifest.excluded},  # they share words with an evaluation's
        "best_step": None if best is None else best.step,
        "validation": None if best is None else best.scores,
    }
    write_whole(output / DRAFTER / PROVENANCE, json.dumps(provenance, indent=2, ensure_ascii=False) + "\n")


def _write_weights(trainer: Trainer) -> None:
    folder, config = trainer.output / DRAFTER, trainer.drafter.config
    best = trainer.best or trainer.published.state_dict()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in best.items()}
    write_drafter(folder, config, tensors, dialect=dialect_of(config), overwrite=True)
    if trainer.loss.kept is not None and takes_hot_tokens(config):
        write_hot_tokens(folder, trainer.loss.kept.tolist())


def dialect_of(config: DrafterConfig) -> str:
    """The dialect of a trained drafter: z-lab's, or the one in which engines read its heads."""
    if config.markov is None and config.confidence is None and config.slots == "fill-in":
        return "zlab"
    return "deepspec" if config.convolution is None else "modelopt"


@contextmanager
def _until_stopped(trainer: Trainer, console: Console) -> Iterator[None]:
    # SIGINT and SIGTERM end the step, save and say so; a second one ends the process.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, _frame: object) -> None:
        trainer.stopping = True
        console.print("stopping: this step is finished and saved first; a second Ctrl-C loses what is not saved yet")
        signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Display:
    """A progress bar, and a log of one JSON object a line.

    Called with every step's `Tick`; shows and logs the mean of the last `every` steps.
    """

    def __init__(self, log: Path, every: int, console: Console) -> None:
        self.log, self.every, self.console = log, every, console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("training", total=1.0)
        self.pending: list[Tick] = []
        self.since = 0.0

    def __enter__(self) -> Self:
        if not self.bar.disable:  # a disabled bar would end with an empty line
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.bar.disable:
            self.bar.stop()

    def __call__(self, tick: Tick) -> None:
        self.pending.append(tick)
        self.bar.update(self.task, completed=min(1.0, tick.progress))
        if tick.step % self.every == 0 or tick.scores is not None:
            self._report(tick)

    def _report(self, tick: Tick) -> None:
        ticks, self.pending = self.pending, []
        hits, slots = sum(t.slot_hits for t in ticks), sum(t.slots for t in ticks)
        seconds = max(1e-9, tick.seconds - self.since)
        self.since = tick.seconds
        accuracy = torch.as_tensor(hits / torch.as_tensor(slots).clamp(min=1)).tolist()
        row: dict[str, object] = {
            "step": tick.step,
            "seconds": round(tick.seconds, 1),
            "progress": round(tick.progress, 4),
            "lr": round(tick.lr, 8),
            "loss": round(sum(t.loss for t in ticks) / len(ticks), 4),
            "gradient_norm": round(tick.gradient_norm, 3),
            "slot_accuracy": [round(share, 4) for share in accuracy],
            "simulated_tau": round(sum(t.simulated_tau for t in ticks) / len(ticks), 4),
            "context_tokens_per_second": round(sum(t.context_tokens for t in ticks) / seconds),
        }
        confidence = [t.confidence_loss for t in ticks if t.confidence_loss is not None]
        if confidence:
            row["confidence_loss"] = round(sum(confidence) / len(confidence), 4)
        if tick.scores is not None:
            row["validation"] = tick.scores.as_json()
            line = f"step {tick.step}: held out: loss {tick.scores.loss:.3f}, "
            line += f"simulated tau {tick.scores.simulated_tau:.2f}, replayed tau {tick.scores.replayed_tau:.2f}"
            self.console.print(line)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        line = f"step {row['step']}  loss {row['loss']}  simulated tau {row['simulated_tau']}"
        self.bar.update(self.task, description=f"{line}  {row['context_tokens_per_second']} tok/s")
