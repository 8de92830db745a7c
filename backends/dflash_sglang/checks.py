"""Problems of a deployment on SGLang 0.5.23, found from files alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from math import isclose

from dflash_serve.adapter.arguments import parser_problems
from dflash_serve.adapter.checks import (
    attention_head_problems,
    block_problems,
    check_pairing,
    device_problems,
    drafter_quantization_problems,
    expert_block_problems,
    expert_problems,
    fraction_problems,
    key_problems,
    length_problems,
    measurement_problems,
    quantization_problems,
    tracing_problems,
    unused_speculation,
    window_problems,
)
from dflash_serve.adapter.launch import memory_problems
from dflash_serve.adapter.refusals import refusal_problems
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.deployment.gpus import GIB
from dflash_serve.errors import Problem

from .engine_arguments import PARSERS, argument_table
from .facts import FACTS, RELEASES
from .layouts import storage_problems
from .settings import (
    BACKUP,
    DFLASH,
    DRAFT_KERNELS,
    DSPARK,
    HOST_RESERVE,
    KEEP_ON_DECODE,
    SINK_COMPUTE,
    SINK_KERNELS,
    TRANSFER,
    WITH_SINKS,
    SGLangSettings,
    head_problems,
)

WITHOUT_KEYS, TOKENIZERS = ("grpc-mode", "smg-grpc-mode", "grpc-port"), "tokenizer-worker-num"
OTHER_SERVERS = ("SGLANG_RUST_SERVER", "SGLANG_GRPC_PORT")
"""Arguments and variables with which SGLang checks no key: of its Rust and gRPC servers, and of several tokenizers
(entrypoints/http_server.py)."""
LANGUAGE_MODELS = (
    *("Beam", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Gemma4", "Glm4MoeLite", "GlmMoeDsa", "GptOss", "IQuestCoder"),
    *("InternLM3", "KimiK3Linear", "Laguna", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "Mellum", "MiMoV2", "MiMoV2Flash"),
    *("Ministral3", "Mistral", "MistralLarge3", "MuseGlimmer", "Nanbeige", "NemotronH", "NemotronHPuzzle", "Phi3"),
    *("Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "TeleFLM"),
)
MULTIMODAL = (
    *("Cosmos3", "Gemma4", "Gemma4Unified", "Glm5Next", "Inkling", "InternS1Pro", "InternS2Mobius", "InternS2Preview"),
    *("KimiK25", "KimiK3", "Lfm2Vl", "MiniCPMV4_6", "MiniCPMV4_7", "MiniMaxM3Sparse", "MuseGlimmer", "MuseSpark"),
    *("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp"),
)
CAPTURING = {
    *(f"{name}ForCausalLM" for name in LANGUAGE_MODELS),
    *(f"{name}ForConditionalGeneration" for name in MULTIMODAL),
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3"),
}
"""Architectures whose model in SGLang 0.5.23 hands out hidden states (`set_dflash_layers_to_capture`)."""
CAPTURING_FOR_DSPARK = {"BailingMoeV3ForCausalLM", "DeepseekV4ForCausalLM", "KimiLinearForCausalLM"}
"""Those that do so for DSPARK only (`set_dspark_layers_to_capture`)."""


def problems(settings: SGLangSettings) -> list[Problem]:
    """Problems of a launch: the drafter's own first, because the others may follow from them."""
    found = list(settings.checkpoint.problems) if settings.checkpoint else []
    found += storage_problems(settings.checkpoint, settings.drafter_devices, "drafter.model")
    found += drafter_quantization_problems(
        settings.deployment, settings.checkpoint.quantization if settings.checkpoint else None
    )
    found += RELEASES.problems(RELEASES.installed())
    if settings.drafter is not None:
        found += check_pairing(settings.drafter, settings.target.shape)
        found += _drafter_problems(settings, settings.drafter)
    found += refusal_problems(settings.deployment, FACTS.refusals)
    for problems_of in (
        _devices,
        _half,
        _experts,
        _block_reuse,
        _heads,
        _precision,
        _lengths,
        memory_problems,
        _arguments,
    ):
        found += problems_of(settings)
    return found


def _drafter_problems(settings: SGLangSettings, drafter: DrafterConfig) -> Iterator[Problem]:
    yield from block_problems(settings.deployment, drafter)
    yield from head_problems(drafter)
    yield from _widths(settings)
    family, architecture = settings.target.shape.model_type, settings.target.architecture
    if architecture not in CAPTURING and not (drafter.markov and architecture in CAPTURING_FOR_DSPARK):
        what = f"SGLang's {architecture} does not hand out hidden states to {settings.algorithm}"
        yield Problem(what, "target.model", "serve without a drafter, or use another backend")
    if drafter.has_mask_embedding:
        what = "SGLang reads a mask embedding from a pickle only, which we never write"
        yield Problem(what, "drafter.model", "use a drafter that masks with a token, or another backend")
    scale = (
        settings.target.shape.hidden_size**0.5 if family.startswith("gemma") else 1.0
    )  # that of the target's embedding
    if drafter.embedding_scale != 1.0 and not isclose(drafter.embedding_scale, scale, rel_tol=0.01):
        what = f"input_embedding_scale is {drafter.embedding_scale}, SGLang scales by the target's {scale:g}"
        yield Problem(what, "drafter.model", "use another backend")
    if family.startswith("gemma") and drafter.family != "DFlash":
        what = f"{family}'s head is its embedding, which SGLang's {drafter.family} cannot draft through (sglang#39362)"
        yield Problem(what, "target.model", "use a plain drafter, or DFlash2 with --backend vllm")
    yield from _attention(settings, drafter)
    yield from _sinks(settings, drafter)


def _sinks(settings: SGLangSettings, drafter: DrafterConfig) -> Iterator[Problem]:
    kernels, gpu = settings.in_effect.get(DRAFT_KERNELS) or settings.draft_kernels, settings.gpu
    published = settings.is_as_published and drafter.attention_sinks
    if published and (kernels != SINK_KERNELS or (gpu is not None and gpu.compute < SINK_COMPUTE)):
        have = f"not {kernels}" if kernels != SINK_KERNELS else f"which {gpu.name if gpu else 'this GPU'} does not run"
        what = f"the attention sinks of this form need SGLang's {SINK_KERNELS}, {have}"
        do = "`dflash-serve convert --to deepspec --layout compressed-tensors` writes a form for other kernels"
        yield Problem(what, f"engine_args.sglang.{DRAFT_KERNELS}", do)
    elif drafter.attention_sinks and kernels not in WITH_SINKS:
        have = f"not in {kernels}" if kernels else f"and {gpu.name if gpu else 'an unknown GPU'} has none by default"
        what = f"attention sinks, which SGLang's attention has in {', '.join(WITH_SINKS)}, {have}"
        do = "name one of these" if kernels or gpu else "name one of these, or hardware.gpu"
        yield Problem(what, f"engine_args.sglang.{DRAFT_KERNELS}", do)


def _widths(settings: SGLangSettings) -> Iterator[Problem]:  # for `auto`, whole blocks are verified, and a note says so
    width, block = settings.deployment.speculation.width, settings.block_size
    if settings.whole_blocks_with is not None and isinstance(width, int) and width not in (1, block):
        what = f"SGLang verifies whole blocks of {block} slots with {settings.whole_blocks_with}, not {width}"
        yield Problem(what, "speculation.width", f"set it to {block}, auto or off")
    if settings.algorithm == DSPARK and settings.deployment.speculation.draft_window is not None:
        yield Problem("SGLang's DSPARK has no window of its own", "speculation.draft_window", "leave it out")


def _attention(settings: SGLangSettings, drafter: DrafterConfig) -> Iterator[Problem]:
    windows = {kind.window for kind in drafter.layers} - {None}
    if len(windows) > 1:
        what = f"its layers have different windows ({', '.join(map(str, sorted(filter(None, windows))))})"
        yield Problem(what, "drafter.model", "SGLang's drafts have one window; use another backend")
    by_rule = all(kind.causal == (kind.window is not None) for kind in drafter.layers)
    if not by_rule and len({kind.causal for kind in drafter.layers}) > 1:
        what = "some layers are causal and others not, other than sliding ones causal"
        yield Problem(what, "drafter.model", "SGLang has one is_causal for all layers; use another backend")
    window = settings.deployment.speculation.draft_window
    block = settings.block_size or 0
    if window is not None and window < block:
        what = f"draft_window {window} is smaller than the block of {block} slots"
        yield Problem(what, "speculation.draft_window", f"use {block} or more")
    longest = settings.deployment.limits.max_model_len or settings.target.shape.max_position_embeddings or 0
    if window is None and not windows and longest > drafter.max_position_embeddings and drafter.rope.scaling is None:
        what = f"{longest} tokens, but its RoPE was made for {drafter.max_position_embeddings} positions"
        do = f"set limits.max_model_len to {drafter.max_position_embeddings}: beyond, acceptance is unknown"
        yield Problem(what, "drafter.model", do)


def _devices(settings: SGLangSettings) -> Iterator[Problem]:
    parallel = settings.deployment.parallel
    yield from device_problems(settings.deployment, parallel.tensor * parallel.pipeline, settings.target.weight_bytes)
    limits = settings.deployment.limits
    shares = parallel.data * (parallel.tensor if parallel.attention_data else 1)
    if limits.max_batch_size is not None and limits.max_batch_size % shares:
        by = "ranks of data-parallel attention" if parallel.attention_data else "copies of the model"
        what = f"{limits.max_batch_size} requests cannot be shared evenly by {shares} {by}"
        yield Problem(what, "limits.max_batch_size", f"use a multiple of {shares}")
    if parallel.data > 1 and parallel.nodes > 1:
        what = "SGLang keeps its copies of the model on one node"
        yield Problem(what, "parallel.data", "set it to 1, and take replicas: `dflash-serve deploy`")
    if parallel.attention_data and parallel.tensor == 1:
        what = "data-parallel attention shares requests among the devices of tensor parallelism, and there is one"
        yield Problem(what, "parallel.attention_data", "leave it out, or set parallel.tensor")
    if parallel.data > 1 and parallel.attention_data:
        what = "copies of the model and data-parallel attention exclude each other"
        yield Problem(what, "parallel.data", "set it to 1, or parallel.attention_data to false")
    if parallel.tensor % parallel.nodes:
        what = f"{parallel.tensor} devices cannot be shared evenly by {parallel.nodes} nodes"
        yield Problem(what, "parallel.nodes", "use a number of nodes that divides parallel.tensor")


def _half(settings: SGLangSettings) -> Iterator[Problem]:
    """Settings of one half of a disaggregated pair that SGLang ignores, or that spoil the other half's work."""
    deployment, role = settings.deployment, settings.deployment.role
    if not settings.is_half:
        return
    if "max_queued_requests" in deployment.limits.model_fields_set:
        what = f"role {role}: SGLang has no limit of its queue there"
        yield Problem(what, "limits.max_queued_requests", "leave it out, and bound the queue at your router")
    if settings.in_effect.get(TRANSFER) == "fake":
        yield Problem(f"role {role}: fake transfers no K/V", f"engine_args.sglang.{TRANSFER}", "name another backend")
    # The decode half drafts with what the prefill half stores of the prompt; SGLang says nothing where that is missing.
    width, method = deployment.speculation.width, settings.in_effect.get("speculative-algorithm")
    if role == "prefill" and settings.checkpoint is None and method is None:
        lost = "beside it a decode half drafts without the prompt, and accepts less"
        if deployment.drafter is not None:
            do = "set it as on the decode half; where that does not draft either, leave the drafter out"
            yield Problem(f"with width {width} a prefill half loads no drafter: {lost}", "speculation.width", do)
        elif width not in ("off", 1):
            do = "name the decode half's; where that does not draft either, set speculation.width to off"
            yield Problem(f"a prefill half without one: {lost}", "drafter", do)


def host_memory_problems(settings: SGLangSettings) -> Iterator[Problem]:
    """Too little host memory for the K/V of retracted requests: SGLang would say so when all weights are loaded."""
    if not settings.has_host_copy or RELEASES.installed() is None or RELEASES.import_problem():
        return
    free: int = import_module("psutil").virtual_memory().available  # as SGLang asks (mem_cache/pool_host/base.py)
    if free <= HOST_RESERVE:
        what = f"{free / GIB:.1f} GiB of host memory are free, and SGLang's copy of retracted K/V begins beyond"
        do = "free some, or set it to cpu_tensor: retracted requests then draft without their context"
        yield Problem(f"{what} {HOST_RESERVE // GIB} GiB", f"engine_args.sglang.{BACKUP}", do)


def _experts(settings: SGLangSettings) -> Iterator[Problem]:
    parallel = settings.deployment.parallel
    yield from expert_problems(settings.deployment, settings.target.experts, "SGLang")
    if parallel.expert in (1, parallel.tensor):
        yield from expert_block_problems(settings.target, parallel.tensor, parallel.expert)


def _block_reuse(settings: SGLangSettings) -> Iterator[Problem]:
    """Settings beside which SGLang itself decides whether prefixes are kept, and logs a warning."""
    asked, where = settings.deployment.kv_cache.block_reuse, "kv_cache.block_reuse"
    given, keeps = settings.in_effect, KEEP_ON_DECODE in settings.in_effect
    kernels = given.get("attention-backend")
    beside = {
        "--enable-mis": "enable-mis" in given,
        f"--enable-deterministic-inference on {kernels}": "enable-deterministic-inference" in given
        and kernels == "flashinfer",
    }
    without = next((argument for argument, is_given in beside.items() if is_given), None)
    if asked and without is not None:
        yield Problem(f"SGLang keeps no prefixes with {without}", where, "leave one of them out")
    elif asked and settings.deployment.role == "decode" and not keeps:
        do = "leave it out"
        if settings.algorithm != DFLASH:
            do += f", or give --{KEEP_ON_DECODE}, which SGLang calls experimental"
        yield Problem("SGLang's decode servers keep no prefixes", where, do)
    elif keeps and settings.deployment.role == "decode" and settings.algorithm == DFLASH:
        what = "SGLang's decode servers keep no prefixes with DFLASH"  # arg_groups/speculative_hook.py
        yield Problem(what, f"engine_args.sglang.{KEEP_ON_DECODE}", "leave it out, or serve without a drafter")
    elif asked is False and settings.deployment.role == "decode" and keeps:
        yield Problem(f"SGLang keeps prefixes with --{KEEP_ON_DECODE}", where, "leave one of them out")


def _heads(settings: SGLangSettings) -> Iterator[Problem]:
    if not settings.deployment.parallel.attention_data:
        yield from attention_head_problems(settings.target, settings.drafter, settings.deployment.parallel.tensor)


def _precision(settings: SGLangSettings) -> Iterator[Problem]:
    yield from _target_precision(settings)
    if settings.deployment.kv_cache.dtype == "nvfp4":
        if settings.gpu is not None and not settings.gpu.has_fp4:
            yield Problem(f"{settings.gpu.name} has no FP4 arithmetic", "kv_cache.dtype", "use fp8 or bfloat16")
        elif settings.checkpoint is not None:
            what = "SGLang refuses DFlash on NVFP4 keys and values (arg_groups/kv_cache_hook.py)"
            yield Problem(what, "kv_cache.dtype", "use fp8 or bfloat16")
    yield from fraction_problems(settings.deployment, "SGLang")


def _target_precision(settings: SGLangSettings) -> Iterator[Problem]:
    yield from quantization_problems(settings.deployment, settings.target)
    drafter, tensor = settings.drafter, settings.deployment.parallel.tensor
    is_plain = drafter is not None and drafter.family == "DFlash"
    if settings.target.head_is_quantized and is_plain and tensor > 1:  # others take it on any number (sglang#35534)
        what = f"the target's lm_head is NVFP4, through which a plain drafter drafts on one device, not {tensor}"
        do = "set it to 1, or use a checkpoint that leaves lm_head out, or a DFlash2 or DSpark drafter"
        yield Problem(what, "parallel.tensor", do)


def _lengths(settings: SGLangSettings) -> Iterator[Problem]:
    yield from length_problems(settings.deployment, settings.target.shape)
    yield from window_problems(settings.deployment)
    yield from unused_speculation(settings.deployment)
    yield from measurement_problems(settings.deployment)


def _arguments(settings: SGLangSettings) -> Iterator[Problem]:
    table, serving = argument_table(settings.deployment), settings.deployment.serving
    yield from table.problems(settings.engine_args)
    if serving.reasoning_parser or serving.tool_call_parser:
        flags = {"reasoning_parser": "reasoning-parser", "tool_call_parser": "tool-call-parser"}
        yield from parser_problems(table, serving, PARSERS, flags)
    if serving.api_key_file is not None:
        unguarded = [f"--{name}" for name in WITHOUT_KEYS if name in settings.in_effect]
        if settings.in_effect.get(TOKENIZERS, 1) != 1:
            unguarded.append(f"--{TOKENIZERS}")
        yield from key_problems(serving.api_key_file, most=1, unguarded=unguarded, variables=OTHER_SERVERS)
    if RELEASES.installed() is not None:
        yield from tracing_problems(settings.deployment)
