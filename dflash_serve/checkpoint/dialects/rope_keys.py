"""Rotary embedding in config.json: transformers 5's `rope_parameters`, and `rope_theta` + `rope_scaling` before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from dflash_serve.checkpoint.config import RopeConfig
from dflash_serve.checkpoint.dialects.section import Section

Scaling = Literal["linear", "llama3", "yarn", "longrope"]

NUMBERS = (
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
LISTS = ("short_factor", "long_factor")
NEEDED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
HARMLESS = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "finetuned",
}
"""Keys that say nothing more about a text drafter: three equal mrope axes are plain RoPE."""


def read_rope(config: Section) -> RopeConfig:
    """The rotary embedding of a transformer's section. No theta is a problem: engines' defaults differ 100-fold."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.raw and old.raw and _kind(new) != _kind(old):
        config.note(f"{new.path} says {_kind(new)!r} but {old.path} says {_kind(old)!r}", "keep the right one")
    section = new if new.raw else old
    for partial in (section, config):
        partial.refuse("partial_rotary_factor", (1,), "partial rotary embedding is not supported")
    theta = section.optional_number("rope_theta")
    outer = config.optional_number("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        config.note(
            f"{section.named('rope_theta')} is {theta} but {config.named('rope_theta')} is {outer}",
            "keep the right one",
        )
    theta = outer if theta is None else theta
    if theta is None or theta <= 0:
        config.note(
            f"no {config.named('rope_theta')}" if theta is None else f"rope_theta is {theta}, not positive",
            "add the target's rope_theta",
        )
        theta = 1.0
    kind = _kind(section)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in get_args(Scaling):
        section.note(f"rope type {kind!r} is not supported", f"supported are: default, {', '.join(NEEDED)}")
        return RopeConfig(theta=theta)
    return _scaled(theta, kind, section, config)


def _kind(section: Section) -> str:
    return section.text("rope_type") or section.text("type") or "default"


def _scaled(theta: float, kind: str, section: Section, config: Section) -> RopeConfig:
    section.only({*NUMBERS, *LISTS, *HARMLESS, "original_max_position_embeddings", "truncate"}, "remove it")
    original = section.optional_integer("original_max_position_embeddings")
    if original is None:
        original = config.optional_integer("original_max_position_embeddings")
    values: dict[str, object] = {
        **{key: section.optional_number(key) for key in NUMBERS},
        **{key: section.numbers(key) for key in LISTS},
        "original_max_position_embeddings": original,
        "truncate": section.flag("truncate"),
    }
    for key in NEEDED[kind]:
        if values[key] is None:
            section.note(f"rope type {kind!r} without {section.named(key)}", "add it")
    return RopeConfig.model_validate({"theta": theta, "scaling": kind, **values})


def rope_parameters(rope: RopeConfig) -> dict[str, object]:
    """The transformers 5 form."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    return {"rope_type": rope.scaling or "default", "rope_theta": rope.theta, **known}


def rope_theta_and_scaling(rope: RopeConfig) -> Mapping[str, object]:
    """The older form, which transformers 5 and every engine read as well."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    scaling = None if rope.scaling is None else {"rope_type": rope.scaling, **known}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
