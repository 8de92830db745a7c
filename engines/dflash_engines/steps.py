"""Sources and steps of a recipe, in order, and a Deployment for each drafter that was built."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.common.extras import import_extra
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.deployment import Deployment, Model
from dflash_serve.errors import UserError

from .pipeline import Measured, Source, Step, Work
from .recipe import Format, Recipe

MODELOPT = ("nvidia-modelopt", "torch", "transformers")
LABEL = "not built here: Edge-LLM builds for the GPU that it finds"
CALIBRATION, ACCEPTANCE = "calibration prompts", "acceptance prompts"
SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Files of a model that its digest covers."""


def find_sources(recipe: Recipe) -> dict[str, Source]:
    """Target, drafter and prompts, as far as a step needs them, with digests of their contents.

    Raises:
        UserError: one cannot be found, or trtllm-build would not serve the target.
    """
    target, drafter = recipe.deployment.target, recipe.deployment.drafter
    if drafter is None:
        raise UserError("no drafter to build for", where="deployment.drafter", do="name one")
    sources = {"drafter": _model(drafter, drafter_folder(drafter.model, drafter.revision))}
    if any("target" in step.needs for step in make_steps(recipe)):
        folder = target_folder(target.model, target.revision)
        if recipe.build.checkpoints:
            from .trtllm_checkpoint import refuse

            refuse(import_extra("engines", "transformers").AutoConfig.from_pretrained(folder))
        sources["target"] = _model(target, folder)
    for name, given in ((CALIBRATION, recipe.build.calibration), (ACCEPTANCE, recipe.build.acceptance)):
        if given is not None and given.prompts is not None:
            sources[name] = _prompts(given.prompts)
    return sources


def _model(model: Model, folder: Path) -> Source:
    files = {name: entry for name, entry in file_entries(folder).items() if name.endswith(SUFFIXES)}
    text = "\n".join(f"{name} {entry.sha256}" for name, entry in files.items())
    description: dict[str, object] = {
        "model": model.model,
        "revision": model.revision,
        "files": {name: entry.model_dump() for name, entry in files.items()},
    }
    return Source(folder, hashlib.sha256(text.encode()).hexdigest(), description)


def _prompts(path: Path) -> Source:
    if not path.is_file():
        raise UserError("no such file of prompts", where=str(path), do="correct the recipe, or unset its variable")
    digest = sha256(path)
    return Source(path, digest, {"file": path.name, "sha256": digest})


def make_steps(recipe: Recipe) -> list[Step]:
    """All steps of a recipe, each after those that it needs."""
    return [*_calibration(recipe), *_targets(recipe), *_drafters(recipe), *_last(recipe)]


def _calibration(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    free = build.calibration.free
    if free and (build.target or build.checkpoints):
        raise UserError("a target is calibrated on data", where="build.calibration.free", do="set it to false")
    if build.target or build.checkpoints or (build.drafter and not free):
        given = build.calibration
        parameters = {"count": given.count, "max_tokens": given.max_tokens, "length": deployment.limits.max_model_len}
        needs = ("target", *([CALIBRATION] if given.prompts else []))
        about = "the target's own answers to the calibration prompts"
        if not given.prompts:
            about += ": a few openers of ours, for no file of prompts is named"

        def answers(work: Work) -> Measured:
            from .calibration import answer

            return answer(work, deployment, given)

        yield Step("answers", answers, needs, parameters, ("torch",), about=about)
    if build.drafter:

        def ranges(work: Work) -> Measured:
            from .calibration import drafter_ranges, free_ranges

            return free_ranges(work) if free else drafter_ranges(work)

        needs = ("drafter",) if free else ("target", "drafter", "answers")
        about = "no data: activations may reach 448" if free else "how large the drafter's activations get on them"
        yield Step("drafter-ranges", ranges, needs, {"free": free}, ("torch",), 2, about)


def _targets(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    for format in build.target:

        def target(work: Work, format: Format = format) -> Measured:
            from .quantize import quantize_target

            return quantize_target(work, format)

        about = f"weights and activations in {format.upper()}, K/V in FP8"
        revision = 3 if format == "fp8" else 2  # NVFP4 is written as before
        yield Step(f"target-{format}", target, ("target", "answers"), {"format": format}, MODELOPT, revision, about)
    if build.checkpoints:
        wanted = build.checkpoints

        def checkpoints(work: Work) -> Measured:
            from .trtllm_checkpoint import write_checkpoints

            return write_checkpoints(work, deployment, wanted)

        parameters = {**wanted.model_dump(mode="json"), "limits": deployment.limits.model_dump(mode="json")}
        about = f"legacy: rank files for trtllm-build at tensor {', '.join(map(str, wanted.tensor))}"
        yield Step("trtllm-checkpoints", checkpoints, ("target", "answers"), parameters, MODELOPT, 2, about)


def _drafters(recipe: Recipe) -> Iterator[Step]:
    for format in recipe.build.drafter:

        def drafter(work: Work, format: Format = format) -> Measured:
            from .quantize import quantize_drafter

            return quantize_drafter(work, format)

        needs = ("drafter", "drafter-ranges")
        yield Step(f"drafter-{format}", drafter, needs, {"format": format}, MODELOPT, 3, "in ModelOpt's layout")


def _last(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    if build.commands:
        needs = ("drafter", *(f"drafter-{f}" for f in build.drafter))
        about = "of TensorRT Edge-LLM: written down, not built here"
        yield Step("commands", write_commands, needs, {"kinds": list(build.commands)}, revision=3, about=about)
    if build.acceptance and build.acceptance.prompts:
        wanted = build.acceptance

        def acceptance(work: Work) -> Measured:
            from .acceptance import measure

            return measure(work, deployment, wanted, build.drafter)

        length = deployment.limits.max_model_len
        measured_on: dict[str, object] = {**wanted.model_dump(exclude={"prompts"}), "length": length}
        needs = ("target", "drafter", ACCEPTANCE, *(f"drafter-{format}" for format in build.drafter))
        about = "of every drafter, against bf16"
        yield Step("acceptance", acceptance, needs, measured_on, ("torch",), 3, about)


def write_commands(work: Work) -> Measured:
    """Step `commands`: commands of TensorRT Edge-LLM, NVIDIA's runtime for small devices; nothing is run."""
    commands = _edge_llm(work.inputs)
    fields = {"label": LABEL, "commands": commands}
    (work.folder / "commands.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    lines = [f"# {name}\n{shlex.join(argv)}\n" for name, argv in commands.items()]
    (work.folder / "commands.sh").write_text("\n".join([f"# {LABEL}\n", *lines]), encoding="utf-8")
    return {"label": LABEL, "commands": len(commands)}


def _edge_llm(inputs: Mapping[str, object]) -> dict[str, list[str]]:
    # Edge-LLM 0.11 exports and builds target and drafter together; it refuses tensor parallelism.
    drafters = sorted(name for name in inputs if name.startswith("drafter-") and name != "drafter-ranges")
    commands = {}
    for name in drafters or ["drafter"]:
        export = ["tensorrt-edgellm-export", "--dflash-base", "--dflash-draft", "--dflash-draft-dir", name]
        commands[f"edge-llm export {name}"] = [*export, "TARGET", f"edge-{name}"]
        build = ["tensorrt-edgellm-build", "--spec-type", "dflash", "--draft-model-dir", f"edge-{name}/draft"]
        commands[f"edge-llm build {name}"] = [*build, f"edge-{name}/base"]
    return commands


def write_deployments(recipe: Recipe, sources: Mapping[str, Source], output: Path) -> list[Path]:
    """Writes a Deployment for every quantised drafter, OUTPUT/serve-<format>.yaml; a bundled target by its folder."""
    written = []
    for format in recipe.build.drafter:
        fields = recipe.deployment.model_dump(mode="json", exclude_unset=True)
        fields["drafter"] = {"model": str(output / f"drafter-{format}"), "quantization": format}
        if "target" in sources and "/" not in recipe.deployment.target.model:
            fields["target"]["model"] = str(sources["target"].folder)
        path = output / f"serve-{format}.yaml"
        write_whole(path, yaml.safe_dump(Deployment.model_validate(fields).model_dump(mode="json", exclude_unset=True)))
        written.append(path)
    return written
