"""Properties of a launch that TensorRT-LLM refuses, gets wrong or does slowly, found before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflash_serve.adapter.checks import (
    BUILT,
    attention_head_problems,
    block_problems,
    check_pairing,
    device_problems,
    drafter_quantization_problems,
    length_problems,
    unused_speculation,
)
from dflash_serve.adapter.draft_layouts import DEQUANTISE, SERVED, Layouts, layout_problems
from dflash_serve.adapter.launch import memory_problems
from dflash_serve.adapter.refusals import refusal_problems
from dflash_serve.checkpoint.catalogue import EngineVerdict
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.deployment.gpus import GIB
from dflash_serve.errors import Problem, UserError

from .engine_arguments import argument_problems, config_fields, serving_problems
from .facts import FACTS
from .settings import PAGE, TensorRTLLMSettings, is_dspark
from .upstream import DFLASH2, FROM_1_4, NEWEST, OLDEST, WITHOUT_DRAFTER, Release

Check = Callable[[TensorRTLLMSettings], Iterator[Problem]]
TO_MODELOPT = EngineVerdict(
    verdict="after convert",
    why="TensorRT-LLM reads ModelOpt's layout alone; `dflash-serve convert --layout modelopt` writes it",
)
LAYOUTS: Layouts = {
    ("modelopt", "fp8"): SERVED,
    ("modelopt", "nvfp4"): SERVED,
    **dict.fromkeys([("compressed-tensors", "fp8"), ("compressed-tensors", "nvfp4"), ("fp8", "fp8")], TO_MODELOPT),
}
"""Quantised drafters (modeling_dflash.py, read, and our own drafter): FP8 by tensor and NVFP4."""
PAGES = (16, 32, 64)  # tokens a page for which trtllm-gen has kernels of other than causal attention
LEAST_POOL = 0.15  # share of the memory after the weights that must stay for the target's K/V, or batches would not fit


def problems(settings: TensorRTLLMSettings) -> list[Problem]:
    """Problems of a launch: the drafter's own first, because the others may follow from them."""
    found = list(settings.checkpoint.problems) if settings.checkpoint else []
    checks: list[Check] = [_refusals, _devices, serving_problems, argument_problems, _target_layout, _target_precision]
    checks += [_kv_dtype, _speculation]
    if settings.drafter is not None:
        checks = [_release, *checks, _drafter_fits, _implementation, _blocks_of_16, _block_reuse]
        checks += [_keys_beside_a_drafter]
    return found + [problem for check in [*checks, _lengths, _rows, _memory] for problem in check(settings)]


def _refusals(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    yield from refusal_problems(settings.deployment, FACTS.refusals)


def _release(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    if settings.release < OLDEST:
        what = f"TensorRT-LLM {settings.release} is not supported with a drafter, {OLDEST} to {NEWEST} are"
        yield Problem(what, "TensorRT-LLM", f"install {OLDEST} or later")


def _devices(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    parallel, hardware = settings.deployment.parallel, settings.deployment.hardware
    world = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.data == 1:
        yield from device_problems(settings.deployment, world, settings.target.weight_bytes)
    if world % parallel.nodes:
        what = f"{world} devices do not spread evenly over {parallel.nodes} nodes"
        yield Problem(what, "parallel.nodes", "change one")
    if hardware.dtype == "bfloat16" and settings.target.dtype not in ("bfloat16", None):
        # Its PyTorch models are made in the `dtype` of config.json; `TorchLlmArgs.dtype` does not change it.
        what = f"TensorRT-LLM serves in the checkpoint's number format, which is {settings.target.dtype}"
        yield Problem(what, "hardware.dtype", "set it to auto, or use --backend sglang or vllm")


def _speculation(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """Keys without a drafter, or a cost table that cannot be read."""
    yield from unused_speculation(settings.deployment)
    try:
        settings.draft_lengths()
    except UserError as error:
        yield error.problem()


def _target_layout(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    parallel, target = settings.deployment.parallel, settings.target
    if parallel.tensor % parallel.expert:
        what = f"expert {parallel.expert} does not divide tensor {parallel.tensor}"
        do = "experts are shared out among the tensor-parallel devices: use a divisor"
        yield Problem(what, "parallel.expert", do)
    if parallel.expert > 1 and not target.experts:
        yield Problem(f"{target.shape.name} has no experts", "parallel.expert", "set it to 1")
    elif parallel.expert > 1 and target.experts % parallel.expert:
        what = f"{target.experts} experts do not spread evenly over {parallel.expert} devices"
        yield Problem(what, "parallel.expert", f"use a divisor of {target.experts}")
    if parallel.attention_data and parallel.tensor == 1:
        yield Problem("attention data parallelism on one device", "parallel.attention_data", "set it to false")
    yield from attention_head_problems(target, settings.drafter, settings.drafter_devices)
    if settings.drafter is not None and settings.drafter.intermediate_size % settings.drafter_devices:
        columns = settings.drafter.intermediate_size
        what = f"the drafter's {columns} MLP columns do not split over {settings.drafter_devices} devices"
        yield Problem(what, "parallel.tensor", f"use a divisor of {columns}, or attention_data")


def _target_precision(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    quantization, gpu = settings.deployment.target.quantization, settings.gpu
    native = settings.target.native_quantization
    if native == "compressed-tensors":
        what = "its weights are compressed-tensors in integers, whose activations TensorRT-LLM takes for quantised too"
        yield Problem(what, "target.model", "serve an FP8 or NVFP4 checkpoint of it, or use --backend vllm")
    elif quantization == "mxfp4" and native != "mxfp4":
        what = "mxfp4 is how gpt-oss is published; TensorRT-LLM does not quantise to it"
        yield Problem(what, "target.quantization", "leave it out, or use a gpt-oss checkpoint")
    elif quantization != "none" and native is None:
        what = f"the target's checkpoint is not {quantization}, and TensorRT-LLM loads weights as they are stored"
        do = "build it with `dflash-serve build`, and name the folder it wrote"
        yield Problem(what, "target.quantization", do if quantization in BUILT else "leave it out")
    elif quantization not in ("none", native, settings.target.precision):
        what = f"the target's weights are {settings.target.precision} already, not {quantization}"
        yield Problem(what, "target.quantization", f"set it to {'mxfp4' if native == 'mxfp4' else 'none'}")
    if gpu is not None:
        kv = settings.deployment.kv_cache.dtype
        for where, formats in (("target.quantization", (quantization, native)), ("kv_cache.dtype", (kv,))):
            if "nvfp4" in formats and not gpu.has_fp4:
                what = f"NVFP4 arithmetic needs Blackwell, {gpu.name} is SM{gpu.compute}"
                yield Problem(what, where, f"use {'fp8' if gpu.has_fp8 else 'bfloat16'}, or b200 or b300")
            if "fp8" in formats and not gpu.has_fp8:
                what = f"FP8 arithmetic needs SM89 or newer, {gpu.name} is SM{gpu.compute}"
                yield Problem(what, where, "use bfloat16, or a newer GPU, or --backend sglang or vllm")


def _kv_dtype(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """Upstream takes auto, fp8 and nvfp4 (`_VALID_KV_CACHE_DTYPES`, model_loader.py); auto is the checkpoint's."""
    if settings.deployment.kv_cache.dtype == "bfloat16" and settings.target.quantized_kv:
        what = "the target's checkpoint asks for quantised K/V, and TensorRT-LLM cannot take them in bfloat16 instead"
        yield Problem(what, "kv_cache.dtype", "set it to auto, or use --backend sglang or vllm")


def unserved_heads(heads: Heads, release: Release) -> Iterator[Problem]:
    """Heads that a release of TensorRT-LLM does not run; no release has d2t."""
    other = "use --backend torch or sglang"
    if heads.latent is not None:
        what = "latent attention (MLA) in a drafter, which dflash-serve does not launch on TensorRT-LLM"
        yield Problem(what, "drafter", "use --backend vllm, or TensorRT-LLM's own command")
    if is_dspark(heads) and release < FROM_1_4:
        what = f"{heads.words}: TensorRT-LLM {release} has no DSpark drafter in a folder of its own"
        yield Problem(what, "drafter", f"install TensorRT-LLM 1.4, or {other}")
    if heads.markov is not None and heads.markov.kind != "vanilla":
        yield Problem(f"a {heads.markov.kind} Markov head: TensorRT-LLM has vanilla ones only", "drafter", other)
    if heads.attention_sinks:
        yield Problem(
            "attention sinks, which no drafter of TensorRT-LLM's has", "drafter", "use --backend sglang or vllm"
        )
    if (heads.convolution is None) != (heads.selector is None) or (heads.convolution and is_dspark(heads)):
        what = f"{heads.words}: TensorRT-LLM has convolutions together with a selector only, and no other head beside"
        yield Problem(what, "drafter", "use --backend torch")
    elif heads.selector is not None and release < DFLASH2:
        what = f"TensorRT-LLM {release} is not known to have DFlash2, {DFLASH2} does"
        yield Problem(what, "drafter", f"install TensorRT-LLM {DFLASH2}, or {other}")
    if heads.draft_vocabulary is not None:
        what = "a reduced draft vocabulary: TensorRT-LLM has no d2t and drafts through the target's head"
        do = "convert it (`dflash-serve convert --full-vocabulary --target ...`), or use --backend torch"
        yield Problem(what, "drafter", do)


def _drafter_fits(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    assert settings.drafter is not None
    yield from unserved_heads(settings.drafter, settings.release)
    family = settings.target.shape.model_type
    if family in WITHOUT_DRAFTER:
        what = f"TensorRT-LLM's model for {family!r} makes no drafter, whatever speculative_config says"
        yield Problem(what, "target.model", "serve without a drafter, or use another backend")
    yield from check_pairing(settings.drafter, settings.target.shape)
    yield from drafter_quantization_problems(settings.deployment, settings.quantization)
    yield from storage_problems(settings.checkpoint, "drafter.model")
    have = settings.quantization.format if settings.quantization else "none"
    if have == "nvfp4" and settings.gpu is not None and not settings.gpu.has_fp4:
        what = f"an NVFP4 drafter needs Blackwell, {settings.gpu.name} is SM{settings.gpu.compute}"
        yield Problem(what, "drafter", "use the FP8 or bf16 drafter")
    yield from block_problems(settings.deployment, settings.drafter)


def storage_problems(checkpoint: Checkpoint | None, where: str) -> Iterator[Problem]:
    """A form of quantised weights that neither TensorRT-LLM's drafter nor ours reads."""
    found = list(layout_problems(checkpoint, LAYOUTS, "TensorRT-LLM", where))
    yield from found
    if not found and checkpoint is not None and any(one.strategy != "tensor" for one in checkpoint.quantised.values()):
        yield Problem("its FP8 weights have a scale for each row, TensorRT-LLM reads one alone", where, DEQUANTISE)


def _implementation(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    if settings.needs_plug_in and settings.drafter is not None and settings.drafter.words:
        ignored = "; ".join(settings.needs_plug_in)
        what = f"TensorRT-LLM would silently ignore: {ignored}; our drafter there is plain DFlash"
        yield Problem(what, "drafter", "use a bf16 drafter without it, or --backend torch")
    elif settings.needs_plug_in and settings.release < FROM_1_4:
        what = f"TensorRT-LLM {settings.release} would silently ignore: {'; '.join(settings.needs_plug_in)}"
        yield Problem(what, "drafter", "install TensorRT-LLM 1.4, which takes our drafter, or use a plain bf16 drafter")
    given = [settings.engine_args.get("load_format"), settings.engine_args.get("load-format")]
    if "dummy" in (str(format).lower() for format in [*given, settings.speculative_args.get("load_format")]):
        what = "with load_format dummy no weights are read, and the drafter makes its first product as it reads them"
        yield Problem(what, "engine_args.tensorrt-llm.load_format", "leave it out, or set speculation.width: off")


def _keys_beside_a_drafter(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """The user's own keys that work, but with no such drafter."""
    where, given = "engine_args.tensorrt-llm", config_fields(settings.engine_args)
    if str(given.get("attn_backend")).upper().startswith("FLASHINFER"):
        what = "TensorRT-LLM's FlashInfer attention takes no drafter that has K/V of its own"
        yield Problem(what, f"{where}.attn_backend", "leave it out, or set speculation.width: off")
    pool = given.get("kv_cache_config")
    page = pool.get("tokens_per_block", PAGE) if isinstance(pool, dict) else PAGE
    if settings.context_in_pool and page not in PAGES:
        what = f"the drafter's attention reads pages of 16, 32 or 64 tokens from the K/V pool, not of {page}"
        yield Problem(what, f"{where}.kv_cache_config.tokens_per_block", "set it to one of them, or leave it out")
    do = "leave it out, or set speculation.width: off"
    if given.get("cache_transceiver_config"):
        what = "one half of a pair never sees the prompt's features, so acceptance silently drops (TensorRT-LLM#19352)"
        yield Problem(what, f"{where}.cache_transceiver_config", do)
    if given.get("kv_connector_config") and not settings.speculative_args.get("context_recompute_tail"):
        what = "what a connector brings of a prompt never passes the target: the drafter has no features of it"
        if settings.recomputes_tails:
            do += f"; or have its end computed again: {where}.speculative_config.context_recompute_tail"
        yield Problem(what, f"{where}.kv_connector_config", do)


def _blocks_of_16(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """FP8 kernels take multiples of 16, NVFP4 has one scale for 16 values: on every device's part of the drafter."""
    config, devices = settings.drafter, settings.drafter_devices
    if config is None or settings.quantization is None:
        return
    format = settings.quantization.format
    parts = {
        "query rows": config.num_attention_heads * config.head_dim // devices,
        "K/V rows": settings.drafter_kv_heads * config.head_dim,
        "MLP columns": config.intermediate_size // devices,
        "hidden columns": config.hidden_size,
    }
    for what, size in parts.items():
        if size % 16:
            said = f"{size} {what} of the drafter on a device are no multiple of 16, which {format.upper()} asks for"
            do = "use fewer devices, attention_data, or the bf16 drafter" if devices > 1 else "use the bf16 drafter"
            yield Problem(said, "parallel.tensor" if devices > 1 else "drafter", do)
    if format == "nvfp4" and settings.implementation != "ours" and config.num_key_value_heads < devices:
        what = f"TensorRT-LLM repeats K/V heads on {devices} devices, but not their NVFP4 scales"
        yield Problem(what, "parallel.tensor", f"use at most {config.num_key_value_heads}, or the FP8 drafter")


def _block_reuse(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """A reused prompt never passes the target, so its features must be made again: as many as the user says."""
    if not settings.deployment.kv_cache.block_reuse:
        return
    if settings.recompute_tail:
        if "enable-chunked-prefill" in settings.given - settings.in_effect.keys():
            what = "without chunked prefill no end of a reused prompt is computed again, whatever was asked"
            where = "engine_args.tensorrt-llm.enable_chunked_prefill"
            yield Problem(what, where, "leave it out, or set kv_cache.block_reuse to false")
        return
    what = "a reused prompt never passes the target: the drafter has no features of it, and accepts little"
    what += " (TensorRT-LLM#16005)"
    do = "set it to false, or leave it out"
    if settings.recomputes_tails:
        do += "; or have its end computed again: engine_args.tensorrt-llm.speculative_config.context_recompute_tail"
    yield Problem(what, "kv_cache.block_reuse", do)


def _lengths(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    yield from length_problems(settings.deployment, settings.target.shape)
    if settings.drafter is not None and settings.max_model_len > settings.drafter.max_position_embeddings:
        covered = settings.drafter.max_position_embeddings
        what = (
            f"the drafter covers {covered} positions of {settings.max_model_len}; longer requests would draft nothing"
        )
        yield Problem(what, "limits.max_model_len", f"set it to {covered}, or use a drafter trained for more")


def _rows(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    asked, batch = settings.deployment.limits.max_num_tokens, settings.max_batch_size
    if asked is None or batch is None or settings.drafter is None:
        return
    rows = batch * settings.block_size
    if rows > asked:
        what = f"{batch} blocks of {settings.block_size} slots are {rows} rows a step, max_num_tokens is {asked}"
        fits = asked // settings.block_size
        do = f"set it to {rows} or more" + (f", or limits.max_batch_size to {fits}" if fits else "")
        yield Problem(what, "limits.max_num_tokens", do)


def _memory(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    yield from memory_problems(settings)
    drafter, memory = settings.drafter, settings.memory
    if drafter is None or memory is None or memory.pool <= 0 or settings.context_in_pool:
        return
    batch, length, budget = settings.max_batch_size or 1, settings.max_model_len, int(memory.pool * (1 - LEAST_POOL))
    needed = settings.arena_bytes(batch, length)
    if needed <= budget:
        return
    what = (
        f"the drafter's context needs {needed / GIB:.1f} GiB a device ({batch} + 1 entries x {drafter.num_layers} "
        f"layers x {length} tokens + {settings.block_size} x {settings.drafter_kv_heads} K/V heads x "
        f"{drafter.head_dim} x 2 x 2 bytes), {budget / GIB:.1f} GiB can be spared"
    )
    largest = budget // settings.arena_bytes(0, length) - 1
    capacity = budget // (settings.context_token_bytes * (batch + 1))
    longest = (capacity - capacity % PAGE - settings.block_size) // PAGE * PAGE
    options = {"limits.max_batch_size": largest, "limits.max_model_len": longest}
    lower = " or ".join(f"{name} to {most}" for name, most in options.items() if most > 0)
    yield Problem(what, "limits", f"lower {lower}" if lower else "use more devices, or a larger GPU")
