"""Drafters that vLLM refuses late or silently serves wrongly: found before launch, and again in its own process.

vLLM 0.32 and 0.33 come up healthy with every one of these; what it then does stands beside each.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.checkpoint.target import TargetShape
from dflash_serve.deployment_checks import check_pairing
from dflash_serve.errors import Problem, UserError
from dflash_vllm.heads import dialect_of, head_problems

V1_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own: 0 brings back the model runner that CPUs have


def drafter_problems(
    drafter: DrafterConfig, target: TargetShape, *, max_model_len: int | None, v1_runner: bool
) -> list[Problem]:
    """Problems of one drafter with its target.

    Args:
        max_model_len: tokens of prompt and answer together; None = what the target was made for.
        v1_runner: whether vLLM's first model runner serves (on CPUs, or asked for).
    """
    found = check_pairing(drafter, target)  # out of range: the first request ends the engine
    longest = max_model_len or target.max_position_embeddings
    found += [*head_problems(drafter), *_heads(drafter, v1_runner)]
    return [*found, *_inputs(drafter, target), *_positions(drafter, longest), *_attention(drafter, v1_runner)]


def _heads(drafter: DrafterConfig, v1_runner: bool) -> Iterator[Problem]:
    if drafter.family != "DFlash" and v1_runner:
        what = f"a {drafter.family} drafter, which vLLM's V1 model runner has not"
        yield Problem(what, "drafter.model", f"serve it on a GPU without {V1_VARIABLE}=0, or use --backend torch")
    if drafter.markov is not None and (drafter.output_multiplier != 1.0 or drafter.final_logit_softcap is not None):
        what = "its logits are scaled or soft-capped before the Markov head's bias, which vLLM leaves out"
        yield Problem(what, "drafter.model", "use --backend torch")
    if drafter.draft_vocabulary is not None and len({kind.causal for kind in drafter.layers}) > 1:
        what = "causal and other layers with a reduced vocabulary: vLLM would make all of them causal"
        yield Problem(what, "drafter.model", "use --backend torch")
    wide = any(kind.window is not None and not kind.causal for kind in drafter.layers)
    if drafter.draft_vocabulary is not None and drafter.markov is not None and wide:
        what = "a reduced vocabulary, a Markov head and sliding layers that are not causal: vLLM makes them causal"
        yield Problem(what, "drafter.model", "use --backend torch")


def _inputs(drafter: DrafterConfig, target: TargetShape) -> Iterator[Problem]:
    """Inputs of the drafter. Scale and soft-cap of a plain drafter's logits do not matter: its drafts are greedy."""
    if drafter.has_mask_embedding:
        what = "vLLM reads a mask embedding from a pickle only, which we never write"
        yield Problem(what, "drafter.model", "use a drafter that masks with a token, or --backend torch")
    if drafter.embedding_scale != 1.0 and drafter.selector is None:
        what = f"input_embedding_scale is {drafter.embedding_scale}, which vLLM ignores for {drafter.family} drafters"
        yield Problem(what, "drafter.model", "use another backend")
    elif target.model_type.startswith("gemma") and drafter.embedding_scale == 1.0:
        # The drafter was trained on rows times sqrt(hidden_size), as the target takes them (vllm#41703, open).
        what = f"{target.model_type} scales its embedding, and vLLM hands it to {drafter.family} drafters unscaled"
        yield Problem(what, "target.model", "use --backend sglang: vLLM would accept few drafts, without an error")
    ids = drafter.target_layer_ids
    if len(set(ids)) < len(ids):
        yield Problem(f"target_layer_ids {list(ids)} name a layer twice, vLLM hands it out once", "drafter.model",
                      "use --backend torch")  # fmt: skip
    elif list(ids) != sorted(ids):
        what = f"target_layer_ids {list(ids)} are not in order; vLLM hands their outputs out in the order of layers"
        yield Problem(what, "drafter.model", "use --backend torch")


def _positions(drafter: DrafterConfig, longest: int | None) -> Iterator[Problem]:
    """V1 stops drafting for the whole batch when one request comes near the end of the table; V2 reads beyond it."""
    if longest is not None and longest > drafter.max_position_embeddings:
        most = drafter.max_position_embeddings
        what = f"{longest} tokens, but the drafter's RoPE table has {most} positions (max_position_embeddings)"
        yield Problem(what, "limits.max_model_len", f"set it to {most}, or use a drafter trained for more")


def _attention(drafter: DrafterConfig, v1_runner: bool) -> Iterator[Problem]:
    """One `is_causal` and one window for all layers, as the dialects that it reads have it."""
    try:
        DIALECTS[dialect_of(drafter)].write(drafter, None)
    except UserError as error:
        yield Problem(f"{error.what}; vLLM reads no other", "drafter.model", "use --backend torch")
    sliding = [kind.window is not None for kind in drafter.layers]
    if v1_runner and any(sliding) and not all(sliding):
        what = "sliding and full-attention layers, which vLLM's V1 model runner does not mix"
        yield Problem(what, "drafter.model", f"serve it on a GPU without {V1_VARIABLE}=0, or use --backend torch")
