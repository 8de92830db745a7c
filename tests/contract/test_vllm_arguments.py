"""What we write, held against what vLLM itself makes of it: its real parser and configuration, without a GPU."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import GPUS, Deployment
from dflash_vllm import VLLMBackend
from dflash_vllm.backend import LAUNCHER
from tests.support.paper_models import FP8, NVFP4, write_paper_drafter, write_paper_target

pytest.importorskip("vllm")

PRECISIONS = {"none": None, "fp8": FP8, "fp8-online": None, "nvfp4": NVFP4}
MATRIX = [
    (gpu, precision, tensor, expert)
    for gpu in (*GPUS, None)
    for precision in PRECISIONS
    for tensor, expert in ((1, 1), (8, 1), (8, 8))
    if precision != "nvfp4" or gpu is None or GPUS[gpu].is_blackwell
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: write_paper_target(folder / name, recipe=recipe) for name, recipe in PRECISIONS.items()}
    for name, recipe in PRECISIONS.items():
        found[f"{name}-experts"] = write_paper_target(folder / f"{name}-experts", experts=16, recipe=recipe)
    return {**found, "drafter": write_paper_drafter(folder / "drafter")}


def engine_args(argv: tuple[str, ...]) -> Any:
    """What vLLM's own parser reads."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert argv[1:4] == ("-m", LAUNCHER, "serve")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv[4:]))
    assert (parsed.host, parsed.port) == ("127.0.0.1", 8000)
    parsed.model = parsed.model_tag
    return AsyncEngineArgs.from_cli_args(parsed)


def deployment(models: dict[str, Path], **changes: Any) -> Deployment:
    precision, expert = changes.pop("precision", "none"), changes.pop("expert", 1)
    target = models[f"{precision}-experts" if expert > 1 else precision]
    fields = {
        "target": {"model": str(target), "quantization": precision.removesuffix("-online")},
        "drafter": {"model": str(models["drafter"])},
    }
    return Deployment.model_validate({**fields, **changes})


@pytest.mark.parametrize(("gpu", "precision", "tensor", "expert"), MATRIX)
def test_vllm_understands_what_we_write(
    models: dict[str, Path], tmp_path: Path, gpu: str | None, precision: str, tensor: int, expert: int
) -> None:
    wanted = deployment(
        models,
        precision=precision,
        expert=expert,
        parallel={"tensor": tensor, "expert": expert},
        hardware={"gpu": gpu, "count": tensor},
        kv_cache={"dtype": "fp8"},
    )
    backend = VLLMBackend()
    assert backend.check(wanted) == []
    backend.prepare(wanted, tmp_path)
    found = engine_args(backend.command(wanted, tmp_path).argv)
    assert found.model == wanted.target.model
    assert (found.dtype, found.kv_cache_dtype, found.generation_config) == ("bfloat16", "fp8", "vllm")
    assert (found.tensor_parallel_size, found.enable_expert_parallel) == (tensor, expert > 1)
    assert (found.max_num_seqs, found.max_num_queued_reqs) == (32, 256)
    assert found.quantization == ("fp8" if precision == "fp8-online" else None)
    assert found.speculative_config["num_speculative_tokens"] == 7


def test_vllms_own_configuration_takes_it(models: dict[str, Path], tmp_path: Path) -> None:
    """As far as a CPU can resolve it."""
    wanted = deployment(models, hardware={"gpu": "none"}, limits={"max_batch_size": 16})
    backend = VLLMBackend()
    backend.prepare(wanted, tmp_path)
    config = engine_args(backend.command(wanted, tmp_path).argv).create_engine_config()
    spec = config.speculative_config
    assert (spec.method, spec.num_speculative_tokens, spec.uses_dynamic_speculative_decoding()) == ("dflash", 7, True)
    assert spec.num_speculative_tokens_per_batch_size == [(1, 1, 7), (2, 2, 3), (3, 3, 1), (4, 16, 0)]
    assert config.scheduler_config.max_num_scheduled_tokens == 8192
    assert config.scheduler_config.max_num_batched_tokens == 8192 + 16 * 7
    assert spec.draft_model_config.hf_config.is_causal is False
    assert spec.draft_model_config.architectures == ["DFlashDraftModel"]


def test_our_schedulers_override_what_is_there() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from dflash_vllm.plugin.scheduler import AsyncWidthScheduler, WidthScheduler

    assert issubclass(WidthScheduler, Scheduler)
    assert issubclass(AsyncWidthScheduler, AsyncScheduler)
    told = inspect.signature(Scheduler.make_spec_decoding_stats).parameters
    assert {"num_draft_tokens", "num_accepted_tokens", "request_id"} <= told.keys()
    assert list(inspect.signature(Scheduler.update_from_output).parameters)[1:] == [
        "scheduler_output",
        "model_runner_output",
    ]
    source = inspect.getsource(Scheduler)
    for name in ("self.dynamic_sd_lookup[", "request_id=req_id", "num_accepted_tokens=num_accepted", "self.running"):
        assert name in source
