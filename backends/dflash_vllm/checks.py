"""Problems of a deployment on vLLM 0.32-0.33, found from files alone."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module

from dflash_serve.adapter.arguments import parser_problems
from dflash_serve.adapter.checks import (
    attention_head_problems,
    block_problems,
    device_problems,
    drafter_quantization_problems,
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
from dflash_serve.common.http import read_keys
from dflash_serve.errors import Problem

from .drafter_rules import drafter_problems
from .engine_arguments import PARSER_FLAGS, PARSERS, argument_table
from .facts import FACTS, RELEASES
from .layouts import storage_problems
from .settings import VLLMSettings

WITHOUT_KEYS = (
    "grpc",
    "grpc-port",
)  # arguments of servers that take no `--middleware` (vLLM's entrypoints/cli/serve.py)
LANGUAGE_MODELS = (
    *("Afmoe", "Apertus", "Cohere2Moe", "DeepseekV2", "DeepseekV3", "DeepseekV32", "DeepseekV4", "Gemma4", "GlmMoeDsa"),
    *("GptOss", "Granite", "K2Horizon", "KimiLinear", "Laguna", "Llama", "Llama4", "Mellum", "MiMoV2", "MiMoV2Flash"),
    *("MiniCPM", "MiniCPM3", "MiniMaxM2", "Mistral", "MuseGlimmer", "NemotronH", "Plamo3", "Qwen2", "Qwen3"),
    *("Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SarvamMLA", "Step1"),
)
MULTIMODAL = (
    *("Gemma4", "Glm5Next", "KimiK25", "KimiK3", "Llama4", "MiniMaxM3Sparse", "Mistral3", "MuseGlimmer", "Qwen3VL"),
    *("Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"),
)
CAPTURING = {
    *(f"{name}ForCausalLM" for name in LANGUAGE_MODELS),
    *(f"{name}ForConditionalGeneration" for name in MULTIMODAL),
}
"""Architectures whose vLLM model hands out hidden states; the installed vLLM is asked about others, which is slow."""
PLUG_IN = "dflash_serve"  # our entry point in vLLM's groups of plug-ins
PLUG_INS_VARIABLE = "VLLM_PLUGINS"  # vLLM's own: the plug-ins that are loaded; absent = all
RUST_VARIABLE = "VLLM_USE_RUST_FRONTEND"  # vLLM's own: its front-end in Rust: no stat logger, no `--middleware`
NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""vLLM's own: the address at which a half is asked where its K/V are."""
PARSER_PLUGINS = {"reasoning-parser-plugin", "tool-parser-plugin"}
"""Arguments that bring parsers of answers which vLLM does not know before it starts."""


def problems(settings: VLLMSettings) -> list[Problem]:
    """Problems of a launch: the drafter's own first, because the others may follow from them."""
    found = list(settings.checkpoint.problems) if settings.checkpoint else []
    devices, on_cpu = settings.deployment.parallel.tensor, settings.on_cpu
    found += storage_problems(settings.checkpoint, devices, "drafter.model", dtype=settings.dtype, on_cpu=on_cpu)
    found += drafter_quantization_problems(
        settings.deployment, settings.checkpoint.quantization if settings.checkpoint else None
    )
    found += RELEASES.problems(RELEASES.installed())
    if settings.drafter is not None:
        limits = settings.deployment.limits
        found += drafter_problems(
            settings.drafter, settings.target.shape, max_model_len=limits.max_model_len, v1_runner=settings.v1_runner
        )
        found += block_problems(settings.deployment, settings.drafter)
    found += [
        *_speculation(settings),
        *_half(settings),
        *refusal_problems(settings.deployment, FACTS.refusals),
        *_devices(settings),
        *expert_problems(settings.deployment, settings.target.experts, "vLLM"),
    ]
    found += attention_head_problems(settings.target, settings.drafter, settings.deployment.parallel.tensor)
    found += [*_precision(settings), *memory_problems(settings)]
    unreadable = list(measurement_problems(settings.deployment))
    found += unreadable or _arguments(settings)  # which arguments are the user's to give depends on them
    return [*found, *length_problems(settings.deployment, settings.target.shape)]


def _arguments(settings: VLLMSettings) -> Iterator[Problem]:
    table, serving = argument_table(settings), settings.deployment.serving
    yield from table.problems(settings.engine_args)
    if not PARSER_PLUGINS & settings.given:
        yield from parser_problems(table, serving, PARSERS, PARSER_FLAGS)
    if serving.api_key_file is not None:
        unguarded = [f"--{name}" for name in WITHOUT_KEYS if name in settings.in_effect]
        unreadable = list(key_problems(serving.api_key_file, unguarded=unguarded, variables=[RUST_VARIABLE]))
        yield from unreadable
        if not unreadable and any(key.startswith("-") for key in read_keys(serving.api_key_file)):
            what = f"{serving.api_key_file} has a key that begins with -, which vLLM takes for a flag"
            yield Problem(what, "serving.api_key_file", "make another key")
    if RELEASES.installed() is not None:
        yield from tracing_problems(settings.deployment)


def _speculation(settings: VLLMSettings) -> Iterator[Problem]:
    if settings.checkpoint is None:
        yield from window_problems(settings.deployment)
        yield from unused_speculation(settings.deployment)
        return
    plug_ins = os.environ.get(PLUG_INS_VARIABLE)
    if plug_ins is not None and PLUG_IN not in plug_ins.split(","):  # vLLM only logs that
        what = f"{plug_ins!r} leaves {PLUG_IN} out: drafters would not be loaded strictly, nor their slots counted"
        yield Problem(what, PLUG_INS_VARIABLE, f"add {PLUG_IN}, or unset it")
    if os.environ.get(RUST_VARIABLE, "0") != "0":
        what = "vLLM's front-end in Rust runs no stat logger: widths and slots would not be counted"
        yield Problem(what, RUST_VARIABLE, "unset it")
    if captures(settings) is False:
        what = f"vLLM's {settings.target.architecture} does not hand out hidden states"
        yield Problem(what, "target.model", "serve without a drafter, or use another backend")
    width, block = settings.deployment.speculation.width, settings.block_size
    if settings.verifies_whole_blocks and settings.drafter is not None and width not in ("auto", block):
        what = f"vLLM verifies whole blocks of {block} slots with a {settings.drafter.family} drafter, not {width}"
        yield Problem(what, "speculation.width", f"set it to {block}, auto or off, or use --backend torch")
    asked = settings.deployment.limits.max_num_tokens
    if asked is not None and settings.block_rows > asked:
        batch, block = settings.max_batch_size, settings.block_size
        what = f"{batch} blocks of {block} slots are {settings.block_rows} rows a step, max_num_tokens is {asked}"
        yield Problem(what, "limits.max_num_tokens", f"set it to {settings.block_rows}, or limits.max_batch_size lower")


def _half(settings: VLLMSettings) -> Iterator[Problem]:
    """Drafters and targets with which a half of a disaggregated pair crashes, or drafts without the prompt."""
    if settings.drafter is None or not settings.is_half:
        return
    width, block = settings.deployment.speculation.width, settings.block_size
    if width not in ("auto", block):
        what = f"vLLM verifies whole blocks of {block} slots on one half of a pair, not {width}"
        yield Problem(what, "speculation.width", f"set it to {block}, auto or off")
    if settings.drafter.family == "DSpark":
        what = "vLLM's DSpark crashed on prefill halves with GPUs (docs/distributed.md), and was not tried since"
        yield Problem(what, "drafter.model", "serve whole, use a plain drafter, or --backend sglang")
    if settings.target.recurrent:
        what = "vLLM does not tell a drafter's K/V from the target's recurrent layers (vllm#57032)"
        yield Problem(what, "target.model", "serve whole, serve without a drafter, or use --backend sglang")


def side_channel_problems(settings: VLLMSettings) -> Iterator[Problem]:
    """An address of this half that is taken: vLLM's start then waits without an end (nixl/base_scheduler.py)."""
    if not settings.is_half:
        return
    host, port = os.environ.get(NIXL_HOST, "localhost"), os.environ.get(NIXL_PORT, "5600")  # vLLM's own defaults
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        yield Problem(f"{port!r} is no port", NIXL_PORT, "set it to a free port of this machine")
        return
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        what = f"this half cannot listen at {host}:{port} ({error.strerror or error}): vLLM would hang at its start"
        do = f"give each half on this machine a free port by {NIXL_PORT}, and {NIXL_HOST} an address of this machine"
        yield Problem(what, NIXL_PORT, do)


def captures(settings: VLLMSettings) -> bool | None:
    """vLLM's model of the target hands out hidden states; None = unknown, as vLLM or the model cannot be imported."""
    if settings.target.architecture in CAPTURING:
        return True
    if not RELEASES.supports(RELEASES.installed()) or RELEASES.import_problem():
        return None
    with redirect_stdout(sys.stderr):  # where vLLM's log goes as soon as it is imported
        known = import_module("vllm").ModelRegistry.models.get(settings.target.architecture)
        asks = import_module("vllm.model_executor.models.interfaces").supports_eagle3
        try:
            return known is not None and bool(asks(known.load_model_cls()))
        except ImportError:
            return None


def _devices(settings: VLLMSettings) -> Iterator[Problem]:
    parallel, size = settings.deployment.parallel, settings.target.weight_bytes
    if parallel.data == 1:
        devices = parallel.tensor * parallel.pipeline
        yield from device_problems(settings.deployment, devices, size, several_nodes=False)


def _precision(settings: VLLMSettings) -> Iterator[Problem]:
    yield from quantization_problems(settings.deployment, settings.target)
    yield from fraction_problems(settings.deployment, "vLLM")
    if settings.dtype == "float32" and not settings.on_cpu:
        yield Problem("vLLM's attention on GPUs has no float32", "hardware.dtype", "use auto or bfloat16")
