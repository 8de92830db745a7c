"""TensorRT-LLM as a Backend: config.yaml, drafter and command line for a Deployment; `trtllm-serve` serves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue, ValidationError

from dflash_serve.backend import Command
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.common.files import write_whole
from dflash_serve.common.settings import describe
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import changed_files
from dflash_serve.draft_method import Eagle3Head
from dflash_serve.errors import Problem, UserError, raise_problems
from dflash_serve.preview import Preview

from .checks import head_problems, problems
from .draft_folder import write_draft_folder
from .engine_arguments import config_fields, merged, own_arguments, serving_options
from .facts import FACTS
from .launch_plan import LaunchPlan, make_launch_plan
from .methods import DRAFTING, method_arguments, method_problems
from .preview import preview
from .releases import DFLASH, NEWEST, TRTLLM_ATTENTION, Release, installed_release
from .upstream import LlmArgs, llm_args

CONFIG, DRAFT, PLUG_IN = "config.yaml", "draft", "dflash_serve_drafter"
"""What `prepare` writes into its folder."""
REGISTERING = '''"""Written by `dflash-serve`: registers its drafter with TensorRT-LLM wherever this is imported."""

from dflash_tensorrt_llm.plugin import register

TargetModel = register({architecture!r}, __name__, {implementation!r})
'''


class TensorRTLLMBackend:
    """Checks, configuration and command line for TensorRT-LLM's PyTorch backend.

    Args:
        release: of TensorRT-LLM; None = the installed one, or the newest we know.
    """

    name = "tensorrt-llm"
    facts = FACTS
    releases = f"{DFLASH.since} to {NEWEST}"
    untried = ()
    drafting_arguments = DRAFTING

    def __init__(self, release: Release | None = None) -> None:
        self._release = release

    @property
    def release(self) -> Release:
        """The release it writes for."""
        return self._release or installed_release()

    def head_problems(self, heads: Heads) -> list[Problem]:
        """What TensorRT-LLM does not serve of a drafter with such heads."""
        return list(head_problems(heads))

    def method_problems(self, target: TargetLayout, head: Eagle3Head | None) -> Iterable[Problem]:
        """Why TensorRT-LLM does not draft by EAGLE-3 (a head) or MTP (None)."""
        return method_problems(target, head, self.release)

    def method_arguments(self, head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
        """TensorRT-LLM's own arguments for it."""
        return method_arguments(head, draft_tokens)

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """Arguments of the server that keys of the deployment stand for, with those keys."""
        return own_arguments(drafter=drafter)

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work; reads config.json files only.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return problems(make_launch_plan(deployment, self.release))

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes config.yaml, draft/ and, where the built-in drafter would not do, the package that registers ours.

        A built target or drafter is held against its manifest first, byte for byte.

        Raises:
            UserError: the first problem of `check`, a built file that was changed, or a drafter that cannot be read.
        """
        plan = make_launch_plan(deployment, self.release)
        raise_problems(problems(plan), hint="`dflash-serve serve --dry-run` shows all")
        raise_problems(changed_files(deployment))
        folder = folder.resolve()
        if plan.drafter is not None:
            assert deployment.drafter is not None
            write_draft_folder(deployment.drafter, plan.drafter, folder / DRAFT, of_upstream=not plan.beyond_upstream)
        for name, text in self._texts(plan, folder).items():
            write_whole(folder / name, text)

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        """What `prepare` would write, and what is chosen where the deployment leaves it open.

        Raises:
            UserError: the target or drafter cannot be found or read at all, or the release would refuse config.yaml.
        """
        plan = make_launch_plan(deployment, self.release)
        return preview(plan, self._texts(plan, folder.resolve()))

    def _texts(self, plan: LaunchPlan, folder: Path) -> dict[str, str]:
        """Name -> text of the files that are ours, beside the drafter's."""
        texts = {CONFIG: self.yaml(plan, folder)}
        if plan.needs_plug_in:
            texts[f"{PLUG_IN}/__init__.py"] = REGISTERING.format(
                architecture=plan.target.architecture, implementation=plan.implementation
            )
        return texts

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """`trtllm-serve` on one node; under `srun` and `trtllm-llmapi-launch`, one task a device, on several."""
        plan, folder = make_launch_plan(deployment, self.release), folder.resolve()
        serve = ["trtllm-serve", plan.deployment.target.model, "--host", host, "--port", str(port)]
        serve += ["--config", str(folder / CONFIG), *serving_options(plan)]
        env = {}
        if plan.needs_plug_in:
            serve += ["--custom_module_dirs", str(folder / PLUG_IN)]
            # The option imports it in this process; the workers import it by name and need to find it.
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return Command((*_launcher(plan), *serve), env)

    def yaml(self, plan: LaunchPlan, folder: Path) -> str:
        """The text of config.yaml.

        Raises:
            UserError: the release would refuse it.
        """
        return yaml.safe_dump(_configuration(plan, folder / DRAFT), sort_keys=False)


def _launcher(plan: LaunchPlan) -> list[str]:
    """What starts one process a device on several nodes (Slurm with PMIx, upstream's deployment guides)."""
    nodes, count = plan.deployment.parallel.nodes, plan.deployment.hardware.count
    if nodes == 1:
        return []
    tasks = [f"--nodes={nodes}", f"--ntasks={count}", f"--ntasks-per-node={count // nodes}"]
    return ["srun", "--mpi=pmix", *tasks, "trtllm-llmapi-launch"]


def _configuration(plan: LaunchPlan, drafter: Path) -> dict[str, object]:
    """The configuration, as far as it differs from upstream's defaults, with the user's own keys.

    Args:
        drafter: the folder that it loads.

    Raises:
        UserError: the release would refuse it.
    """
    batch, target = plan.max_batch_size, plan.deployment.target
    limit = {} if batch is None else {"max_batch_size": batch}
    fields: dict[str, object] = {
        "tensor_parallel_size": plan.deployment.parallel.tensor,
        **limit,
        "max_seq_len": plan.max_model_len,
        "max_num_tokens": plan.max_num_tokens,
        "kv_cache_config": _kv_cache(plan),
        # Padding lets every batch size use a graph; without it a batch of 17 runs eagerly.
        "cuda_graph_config": {"enable_padding": True, **limit},
        "enable_iter_perf_stats": True,  # acceptance in /metrics
        "return_perf_metrics": True,  # without it there is no /prometheus/metrics
        **_parallel(plan),
        **({} if target.revision is None else {"revision": target.revision}),
        **({} if plan.drafter is None else {"speculative_config": _speculative(plan, drafter)}),
    }
    fields = merged(fields, config_fields(plan.engine_args))
    mirrored = LlmArgs.model_fields.keys() - (DRAFTING if plan.drafts_itself else ())  # DFlash alone is
    ours = {name: value for name, value in fields.items() if name in mirrored}
    try:
        known = llm_args(ours, plan.release).yaml_fields()
    except ValidationError as error:
        raise UserError(describe(error), where=f"configuration for TensorRT-LLM {plan.release}") from None
    return {**known, **{name: value for name, value in fields.items() if name not in known}}


def _parallel(plan: LaunchPlan) -> dict[str, object]:
    """How the target is spread over devices, beyond tensor parallelism."""
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


def _kv_cache(plan: LaunchPlan) -> dict[str, object]:
    """The target's K/V pool; blocks are reused only where no drafter needs the features of every prompt token."""
    kv_cache = plan.deployment.kv_cache
    speculates = plan.drafter is not None or plan.drafts_itself
    fields: dict[str, object] = {
        "enable_block_reuse": not speculates if kv_cache.block_reuse is None else kv_cache.block_reuse
    }
    if kv_cache.dtype in ("fp8", "nvfp4"):  # any other is the target's own type, `auto` to upstream
        fields["dtype"] = kv_cache.dtype
    fraction = kv_cache.memory_fraction
    if fraction is None and plan.drafter is not None and plan.gpu is not None:
        fraction = plan.pool_fraction(plan.gpu)
    return fields if fraction is None else {**fields, "free_gpu_memory_fraction": fraction}


def _speculative(plan: LaunchPlan, drafter: Path) -> dict[str, object]:
    """DFlash with the drafter in that folder; K = B - 1, for upstream does not count the anchor."""
    config, lengths = plan.drafter, plan.draft_lengths()
    assert config is not None
    return {
        "decoding_type": "DFlash",
        "max_draft_len": max(lengths.values()) if lengths else plan.block_size - 1,
        **({"draft_len_schedule": lengths} if lengths else {}),
        "speculative_model": str(drafter),
        # Upstream finds these itself only in a local folder; said here, nothing depends on it.
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
        "target_layer_ids": list(config.target_layer_ids),
        # Older releases do not know the key, and have what is its default since.
        **({"attention_backend": plan.attention_backend} if plan.release.has(TRTLLM_ATTENTION) else {}),
        **({"context_recompute_tail": plan.recompute_tail} if plan.deployment.kv_cache.block_reuse else {}),
    }


backend = TensorRTLLMBackend()
