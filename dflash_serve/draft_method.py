"""Drafting methods that DFlash is compared with, EAGLE-3 and MTP: named in a word, checked, run by the engine itself.

Such a variant is the deployment without a drafter of ours, its engine given arguments of its own. `eagle3:CHECKPOINT`
drafts with an EAGLE-3 head, `mtp` with the layers that the target brings; `:K` behind either says how many tokens are
drafted a step, one after the other (a chain, as all engines have it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pydantic import JsonValue

from dflash_serve.backend import Backend
from dflash_serve.checkpoint.files import load_object
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.target import (
    TargetLayout,
    language_model,
    read_target_layout,
    required_size,
    target_configuration,
)
from dflash_serve.deployment import Deployment, Speculation
from dflash_serve.errors import Problem, UserError, raise_problems

EAGLE3: Literal["eagle3"] = "eagle3"
MTP: Literal["mtp"] = "mtp"
METHODS = (EAGLE3, MTP)
DRAFTED = 3
"""Tokens drafted a step unless the word says otherwise: what SGLang chooses itself for most targets
(`_auto_choose_speculative_params`, 0.5.23)."""
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a config.json that count a target's MTP layers (DeepSeek's and GLM's; Qwen3.5's)."""
MTP_UNTOLD = ("longcat_flash", "mimo_v2", "nemotron_h", "qwen3_next", "step3p5")
"""Families (model_type's beginning) that have such layers though config.json may not count them (vLLM 0.32,
`SpeculativeConfig.hf_config_override`)."""
WHERE = "--variants"


@dataclass(frozen=True)
class Eagle3Head:
    """An EAGLE-3 checkpoint, by its config.json."""

    checkpoint: str
    """Folder or hub id, as it was named."""
    architecture: str
    hidden_size: int
    """Of the target's outputs that it takes."""
    vocab_size: int
    """Of its embedding: the target's."""
    quantized: bool


@dataclass(frozen=True)
class DraftMethod:
    """One that was asked for."""

    name: Literal["eagle3", "mtp"]
    checkpoint: str
    """Empty for MTP, whose layers are the target's own."""
    draft_tokens: int
    """K, a step; the target's own token is not among them."""


@runtime_checkable
class ComparedBackend(Backend, Protocol):
    """One whose engine drafts by these methods, too. For both functions a head of None means MTP."""

    drafting_arguments: Collection[str]
    """Its engine's arguments, with underscores, that say whether and how it drafts without a drafter of ours."""

    def method_problems(self, target: TargetLayout, head: Eagle3Head | None) -> Iterable[Problem]:
        """Why its engine does not draft so for this target, as far as files tell."""
        ...

    def method_arguments(self, head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
        """Its engine's own arguments for it, as `engine_args` have them."""
        ...


def parse_method(word: str) -> DraftMethod | None:
    """`eagle3:CHECKPOINT[:K]` or `mtp[:K]`; None where the word is neither.

    Raises:
        UserError: no checkpoint, one for MTP, or a K of 0.
    """
    name, _, rest = word.partition(":")
    if name not in METHODS:
        return None
    checkpoint, _, count = rest.rpartition(":")
    if not count.isdecimal():
        checkpoint, count = rest, str(DRAFTED)
    where = f"{WHERE} {word}"
    if int(count) < 1:
        raise UserError("no token is drafted", where=where, do="give 1 or more, or leave the number out")
    if name == EAGLE3:
        if not checkpoint:
            raise UserError("no checkpoint is named", where=where, do="give eagle3:FOLDER or eagle3:ORG/NAME")
        return DraftMethod(EAGLE3, checkpoint, int(count))
    if checkpoint:
        what = f"MTP layers are the target's own, {checkpoint!r} is no number of tokens"
        raise UserError(what, where=where, do="give mtp, or mtp:3")
    return DraftMethod(MTP, "", int(count))


def drafting_by(method: DraftMethod, deployment: Deployment, backend: Backend) -> Deployment:
    """The deployment without a drafter of ours, drafting by a method of its engine's own.

    Raises:
        UserError: the engine or the target does not have it, or the checkpoint cannot be read or does not fit.
    """
    if not isinstance(backend, ComparedBackend):
        what = f"{backend.facts.title} drafts with DFlash alone"
        do = "use the --backend of an engine that has it, or --endpoint NAME=URL"
        raise UserError(what, where=f"{WHERE} {method.name}", do=do)
    target = read_target_layout(target_configuration(deployment.target), deployment.target)
    head = read_eagle3_head(method.checkpoint) if method.name == EAGLE3 else None
    unfit = list(_misfits(head, target)) if head is not None else list(_mtp_problems(deployment, target))
    raise_problems([*unfit, *backend.method_problems(target, head)])
    own = backend.method_arguments(head, method.draft_tokens)
    given = {**deployment.engine_args, backend.name: {**deployment.engine_args.get(backend.name, {}), **own}}
    return deployment.model_copy(
        update={"drafter": None, "speculation": Speculation(width="off"), "engine_args": given}
    )


def drafting_problems(deployment: Deployment, backend: Backend) -> Iterator[Problem]:
    """Arguments that would make every variant draft, `off` too, or stand beside a method's own."""
    if not isinstance(backend, ComparedBackend):
        return
    for name in deployment.engine_args.get(backend.name, {}):
        if name.replace("-", "_") in backend.drafting_arguments:
            what, do = "the variants say how it drafts", f"leave it out, and name the method: {WHERE} eagle3:..., mtp"
            yield Problem(what, f"engine_args.{backend.name}.{name}", do)


def read_eagle3_head(checkpoint: str) -> Eagle3Head:
    """Reads a head's config.json; of a hub id, only that file is fetched.

    Raises:
        UserError: there is none, or it is no EAGLE-3 head's.
    """
    folder = local_folder(checkpoint, files=["config.json"])
    raw = load_object(folder / "config.json")
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "unknown"
    if not _is_eagle3(raw, architecture.lower()):
        what = f"its config.json is no EAGLE-3 head's (architecture {architecture})"
        raise UserError(what, where=checkpoint, do="give a checkpoint of an EAGLE-3 head")
    inner = raw.get("transformer_layer_config")
    sizes: Mapping[str, object] = inner if isinstance(inner, dict) else raw
    taken = raw.get("target_hidden_size")
    return Eagle3Head(
        checkpoint=checkpoint,
        architecture=architecture,
        hidden_size=taken if type(taken) is int else required_size(sizes, "hidden_size", folder),
        vocab_size=required_size(sizes, "vocab_size", folder),
        quantized=isinstance(raw.get("quantization_config"), dict),
    )


def _is_eagle3(raw: Mapping[str, object], architecture: str) -> bool:
    """By its architecture or speculators' word; SafeAILab's own heads are told by their reduced vocabulary alone."""
    kind = raw.get("speculators_model_type")
    plain = kind is None and architecture.endswith("forcausallm") and "draft_vocab_size" in raw
    return EAGLE3 in architecture or kind == EAGLE3 or plain


def _misfits(head: Eagle3Head, target: TargetLayout) -> Iterator[Problem]:
    """Sizes in which the head cannot be this target's."""
    pairs = {
        "hidden_size": (head.hidden_size, target.shape.hidden_size),
        "vocab_size": (head.vocab_size, target.shape.vocab_size),
    }
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            do = "use the EAGLE-3 head that was trained for this target"
            yield Problem(f"its {name} is {own}, {target.shape.name}'s is {wanted}", head.checkpoint, do)


def _mtp_problems(deployment: Deployment, target: TargetLayout) -> Iterator[Problem]:
    """A target without MTP layers."""
    raw = load_object(target_configuration(deployment.target) / "config.json", kind="target")
    told = [holder.get(key) for holder in (raw, language_model(raw)) for key in MTP_KEYS]
    if not any(told) and not target.shape.model_type.startswith(MTP_UNTOLD):
        what = f"{target.shape.name} has no MTP layers ({' or '.join(MTP_KEYS)} in its config.json)"
        yield Problem(what, f"{WHERE} {MTP}", "leave it out, or name a target that was trained with them")
