"""TensorRT-LLM as a backend: a plan's files, command, choices and notes. `trtllm-serve` serves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from dflash_serve.adapter.launch import DRAFT, DraftForm, ServerAdapter
from dflash_serve.adapter.protocol import Choice, Command, PreparedFile
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, SINGLE, load_object
from dflash_serve.checkpoint.reader import DIALECTS, HINT, Checkpoint, read_tensors
from dflash_serve.checkpoint.writer import fc_in_layer_order
from dflash_serve.common.files import whole_folder
from dflash_serve.common.settings import describe
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB
from dflash_serve.deployment.variables import COST_TABLE
from dflash_serve.errors import Problem, UserError, raise_problems

from .checks import problems, unserved_heads
from .engine_arguments import HARMONY, config_fields, merged, mirrored, named_parsers, serving_options
from .facts import FACTS
from .launch_plan import ROWS, TensorRTLLMPlan, has_two_sided_windows, is_dspark, starving_from
from .plugin import BUILT
from .upstream import NEUTRAL, NEWEST, OLDEST, TRTLLM_ATTENTION, LlmArgs, Release, installed_release, installed_verdict

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, PLUG_IN = "config.yaml", "dflash_serve_drafter"
"""Names of the configuration and of the package that registers our drafter, below the prepared folder."""
CORRECT = "correct engine_args.tensorrt-llm; report it if nothing is wrong there"
REGISTERING = '''"""Written by `dflash-serve`: registers its drafter with TensorRT-LLM wherever this is imported."""

from dflash_tensorrt_llm.plugin import register

TargetModel = register({architecture!r}, __name__, {implementation!r})
'''


def configuration(plan: TensorRTLLMPlan, drafter: Path) -> dict[str, object]:
    """config.yaml, as far as it differs from upstream's defaults, with the user's own keys.

    Args:
        drafter: the folder that it loads.

    Raises:
        UserError: TensorRT-LLM would refuse it.
    """
    batch, target = plan.max_batch_size, plan.deployment.target
    limit = {} if batch is None else {"max_batch_size": batch}
    given = config_fields(plan.engine_args)
    graphs = given.get("cuda_graph_config")
    fields: dict[str, object] = {
        "tensor_parallel_size": plan.deployment.parallel.tensor,
        **limit,
        "max_seq_len": plan.max_model_len,
        "max_num_tokens": plan.max_num_tokens,
        "kv_cache_config": _kv_cache(plan),
        # Padding lets every batch size use a graph; without it a batch of 17 runs eagerly.
        "cuda_graph_config": {
            "enable_padding": True,
            **({} if isinstance(graphs, dict) and graphs.get("batch_sizes") else limit),
        },
        "enable_iter_perf_stats": True,  # acceptance in /metrics
        "return_perf_metrics": True,  # without it there is no /prometheus/metrics
        **_parallel(plan),
        # Without it upstream silently computes no tail again.
        **({"enable_chunked_prefill": True} if plan.deployment.kv_cache.block_reuse and plan.recompute_tail else {}),
        **({} if target.revision is None else {"revision": target.revision}),
        **({} if plan.drafter is None else {"speculative_config": _speculative(plan, drafter)}),
    }
    fields = merged(fields, given)
    where = f"configuration for TensorRT-LLM {plan.release}"
    refusal = installed_verdict(plan.release, {"model": target.model, **fields})
    if refusal:
        raise UserError(refusal, where=f"{where}, which is installed", do=CORRECT)
    if refusal is not None:
        return fields
    # Of all methods of speculation, DFlash and DSpark alone are mirrored.
    names = LlmArgs.model_fields.keys() - ({"speculative_config"} if plan.drafts_itself else set())
    ours, others = mirrored(fields, names)
    try:
        known = LlmArgs.model_validate(ours).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise UserError(describe(error), where=where, do=CORRECT) from None
    return merged(known, others)


def _parallel(plan: TensorRTLLMPlan) -> dict[str, object]:
    parallel, fields = plan.deployment.parallel, dict[str, object]()
    if parallel.pipeline > 1 or parallel.context > 1:
        fields |= {"pipeline_parallel_size": parallel.pipeline, "context_parallel_size": parallel.context}
    if parallel.expert > 1:
        fields["moe_expert_parallel_size"] = parallel.expert
    if parallel.attention_data:
        fields["enable_attention_dp"] = True
    if parallel.nodes > 1:
        fields["gpus_per_node"] = plan.deployment.hardware.count // parallel.nodes
    return fields


def _kv_cache(plan: TensorRTLLMPlan) -> dict[str, object]:
    """The target's K/V pool; blocks are reused only where no drafter needs the features of every prompt token."""
    kv_cache = plan.deployment.kv_cache
    speculates = plan.drafter is not None or plan.drafts_itself
    fields: dict[str, object] = {
        "enable_block_reuse": not speculates if kv_cache.block_reuse is None else kv_cache.block_reuse
    }
    if kv_cache.dtype in ("fp8", "nvfp4"):  # upstream has no bfloat16: `auto`, the checkpoint's own
        fields["dtype"] = kv_cache.dtype
    fraction = plan.pool_fraction if kv_cache.memory_fraction is None else kv_cache.memory_fraction
    return fields if fraction is None else {**fields, "free_gpu_memory_fraction": fraction}


def _speculative(plan: TensorRTLLMPlan, drafter: Path) -> dict[str, object]:
    """DFlash or DSpark with the drafter in that folder; K = B - 1, for upstream does not count the anchor."""
    config, lengths = plan.drafter, plan.draft_lengths()
    assert config is not None
    most = max(lengths.values()) if lengths else plan.block_size - 1
    return {
        "decoding_type": plan.decoding_type,
        "max_draft_len": most,
        **({"draft_len_schedule": lengths} if lengths else {}),
        **({"block_size": most} if plan.decoding_type == "DSpark" else {}),
        "speculative_model": str(drafter),
        # Upstream finds these itself only in a local folder; said here, nothing depends on it.
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
        "target_layer_ids": list(config.target_layer_ids),
        # Older releases do not know the key, and have what is its default since.
        **({"attention_backend": plan.attention_backend} if plan.release >= TRTLLM_ATTENTION else {}),
        **({"context_recompute_tail": plan.recompute_tail} if plan.deployment.kv_cache.block_reuse else {}),
    }


def _dialect(heads: Heads) -> str:
    return "deepspec" if is_dspark(heads) else "zlab"


def draft_config(plan: TensorRTLLMPlan, checkpoint: Checkpoint) -> dict[str, object]:
    """The draft folder's config.json, with windows and quantisation in TensorRT-LLM's own words.

    z-lab's dialect; for DSpark DeepSpec's, whose keys upstream reads at top level (`resolve_dspark_head_config`,
    modeling_dflash.py), with `shift_label` for the slots.
    """
    config = plan.drafter
    assert config is not None
    if plan.beyond_upstream:  # our drafter reads `NEUTRAL`, for z-lab's dialect cannot mix windows of both kinds
        layers = tuple(kind.model_copy(update={"causal": kind.window is not None}) for kind in config.layers)
        config = config.model_copy(update={"layers": layers})
    fields = DIALECTS[_dialect(config)].write(config, None)
    if is_dspark(config):
        slots: dict[str, object] = {"shift_label": config.slots == "anchor-first"}
        fields["dflash_config"] = slots | {key: fields[key] for key in ("mask_token_id", "target_layer_ids")}
    if has_two_sided_windows(config) and config.selector is None:
        # 1.4 calls them `use_swa`, and wants no `sliding_window`; of a DFlash2 drafter it reads `is_causal`.
        dflash, windows = fields["dflash_config"], [kind.window for kind in config.layers if kind.window is not None]
        assert isinstance(dflash, dict)
        fields["dflash_config"] = {**dflash, "use_swa": True, "swa_window_size": windows[0]}
        fields["use_sliding_window"] = False
    if checkpoint.quantization is not None:
        original = load_object(checkpoint.folder / "config.json")
        fields |= {IN_CONFIG: original[IN_CONFIG]} if IN_CONFIG in original else {}
    return {**fields, "dtype": plan.draft_dtype, "torch_dtype": plan.draft_dtype}


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Codes or scales of a quantised weight, whose types say what they are."""
    return tensor.element_size() == 1 or "scale" in name.rpartition(".")[2]


class TensorRTLLMBackend(ServerAdapter[TensorRTLLMPlan]):
    """Checks, configuration and command line for TensorRT-LLM's PyTorch backend.

    Args:
        release: of TensorRT-LLM; None = the installed one, or the newest that was read.
    """

    name = "tensorrt-llm"
    facts = FACTS
    releases = f"{OLDEST} to {NEWEST}"
    untried = ("DFlash2", "DSpark")
    drafting_arguments = ("speculative_config",)
    plan = TensorRTLLMPlan

    def __init__(self, release: Release | None = None) -> None:
        self._release = release

    @property
    def release(self) -> Release:
        """The release that it writes for."""
        return self._release or installed_release()

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Reasons why the engine does not serve such a drafter."""
        return list(unserved_heads(heads, self.release))

    def resolve(self, deployment: Deployment) -> TensorRTLLMPlan:
        return replace(super().resolve(deployment), release=self.release)

    def problems(self, plan: TensorRTLLMPlan) -> list[Problem]:
        """Problems of a plan, in the order in which a user would fix them."""
        if found := problems(plan):
            return found
        try:
            configuration(plan, Path(DRAFT))
        except UserError as error:
            return [error.problem()]
        return []

    def draft_form(self, drafter: DrafterConfig, target: str) -> DraftForm:
        """z-lab's dialect, or DeepSpec's."""
        return DraftForm(_dialect(drafter), f"{'DeepSpec' if is_dspark(drafter) else 'z-lab'}'s dialect")

    def own_files(self, plan: TensorRTLLMPlan, folder: Path) -> Iterator[PreparedFile]:
        """config.yaml and, where the built-in drafter would not do, the package that registers ours.

        Raises:
            UserError: TensorRT-LLM would refuse config.yaml.
        """
        text = yaml.safe_dump(configuration(plan, folder / DRAFT), sort_keys=False)
        yield PreparedFile(CONFIG, "what `trtllm-serve --config` reads", text)
        if plan.needs_plug_in:
            text = REGISTERING.format(architecture=plan.target.architecture, implementation=plan.implementation)
            yield PreparedFile(f"{PLUG_IN}/__init__.py", "registers our drafter with TensorRT-LLM", text)

    def draft_files(self, plan: TensorRTLLMPlan) -> Iterator[PreparedFile]:
        """Files of the drafter."""
        checkpoint = plan.checkpoint
        if plan.drafter is None or checkpoint is None or any(unserved_heads(plan.drafter, plan.release)):
            return
        form = self.draft_form(plan.drafter, plan.deployment.target.model)
        text = json.dumps(draft_config(plan, checkpoint), indent=2, sort_keys=True) + "\n"
        yield PreparedFile(f"{DRAFT}/config.json", f"the drafter's description in {form.words}", text)
        text = plan.drafter.model_dump_json(indent=2) + "\n"
        yield PreparedFile(f"{DRAFT}/{NEUTRAL}", "the same for our plug-in", text)
        if (checkpoint.folder / QUANT_CONFIG).is_file():
            text = (checkpoint.folder / QUANT_CONFIG).read_text(encoding="utf-8")
            yield PreparedFile(f"{DRAFT}/{QUANT_CONFIG}", "its quantisation", text)
        yield PreparedFile(f"{DRAFT}/{SINGLE}", f"the drafter's {len(checkpoint.headers)} tensors")

    def write_draft(self, plan: TensorRTLLMPlan, folder: Path) -> None:
        """Writes the drafter in `draft_dtype`, whole or not at all.

        Raises:
            UserError: a tensor is not finite, or the folder is not ours to replace.
        """
        from safetensors.torch import save_file
        from torch import bfloat16, float16

        checkpoint, found = plan.checkpoint, list[Problem]()
        assert checkpoint is not None
        assert checkpoint.config is not None
        if folder.exists() and not (folder / NEUTRAL).is_file():
            raise UserError("is there already, and not written by us", where=str(folder), do="give another folder")
        dtype = float16 if plan.draft_dtype == "float16" else bfloat16
        tensors = {
            name: tensor.clone() if is_quantized(name, tensor) else tensor.to(dtype, copy=True)
            for name, tensor in read_tensors(checkpoint, found)
        }
        raise_problems(found, hint=HINT)
        tensors = fc_in_layer_order(tensors, checkpoint.config.target_layer_ids)
        with whole_folder(folder) as scratch:
            for file in self.draft_files(plan):
                if file.text is not None:
                    (scratch / Path(file.name).name).write_text(file.text, encoding="utf-8")
            save_file(tensors, scratch / SINGLE, metadata={"format": "pt"})

    def launch(self, plan: TensorRTLLMPlan, folder: Path, host: str, port: int) -> Command:
        """`trtllm-serve` on one node; on several, one task a device (Slurm with PMIx, upstream's deployment guides)."""
        words, nodes, count = list[str](), plan.deployment.parallel.nodes, plan.deployment.hardware.count
        if nodes > 1:
            words += ["srun", "--mpi=pmix", f"--nodes={nodes}", f"--ntasks={count}"]
            words += [f"--ntasks-per-node={count // nodes}", "trtllm-llmapi-launch"]
        words += ["trtllm-serve", plan.deployment.target.model, "--host", host, "--port", str(port)]
        words += ["--config", str(folder / CONFIG), *serving_options(plan)]
        env = {}
        if plan.needs_plug_in:
            words += ["--custom_module_dirs", str(folder / PLUG_IN)]
            # The option imports it in this process; the workers import it by name and need to find it.
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return Command(tuple(words), env)

    def choices(self, plan: TensorRTLLMPlan) -> Iterator[Choice]:
        """Settings that the deployment leaves open."""
        deployment, limits = plan.deployment, plan.deployment.limits
        if limits.max_batch_size is None:
            yield _max_batch_size(plan)
        if limits.max_model_len is None:
            known = plan.target.shape.max_position_embeddings
            source = "the target's positions" if known else "no config.json says more"
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
            if deployment.kv_cache.memory_fraction is None and plan.pool_fraction is not None:
                beside = "" if plan.context_in_pool else ", and the drafter's context"
                why = f"what weights and activations leave{beside}"
                yield Choice("kv_cache.memory_fraction", f"{plan.pool_fraction}", why)
            if deployment.kv_cache.block_reuse is None:
                why = "a reused prompt would leave the drafter without its features"
                yield Choice("kv_cache.block_reuse", "false", why)
        if plan.gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked")
        why = "TensorRT-LLM's: the installed one, or else the newest whose sources were read"
        yield Choice("release", f"{plan.release}", why)

    def notes(self, plan: TensorRTLLMPlan) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        serving = plan.deployment.serving
        if HARMONY in (serving.reasoning_parser, serving.tool_call_parser) and named_parsers(plan) != serving:
            yield "gpt-oss's answers are parsed by trtllm-serve itself: no parser is named to it"
        if plan.drafter is None:
            return
        yield from _width_notes(plan)
        limits = plan.deployment.limits
        if limits.max_queued_requests and "max_queued_requests" not in limits.model_fields_set:
            yield "TensorRT-LLM queues without bound: bound the queue at your gateway"
        # speculative/dflash_attention.py (@0352547, and FA4's) raises without it.
        package = {"VANILLA": "flash-attn", "FA4": "flash-attn-4 (flash_attn.cute)"}.get(plan.attention_backend)
        if package is not None:
            yield f"the drafter's attention needs the package {package} beside TensorRT-LLM"
        if plan.needs_plug_in:
            yield f"every rank's log must say {BUILT!r}: one that does not has not loaded this drafter"
        yield "acceptance by slot is in its metrics; the width of a step is not"


def _implementation(plan: TensorRTLLMPlan) -> Choice:
    chosen = {
        "upstream": ("TensorRT-LLM's own", "it has everything that this drafter needs"),
        "dequantised context": (
            "TensorRT-LLM's own, with a context K/V of ours",
            "its fused K/V product would ignore the scales of quantised weights; its other parts read them",
        ),
        "ours": ("ours", f"TensorRT-LLM's own would ignore: {'; '.join(plan.beyond_upstream)}"),
    }
    return Choice("drafter implementation", *chosen[plan.implementation])


def _max_batch_size(plan: TensorRTLLMPlan) -> Choice:
    value = "TensorRT-LLM's default, 2048" if plan.max_batch_size is None else f"{plan.max_batch_size}"
    if plan.drafter is None:
        why = "its memory decides how many run at once"
    elif plan.context_in_pool:
        why = "the drafter's context lies in the K/V pool with all else"
    else:
        arena = plan.arena_bytes(plan.max_batch_size or 1, plan.max_model_len) / GIB
        why = f"the drafter's context of so many takes {arena:.1f} GiB a device, beside the K/V pool"
    return Choice("limits.max_batch_size", value, why)


def _width_notes(plan: TensorRTLLMPlan) -> Iterator[str]:
    if plan.users_schedule:
        starving = starving_from(plan.users_schedule, plan.max_batch_size or 1)
        if starving is not None:
            yield (
                f"from {starving} requests on nothing is drafted, and the drafter misses the features of tokens that "
                "are decoded then: it accepts little until those requests end (TensorRT-LLM#16888)"
            )
    elif plan.draft_lengths():
        yield (
            "the width follows how many requests run, and nothing else; it never falls below 2 slots, because a step "
            "without a draft would leave the drafter without its features (TensorRT-LLM#16888)"
        )
    elif plan.deployment.speculation.width == "auto":
        yield (
            f"TensorRT-LLM verifies all {plan.block_size} slots in every step, whatever that costs: at high load it "
            "can be slower than no speculation; set speculation.width, "
            f"{plan.way_to_follow_cost}, or use --backend sglang"
        )


backend = TensorRTLLMBackend()
