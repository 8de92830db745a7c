"""The keys of heads and of the slot convention, which all dialects call nearly the same.

Nothing is guessed: where a key is missing that means opposite things in two readers, the checkpoint's other words or
its tensors settle it, or it is refused (engines load the wrong reading without a word and accept nothing).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast, get_args

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects.dialect import ConfigSection, inexpressible
from dflash_serve.checkpoint.heads import (
    ConfidenceConfig,
    ConvolutionConfig,
    MarkovConfig,
    MarkovKind,
    SelectorConfig,
    Slots,
)

MARKOV_KEYS = {
    *("markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head"),
    *("confidence_head_with_markov", "confidence_head_alpha"),
}
DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
SLOT_KEYS = {"sample_from_anchor", "shift_label"}
KEYS = MARKOV_KEYS | DFLASH2_KEYS | SLOT_KEYS
CONFIDENCE = "confidence_head."
"""The beginning of its tensors' names."""


def read_heads(config: ConfigSection, stored: Collection[str], *, markov_kind: str | None = None) -> dict[str, object]:
    """`markov`, `confidence`, `convolution` and `selector` of a DrafterConfig.

    Args:
        config: where the keys are.
        stored: names of the checkpoint's tensors; none where only its configuration is there.
        markov_kind: what a missing markov_head_type means in this dialect; None = it must be given.
    """
    markov = _markov(config, markov_kind)
    return {
        "markov": markov,
        "confidence": _confidence(config, stored, markov),
        "convolution": _convolution(config),
        "selector": _selector(config),
    }


def read_slots(config: ConfigSection, default: Slots) -> Slots:
    """The slot convention; `default` is what this dialect's own code does without a key."""
    sampled, shifted = config.flag("sample_from_anchor"), config.flag("shift_label")
    if sampled is not None and shifted is not None and sampled != shifted:
        names = config.named("sample_from_anchor"), config.named("shift_label")
        config.note(f"{names[0]} is {sampled} but {names[1]} is {shifted}", "keep the right one")
    told = shifted if sampled is None else sampled
    return default if told is None else "anchor-first" if told else "fill-in"


def _markov(config: ConfigSection, default: str | None) -> MarkovConfig | None:
    rank = config.optional_integer("markov_rank", minimum=0)
    if not rank:
        return None
    kind = config.text("markov_head_type") or default
    if kind is None:
        do = "add what it was trained with: vanilla, gated or rnn"
        config.note(f"{config.named('markov_rank')} is {rank}, but there is no markov_head_type", do)
        return None
    if kind.lower() not in get_args(MarkovKind):
        do = f"supported are: {', '.join(get_args(MarkovKind))}"
        config.note(f"{config.named('markov_head_type')} is {kind!r}, which is not supported", do)
        return None
    return MarkovConfig(kind=cast(MarkovKind, kind.lower()), rank=rank)


def _confidence(config: ConfigSection, stored: Collection[str], markov: MarkovConfig | None) -> ConfidenceConfig | None:
    """A missing switch means on for SGLang and off for speculators: the tensors decide."""
    enabled, used = config.flag("enable_confidence_head"), config.flag("use_confidence_head")
    if enabled is not None and used is not None and enabled != used:
        config.note(f"enable_confidence_head is {enabled} but use_confidence_head is {used}", "keep the right one")
    told = used if enabled is None else enabled
    present = any(name.startswith(CONFIDENCE) for name in stored) if told is None else told
    if not present:
        return None
    with_markov = config.flag("confidence_head_with_markov")
    if with_markov is None:
        if markov is not None and used is None:  # ModelOpt, which writes use_, has one with Markov embeddings only
            do = "add whether it reads Markov embeddings: true or false"
            config.note("a confidence head without confidence_head_with_markov", do)
        with_markov = markov is not None
    return ConfidenceConfig(with_markov=with_markov)


def _convolution(config: ConfigSection) -> ConvolutionConfig | None:
    sizes = _together(config, "conv_kernel_size", "conv_group_size")
    return None if sizes is None else ConvolutionConfig(taps=sizes[0], group_size=sizes[1])


def _selector(config: ConfigSection) -> SelectorConfig | None:
    sizes = _together(config, "selector_rank", "selector_top_k")
    return None if sizes is None else SelectorConfig(rank=sizes[0], top_k=sizes[1])


def _together(config: ConfigSection, *keys: str) -> tuple[int, int] | None:
    """Two sizes that come both or not at all; 0 is what engines write for not at all."""
    first, second = (config.optional_integer(key, minimum=0) or 0 for key in keys)
    if bool(first) != bool(second):
        here, missing = keys if first else keys[::-1]
        config.note(f"{config.named(here)} without {missing}", f"add {missing}, or remove {here}")
        return None
    return (first, second) if first else None


def slot_keys(config: DrafterConfig) -> dict[str, object]:
    """The slot convention, always written out."""
    return {"sample_from_anchor": config.slots == "anchor-first"}


def markov_keys(config: DrafterConfig) -> dict[str, object]:
    """The Markov and confidence heads, written out where they are absent, too."""
    markov, confidence = config.markov, config.confidence
    return {
        "markov_rank": markov.rank if markov else 0,
        "markov_head_type": markov.kind if markov else "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.with_markov,
    }


def dflash2_keys(config: DrafterConfig) -> dict[str, object]:
    """Convolution and selector; {} of a drafter without."""
    keys: dict[str, object] = {}
    if config.convolution is not None:
        keys |= {"conv_kernel_size": config.convolution.taps, "conv_group_size": config.convolution.group_size}
    if config.selector is not None:
        keys |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    return keys


def refuse_to_write(config: DrafterConfig, dialect: str, *, heads: Collection[str]) -> None:
    """Says what of a drafter a dialect has no words for.

    Args:
        heads: those it has: `slots`, `draft_vocabulary`, `markov`, `confidence`, `convolution`, `selector`.

    Raises:
        UserError: something else is there.
    """
    present = {
        "slots": (config.slots != "fill-in", "anchor-first slots"),
        "draft_vocabulary": (config.draft_vocabulary is not None, "a reduced draft vocabulary"),
        "markov": (config.markov is not None, "a Markov head"),
        "confidence": (config.confidence is not None, "a confidence head"),
        "convolution": (config.convolution is not None, "convolutions"),
        "selector": (config.selector is not None, "a candidate selector"),
    }
    for head, (there, what) in present.items():
        if there and head not in heads:
            raise inexpressible(what, dialect)
