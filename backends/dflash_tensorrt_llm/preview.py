"""What TensorRT-LLM makes of what a Deployment leaves open, and what would be written for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.cost_table import COST_TABLE
from dflash_serve.deployment import GIB
from dflash_serve.preview import Choice, PreparedFile, Preview

from .checks import head_problems
from .engine_arguments import HARMONY, named_parsers
from .launch_plan import ROWS, LaunchPlan
from .plugin import BUILT
from .schedule import starving_from


def preview(plan: LaunchPlan, files: Mapping[str, str]) -> Preview:
    """Everything but the command and the problems.

    Args:
        files: name -> text of those of its own that `prepare` would write.
    """
    return Preview([*_files(plan, files)], list(_choices(plan)), list(notes(plan)))


def _files(plan: LaunchPlan, files: Mapping[str, str]) -> Iterator[PreparedFile]:
    about = {"config.yaml": "what `trtllm-serve --config` reads"}
    for name, text in files.items():
        yield PreparedFile(name, about.get(name, "registers our drafter with TensorRT-LLM"), text)
    if plan.drafter is not None and not any(head_problems(plan.drafter)):
        text = json.dumps(DIALECTS["zlab"].write(plan.drafter, None), indent=2, sort_keys=True) + "\n"
        yield PreparedFile("draft/config.json", "the drafter's description in z-lab's dialect", text)
        yield PreparedFile(
            "draft/dflash_serve.json", "the same for our plug-in", plan.drafter.model_dump_json(indent=2)
        )
        yield PreparedFile("draft/model.safetensors", "the drafter's weights, linked, or renamed to z-lab's names")


def _choices(plan: LaunchPlan) -> Iterator[Choice]:
    limits, deployment = plan.deployment.limits, plan.deployment
    if limits.max_batch_size is None:
        yield _max_batch_size(plan)
    if limits.max_model_len is None:
        source = "the target's positions" if plan.target.shape.max_position_embeddings else "no config.json says more"
        yield Choice("limits.max_model_len", f"{plan.max_model_len}", source)
    if limits.max_num_tokens is None:
        why = "upstream's default" if plan.max_num_tokens == ROWS else "a full batch of blocks"
        yield Choice("limits.max_num_tokens", f"{plan.max_num_tokens}", why)
    if plan.drafter is not None:
        if deployment.speculation.block_size is None:
            yield Choice("speculation.block_size", f"{plan.drafter.block_size}", "the drafter's own")
        if lengths := plan.draft_lengths():
            widths = ", ".join(f"{length + 1} slots up to {size} requests" for size, length in lengths.items())
            yield Choice("speculation.width", f"auto ({widths})", f"what pays by {COST_TABLE}")
        yield _implementation(plan)
        yield Choice("attention of the drafter", plan.attention_backend, "what runs it on this GPU and release")
        if deployment.kv_cache.memory_fraction is None and plan.gpu is not None:
            why = "what weights and activations leave" + ("" if plan.context_in_pool else ", and the drafter's context")
            yield Choice("kv_cache.memory_fraction", f"{plan.pool_fraction(plan.gpu)}", why)
        if deployment.kv_cache.block_reuse is None:
            yield Choice(
                "kv_cache.block_reuse", "false", "a reused prompt would leave the drafter without its features"
            )
    if plan.gpu is None:
        yield Choice("hardware.gpu", "not named", "memory is not checked")
    yield Choice("release", f"{plan.release}", "the installed one, or the newest whose sources were read")


def _implementation(plan: LaunchPlan) -> Choice:
    """Whose drafter runs, and why not the other."""
    chosen = {
        "upstream": ("TensorRT-LLM's own", "this one needs nothing else"),
        "dequantised context": (
            "TensorRT-LLM's own, with a context K/V of ours",
            "its fused product ignores the scales of quantised weights; all else of it runs as for bf16",
        ),
        "ours": ("ours", f"TensorRT-LLM's own would ignore: {'; '.join(plan.beyond_upstream)}"),
    }
    return Choice("drafter implementation", *chosen[plan.implementation])


def _max_batch_size(plan: LaunchPlan) -> Choice:
    batch = plan.max_batch_size
    if batch is None:
        return Choice(
            "limits.max_batch_size", "TensorRT-LLM's default, 2048", "its memory decides how many run at once"
        )
    if plan.context_in_pool:
        return Choice("limits.max_batch_size", f"{batch}", "the drafter's context lies in the K/V pool with all else")
    arena = plan.arena_bytes(batch, plan.max_model_len) / GIB
    why = f"the drafter's context of so many takes {arena:.1f} GiB a device, beside the K/V pool"
    return Choice("limits.max_batch_size", f"{batch}", why)


def notes(plan: LaunchPlan) -> Iterator[str]:
    """What TensorRT-LLM does not do with this deployment, or does otherwise."""
    serving = plan.deployment.serving
    if HARMONY in (serving.reasoning_parser, serving.tool_call_parser) and named_parsers(plan) != serving:
        yield "gpt-oss's answers are parsed by trtllm-serve itself: no parser is named to it"
    if plan.drafter is None:
        return
    yield from _width_notes(plan)
    if (
        plan.deployment.limits.max_queued_requests
        and "max_queued_requests" not in plan.deployment.limits.model_fields_set
    ):
        yield "TensorRT-LLM queues without bound: bound the queue at your gateway"
    if plan.needs_plug_in:
        yield f"every rank's log must say {BUILT!r}: one that does not has not loaded this drafter"
    yield "acceptance by slot is in its metrics; the width of a step is not"


def _width_notes(plan: LaunchPlan) -> Iterator[str]:
    """How far the width follows cost."""
    if plan.draft_lengths():
        yield (
            "the width follows how many requests run, and nothing else; it never falls below 2 slots, because a step "
            "without a draft would leave the drafter without its features (TensorRT-LLM #16888)"
        )
    elif plan.users_schedule:
        starving = starving_from(plan.users_schedule, plan.max_batch_size or 1)
        if starving is not None:
            yield (
                f"from {starving} requests on nothing is drafted, and the drafter misses the features of what is "
                "decoded then: it accepts little for the rest of those requests (TensorRT-LLM #16888)"
            )
    elif plan.deployment.speculation.width == "auto":
        yield (
            f"TensorRT-LLM verifies all {plan.block_size} slots in every step, whatever that costs: at high load it "
            "can be slower than no speculation; set speculation.width, "
            f"{plan.way_to_follow_cost}, or use --backend sglang"
        )
