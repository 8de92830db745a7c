"""The question of a plan: pair, GPUs, load and limits. All mistakes in it are found here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.files import load_object
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import target_source
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.deployment import PER_NODE, Deployment, Model
from dflash_serve.deployment_checks import block_problems, check_pairing, head_problems
from dflash_serve.errors import Problem, UserError, did_you_mean, first_line, raise_problems
from dflash_serve.planning import tables
from dflash_serve.planning.prediction import ExpectedAcceptance, Load
from dflash_serve.planning.step_times import SPECIFICATIONS, Constants, Pair, Roofline, Specification, Split, StepTimes

USUAL_LAYERS, USUAL_FEATURES, USUAL_BLOCK = 5, 5, 16
"""Shape of most published DFlash drafters (z-lab)."""


@dataclass(frozen=True)
class Objective:
    """Limits that a plan must meet; None = no limit."""

    interactivity: float | None = None
    """Tokens/s/user at least."""
    first_token_ms: float | None = None
    """TTFT at most."""


@dataclass(frozen=True)
class PlanQuestion:
    """Everything that a plan depends on."""

    deployment: Deployment
    backend: str
    on: Specification
    pair: Pair
    block_size: int
    load: Load
    objective: Objective
    acceptances: tuple[ExpectedAcceptance, ...]
    """One, or a band from low to high."""
    constants: Constants

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return self.deployment.hardware.count

    def splits(self) -> list[Split]:
        """Ways of laying one copy over GPUs: the one that was asked for, or all that divide.

        Raises:
            UserError: the one that was asked for does not.
        """
        parallel, layout = self.deployment.parallel, self.pair.layout
        if "tensor" in parallel.model_fields_set:
            raise_problems(list(self._split_problems(parallel.tensor)))
            tensors = [parallel.tensor]
        else:
            sizes = [size for size in (1, 2, 4, 8, 16) if size <= min(self.count, PER_NODE)]
            tensors = [size for size in sizes if not list(self._split_problems(size))]
        asked = parallel.expert if "expert" in parallel.model_fields_set else None
        found = []
        for tensor in tensors:
            wanted = {1, tensor} if asked is None else {asked}
            found += [Split(tensor, ep) for ep in sorted(wanted) if ep == 1 or not layout.experts % ep]
        found = [each for each in found if each.expert == 1 or layout.experts]
        if not found:
            what = f"no split of {layout.shape.name} over {self.count} GPUs is possible"
            raise UserError(what, where="--count", do="give another number of GPUs")
        return found

    def _split_problems(self, tensor: int) -> Iterator[Problem]:
        if self.count % tensor:
            what = f"TP {tensor} does not divide {self.count} GPUs"
            yield Problem(what, "--tensor", f"use a divisor of {self.count}, or change --count")
        for problem in head_problems(self.pair.layout, self.pair.drafter, tensor):
            yield Problem(f"TP {tensor}: {problem.what} ({problem.where})", "--tensor", problem.do)


def specification(gpu: str | None) -> Specification:
    """The data sheet of a GPU.

    Raises:
        UserError: no GPU was named, or its data sheet is not known.
    """
    have = ", ".join(SPECIFICATIONS)
    if gpu in SPECIFICATIONS:
        return SPECIFICATIONS[gpu]
    if gpu is None:
        raise UserError("which GPU?", where="--gpu", do=f"name one: {have}")
    what = "a CPU is not planned for" if gpu == "none" else f"nothing is known of a GPU {gpu!r}"
    raise UserError(what, where="--gpu", do=did_you_mean(gpu, SPECIFICATIONS) or f"there are: {have}")


def read_pair(deployment: Deployment) -> Pair:
    """Target and drafter from their configurations; no weights are read. Of known targets the operator tables' library
    has the configuration, for machines without a network.

    Raises:
        UserError: one cannot be had, or they do not fit.
    """
    model = deployment.target
    folder = _target_folder(model)
    layout = read_target_layout(folder, model)
    if deployment.drafter is None:
        block = deployment.speculation.block_size or USUAL_BLOCK
        drafter, assumed = usual_drafter(layout, load_object(folder / "config.json", kind="target"), block)
    else:
        drafter, assumed = read_config(deployment.drafter.model, deployment.drafter.revision)[0], None
        raise_problems([*check_pairing(drafter, layout.shape), *block_problems(deployment, drafter)])
    bytes_each = 1.0 if deployment.kv_cache.dtype == "fp8" else 2.0
    return Pair(model, folder, layout, drafter, assumed, bytes_each)


def _target_folder(model: Model) -> Path:
    shipped = None if Path(model.model).is_dir() else tables.shipped_configuration(model.model)
    if shipped is not None:
        return shipped
    return target_configuration(model.model_copy(update={"model": str(target_source(model.model))}))


def usual_drafter(layout: TargetLayout, raw: Mapping[str, Any], block_size: int) -> tuple[DrafterConfig, str]:
    """A drafter of the usual shape for this target, and a sentence that says that it is assumed."""
    inner = next((raw[key] for key in ("text_config", "llm_config") if isinstance(raw.get(key), dict)), raw)
    shape, wide = layout.shape, inner.get("intermediate_size")
    config = DrafterConfig(
        block_size=block_size,
        target_layer_ids=uniform_target_layer_ids(shape.num_layers, USUAL_FEATURES),
        mask_token_id=0,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=wide if isinstance(wide, int) and not layout.experts else 3 * shape.hidden_size,
        num_attention_heads=layout.attention_heads,
        num_key_value_heads=layout.attention_heads if layout.latent else layout.kv_heads,
        head_dim=layout.head_dim,
        layers=(AttentionKind(),) * USUAL_LAYERS,
    )
    words = f"no drafter was named: one of {USUAL_LAYERS} layers as wide as the target, B = {block_size}, is assumed"
    return config, words


def step_times_of(question: PlanQuestion, split: Split) -> tuple[StepTimes, str | None]:
    """The operator tables where they can price this, else the roofline; and why, where it is that."""
    pair, on, context = question.pair, question.on, question.load.context
    by_hand = Roofline(pair, on, split)
    if tables.installed() is None:
        return by_hand, "the operator tables are not installed (pip install 'dflash-serve[plan]')"
    try:
        measured = tables.Tables(pair, on, split, question.constants.tables)
        block = question.block_size
        _ = measured.verify(1, block, context), measured.draft(1, block, context), measured.prefill(1, 8)
        _ = measured.kv_tokens()
    except Exception as error:  # the library's own errors are of many kinds: none of them prices this
        return by_hand, f"the operator tables cannot price {split} ({first_line(error)[:140]})"
    return measured, None
