"""`TensorRTLLMLaunch`: files, command, choices and notes of a launch of `trtllm-serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from dflash_serve.adapter.launch import DRAFT, DraftForm
from dflash_serve.adapter.protocol import Choice, Command, PreparedFile
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, SINGLE, load_object
from dflash_serve.checkpoint.reader import DIALECTS, HINT, Checkpoint, read_tensors
from dflash_serve.checkpoint.writer import fc_in_layer_order
from dflash_serve.common.files import whole_folder
from dflash_serve.common.settings import describe
from dflash_serve.deployment.gpus import GIB
from dflash_serve.deployment.variables import COST_TABLE
from dflash_serve.errors import Problem, UserError, raise_problems

from .checks import problems, unserved_heads
from .engine_arguments import HARMONY, config_fields, merged, mirrored, named_parsers, serving_options
from .plugin import BUILT
from .settings import ROWS, TensorRTLLMSettings, has_two_sided_windows, is_dspark, starving_from
from .upstream import NEUTRAL, TRTLLM_ATTENTION, LlmArgs, installed_verdict

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, PLUG_IN = "config.yaml", "dflash_serve_drafter"
"""Names of the configuration and of the package that registers our drafter, below the prepared folder."""
CORRECT = "correct engine_args.tensorrt-llm; report it if nothing is wrong there"
REGISTERING = '''"""Written by `dflash-serve`: registers its drafter with TensorRT-LLM wherever this is imported."""

from dflash_tensorrt_llm.plugin import register

TargetModel = register({architecture!r}, __name__, {implementation!r})
'''


def _dialect(heads: Heads) -> str:
    return "deepspec" if is_dspark(heads) else "zlab"


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Codes or scales of a quantised weight, whose types say what they are."""
    return tensor.element_size() == 1 or "scale" in name.rpartition(".")[2]


class TensorRTLLMLaunch(TensorRTLLMSettings):
    """A launch of TensorRT-LLM's PyTorch backend."""

    def _problems(self) -> list[Problem]:
        if found := problems(self):
            return found
        try:
            _ = self.configuration
        except UserError as error:
            return [error.problem()]
        return []

    def _draft_form(self, drafter: DrafterConfig) -> DraftForm:
        """z-lab's dialect, or DeepSpec's."""
        return DraftForm(_dialect(drafter), f"{'DeepSpec' if is_dspark(drafter) else 'z-lab'}'s dialect")

    def _own_files(self, folder: Path) -> Iterator[PreparedFile]:
        """config.yaml and, where the built-in drafter would not do, the package that registers ours.

        Raises:
            UserError: TensorRT-LLM would refuse config.yaml.
        """
        configuration = self.configuration
        own = configuration.get("speculative_config")
        if self.drafter is not None and isinstance(own, dict):
            configuration = {**configuration, "speculative_config": {**own, "speculative_model": str(folder / DRAFT)}}
        text = yaml.safe_dump(configuration, sort_keys=False)
        yield PreparedFile(CONFIG, "what `trtllm-serve --config` reads", text)
        if self.needs_plug_in:
            text = REGISTERING.format(architecture=self.target.architecture, implementation=self.implementation)
            yield PreparedFile(f"{PLUG_IN}/__init__.py", "registers our drafter with TensorRT-LLM", text)

    def _draft_files(self) -> Iterator[PreparedFile]:
        """Files of the drafter."""
        checkpoint = self.checkpoint
        if self.drafter is None or checkpoint is None or any(unserved_heads(self.drafter, self.release)):
            return
        form = self._draft_form(self.drafter)
        text = json.dumps(self._draft_config(checkpoint), indent=2, sort_keys=True) + "\n"
        yield PreparedFile(f"{DRAFT}/config.json", f"the drafter's description in {form.words}", text)
        text = self.drafter.model_dump_json(indent=2) + "\n"
        yield PreparedFile(f"{DRAFT}/{NEUTRAL}", "the same for our plug-in", text)
        if (checkpoint.folder / QUANT_CONFIG).is_file():
            text = (checkpoint.folder / QUANT_CONFIG).read_text(encoding="utf-8")
            yield PreparedFile(f"{DRAFT}/{QUANT_CONFIG}", "its quantisation", text)
        yield PreparedFile(f"{DRAFT}/{SINGLE}", f"the drafter's {len(checkpoint.headers)} tensors")

    def _write_draft(self, folder: Path) -> None:
        """Writes the drafter in `draft_dtype`, whole or not at all.

        Raises:
            UserError: a tensor is not finite, or the folder is not ours to replace.
        """
        from safetensors.torch import save_file
        from torch import bfloat16, float16

        checkpoint, problems = self.checkpoint, list[Problem]()
        assert checkpoint is not None
        assert checkpoint.config is not None
        if folder.exists() and not (folder / NEUTRAL).is_file():
            raise UserError("is there already, and not written by us", where=str(folder), do="give another folder")
        dtype = float16 if self.draft_dtype == "float16" else bfloat16
        tensors = {
            name: tensor.clone() if is_quantized(name, tensor) else tensor.to(dtype, copy=True)
            for name, tensor in read_tensors(checkpoint, problems)
        }
        raise_problems(problems, hint=HINT)
        tensors = fc_in_layer_order(tensors, checkpoint.config.target_layer_ids)
        with whole_folder(folder) as scratch:
            for file in self._draft_files():
                if file.text is not None:
                    (scratch / Path(file.name).name).write_text(file.text, encoding="utf-8")
            save_file(tensors, scratch / SINGLE, metadata={"format": "pt"})

    def _command(self, folder: Path, host: str, port: int) -> Command:
        """`trtllm-serve` on one node; on several, one task a device (Slurm with PMIx, upstream's deployment guides)."""
        words, nodes, count = list[str](), self.deployment.parallel.nodes, self.deployment.hardware.count
        if nodes > 1:
            words += ["srun", "--mpi=pmix", f"--nodes={nodes}", f"--ntasks={count}"]
            words += [f"--ntasks-per-node={count // nodes}", "trtllm-llmapi-launch"]
        words += ["trtllm-serve", self.deployment.target.model, "--host", host, "--port", str(port)]
        words += ["--config", str(folder / CONFIG), *serving_options(self)]
        env = {}
        if self.needs_plug_in:
            words += ["--custom_module_dirs", str(folder / PLUG_IN)]
            # The option imports it in this process; the workers import it by name and need to find it.
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return Command(tuple(words), env)

    def _choices(self) -> Iterator[Choice]:
        """Settings that the deployment leaves open."""
        deployment, limits = self.deployment, self.deployment.limits
        if limits.max_batch_size is None:
            yield self._max_batch_size()
        if limits.max_model_len is None:
            known = self.target.shape.max_position_embeddings
            source = "the target's positions" if known else "no config.json says more"
            yield Choice("limits.max_model_len", f"{self.max_model_len}", source)
        if limits.max_num_tokens is None:
            why = "upstream's default" if self.max_num_tokens == ROWS else "a full batch of blocks"
            yield Choice("limits.max_num_tokens", f"{self.max_num_tokens}", why)
        if self.drafter is not None:
            if deployment.speculation.block_size is None:
                yield Choice("speculation.block_size", f"{self.drafter.block_size}", "the drafter's own")
            if lengths := self.draft_lengths():
                widths = ", ".join(f"{length + 1} slots up to {size} requests" for size, length in lengths.items())
                yield Choice("speculation.width", f"auto ({widths})", f"what pays by {COST_TABLE}")
            yield self._implementation()
            yield Choice("attention of the drafter", self.attention_backend, "what runs it on this GPU and release")
            if deployment.kv_cache.memory_fraction is None and self.pool_fraction is not None:
                beside = "" if self.context_in_pool else ", and the drafter's context"
                why = f"what weights and activations leave{beside}"
                yield Choice("kv_cache.memory_fraction", f"{self.pool_fraction}", why)
            if deployment.kv_cache.block_reuse is None:
                why = "a reused prompt would leave the drafter without its features"
                yield Choice("kv_cache.block_reuse", "false", why)
        if self.gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked")
        why = "TensorRT-LLM's: the installed one, or else the newest whose sources were read"
        yield Choice("release", f"{self.release}", why)

    def _notes(self) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        serving = self.deployment.serving
        if HARMONY in (serving.reasoning_parser, serving.tool_call_parser) and named_parsers(self) != serving:
            yield "gpt-oss's answers are parsed by trtllm-serve itself: no parser is named to it"
        if self.drafter is None:
            return
        yield from self._width_notes()
        limits = self.deployment.limits
        if limits.max_queued_requests and "max_queued_requests" not in limits.model_fields_set:
            yield "TensorRT-LLM queues without bound: bound the queue at your gateway"
        # speculative/dflash_attention.py (@0352547, and FA4's) raises without it.
        package = {"VANILLA": "flash-attn", "FA4": "flash-attn-4 (flash_attn.cute)"}.get(self.attention_backend)
        if package is not None:
            yield f"the drafter's attention needs the package {package} beside TensorRT-LLM"
        if self.needs_plug_in:
            yield f"every rank's log must say {BUILT!r}: one that does not has not loaded this drafter"
        yield "acceptance by slot is in its metrics; the width of a step is not"

    @cached_property
    def configuration(self) -> dict[str, object]:
        """config.yaml, as far as it differs from upstream's defaults, with the user's own keys; the drafter is `DRAFT`.

        Raises:
            UserError: TensorRT-LLM would refuse it.
        """
        batch, target = self.max_batch_size, self.deployment.target
        limit = {} if batch is None else {"max_batch_size": batch}
        own = config_fields(self.engine_args)
        graphs = own.get("cuda_graph_config")
        fields: dict[str, object] = {
            "tensor_parallel_size": self.deployment.parallel.tensor,
            **limit,
            "max_seq_len": self.max_model_len,
            "max_num_tokens": self.max_num_tokens,
            "kv_cache_config": self._kv_cache(),
            # Padding lets every batch size use a graph; without it a batch of 17 runs eagerly.
            "cuda_graph_config": {
                "enable_padding": True,
                **({} if isinstance(graphs, dict) and graphs.get("batch_sizes") else limit),
            },
            "enable_iter_perf_stats": True,  # acceptance in /metrics
            "return_perf_metrics": True,  # without it there is no /prometheus/metrics
            **self._parallel(),
            # Without it upstream silently computes no tail again.
            **(
                {"enable_chunked_prefill": True} if self.deployment.kv_cache.block_reuse and self.recompute_tail else {}
            ),
            **({} if target.revision is None else {"revision": target.revision}),
            **({} if self.drafter is None else {"speculative_config": self._speculative()}),
        }
        fields = merged(fields, own)
        where = f"configuration for TensorRT-LLM {self.release}"
        refusal = installed_verdict(self.release, {"model": target.model, **fields})
        if refusal:
            raise UserError(refusal, where=f"{where}, which is installed", do=CORRECT)
        if refusal is not None:
            return fields
        # Of all methods of speculation, DFlash and DSpark alone are mirrored.
        names = LlmArgs.model_fields.keys() - ({"speculative_config"} if self.drafts_itself else set())
        ours, others = mirrored(fields, names)
        try:
            known = LlmArgs.model_validate(ours).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise UserError(describe(error), where=where, do=CORRECT) from None
        return merged(known, others)

    def _parallel(self) -> dict[str, object]:
        parallel, fields = self.deployment.parallel, dict[str, object]()
        if parallel.pipeline > 1 or parallel.context > 1:
            fields |= {"pipeline_parallel_size": parallel.pipeline, "context_parallel_size": parallel.context}
        if parallel.expert > 1:
            fields["moe_expert_parallel_size"] = parallel.expert
        if parallel.attention_data:
            fields["enable_attention_dp"] = True
        if parallel.nodes > 1:
            fields["gpus_per_node"] = self.deployment.hardware.count // parallel.nodes
        return fields

    def _kv_cache(self) -> dict[str, object]:
        """The target's K/V pool; blocks are reused only where no drafter needs the features of every prompt token."""
        kv_cache = self.deployment.kv_cache
        speculates = self.drafter is not None or self.drafts_itself
        fields: dict[str, object] = {
            "enable_block_reuse": not speculates if kv_cache.block_reuse is None else kv_cache.block_reuse
        }
        if kv_cache.dtype in ("fp8", "nvfp4"):  # upstream has no bfloat16: `auto`, the checkpoint's own
            fields["dtype"] = kv_cache.dtype
        fraction = self.pool_fraction if kv_cache.memory_fraction is None else kv_cache.memory_fraction
        return fields if fraction is None else {**fields, "free_gpu_memory_fraction": fraction}

    def _speculative(self) -> dict[str, object]:
        """DFlash or DSpark; K = B - 1, for upstream does not count the anchor."""
        config, lengths = self.drafter, self.draft_lengths()
        assert config is not None
        most = max(lengths.values()) if lengths else self.block_size - 1
        return {
            "decoding_type": self.decoding_type,
            "max_draft_len": most,
            **({"draft_len_schedule": lengths} if lengths else {}),
            **({"block_size": most} if self.decoding_type == "DSpark" else {}),
            "speculative_model": DRAFT,
            # Upstream finds these itself only in a local folder; said here, nothing depends on it.
            **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
            "target_layer_ids": list(config.target_layer_ids),
            # Older releases do not know the key, and have what is its default since.
            **({"attention_backend": self.attention_backend} if self.release >= TRTLLM_ATTENTION else {}),
            **({"context_recompute_tail": self.recompute_tail} if self.deployment.kv_cache.block_reuse else {}),
        }

    def _draft_config(self, checkpoint: Checkpoint) -> dict[str, object]:
        """The draft folder's config.json, with windows and quantisation in TensorRT-LLM's own words.

        z-lab's dialect; for DSpark DeepSpec's, whose keys upstream reads at top level (`resolve_dspark_head_config`,
        modeling_dflash.py), with `shift_label` for the slots.
        """
        config = self.drafter
        assert config is not None
        if self.beyond_upstream:  # our drafter reads `NEUTRAL`, for z-lab's dialect cannot mix windows of both kinds
            layers = tuple(kind.model_copy(update={"causal": kind.window is not None}) for kind in config.layers)
            config = config.model_copy(update={"layers": layers})
        fields = DIALECTS[_dialect(config)].write(config, None)
        if is_dspark(config):
            slots: dict[str, object] = {"shift_label": config.slots == "anchor-first"}
            fields["dflash_config"] = slots | {key: fields[key] for key in ("mask_token_id", "target_layer_ids")}
        if has_two_sided_windows(config) and config.selector is None:
            # 1.4 calls them `use_swa`, and wants no `sliding_window`; of a DFlash2 drafter it reads `is_causal`.
            dflash, windows = (
                fields["dflash_config"],
                [kind.window for kind in config.layers if kind.window is not None],
            )
            assert isinstance(dflash, dict)
            fields["dflash_config"] = {**dflash, "use_swa": True, "swa_window_size": windows[0]}
            fields["use_sliding_window"] = False
        if checkpoint.quantization is not None:
            original = load_object(checkpoint.folder / "config.json")
            fields |= {IN_CONFIG: original[IN_CONFIG]} if IN_CONFIG in original else {}
        return {**fields, "dtype": self.draft_dtype, "torch_dtype": self.draft_dtype}

    def _implementation(self) -> Choice:
        chosen = {
            "upstream": ("TensorRT-LLM's own", "it has everything that this drafter needs"),
            "dequantised context": (
                "TensorRT-LLM's own, with a context K/V of ours",
                "its fused K/V product would ignore the scales of quantised weights; its other parts read them",
            ),
            "ours": ("ours", f"TensorRT-LLM's own would ignore: {'; '.join(self.beyond_upstream)}"),
        }
        return Choice("drafter implementation", *chosen[self.implementation])

    def _max_batch_size(self) -> Choice:
        value = "TensorRT-LLM's default, 2048" if self.max_batch_size is None else f"{self.max_batch_size}"
        if self.drafter is None:
            why = "its memory decides how many run at once"
        elif self.context_in_pool:
            why = "the drafter's context lies in the K/V pool with all else"
        else:
            arena = self.arena_bytes(self.max_batch_size or 1, self.max_model_len) / GIB
            why = f"the drafter's context of so many takes {arena:.1f} GiB a device, beside the K/V pool"
        return Choice("limits.max_batch_size", value, why)

    def _width_notes(self) -> Iterator[str]:
        if self.users_schedule:
            starving = starving_from(self.users_schedule, self.max_batch_size or 1)
            if starving is not None:
                yield (
                    f"from {starving} requests on nothing is drafted, and the drafter misses the features of tokens "
                    "that are decoded then: it accepts little until those requests end (TensorRT-LLM#16888)"
                )
        elif self.draft_lengths():
            yield (
                "the width follows how many requests run, and nothing else; it never falls below 2 slots, because a "
                "step without a draft would leave the drafter without its features (TensorRT-LLM#16888)"
            )
        elif self.deployment.speculation.width == "auto":
            yield (
                f"TensorRT-LLM verifies all {self.block_size} slots in every step, whatever that costs: at high load "
                "it can be slower than no speculation; set speculation.width, "
                f"{self.way_to_follow_cost}, or use --backend sglang"
            )
