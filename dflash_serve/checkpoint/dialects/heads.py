"""Drafters that are DFlash plus something else: recognised, to be refused by name, not by symptom."""

from __future__ import annotations

from dflash_serve.checkpoint.dialects.section import ConfigSection

HEADS_BY_TENSOR = {
    "DFlash2": ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    "DSpark": ("markov_w1", "markov_w2", "markov_head.", "confidence_proj", "confidence_head."),
    "Domino": ("prefix_gru.", "embed_proj."),
    "LiLiCorr": ("lilicorr.",),
    "Laguna": ("aux_hidden_norms.", ".g_proj."),
}
"""Parts of tensor names that only such a head has (z-lab, ModelOpt and DeepSpec exports)."""

DO = "use a plain DFlash drafter of the same target"


def head_of_tensor(name: str) -> str | None:
    """The head a tensor belongs to, if it is one we know."""
    return next((head for head, parts in HEADS_BY_TENSOR.items() if any(part in name for part in parts)), None)


def head_of_config(config: ConfigSection) -> str | None:
    """The head that the configuration asks for: by architecture, projector type, or the sizes only that head has."""
    named = " ".join(
        [
            *(config.strings("architectures") or ()),
            config.text("projector_type") or "",
            config.text("speculators_model_type") or "",
        ]
    ).lower()
    for head in (*HEADS_BY_TENSOR, "MuseGlimmer", "xPress", "DFlare"):
        if head.lower() in named:
            return head
    if config.has("conv_kernel_size") or config.has("selector_rank"):
        return "DFlash2"
    if config.has("markov_rank") or config.flag("use_confidence_head"):
        return "DSpark"
    return None


def refuse_head(head: str, where: ConfigSection) -> None:
    """Notes that the head is not supported."""
    where.note(f"the drafter has a {head} head, which is not supported yet", DO)


def refuse_other_slots(config: ConfigSection) -> None:
    """Notes conventions in which slot j does not predict the token at its own position, and attention we have not."""
    shifted = "its slots are shifted by one (slot 0 predicts too), which DFlash's are not; not supported yet"
    config.refuse("sample_from_anchor", (False,), shifted, DO)
    config.refuse("shift_label", (False,), shifted, DO)
    config.refuse("attention_sink_bias", (False,), "attention sinks are not supported yet", DO)
    config.refuse("add_swa_attention_sink_bias", (False,), "attention sinks are not supported yet", DO)
    config.refuse("attention_value_scale", (1,), "scaled attention values are not supported yet", DO)
    config.refuse("projector_type", ("dflash",), "only plain DFlash drafters are supported", DO)
