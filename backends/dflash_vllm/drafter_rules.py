"""Drafters on vLLM: the method and dialect of each kind, and those that vLLM refuses late or silently serves wrongly.

`models/qwen3_dflash.py` serves plain drafters and `d2t`, `qwen3_dflash2.py` convolutions and a selector, and
`qwen3_dspark.py` a vanilla Markov head, both slot conventions and `d2t`; `models/kimi_k3/nvidia/dspark_mla.py` serves a
vanilla Markov head on latent attention. All but plain drafters need the V2 model runner, which needs a GPU. vLLM 0.32
and 0.33 come up healthy with every drafter that is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.adapter.checks import check_pairing
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.checkpoint.target import TargetShape
from dflash_serve.errors import Problem, UserError

from .facts import RELEASES

UNTRIED = ("DFlash2", "DSpark")  # families that were read and not run: they want a GPU
TORCH, OTHERS = "use --backend torch", "use --backend torch or sglang"
RAISES_TABLES = (0, 33)  # the first release that makes a drafter's RoPE table as long as max_model_len (V2 runner)
CACHE_ONLY = (None, "linear", "llama3")  # RoPE whose frequencies do not depend on the table: the others' stays short
V1_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own: 0 brings back the model runner that CPUs have


def method_of(heads: Heads) -> str:
    """vLLM's name of the method; its `dflash` finds DFlash2 by the architecture."""
    return "dflash" if heads.markov is None else "dspark"


def dialect_of(heads: Heads) -> str:
    """Dialect of the draft folder: only speculators' has words for `d2t`; dspark reads DeepSpec's, MLA has its own."""
    if heads.latent is not None:
        return "k3-dspark"
    if heads.draft_vocabulary is not None:
        return "speculators"
    return "zlab" if heads.markov is None else "deepspec"


def verifies_whole_blocks(heads: Heads) -> bool:
    """True where our widths do not run: vLLM's schedules of widths were never tried with dspark and DFlash2."""
    return heads.family in UNTRIED


def head_problems(heads: Heads) -> list[Problem]:
    """Heads for which vLLM has no model."""
    return [Problem(what, "drafter.model", do) for what, do in _unknown_heads(heads)]


def drafter_problems(
    drafter: DrafterConfig, target: TargetShape, *, max_model_len: int | None, v1_runner: bool
) -> list[Problem]:
    """Problems of one drafter with its target.

    Args:
        max_model_len: tokens of prompt and answer together; None = what the target was made for.
        v1_runner: whether vLLM's first model runner serves (on CPUs, or asked for).
    """
    found = check_pairing(drafter, target)  # out of range: the first request ends the engine
    found += head_problems(drafter)
    found += [Problem(what, "drafter.model", do) for what, do in _misread(drafter, v1_runner)]
    if drafter.embedding_scale == 1.0 and target.model_type.startswith("gemma"):
        # The drafter was trained on rows times sqrt(hidden_size), as the target takes them (vllm#41703, open).
        what = f"{target.model_type} scales its embedding, and vLLM hands it to {drafter.family} drafters unscaled"
        plain = "" if drafter.family == "DFlash" else "a plain drafter with "
        do = f"use {plain}--backend sglang: vLLM would accept few drafts, without an error"
        found.append(Problem(what, "target.model", do))
    longest, most = max_model_len or target.max_position_embeddings, drafter.max_position_embeddings
    is_raised = not v1_runner and (RELEASES.numbers(RELEASES.installed()) or (0,)) >= RAISES_TABLES
    if longest is not None and longest > most and not (is_raised and drafter.rope.scaling in CACHE_ONLY):
        # V1 stops drafting for the whole batch when one request comes near the end of the table; V2 reads beyond it.
        what = f"{longest} tokens, but the drafter's RoPE table has {most} positions (max_position_embeddings)"
        found.append(Problem(what, "limits.max_model_len", f"set it to {most}, or use a drafter trained for more"))
    return found


def _unknown_heads(heads: Heads) -> Iterator[tuple[str, str]]:
    """(what, do) of each."""
    known = "vLLM 0.32 and 0.33"
    if heads.markov is not None and heads.markov.kind != "vanilla":
        yield f"a {heads.markov.kind} Markov head: {known} have vanilla ones only", OTHERS
    if heads.latent is not None and (heads.markov is None or heads.draft_vocabulary or heads.attention_sinks):
        what = "latent attention (MLA) without a Markov head, with a reduced vocabulary or with sinks"
        yield f"{what}: {known} have it in K3DSparkModel alone", "use a drafter with grouped-query attention"
    if heads.markov is not None and heads.convolution is not None:
        yield f"convolutions beside a Markov head, which no model of {known} has", TORCH
    elif (heads.convolution is None) != (heads.selector is None):
        have, other = ("convolutions", "a selector") if heads.convolution else ("a candidate selector", "convolutions")
        yield f"{have} without {other}: {known} build both or neither", OTHERS
    if heads.markov is None and heads.slots == "anchor-first":
        do = "convert it (`dflash-serve convert --to deepspec --markov-head zero`), or use --backend torch"
        yield f"anchor-first slots without a Markov head: {known} read them in method dspark only", do
    if heads.markov is None and heads.confidence is not None:
        yield f"a confidence head without a Markov head: {known} have both or neither", TORCH


def _misread(drafter: DrafterConfig, v1_runner: bool) -> Iterator[tuple[str, str]]:
    """(what, do) of each. Scale and soft-cap of a plain drafter's logits do not matter: its drafts are greedy."""
    on_a_gpu = f"serve it on a GPU without {V1_VARIABLE}=0, or {TORCH}"
    if drafter.family != "DFlash" and v1_runner:
        yield f"a {drafter.family} drafter, which vLLM's V1 model runner has not", on_a_gpu
    if drafter.markov is not None and (drafter.output_multiplier != 1.0 or drafter.final_logit_softcap is not None):
        yield "its logits are scaled or soft-capped before the Markov head's bias, which vLLM leaves out", TORCH
    if drafter.draft_vocabulary is not None and len({kind.causal for kind in drafter.layers}) > 1:
        yield "causal and other layers with a reduced vocabulary: vLLM would make all of them causal", TORCH
    sliding = [kind.window is not None for kind in drafter.layers]
    wide = any(kind.window is not None and not kind.causal for kind in drafter.layers)
    if drafter.draft_vocabulary is not None and drafter.markov is not None and wide:
        what = "a reduced vocabulary, a Markov head and sliding layers that are not causal: vLLM makes them causal"
        yield what, TORCH
    if v1_runner and any(sliding) and not all(sliding):
        yield "sliding and full-attention layers, which vLLM's V1 model runner does not mix", on_a_gpu
    if drafter.has_mask_embedding:
        what = "vLLM reads a mask embedding from a pickle only, which we never write"
        yield what, "use a drafter that masks with a token, or --backend torch"
    if drafter.embedding_scale != 1.0 and drafter.selector is None:
        what = f"input_embedding_scale is {drafter.embedding_scale}, which vLLM ignores for {drafter.family} drafters"
        yield what, "use another backend"
    try:  # one `is_causal` and one window for all layers, as the dialects that vLLM reads have it
        DIALECTS[dialect_of(drafter)].write(drafter, None)
    except UserError as error:
        yield f"{error.what}; vLLM reads no other", TORCH
