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

import torch
from pydantic import ValidationError
from rich.console import Console
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, TransformerConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import PROVENANCE, drafter_folder, target_folder
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.progress import Work, doing, shown
from dflash_serve.common.provenance import argv, commit, now, processor, versions
from dflash_serve.common.settings import describe
from dflash_serve.common.store import digest
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter, takes_hot_tokens, write_hot_tokens
from dflash_serve.models.drafter_heads import ConfidenceHead, GroupedConvolution, MarkovHead
from dflash_serve.models.loader import load_drafter, load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.training.data import answer_engine, make_data
from dflash_serve.training.other_target import OtherTarget, load_other_target, other_family, read_sizes
from dflash_serve.training.parallel import ALONE, Processes, joined_processes
from dflash_serve.training.recipe import DrafterSection, TargetSection, TrainingRecipe
from dflash_serve.training.shards import MANIFEST, DataManifest, load_answers, totals
from dflash_serve.training.trainer import CHECKPOINT, Tick, Trainer

DRAFTER = "drafter"
HEAD_NORM = 1.5
"""First value of the q/k norms: unit rows would leave the scores of a target without such norms too flat."""
TIMED_STEPS = 10
NOISE = 0.002
RANDOM = 0.02
FRESH = ("target", "random")  # first weights that do not come from another drafter
ADDED = ("convolution", "markov", "confidence")  # parts that a given drafter without them gets, idle at first


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
    recipe: TrainingRecipe,
    output: Path,
    *,
    device: torch.device | str = "cpu",
    resume: bool = False,
    data_only: bool = False,
    quiet: bool = False,
) -> bool:
    """Makes the data, trains on it and writes output/drafter; under `torchrun` with all its processes.

    Args:
        resume: go on where a run with the same settings stopped.
        data_only: end when the answers are there.

    Returns:
        True if it did all that was asked; False if it was stopped, and --resume goes on.

    Raises:
        UserError: the output folder holds another run.
    """
    finished, started = (output / DRAFTER / PROVENANCE).is_file(), now()
    if not data_only and not resume and any(output.glob(f"{CHECKPOINT}*")):
        do = "give another --output" if finished else "add --resume, or give another --output"
        raise UserError(f"it holds {'a finished' if finished else 'an unfinished'} run", where=str(output), do=do)
    # Before hours are spent on answers:
    folder = target_folder(recipe.target.model, recipe.target.revision)
    check_recipe(recipe, folder)
    with joined_processes(torch.device(device)) as (processes, own):
        console = Console(stderr=True, quiet=quiet or not processes.first, markup=False, emoji=False)
        with shown(quiet=console.quiet, console=console):
            manifest = make_data(
                recipe,
                lambda: answer_engine(recipe, own.type),
                output / "data",
                lambda what, count: console.print(f"{what}: {count}"),
                processes,
            )
        answers, tokens, answer_tokens = totals(manifest.shards)
        console.print(f"data: {answers} answers, {tokens} tokens, {answer_tokens} of them answered")
        if data_only:
            return True
        trainer = new_trainer(recipe, _target(recipe.target, folder, own), manifest, output, processes)
        if recipe.data.answers.server is not None:
            share = f"{trainer.likeliest():.0%} of the server's tokens are the target's own likeliest"
            console.print(f"{share} ({recipe.data.answers.sampled_share:.0%} of the answers are sampled)")
        done = train(trainer, console, resume=resume, finished=finished)
        if not done:
            console.print(f"stopped at step {trainer.progress.step}; go on with --resume")
        elif processes.first:
            publish(trainer, manifest, started)
            best = trainer.progress.best
            of = "" if best is None else f" (step {best.step}, the best on held-out answers)"
            console.print(f"drafter: {output / DRAFTER}{of}")
        processes.wait()  # torchrun ends all of them once one has exited with an error, and the first one writes
    return done


def _target(model: TargetSection, folder: Path, device: torch.device) -> TargetModel | OtherTarget:
    # Never fp16: features reach 25,000, too near its end.
    if other_family(folder) is not None:
        return load_other_target(folder, device)
    return load_target(model.model, dtype=torch.bfloat16, device=device, revision=model.revision)


def train(trainer: Trainer, console: Console, *, resume: bool, finished: bool) -> bool:
    """Trains to the end of the budget, with a progress bar and a log; False if it was stopped before.

    Args:
        finished: the folder holds a finished drafter.

    Raises:
        UserError: --resume is asked for, and the finished drafter has other settings.
    """
    if resume and trainer.resume():
        console.print(f"resumed at step {trainer.progress.step}")
    elif resume and (other := trainer.other_settings()):
        if finished:
            what = f"it holds a finished run with other settings ({other})"
            raise UserError(what, where=str(trainer.output), do="give another --output")
        console.print(f"the checkpoint was made with other settings ({other}); training starts anew")
    log = trainer.output / "log.jsonl" if trainer.processes.first else Path(os.devnull)
    every, since = trainer.recipe.training.log_every, trainer.progress.seconds
    told = shown(quiet=console.quiet, console=console), doing("training", of=1.0, before=trainer.fraction)
    with told[0], told[1] as work, _until_stopped(trainer, console):
        trainer.run(Display(log, every, console, work, since=since))
    return trainer.fraction >= 1


def new_trainer(
    recipe: TrainingRecipe,
    target: TargetModel | OtherTarget,
    manifest: DataManifest,
    output: Path,
    processes: Processes = ALONE,
) -> Trainer:
    """The trainer of a recipe on finished data, at step 0."""
    share = recipe.data.validation_share
    training, validation = load_answers(output / "data", manifest, validation_share=share, seed=recipe.seed)
    config = drafter_config(recipe.drafter, target.config)
    drafter = new_drafter(config, target, init=recipe.drafter.init, seed=recipe.seed)
    return Trainer(recipe, target, drafter, training, validation, output, processes)


def drafter_config(section: DrafterSection, target: TransformerConfig) -> DrafterConfig:
    """The description of a drafter for this target.

    Raises:
        UserError: the recipe asks for layers or a mask token that the target does not have.
    """
    ids = section.target_layer_ids or uniform_target_layer_ids(target.num_layers, section.num_features)
    try:
        return DrafterConfig(
            block_size=section.block_size,
            target_layer_ids=ids,
            num_target_layers=target.num_layers,
            mask_token_id=section.mask_token_id,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=section.intermediate_size or target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            layers=(AttentionKind(),) * section.num_layers,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            slots=section.slots,
            markov=section.markov,
            confidence=section.confidence,
            convolution=section.convolution,
        )
    except ValidationError as error:
        raise UserError(describe(error), where="drafter", do="correct the recipe") from None


def check_recipe(recipe: TrainingRecipe, folder: Path) -> DrafterConfig:
    """Checks that the drafter can be made, and its data, by the configuration of the target in `folder`.

    Raises:
        UserError: the recipe does not fit the target, or the drafter to go on from is described otherwise or not there.
    """
    section, target = recipe.drafter, read_sizes(folder)
    wanted = drafter_config(section, target)
    if recipe.training.heads_only:
        if wanted.markov is None and wanted.confidence is None:
            what = "the drafter has neither a Markov nor a confidence head"
            raise UserError(what, where="training.heads_only", do="give the recipe drafter.markov")
        if section.init in FRESH:
            what = f"with drafter.init: {section.init} the rest of the drafter would stay untrained"
            raise UserError(what, where="training.heads_only", do="set drafter.init to a trained drafter")
    family = other_family(folder)
    if family is not None and recipe.data.answers.server is None:
        what = f"the embedded engine does not run model_type {family!r}, so it cannot answer"
        do = "start it on vLLM or SGLang, and give that server's URL as data.answers.server"
        raise UserError(what, where=str(folder / "config.json"), do=do)
    if section.init not in FRESH:
        _refuse_other(wanted, read_config(section.init)[0], section.init)
    elif section.init == "target" and (family or wanted.intermediate_size != target.intermediate_size):
        what = f"layers of model_type {family!r} are no drafter's first weights"
        if family is None:
            what = "the target's layers have another intermediate size, so they cannot be its first weights"
        raise UserError(what, where="drafter.init", do="set it to random, or to a drafter to go on from")
    return wanted


@torch.no_grad()
def new_drafter(config: DrafterConfig, target: TargetModel | OtherTarget, *, init: str, seed: int) -> Drafter:
    """A drafter in fp32 on the target's device, before training; the same for the same seed.

    Args:
        init: as in the recipe.

    Raises:
        UserError: the drafter to go on from cannot be read, or is described otherwise.
    """
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, RANDOM, generator=generator)
    for part in drafter.modules():
        if isinstance(part, GroupedConvolution | MarkovHead | ConfidenceHead):
            part.make_idle()
    drafter.norm.weight.copy_(target.norm_weight().float().cpu())
    if init == "target":
        assert isinstance(target, TargetModel)
        _from_target(drafter, target, generator)
    elif init not in FRESH:
        given = load_drafter(init, dtype=torch.float32)
        _refuse_other(config, given.config, init)
        drafter.load_state_dict({**drafter.state_dict(), **given.state_dict()})  # parts it does not have stay idle
    return drafter.float().to(target.embedding.device)


def _from_target(drafter: Drafter, target: TargetModel, generator: torch.Generator) -> None:
    # layers from the target's last ones; the context starts as its deepest feature, normed as in the target
    config, depth = drafter.config, target.config.num_layers
    state: dict[str, Tensor] = {}
    for index in range(config.num_layers):
        source = max(0, depth - config.num_layers + index)
        state |= {f"layers.{index}.{name}": weight for name, weight in target.layer_weights(source).items()}
        for norm in ("q_norm", "k_norm"):
            name = f"layers.{index}.self_attn.{norm}.weight"
            state.setdefault(name, torch.full((config.head_dim,), HEAD_NORM))
    after = min(depth - 1, config.target_layer_ids[-1] + 1)
    state["hidden_norm.weight"] = target.layer_weights(after)["input_layernorm.weight"]
    drafter.load_state_dict({name: weight.float().cpu() for name, weight in state.items()}, strict=False)
    size = config.hidden_size
    drafter.fc.weight.normal_(0.0, NOISE, generator=generator)
    drafter.fc.weight[:, -size:] += torch.eye(size)


def _refuse_other(config: DrafterConfig, given: DrafterConfig, name: str) -> None:
    without = {head: None for head in ADDED if getattr(given, head) is None}
    config = config.model_copy(update={**without, "block_size": given.block_size})  # no weight depends on the latter
    wanted, found = config.model_dump(), given.model_dump()
    different = ", ".join(key for key in wanted if wanted[key] != found[key])
    if different:
        do = "give the recipe its values, or start from the target"
        raise UserError(f"its {different} differ from the recipe's", where=f"drafter.init {name}", do=do)


def publish(trainer: Trainer, manifest: DataManifest, started: str) -> None:
    """Validates a last time and writes the best held-out step in bf16, with all that is needed to make it again.

    Without held-out answers the last step's weights are written.
    """
    output, recipe, device = trainer.output, trainer.recipe, trainer.head.device
    if trainer.validation:
        trainer.keep_best(trainer.progress.step, trainer.validate())
    best = trainer.progress.best
    folder, config = output / DRAFTER, trainer.drafter.config
    weights = trainer.best or trainer.drafter.state_dict()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    write_drafter(folder, config, tensors, dialect=dialect_of(config), overwrite=True)
    if trainer.loss.kept is not None and takes_hot_tokens(config):
        write_hot_tokens(folder, trainer.loss.kept.tolist())
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
    write_whole(folder / PROVENANCE, json.dumps(provenance, indent=2, ensure_ascii=False) + "\n")


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


def time_left(first: Tick, last: Tick) -> str:
    """A line with the time that is left, without validations. `first` itself is not timed: it may compile."""
    steps, seconds = last.step - first.step, last.seconds - first.seconds
    rest = (1 - last.progress) / max(1e-12, last.progress - first.progress)
    minutes = round(rest * seconds / 60)
    left = f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / steps:.3g} s a step over {steps} steps: about {left} and {round(rest * steps)} steps are left"


class Display:
    """The training's progress, and a log of one JSON object a line.

    Called with every step's `Tick`; shows and logs the mean of the last `every` steps.

    Args:
        work: the training, whose share that is done follows the ticks.
        since: seconds of training before the first tick.
    """

    def __init__(self, log: Path, every: int, console: Console, work: Work, *, since: float) -> None:
        self.log, self.every, self.console, self.work = log, every, console, work
        self.pending: list[Tick] = []
        self.since = since
        self.first: Tick | None = None

    def __call__(self, tick: Tick) -> None:
        self.pending.append(tick)
        self.first = self.first or tick
        if tick.step - self.first.step == TIMED_STEPS:
            self.console.print(time_left(self.first, tick))
        self.work.done = min(1.0, tick.progress)
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
        self.work.part = f"{line}  {row['context_tokens_per_second']} tokens/s"
