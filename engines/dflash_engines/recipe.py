"""The recipe file of `dflash-serve build`: a deployment and the outputs to build for it. Unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeGuard, get_args

from pydantic import NonNegativeInt, ValidationError

from dflash_serve.common.documents import read_recipe_file
from dflash_serve.common.settings import Frozen, PositiveInt, describe
from dflash_serve.deployment.description import Deployment, Hardware, Limits
from dflash_serve.deployment.layers import with_absolute_paths
from dflash_serve.errors import UserError, did_you_mean

Format = Literal["fp8", "nvfp4"]
Integers = Literal["int8", "w8a16", "w4a16"]


class Prompts(Frozen):
    """Prompts of a JSONL file, one {"prompt": ...} a line."""

    prompts: Path | None = None
    """None = calibration uses built-in openers; acceptance is left out."""
    count: PositiveInt = 64
    max_tokens: PositiveInt = 256
    """Longest answer of the target to each prompt."""


class Calibration(Prompts):
    """Data for activation ranges: the target's answers, or none. ModelOpt's and TensorRT-LLM's examples take 512
    samples of 512 tokens."""

    count: PositiveInt = 512
    max_tokens: PositiveInt = 512
    free: bool = False
    """Calibrate without data and without the target: every activation range of the drafter is set to 448 (an FP8 input
    scale of 1). For targets that the embedded backend does not run. ModelOpt's own `quantize_drafter.py` does so and
    lost no acceptance in FP8."""


class Acceptance(Prompts):
    """Prompts that acceptance is measured on."""

    skip: NonNegativeInt = 0
    """Prompts skipped first: those that the drafters were calibrated on."""


class Checkpoints(Frozen):
    """TensorRT-LLM checkpoints for trtllm-build, which ended with 1.3.0rc20: legacy."""

    tensor: tuple[PositiveInt, ...] = (1,)
    precision: Literal["bf16", "fp8"] = "fp8"


class Build(Frozen):
    """Outputs of a build; an empty list makes none of its kind."""

    target: tuple[Format, ...] = ()
    """Precisions of Hugging Face-form target checkpoints."""
    drafter: tuple[Format | Integers, ...] = ()
    """Precisions of the drafter: fp8 and nvfp4 by ModelOpt, with ranges of activations; int8 (weights and activations),
    w8a16 and w4a16 (weights alone) in compressed-tensors' layout, from the weights alone."""
    calibration: Calibration = Calibration()
    checkpoints: Checkpoints | None = None
    acceptance: Acceptance | None = None


def is_integer(format: Format | Integers) -> TypeGuard[Integers]:
    """A precision of the drafter that needs neither ModelOpt nor ranges of activations."""
    return format in get_args(Integers)


class BuildRecipe(Frozen):
    """One YAML file, as in `engines/recipes`: a deployment and the outputs to build for it."""

    deployment: Deployment
    build: Build = Build()

    @property
    def measured(self) -> Deployment:
        """The deployment on the embedded engine, which answers prompts and measures acceptance during a build.

        Left out are keys of the server that the outputs are for: its devices, limits, K/V cache, clients and arguments.
        Every step verifies the whole block, whatever the width.
        """
        given = self.deployment
        return Deployment(
            target=given.target.model_copy(update={"quantization": "none"}),
            drafter=given.drafter,
            speculation=given.speculation.model_copy(update={"width": "auto"}),
            limits=Limits(max_batch_size=4, max_model_len=given.limits.max_model_len),
            hardware=Hardware(dtype=given.hardware.dtype, gpu="none" if given.hardware.gpu == "none" else None),
            engine_args={name: own for name, own in given.engine_args.items() if name == "torch"},
        )

    def measured_by(self, *sections: str) -> dict[str, object]:
        """Sections of `measured` without defaults, for the key of a step."""
        return self.measured.model_dump(mode="json", include=set(sections), exclude_defaults=True)


def find_recipe(path: Path) -> Path:
    """The file itself, or the recipe of that name that comes with this package.

    Raises:
        UserError: there is neither.
    """
    if path.exists() or path.suffix in (".yaml", ".yml") or path.parent != Path():
        return path
    here = Path(__file__).parent
    folder = next(each for each in (here / "recipes", here.parent / "recipes") if each.is_dir())
    names = sorted(each.stem for each in folder.glob("*.yaml"))
    if path.name not in names:
        do = did_you_mean(path.name, names) or f"there are: {', '.join(names)}"
        raise UserError("neither a file nor a recipe's name", where=str(path), do=do)
    return folder / f"{path.name}.yaml"


def load_recipe(path: Path) -> BuildRecipe:
    """Reads a recipe; ${NAME} is taken from the environment.

    Raises:
        UserError: it cannot be read, or has an unset variable, an unknown key or an impossible value.
    """
    described = read_recipe_file(path)
    if not isinstance(described, dict):
        raise UserError("not a mapping", where=str(path), do="start with `deployment: {target: {model: ...}}`")
    if isinstance(described.get("deployment"), dict):
        described["deployment"] = with_absolute_paths(described["deployment"], path)
    try:
        return BuildRecipe.model_validate(described)
    except ValidationError as error:
        raise UserError(describe(error, BuildRecipe), where=str(path)) from None
