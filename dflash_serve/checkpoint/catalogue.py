"""The published drafters and their targets, from two checked data files: no network, no torch.

`assets/drafters.json` has a row for each drafter, which `python -m dflash_serve.catalogue_row` makes of a checkpoint;
`assets/targets.json` has what config.json says of their targets. Fields were read in public pages, cards and
repositories; null = not known. Acceptance lengths are their publishers', at other prompts and settings each: they do
not compare across rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, Heads, uniform_target_layer_ids
from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.errors import UserError, did_you_mean

ASSETS = Path(__file__).parents[1] / "assets"
DATA, TARGETS = ASSETS / "drafters.json", ASSETS / "targets.json"
AUTO = "auto"  # Name of a drafter that stands for the best published one for the target and the backend
Kind = Literal["DFlash", "DFlash2", "DSpark", "Domino"]
RANKED: Sequence[Kind] = ("DFlash2", "DSpark", "DFlash", "Domino")
"""Mean acceptance lengths of one publisher's drafters of one target, Qwen3.5-4B: 5.97, 5.49, 4.92 (z-lab, 2026)."""
RESTRICTED = ("-NC", "-ND", "non-commercial")  # Marks of licences that restrict who may serve


class PublishedAcceptance(Frozen):
    """An acceptance length as its publisher gives it, the bonus token counted."""

    benchmark: str
    value: Annotated[float, Field(ge=1)]
    setting: str
    source: str


class EngineVerdict(Frozen):
    """An engine's use of a drafter.

    served: by `dflash-serve serve`. after convert: by it, once `dflash-serve convert` has rewritten the checkpoint.
    engine alone: by the engine's own command; dflash-serve does not read the checkpoint. refused: it cannot, or would
    serve it wrongly. not known: the row lacks what the rules ask.
    """

    verdict: Literal["served", "after convert", "engine alone", "refused", "not known"]
    why: str | None = None  # None: it is served


class DrafterSizes(Frozen):
    """Sizes of a drafter's layers, as far as a plan needs them."""

    layers: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocabulary: PositiveInt
    features: PositiveInt  # Layers of the target that it reads
    windows: tuple[PositiveInt | None, ...] = ()  # Of each layer; () = all have full attention
    attention_bias: bool = False

    @classmethod
    def of(cls, config: DrafterConfig) -> DrafterSizes:
        """The sizes of a drafter that was read."""
        windows = tuple(kind.window for kind in config.layers)
        return cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocabulary=config.vocab_size,
            features=len(config.target_layer_ids),
            windows=windows if any(windows) else (),
            attention_bias=config.attention_bias,
        )

    def config(self, block_size: int, heads: Heads, target_layers: int) -> DrafterConfig:
        """A description with these sizes; ids of layers and of the mask token, which change no cost, are made up."""
        windows = self.windows or (None,) * self.layers
        return DrafterConfig(
            block_size=block_size,
            target_layer_ids=uniform_target_layer_ids(target_layers, self.features),
            mask_token_id=0,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            layers=tuple(AttentionKind(window=window) for window in windows),
            attention_bias=self.attention_bias,
            **heads.parts,
        )


class CataloguedDrafter(Frozen):
    """One published drafter."""

    repository: str  # Hub id, or the bundled `smollm2`
    target: str  # Hub id of the target it was trained for
    kind: Kind
    block_size: Annotated[int, Field(ge=2)] | None  # B, the anchor counted
    heads: Heads | None
    weights: str | None  # Format of its own weights: bf16, fp8, nvfp4, w4a16, ...
    layout: str | None = None  # Quantiser whose layout they have: modelopt, compressed-tensors, ...; None = plain
    target_precision: str | None
    """Format of the target's weights in its training. Beside another form of the target it may accept nothing."""
    thinking: Literal["on", "off", "both"] | None  # Mode of the target that it was trained for
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    """A commit that was seen; checkpoints are replaced in place, so pin one where it is null."""
    licence: str | None
    gated: bool | None  # The hub gives it only to accounts that accepted its terms
    acceptance_length: tuple[PublishedAcceptance, ...]
    source: str  # Source of the row's other fields
    unread: str | None  # Part of it that dflash-serve does not read: none of its launches serves such a drafter
    engines: Mapping[str, EngineVerdict]  # Backend -> verdict
    sizes: DrafterSizes | None

    @property
    def is_restricted(self) -> bool:
        """Its licence forbids commercial use or changed copies."""
        return self.licence is not None and any(mark in self.licence for mark in RESTRICTED)

    @property
    def is_proven(self) -> bool:
        """One commit of it is known, and its publisher says what it accepts."""
        return bool(self.acceptance_length) and (self.revision is not None or "/" not in self.repository)


class CataloguedTarget(Frozen):
    """A target's config.json as far as it is known; with all sizes, or with its `model_type` alone."""

    source: str
    config: Mapping[str, Any]

    @property
    def has_sizes(self) -> bool:
        return len(self.config) > 1

    @property
    def family(self) -> str | None:
        """Its `model_type`."""
        return self.config.get("model_type")

    @property
    def configuration(self) -> dict[str, Any]:
        """The keys of config.json; an interval becomes the list of all layers' kinds, for which operator tables ask."""
        text = self.config.get("text_config", self.config)
        interval, layers = text.get("full_attention_interval"), text.get("num_hidden_layers")
        if not interval or "layer_types" in text:
            return dict(self.config)
        each = ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]
        whole = {**text, "layer_types": each}
        return {**self.config, "text_config": whole} if "text_config" in self.config else whole


class Catalogue(Frozen):
    """The data file of drafters."""

    gathered: str  # The day its rows were last looked at
    drafters: tuple[CataloguedDrafter, ...]


class Targets(Frozen):
    """The data file of targets."""

    targets: Mapping[str, CataloguedTarget]


@cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    return Catalogue.model_validate_json(DATA.read_text(encoding="utf-8"))


@cache
def _targets() -> Mapping[str, CataloguedTarget]:
    return Targets.model_validate_json(TARGETS.read_text(encoding="utf-8")).targets


def catalogued_target(name: str) -> CataloguedTarget | None:
    """The configuration of a target that is found by its whole hub id, in capitals or not; None = it is not known."""
    return next((target for known, target in _targets().items() if known.lower() == name.lower()), None)


def catalogued_drafter(name: str) -> CataloguedDrafter | None:
    """A drafter by its whole hub id in any case."""
    return next((one for one in catalogue().drafters if one.repository.lower() == name.lower()), None)


def drafters_of(target: str) -> list[CataloguedDrafter]:
    """The drafters of a target, by its hub id in any case or the part behind the slash; [] = none is known."""
    wanted = target.rstrip("/").lower()
    return [
        drafter
        for drafter in catalogue().drafters
        if wanted in (drafter.target.lower(), drafter.target.lower().rpartition("/")[2])
    ]


def unknown_target(target: str) -> UserError:
    """The error for a target without a drafter."""
    known = sorted({drafter.target for drafter in catalogue().drafters})
    longer = [name for name in known if name.lower().startswith(target.lower())]
    near = did_you_mean(target, longer) or did_you_mean(target, known)
    do = near or "`dflash-serve drafters` lists them all; `dflash-serve train` makes one"
    return UserError(f"no published drafter of it is known (catalogue of {catalogue().gathered})", where=target, do=do)


def able_drafters(
    target: str, serves: Callable[[CataloguedDrafter], bool], untried: Collection[str] = (), precision: str = "none"
) -> list[CataloguedDrafter]:
    """The drafters that `auto` may take, the best first.

    Families that the backend was run with come first. Then drafters with a pinned commit and a published acceptance
    length; then by kind, the publishers' own order (`RANKED`); then pinned ones; then the file's order. Drafters with a
    restricting licence, behind a gate, or made for another precision of the target have to be named.

    Args:
        serves: whether the backend serves a drafter.
        untried: families that it was not run with.
        precision: format that the engine converts the target to; `none` = it does not.
    """
    able = [
        one
        for one in drafters_of(target)
        if not (one.is_restricted or one.gated)
        and (precision == "none" or one.target_precision in (None, precision))
        and serves(one)
    ]

    def order(one: CataloguedDrafter) -> tuple[bool, bool, int, bool]:
        return one.kind in untried, not one.is_proven, RANKED.index(one.kind), one.revision is None

    return sorted(able, key=order)
