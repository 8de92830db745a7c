"""A whole run: data, then training, then the finished drafter."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from dflash_serve.checkpoint.manifest import file_entries
from dflash_serve.checkpoint.source import drafter_source, local_folder
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from dflash_serve.training import provenance
from dflash_serve.training.answers import make_data, totals
from dflash_serve.training.dataset import load_answers
from dflash_serve.training.display import Display
from dflash_serve.training.initialise import FRESH, drafter_config, new_drafter
from dflash_serve.training.recipe import Recipe, section_hash
from dflash_serve.training.shards import MANIFEST, Manifest, file_sha256, write_text
from dflash_serve.training.state import CURRENT
from dflash_serve.training.target import Target, Tokenizer
from dflash_serve.training.trainer import Trainer
from dflash_serve.training.validation import Scores

DRAFTER = "drafter"


def choose_device(name: str) -> tuple[torch.device, torch.dtype]:
    """`auto` is the GPU where there is one. The target runs in bf16: features reach 25,000, too near fp16's end.

    Raises:
        UserError: a GPU is asked for where there is none.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise UserError(f"{name!r} is asked for, but PyTorch sees no GPU", where="--device", do="use auto or cpu")
    try:
        return torch.device(("cuda" if available else "cpu") if name == "auto" else name), torch.bfloat16
    except RuntimeError:
        raise UserError(f"no device {name!r}", where="--device", do="use auto, cpu or cuda") from None


def run(
    recipe: Recipe, target: Target, tokenizer: Tokenizer, output: Path, *, resume: bool = False, data_only: bool = False
) -> None:
    """Makes the data, trains on it and writes output/drafter in z-lab's form; goes on where a killed run stopped.

    Raises:
        UserError: the output folder holds another run.
    """
    console = Console(stderr=True)
    started = provenance.now()
    if (output / CURRENT).exists() and not resume and not data_only:
        raise UserError("it holds an unfinished run", where=str(output), do="add --resume, or give another --output")
    manifest = make_data(recipe, target, tokenizer, output / "data", lambda what, n: console.print(f"{what}: {n}"))
    answers, tokens, answer_tokens = totals(manifest.shards)
    console.print(f"data: {answers} answers, {tokens} tokens, {answer_tokens} of them answered")
    if data_only:
        return
    trainer = new_trainer(recipe, target, manifest, output)
    if resume and trainer.resume():
        console.print(f"resumed at step {trainer.progress.step}")
    with Display(output / "log.jsonl", recipe.training.log_every, console) as display, _until_stopped(trainer):
        scores = trainer.run(display)
    if trainer.fraction < 1:
        console.print(f"stopped at step {trainer.progress.step}; go on with --resume")
        return
    scores = trainer.validate() if trainer.validation else scores
    publish(trainer, manifest, output, started, scores)
    console.print(f"drafter: {output / DRAFTER}")


def new_trainer(recipe: Recipe, target: Target, manifest: Manifest, output: Path) -> Trainer:
    """The trainer of a recipe on finished data, at step 0."""
    training, validation = load_answers(
        output / "data", manifest, validation_share=recipe.data.validation_share, seed=recipe.seed
    )
    config = drafter_config(recipe.drafter, target.config)
    drafter = new_drafter(config, target, init=recipe.drafter.init, seed=recipe.seed)
    # The budget may be changed on resumption, so it is no part of what a checkpoint must match.
    settings = recipe.training.model_copy(update={"steps": None, "minutes": None})
    wanted = section_hash(recipe.target, recipe.data, recipe.drafter, settings, recipe.seed)
    return Trainer(recipe, target, drafter, training, validation, output, wanted)


def publish(trainer: Trainer, manifest: Manifest, output: Path, started: str, scores: Scores | None) -> None:
    """Writes the drafter in bf16 and its provenance."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.average.published().items()}
    write_drafter(output / DRAFTER, trainer.drafter.config, tensors, overwrite=True)
    answers, _, answer_tokens = totals(manifest.shards)
    record = provenance.Provenance(
        argv=provenance.argv(),
        recipe_sha256=section_hash(trainer.recipe),
        data_sha256=file_sha256(output / "data" / MANIFEST),
        initial_sha256=_initial(trainer.recipe),
        seed=trainer.recipe.seed,
        commit=provenance.commit(),
        versions=provenance.versions(),
        hardware=provenance.hardware(trainer.head.device),
        threads=torch.get_num_threads(),
        started=started,
        ended=provenance.now(),
        steps=trainer.progress.step,
        training_seconds=round(trainer.progress.seconds, 1),
        data_seconds=round(manifest.seconds, 1),
        answers=answers,
        answer_tokens=answer_tokens,
        validation=None if scores is None else scores.as_json(),
    )
    write_text(output / DRAFTER / "provenance.json", record.model_dump_json(indent=2) + "\n")


def _initial(recipe: Recipe) -> dict[str, str] | None:
    """Checksums of the drafter that was gone on from."""
    if recipe.drafter.init in FRESH:
        return None
    files = file_entries(local_folder(drafter_source(recipe.drafter.init)))
    return {name: entry.sha256 for name, entry in files.items()}


@contextmanager
def _until_stopped(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM end the step and save; a second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, _frame: object) -> None:
        trainer.stopping = True
        signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
