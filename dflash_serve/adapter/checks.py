"""Checks that every engine shares: blocks, widths, lengths, devices, heads, keys, changed files, pairs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from dflash_serve.checkpoint.catalogue import catalogued_drafter
from dflash_serve.checkpoint.config import MOST_PADDING, DrafterConfig
from dflash_serve.checkpoint.files import checksum_problems, read_headers, tokenizer_problems
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target import TargetLayout, TargetShape
from dflash_serve.common.http import read_keys
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB, GPUS, PER_NODE
from dflash_serve.deployment.variables import given_cost, given_survival
from dflash_serve.errors import Problem, UserError


def uses_drafter(deployment: Deployment) -> bool:
    """The drafter is loaded."""
    return deployment.drafter is not None and deployment.speculation.width not in ("off", 1)


def block_size_of(deployment: Deployment) -> int:
    """B of the deployment's blocks: its own, else the drafter's. The deployment names a drafter."""
    if deployment.speculation.block_size is not None:
        return deployment.speculation.block_size
    assert deployment.drafter is not None
    return read_config(deployment.drafter.model, deployment.drafter.revision)[0].block_size


def block_problems(deployment: Deployment, drafter: DrafterConfig) -> Iterator[Problem]:
    """A block or a width that the drafter cannot fill."""
    speculation, trained = deployment.speculation, drafter.block_size
    block = speculation.block_size or trained
    if block > trained:
        what = f"block_size {block} is larger than the drafter's {trained}"
        do = f"use {trained} or less: a drafter cannot fill slots it was not trained for"
        yield Problem(what, "speculation.block_size", do)
    if isinstance(speculation.width, int) and speculation.width > block:
        what = f"width {speculation.width} is larger than the block of {block} slots"
        yield Problem(what, "speculation.width", f"use 1 to {block}, auto or off")
    limits = deployment.limits
    for key, tokens in (("max_model_len", limits.max_model_len), ("max_num_tokens", limits.max_num_tokens)):
        if tokens is not None and tokens < block:
            what = f"{tokens} tokens cannot hold one block of {block} slots"
            yield Problem(what, f"limits.{key}", f"use {block} or more, or a smaller speculation.block_size")


def window_problems(deployment: Deployment) -> Iterator[Problem]:
    """A window of a drafter that is not loaded."""
    if deployment.speculation.draft_window is None or uses_drafter(deployment):
        return
    what, do = "there is no drafter", "name one, or remove the window"
    if deployment.drafter is not None:
        what = f"with speculation.width {deployment.speculation.width} no drafter is loaded"
        do = "remove the window, or set another width"
    yield Problem(what, "speculation.draft_window", do)


def measurement_problems(deployment: Deployment) -> Iterator[Problem]:
    """A cost table or a survival in the environment that `width: auto` could not read."""
    if not uses_drafter(deployment) or deployment.speculation.width != "auto":
        return
    for read in (given_cost, given_survival):
        try:
            read()
        except UserError as error:
            yield error.problem()


def fraction_problems(deployment: Deployment, engine: str) -> Iterator[Problem]:
    """A share of the memory of a GPU that is not named, where the engine must be told the share of all memory."""
    if deployment.kv_cache.memory_fraction is not None and GPUS.get(deployment.hardware.gpu or "none") is None:
        what = "a share of the memory is asked for, but not of which GPU"
        yield Problem(what, "kv_cache.memory_fraction", f"name hardware.gpu, or leave the share to {engine}")


def unused_speculation(deployment: Deployment) -> Iterator[Problem]:
    """A block or a number of slots, and no drafter that could fill them."""
    if deployment.drafter is not None:
        return
    block, width = deployment.speculation.block_size, deployment.speculation.width
    do = "name a drafter, or leave it out"
    if block is not None:
        yield Problem(f"block_size {block}, but there is no drafter", "speculation.block_size", do)
    if width not in ("auto", "off", 1):
        yield Problem(f"width {width}, but there is no drafter", "speculation.width", do)


BUILT = ("fp8", "nvfp4")
"""Formats that `dflash-serve build` makes of a target."""
BUILT_OF_DRAFTERS = (*BUILT, "int8", "w8a16", "w4a16")


def quantization_problems(deployment: Deployment, target: TargetLayout) -> Iterator[Problem]:
    """A number format of the target that its checkpoint has not. Engines convert bf16 weights to fp8."""
    asked, native = deployment.target.quantization, target.native_quantization
    where = "target.quantization"
    if asked != "none" and native is not None and asked not in (native, target.precision):
        do = "leave it out: a quantised checkpoint says its format itself"
        yield Problem(f"{asked} is asked for, but the checkpoint is {target.precision}", where, do)
    elif asked not in ("none", "fp8") and native is None:
        what = f"{asked} is asked for, but the checkpoint is not quantised"
        do = f"give a checkpoint in {asked}, or leave it out"
        yield Problem(what, where, f"{do}; `dflash-serve build` makes one" if asked in BUILT else do)


def drafter_quantization_problems(deployment: Deployment, found: Quantization | None) -> Iterator[Problem]:
    """A number format of the drafter that its checkpoint has not: every engine takes the weights as they are stored."""
    asked = deployment.drafter.quantization if deployment.drafter else "none"
    have = found.format if found else "none"
    if asked not in ("none", have):
        what = f"the drafter's checkpoint is {'not quantised' if have == 'none' else have}, not {asked}"
        do = f"set it to {have}"
        if asked in BUILT_OF_DRAFTERS:
            do += "; or build the drafter with `dflash-serve build`, and name the folder it wrote"
        yield Problem(what, "drafter.quantization", do)


def length_problems(deployment: Deployment, target: TargetShape) -> Iterator[Problem]:
    """More tokens than the target has positions."""
    asked, most = deployment.limits.max_model_len, target.max_position_embeddings
    if asked is not None and most is not None and asked > most:
        what = f"{asked} is more than the target's {most} positions"
        yield Problem(what, "limits.max_model_len", f"use {most} or less")


def device_problems(
    deployment: Deployment, model_devices: int, weight_bytes: int, *, several_nodes: bool = True
) -> Iterator[Problem]:
    """Another number of GPUs than the deployment has, or more on a node than a node has.

    A model that fits one GPU is advised to be copied, not split.

    Args:
        model_devices: GPUs of one copy of the model.
        weight_bytes: of the target, on all its devices together.
        several_nodes: the backend has servers of several nodes.
    """
    parallel, count = deployment.parallel, deployment.hardware.count
    gpu = GPUS.get(deployment.hardware.gpu or "none")
    most = gpu.per_node if gpu else PER_NODE
    if count > most * parallel.nodes:
        named, nodes = f"node of {gpu.name}" if gpu else "node", -(-count // most)
        what = f"{count} GPUs (hardware.count) on {parallel.nodes} node{'s' * (parallel.nodes > 1)}"
        where, do = "parallel.nodes", f"set it to {nodes} or more"
        if parallel.data > 1:
            where, do = "parallel.data", "use fewer copies in this server, and more servers"
        elif not several_nodes:
            where, do = "hardware.count", "use fewer, or --backend sglang"
        yield Problem(f"{what}, but a {named} has at most {most}", where, do)
    used = model_devices * parallel.data
    if used == count:
        return
    what = f"{model_devices} GPU{'s' * (model_devices > 1)} for a copy of the model"
    what += f" x {parallel.data} copies" if parallel.data > 1 else ""
    what += f", but hardware.count is {count}"
    fits = weight_bytes / model_devices < (gpu or min(GPUS.values(), key=lambda one: one.memory)).memory / 2
    ways = {"parallel.tensor": f"parallel.tensor to {count}", "hardware.count": f"hardware.count to {used}"}
    if fits and count > used and count % model_devices == 0:
        size, copies = f"{weight_bytes / model_devices / GIB:.0f} GiB of weights", count // model_devices
        ways = {"parallel.data": f"parallel.data to {copies} ({size} leave room on a GPU: copies answer more)"} | ways
    yield Problem(what, next(iter(ways)), f"set {', or '.join(ways.values())}")


def expert_problems(deployment: Deployment, experts: int, engine: str) -> Iterator[Problem]:
    """Experts that an engine, which shares them among its tensor-parallel devices, cannot share so."""
    parallel = deployment.parallel
    if parallel.expert == 1:
        return
    if not experts:
        yield Problem("the target has no experts", "parallel.expert", "set it to 1")
    elif parallel.expert != parallel.tensor:
        what = f"expert parallelism {parallel.expert} is not tensor parallelism {parallel.tensor}"
        do = f"{engine} shares experts among all tensor-parallel devices: use {parallel.tensor} or 1"
        yield Problem(what, "parallel.expert", do)
    elif experts % parallel.expert:
        what = f"{experts} experts cannot be shared evenly by {parallel.expert} devices"
        yield Problem(what, "parallel.expert", "use a divisor")


def expert_block_problems(target: TargetLayout, tensor: int, expert: int) -> Iterator[Problem]:
    """Experts in FP8 whose slices are no whole blocks: SGLang refuses them while it loads (`quantization/fp8.py`)."""
    blocks, slices = target.expert_blocks, tensor // expert
    if blocks and blocks % slices:
        what = f"an expert's {blocks} FP8 blocks cannot be shared evenly by {slices} devices"
        yield Problem(what, "parallel.tensor", f"set parallel.expert to {tensor}, or use a divisor of {blocks}")


def attention_head_problems(target: TargetLayout, drafter: DrafterConfig | None, tensor: int) -> Iterator[Problem]:
    """Heads are split over devices; K/V heads are split, or repeated where there are more devices than heads."""
    shapes = [("target.model", target.attention_heads, 1 if target.latent else target.kv_heads)]
    if drafter is not None:
        shapes.append(
            ("drafter.model", drafter.num_attention_heads, 1 if drafter.latent else drafter.num_key_value_heads)
        )
    for where, heads, kv_heads in shapes:
        if heads % tensor:
            what = f"{heads} attention heads cannot be split over {tensor} devices"
            yield Problem(what, where, "use a number of devices that divides them")
        elif max(kv_heads, tensor) % min(kv_heads, tensor):
            what = f"{kv_heads} K/V heads can be neither split over {tensor} devices nor repeated evenly"
            yield Problem(what, where, "use a divisor or a multiple of them")


def key_problems(
    file: str, most: int | None = None, unguarded: Iterable[str] = (), variables: Iterable[str] = ()
) -> Iterator[Problem]:
    """A file of API keys that cannot be read, has none, or more than an engine takes.

    Args:
        unguarded: arguments that are given, and with which the engine checks no key.
        variables: variables of the environment with which it checks none, where they are set to something.
    """
    where = "serving.api_key_file"
    is_set = (name for name in variables if os.environ.get(name, "").lower() not in ("", "0", "false"))
    for name in (*unguarded, *is_set):
        do = f"leave {name} out, or check keys in a gateway"
        yield Problem(f"with {name} this engine checks no API key", where, do)
    try:
        keys = read_keys(file)
    except UserError as error:
        yield Problem(f"{error.where} {error.what}", where, error.do)
        return
    if most is not None and len(keys) > most:
        yield Problem(f"{file} has {len(keys)} keys, this engine takes {most}", where, "leave one in it")


def tracing_problems(deployment: Deployment) -> Iterator[Problem]:
    """Traces are asked for, and this environment, an engine's, has nothing that sends them."""
    if deployment.serving.otlp_traces_endpoint is None:
        return
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        do = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        yield Problem("OpenTelemetry is not installed beside the engine", "serving.otlp_traces_endpoint", do)


def changed_files(deployment: Deployment) -> list[Problem]:
    """Files of what `dflash-serve build` made that are not what it made; asked before anything is loaded.

    Raises:
        UserError: a manifest cannot be read.
    """
    folders = [Path(deployment.target.model)]
    if deployment.drafter is not None and uses_drafter(deployment):
        folders.append(Path(drafter_source(deployment.drafter.model)))
    return [problem for folder in folders if folder.is_dir() for problem in checksum_problems(folder)]


def target_file_problems(target: str, *, weights: bool = True, tokenizer: bool = True) -> list[Problem]:
    """Problems of the files of a target's folder, whose data are not read; none for a hub id.

    A folder without weights has none: it describes a target that is fetched or deployed elsewhere.

    Args:
        weights: the engine reads them from safetensors.
        tokenizer: the engine takes it from this folder.
    """
    folder, found = Path(target), list[Problem]()
    if not any(folder.glob("*.safetensors*")):
        return []
    if weights:
        read_headers(folder, found)
    return found + (tokenizer_problems(folder) if tokenizer else [])


def layer_problems(drafter: DrafterConfig, engine: str) -> Iterator[Problem]:
    """Target layers that an engine hands out otherwise than listed: in the order of layers, each once.

    SGLang 0.5.23 (`layers_to_capture` in models/llama.py, qwen3.py, gpt_oss.py), vLLM 0.32
    (`_set_aux_hidden_state_layers`, models/interfaces.py), TensorRT-LLM.
    """
    ids = list(drafter.target_layer_ids)
    if len(set(ids)) < len(ids):
        what = f"target_layer_ids {ids} name a layer twice; {engine} hands its output out once"
        yield Problem(what, "drafter.model", "use --backend torch")
    elif ids != sorted(ids):
        what = f"target_layer_ids {ids} are not in order; {engine} hands outputs out in the order of layers"
        yield Problem(what, "drafter.model", "start it by `dflash-serve serve`, which puts the columns of fc in order")


def check_pairing(config: DrafterConfig, target: TargetShape) -> list[Problem]:
    """Reasons why the drafter cannot be this target's."""
    where = f"drafter for {target.name}"
    return [Problem(what, where, do) for what, do in _mismatches(config, target)]


def pairing_notes(config: DrafterConfig, target: TargetShape) -> list[str]:
    """Unusual properties of a pair that may be sound: a drafter can be trained with a RoPE base of its own."""
    sound = "sound only where it was trained so; where it was not, it accepts little, and `dflash-serve doctor` says so"
    notes, (own, scaling) = [], (config.rope.theta, config.rope.scaling)
    if target.rope_theta not in (None, own):
        notes.append(f"its RoPE base is {own:g}, {target.name}'s is {target.rope_theta:g}: {sound}")
    if target.rope_theta is not None and target.rope_scaling != scaling:
        kinds = f"its RoPE is {scaling or 'plain'}, {target.name}'s is {target.rope_scaling or 'plain'}"
        notes.append(f"{kinds}: {sound}")
    for key, tokens in target.special_tokens.items():
        if config.mask_token_id in tokens:
            notes.append(f"mask_token_id {config.mask_token_id} is {target.name}'s {key}: {sound}")
    return notes


def precision_of_training(drafter: str) -> str | None:
    """Format of the weights of the target that a published drafter was trained beside; None = not known."""
    row = catalogued_drafter(drafter)
    return row.target_precision if row else None


def precision_notes(drafter: str, target: str, precision: str | None) -> Iterator[str]:
    """A published drafter beside a form of its target that it was not trained with.

    Args:
        drafter: hub id; nothing is known of other names.
        target: name of the target, for the message.
        precision: format of the target's weights; None = unquantised.
    """
    row = catalogued_drafter(drafter)
    made, served = row.target_precision if row else None, precision or "bf16"
    if row is not None and made not in (None, served):
        beside = f"{row.repository} was trained beside {row.target} with {made} weights, {target} has {served}"
        yield f"{beside}: it may accept nothing, without an error; `dflash-serve doctor` measures it"


def _mismatches(config: DrafterConfig, target: TargetShape) -> Iterator[tuple[str, str]]:
    """(what, do) of each."""
    other = "use the drafter that was trained for this target"
    if config.hidden_size != target.hidden_size:
        yield f"hidden_size is {config.hidden_size}, the target's is {target.hidden_size}", other
    if config.vocab_size != target.vocab_size:
        sizes = f"vocab_size is {config.vocab_size}, the target's is {target.vocab_size}"
        padded = 0 < config.vocab_size - target.vocab_size < MOST_PADDING
        right = "cut it to the target's by `dflash-serve convert --target`"
        yield (f"{sizes}: it may be a padded size", f"{right}, or {other}") if padded else (sizes, other)
    if config.num_target_layers not in (None, target.num_layers):
        yield f"trained for a target of {config.num_target_layers} layers, this one has {target.num_layers}", other
    beyond = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
    if beyond:
        yield (
            f"target_layer_ids {list(config.target_layer_ids)} name {beyond}, but the target has layers "
            f"0..{target.num_layers - 1} (ids are 0-based layer outputs)",
            "correct target_layer_ids (speculators and GGUF count from 1), or use this target's drafter",
        )
    token = config.mask_token_id
    if token is not None and token >= target.vocab_size:
        yield (
            f"mask_token_id {token} has no row in the target's embedding of {target.vocab_size}",
            "correct mask_token_id; a special token added after training does not count",
        )
    longest = target.max_position_embeddings
    if longest is not None and config.block_size > longest:
        yield f"block_size {config.block_size} exceeds the target's {longest} positions", "correct block_size"
