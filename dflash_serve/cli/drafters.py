"""Verbs on drafters: `dflash-serve drafters` lists published ones, `inspect` describes a folder, `convert` rewrites it,
`train` makes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from dflash_serve.adapter.checks import check_pairing, pairing_notes, precision_notes, precision_of_training
from dflash_serve.adapter.registry import backend, installed
from dflash_serve.adapter.verdicts import checkpoint_verdict, published_family, verdict
from dflash_serve.checkpoint.catalogue import CataloguedDrafter, EngineVerdict, catalogue, drafters_of, unknown_target
from dflash_serve.checkpoint.config import DrafterConfig, context_bytes
from dflash_serve.checkpoint.other_methods import other_methods
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.reader import HINT, Checkpoint, open_checkpoint, sizes, weight_problems, weights_of
from dflash_serve.checkpoint.source import PROVENANCE, target_described
from dflash_serve.checkpoint.target import TargetShape, read_target_format, read_target_shape
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.cli import options
from dflash_serve.common.extras import import_problem, need
from dflash_serve.common.files import require_writable
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.terminal import broken, say
from dflash_serve.errors import Problem, UserError, listed, raise_problems

if TYPE_CHECKING:
    from dflash_serve.checkpoint.repacking import Repacked

FULL = (
    "Replace a reduced draft vocabulary by the target's whole one. The drafter then drafts through the target's output "
    "head. This needs a drafter whose own head is a copy of rows of that head."
)
MARKOV = "Add a Markov head that changes no draft: zero, as SGLang's DSPARK wants one, or fresh, to be trained."
CATALOGUED = ("format of its weights", "precision of its target", "thinking", "gate")  # what a row may not know
DEQUANTISE = "Write quantised weights in bf16, which every engine loads."
LAYOUT = "Quantiser whose layout quantised weights are written in; its own unless given."
OWN_HEAD = "lm_head.weight"
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
Verdicts = Mapping[str, EngineVerdict]  # By backend
BF16 = "bf16"  # Precision of a target that is not quantised, in the catalogue's words
LEAD = {
    **{"after convert": "after `convert` by", "engine alone": "by the engine's own command, not through dflash-serve,"},
    **{"refused": "not by", "not known": "not known of"},
}
"""Verdict -> the words before the engine that it is of."""


class Precisions(NamedTuple):
    """Formats of the weights of a target; None = not known."""

    trained: str | None  # Of the one that the drafter was trained beside, by the catalogue
    given: str | None  # Of the one that it is inspected for

    @property
    def words(self) -> str | None:
        """A line for a person; None = nothing to say."""
        if self.given is None:
            return None if self.trained is None else f"a target with {self.trained} weights"
        if self.trained is None:
            return f"not known; this target has {self.given} weights"
        same = "as this target has" if self.trained == self.given else f"and this target has {self.given}"
        return f"a target with {self.trained} weights, {same}"


class To(StrEnum):
    """The dialects there are; `zlab` is what SGLang, TensorRT-LLM, vLLM and z-lab's own code read."""

    zlab = "zlab"
    speculators = "speculators"
    modelopt = "modelopt"
    deepspec = "deepspec"
    specforge = "specforge"
    k3_dspark = "k3-dspark"


UNWRITTEN = "Read and convert it, tell the same, and write nothing."


class QuantisedLayout(StrEnum):
    """Layouts of quantised weights."""

    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"
    fp8 = "fp8"


class MarkovHeadKind(StrEnum):
    """A Markov head to add, which changes no draft: all zeros, or one to be trained."""

    zero = "zero"
    fresh = "fresh"


class Stage(StrEnum):
    """The stages of a training run at which it can stop."""

    data = "data"
    all = "all"


def drafters(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]", help="Hub id of a target.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List published drafters: kind, block size, revision, licence, engines that serve them, published acceptance.

    EAGLE-3 heads and MTP layers with a published acceptance stand beside them: `bench --variant` runs those.
    From files of this release: nothing is fetched. A drafter named `auto` is chosen from it.
    """
    found = list(catalogue().drafters) if target is None else drafters_of(target)
    others = other_methods(target)
    if not (found or others) and target is not None:
        raise unknown_target(target)
    backends = [backend(name) for name in installed()]
    rows = [(one, {each.name: verdict(each, one) for each in backends}) for one in found]
    if as_json:
        releases = {backend.name: backend.releases for backend in backends}
        listed = [
            {
                **one.model_dump(mode="json"),
                "engines": {
                    name: {**each.model_dump(), "serves": each.verdict == "served", "why_not": each.why}
                    for name, each in verdicts.items()
                },
            }
            for one, verdicts in rows
        ]
        beside = [one.model_dump(mode="json") for one in others]
        told = {"gathered": catalogue().gathered, "releases": releases, "drafters": listed, "other_methods": beside}
        typer.echo(json.dumps(told, indent=2))
        return
    for one, verdicts in rows:
        say(one.repository if quiet else _published(one, verdicts))
    if not quiet:
        for other in others:
            say(f"{other.words}\n")
        engines = ", ".join(f"{backend.facts.title} {backend.releases}" for backend in backends)
        say(f"{len(found)} drafters, looked up on {catalogue().gathered}. Engines: {engines}")
        say("Revisions that are not pinned may change: set drafter.revision. `serve --dry-run` checks the pair.")


def inspect(
    drafter: Annotated[str, typer.Argument(metavar="PATH_OR_ID", help="Folder or hub id of a drafter.")],
    target: options.Target = None,
    revision: options.Revision = None,
    block_size: options.UnwrittenBlockSize = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Describe a drafter and list everything wrong with it, by itself or for a --target; exit code 1 if anything is."""
    checkpoint = open_checkpoint(drafter, revision, block_size=block_size)
    with shown(quiet=quiet or as_json), doing(f"reading the weights of {drafter}"):
        problems = checkpoint.problems + weight_problems(checkpoint)
    notes, unread = _list_notes(checkpoint), list[Problem]()
    family, pairing = published_family(drafter), Precisions(precision_of_training(drafter), None)
    if target is not None and checkpoint.config is not None:
        try:
            family = (shape := _shape(target)).model_type
            problems += check_pairing(checkpoint.config, shape)
            notes += pairing_notes(checkpoint.config, shape)
            precision = read_target_format(target_described(target)) or BF16
            pairing = Precisions(pairing.trained, precision)
            notes += precision_notes(drafter, target, precision)
            if _has_own_head(checkpoint) and find_spec("torch") is None:
                notes.append("its lm_head was not compared with the target's: that needs PyTorch (extra [torch])")
            elif _has_own_head(checkpoint):
                problems += _own_head_problems(checkpoint, target)
        except UserError as error:  # what was read of the drafter is shown all the same
            unread.append(error.problem())
    engines = {name: checkpoint_verdict(backend(name), checkpoint, family, problems) for name in installed()}
    problems += unread
    if as_json:
        typer.echo(json.dumps(_as_json(checkpoint, problems, notes, engines, pairing), indent=2))
    else:
        _print(checkpoint, problems, notes, engines, pairing, quiet=quiet)
    if problems:
        raise typer.Exit(1)


def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a drafter in any dialect.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[To, typer.Option("--to", help=f"Dialect to write: {', '.join(To)}.")] = To.zlab,
    target: options.Target = None,
    revision: options.Revision = None,
    block_size: options.UnwrittenBlockSize = None,
    full_vocabulary: Annotated[bool, typer.Option("--full-vocabulary", help=FULL)] = False,
    markov_head: Annotated[MarkovHeadKind | None, typer.Option("--markov-head", help=MARKOV)] = None,
    markov_rank: Annotated[int, typer.Option(help="Rank of the Markov head that is added.", min=1)] = 16,
    dequantise: Annotated[bool, typer.Option("--dequantise", help=DEQUANTISE)] = False,
    layout: Annotated[QuantisedLayout | None, typer.Option("--layout", help=LAYOUT)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=UNWRITTEN)] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DST.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a drafter in another dialect. Weights keep their values and dtypes; nothing half-written is left behind.

    A --target that is given is checked against the drafter, and named in what is written. A vocabulary that is padded
    beyond the target's is cut to it. Quantised weights are written as engines load them: fc and heads in bf16, one
    scale for products that engines fuse. It says what this rounds.
    """
    _need_torch()
    if markov_head is None:
        options.refuse_ignored(context, ("markov_rank",), "no Markov head is added", "give --markov-head, too")
    from dflash_serve.checkpoint.conversions import with_full_vocabulary, with_markov_head, without_padding
    from dflash_serve.models.loader import head_weight

    checkpoint = open_checkpoint(source, revision, block_size=block_size)
    weights = _repacked(checkpoint, dequantise, layout)
    tensors, config = weights.with_shapes, checkpoint.config
    assert config is not None
    assert checkpoint.dialect is not None
    if target is not None:
        shape = _shape(target)
        config, tensors = without_padding(config, tensors, shape.vocab_size)
        raise_problems(check_pairing(config, shape), hint="`dflash-serve inspect --target` shows all")
        config = config.model_copy(update={"num_target_layers": shape.num_layers})
    if full_vocabulary:
        if target is None:
            do = "give --target: its head is compared row by row"
            raise UserError("the drafter's head must be the target's", where="--full-vocabulary", do=do)
        config, tensors = with_full_vocabulary(config, tensors, head_weight(target))
    if markov_head is not None:
        config, tensors = with_markov_head(config, tensors, rank=markov_rank, fresh=markov_head == "fresh")
    tensors = {**{name: tensor for name, tensor in tensors.items() if not tensor.is_meta}, **weights.stored}
    as_named = partial(write_drafter, dialect=to.value, target=target, overwrite=overwrite, dry_run=dry_run)
    as_named(destination, config, tensors, quantised=weights.schemes)
    note, was = _conversion_note(config, to, target), checkpoint.quantization
    if as_json:
        names = {"source": str(checkpoint.folder), "from": checkpoint.dialect.name, "destination": str(destination)}
        report = {**names, "to": to.value, "tensors": len(tensors), "note": note, "written": not dry_run}
        typer.echo(json.dumps({**report, "weights": weights.report if was else None}))
    elif not quiet:
        told = f"{destination}: {checkpoint.dialect.name} -> {to.value}, {len(tensors)} tensors"
        told += f"\nweights: {weights.words}" if was else ""
        typer.echo(told + (f"\nnote: {note}" if note else "") + ("\nnothing was written" if dry_run else ""))


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe: target, data, drafter, training, seed.")],
    output: Annotated[Path, typer.Option(help="Folder for data, checkpoints, log and the finished drafter.")] = Path(
        "drafter"
    ),
    resume: options.Resume = False,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda or cuda:N.")] = "auto",
    stage: Annotated[Stage, typer.Option(help="How far to go; data: until the answers are there.")] = Stage.all,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell sizes, memory and disk, and do nothing.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a drafter for a target on answers the target writes itself; on several GPUs under `torchrun --no-python`.

    JSON is the finished drafter's provenance.json, or null where the run has not ended; of a dry run, what it tells.
    """
    need("train", "safetensors", "torch", "transformers")
    _need_torch()
    from dflash_serve.training.parallel import started
    from dflash_serve.training.recipe import load_recipe
    from dflash_serve.training.run import DRAFTER, choose_device, run

    if not DEVICE.fullmatch(device):
        raise UserError(f"no device {device!r}", where="--device", do="use auto, cpu, cuda or cuda:N")
    settings, processes = load_recipe(recipe), started()
    if dry_run:
        if processes.first:
            from dflash_serve.training.outlook import outlook, outlook_text

            figures = outlook(settings, processes.count)
            typer.echo(json.dumps(figures, indent=2) if as_json else outlook_text(figures))
        return
    require_writable(output)
    data_only = stage is Stage.data
    done = run(settings, output, device=choose_device(device), resume=resume, data_only=data_only, quiet=quiet)
    if as_json and processes.first:
        provenance = output / DRAFTER / PROVENANCE
        typer.echo(provenance.read_text(encoding="utf-8") if provenance.is_file() else "null", nl=False)
    if not done:
        raise typer.Exit(130)  # as after any other interruption


def _repacked(checkpoint: Checkpoint, dequantise: bool, layout: QuantisedLayout | None) -> Repacked:
    from dflash_serve.checkpoint.repacking import dequantised, repacked

    raise_problems(checkpoint.problems, hint=HINT)
    if dequantise and layout is not None:
        raise UserError("dequantised weights have no layout", where="--layout", do="give it or --dequantise")
    if checkpoint.quantization is None and (dequantise or layout is not None):
        where = "--dequantise" if dequantise else "--layout"
        raise UserError("the drafter is not quantised", where=where, do="leave it out")
    weights = weights_of(checkpoint)
    if dequantise:
        return dequantised(weights)
    return repacked(weights, checkpoint.quantised, layout.value if layout else None)


def _need_torch() -> None:
    need("torch", "safetensors", "torch")
    if broken := import_problem("PyTorch", "torch"):
        raise broken.error()


def _published(drafter: CataloguedDrafter, verdicts: Verdicts) -> str:
    heads = f" ({drafter.heads.words})" if drafter.heads and drafter.heads.words else ""
    serving = [name for name, each in verdicts.items() if each.verdict == "served"]
    figures = [f"{one.value:g} {one.benchmark} ({one.setting}; {one.source})" for one in drafter.acceptance_length]
    pinned = "fixed by this release" if "/" not in drafter.repository else drafter.revision or "not pinned"
    layout = f" ({drafter.layout})" if drafter.layout else ""
    pairing = [f"{drafter.weights} weights{layout}"] if drafter.weights else []
    pairing += [f"made for the target in {drafter.target_precision}"] if drafter.target_precision else []
    pairing += [f"thinking {drafter.thinking}"] if drafter.thinking else []
    pairing += ["gated: accept its terms on the hub"] if drafter.gated else []
    values = (drafter.weights, drafter.target_precision, drafter.thinking, drafter.gated)
    unknown = [name for name, value in zip(CATALOGUED, values, strict=True) if value is None]
    lines = [
        f"{drafter.repository}  for {drafter.target}",
        f"  {drafter.kind}{heads}, block size {drafter.block_size or 'not known'}",
        f"  revision {pinned}; licence {drafter.licence or 'not known'}",
        *([f"  {'; '.join(pairing)}"] if pairing else []),
        *([f"  not known: {', '.join(unknown)}"] if unknown else []),
        f"  served by {', '.join(serving) or 'none through dflash-serve'}",
        *(f"  {LEAD[each.verdict]} {name}: {each.why}" for name, each in verdicts.items() if each.verdict in LEAD),
        *([f"  published acceptance length: {'; '.join(figures)}"] if figures else []),
    ]
    return "\n".join(lines) + "\n"


def _shape(target: str) -> TargetShape:
    return replace(read_target_shape(target_described(target)), name=target)


def _conversion_note(config: DrafterConfig, to: To, target: str | None) -> str | None:
    if to is To.speculators:
        if len({kind.causal for kind in config.layers}) > 1:
            return "vLLM 0.32 and 0.33 would make every layer causal, full-attention ones too: give vLLM `--to zlab`"
        return None if target is not None else "the verifier is not named; vLLM serves it by that name: give --target"
    if config.num_target_layers is not None:
        return None
    # z-lab's `DFlashDraftModel` reads num_target_layers whether it needs it or not (dflash 0.1.0).
    return "num_target_layers is not known and so not written; z-lab's own code asks for it: give --target"


def _has_own_head(checkpoint: Checkpoint) -> bool:
    header, config = checkpoint.headers.get(OWN_HEAD), checkpoint.config
    return header is not None and config is not None and header.shape == (config.vocab_size, config.hidden_size)


def _own_head_problems(checkpoint: Checkpoint, target: str) -> list[Problem]:
    """A head over the whole vocabulary that a checkpoint brings as a copy of the target's, and is none.

    DeepSpec and speculators ship such copies; every engine leaves them out and drafts through the target's.
    """
    import torch
    from safetensors import safe_open

    from dflash_serve.checkpoint.conversions import differing_rows
    from dflash_serve.models.loader import head_weight

    file = checkpoint.headers[OWN_HEAD].file
    with safe_open(file, framework="pt") as opened:
        own, head = opened.get_tensor(OWN_HEAD), head_weight(target)
    if own.shape != head.shape:
        return []  # the pairing says so
    differing = differing_rows(own, head, torch.arange(len(own)))
    if not differing:
        return []
    what = f"{differing} of {len(own)} rows of its lm_head are not the target's, through which every engine drafts"
    return [Problem(what, str(file), "use the target it was trained for, or a drafter without a head")]


def _as_json(
    checkpoint: Checkpoint, problems: list[Problem], notes: list[str], engines: Verdicts, pairing: Precisions
) -> dict[str, object]:
    parameters, size = sizes(checkpoint)
    config, dialect, quantization = checkpoint.config, checkpoint.dialect, checkpoint.quantization
    return {
        "path": str(checkpoint.folder),
        "dialect": None if dialect is None else dialect.name,
        "quantization": None if quantization is None else quantization.facts,
        "config": None if config is None else config.model_dump(mode="json"),
        "parameters": parameters,
        "bytes": size,
        "target_precision": pairing._asdict(),
        "engines": {name: each.model_dump() for name, each in engines.items()},
        "problems": [asdict(problem) for problem in problems],
        "notes": notes,
    }


def _print(
    checkpoint: Checkpoint,
    problems: list[Problem],
    notes: list[str],
    engines: Verdicts,
    pairing: Precisions,
    *,
    quiet: bool,
) -> None:
    console = Console(soft_wrap=True)
    if not quiet:
        rows = _rows(checkpoint) + ([] if pairing.words is None else [("made beside", pairing.words)])
        for name, value in (*rows, *((name, _of_engine(each)) for name, each in engines.items())):
            console.print(_labelled(f"{name:15}", value, "bold"))
        for note in notes:
            console.print(_labelled("note  ", note, "bold yellow"))
    for line in listed(problems):
        console.print(_labelled("problem  ", line, "bold red"))
    if not problems:
        console.print(Text("no problems found", style="green"))


def _labelled(label: str, value: str, style: str) -> Text:
    line = label + value
    if " " in value:  # a path stays whole, to be copied
        line = broken(line, hang=len(label))
    text = Text(line)
    text.stylize(style, 0, len(label))
    return text


def _list_notes(checkpoint: Checkpoint) -> list[str]:
    wrong = checkpoint.mislisted
    if not wrong:
        return []
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    said = f"the files say otherwise than the tensors whether {wrong[0]}{more} is quantised"
    return [f"{said}; dflash-serve goes by the tensors, engines by the files: `dflash-serve convert` corrects them"]


def _of_engine(each: EngineVerdict) -> str:
    return each.verdict.replace("convert", "`convert`") + (f": {each.why}" if each.why else "")


def _rows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    parameters, size = sizes(checkpoint)
    dialect = "unknown" if checkpoint.dialect is None else checkpoint.dialect.name
    rows = [("drafter", str(checkpoint.folder)), ("dialect", dialect)]
    rows += [] if checkpoint.quantization is None else [("quantisation", _quantization(checkpoint.quantization))]
    rows += [] if checkpoint.config is None else _config_rows(checkpoint.config)
    return [*rows, ("parameters", f"{parameters:,}"), ("size", f"{size / 2**20:,.1f} MiB")]


def _quantization(found: Quantization) -> str:
    left_out = f"; {', '.join(found.excluded)} in bf16" if found.excluded else ""
    cache = f"; K/V cache {found.kv_cache}" if found.kv_cache else ""
    return found.format.upper() + left_out + cache


def _config_rows(config: DrafterConfig) -> list[tuple[str, str]]:
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} K/V heads, head_dim {config.head_dim}"
    if config.latent is not None:
        latent = f"a latent vector of {config.latent.width} for K/V, queries of rank {config.latent.q_lora_rank}"
        heads = f"{config.num_attention_heads} heads of {config.head_dim}, {latent}"
    sizes = f"hidden {config.hidden_size}, intermediate {config.intermediate_size}, vocabulary {config.vocab_size:,}"
    mask = "its own mask_embedding" if config.has_mask_embedding else f"token {config.mask_token_id}"
    rope = f"{config.rope.scaling or 'default'}, theta {config.rope.theta:g}"
    rope += f", factor {config.rope.factor:g}" if config.rope.factor is not None else ""
    ids = ", ".join(map(str, config.target_layer_ids))
    depth = "a depth not given" if config.num_target_layers is None else f"{config.num_target_layers}"
    # An anchor-first checkpoint counts its rows, which is one fewer.
    anchor_first = f"drafted slots; block_size {config.rows()} in config.json"
    slots = "masked slots" if config.slots == "fill-in" else anchor_first
    scales = {"embedding scale": config.embedding_scale, "output multiplier": config.output_multiplier}
    extras = [f"{name} {value:g}" for name, value in scales.items() if value != 1.0]
    extras += [] if config.final_logit_softcap is None else [f"logit soft-cap {config.final_logit_softcap:g}"]
    extras += ["attention bias"] if config.attention_bias else []
    return [
        *([("kind", f"{config.family}: {config.words}")] if config.words else []),
        ("block size", f"{config.block_size} (the anchor and {config.block_size - 1} {slots})"),
        ("mask", mask),
        ("target layers", f"{ids} of {depth} (outputs, 0-based)"),
        *((f"layer {index}", _kind(config, index)) for index in range(config.num_layers)),
        ("attention", heads),
        ("K/V of a token", f"{context_bytes(config):,} bytes in all layers, in bf16"),
        ("sizes", sizes),
        ("RoPE", f"{rope}, {config.max_position_embeddings:,} positions"),
        ("norm epsilon", f"{config.rms_norm_eps:g}"),
        *([("extras", ", ".join(extras))] if extras else []),
    ]


def _kind(config: DrafterConfig, index: int) -> str:
    kind = config.layers[index]
    window = "full attention" if kind.window is None else f"window of {kind.window}"
    return f"{window}, {'causal' if kind.causal else 'bidirectional'} in the block"
