"""What we write, held against what vLLM itself makes of it: its real parser and configuration, without a GPU."""

from __future__ import annotations

import inspect
import json
from argparse import BooleanOptionalAction
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter.arguments import ArgumentTable, pinned_parser
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_vllm import VLLMBackend
from dflash_vllm.engine_arguments import COMMAND_LINE, KEYS, OUR_SCHEDULER, PARSERS, PINNED, PINNED_RELEASE, _parser
from dflash_vllm.facts import RELEASES
from dflash_vllm.launch import KEYS_MIDDLEWARE, LAUNCHER
from dflash_vllm.settings import UNIFORM_ATTENTION
from tests.support.golden_deployments import FOLDER as GOLDEN
from tests.support.golden_deployments import NAMES, hub
from tests.support.paper_models import FP8, NVFP4, write_paper_drafter, write_paper_target
from tests.support.server_routes import open_to, routes_of

pytest.importorskip("vllm")
__all__ = ["hub"]

PRECISIONS = {"none": None, "fp8": FP8, "fp8-online": None, "nvfp4": NVFP4}
MATRIX = [
    *((gpu, "none", 1, 1) for gpu in (*GPUS, None)),
    *(("b200", precision, 8, expert) for precision in PRECISIONS for expert in (1, 8)),
]


LARGE = ("h100", "h200", "b200", "b300", "gb200", "gb300")  # vLLM trims drafted blocks on SM90 and SM100 alone


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: write_paper_target(folder / name, recipe=recipe) for name, recipe in PRECISIONS.items()}
    for name, recipe in PRECISIONS.items():
        found[f"{name}-experts"] = write_paper_target(folder / f"{name}-experts", experts=16, recipe=recipe)
    return {**found, "drafter": write_paper_drafter(folder / "drafter")}


def parsed_words(argv: tuple[str, ...]) -> Any:
    """What vLLM's own parser reads, `serve` among it."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert argv[1:4] == ("-m", LAUNCHER, "serve")
    assert find_spec(LAUNCHER)
    parser = FlexibleArgumentParser()
    command_line = import_module(COMMAND_LINE[RELEASES.numbers(version("vllm"))])
    return command_line.make_arg_parser(parser.add_subparsers().add_parser("serve")).parse_args(list(argv[4:]))


def engine_args(argv: tuple[str, ...]) -> Any:
    """What vLLM makes of it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parsed = parsed_words(argv)
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
    from vllm.config import SpeculativeConfig

    wanted = deployment(
        models,
        precision=precision,
        expert=expert,
        parallel={"tensor": tensor, "expert": expert},
        hardware={"gpu": gpu, "count": tensor},
        kv_cache={"dtype": "fp8"},
    )
    backend = VLLMBackend()
    assert backend.launch(wanted).problems == []
    backend.launch(wanted).prepare(tmp_path)
    found = engine_args(backend.launch(wanted).command(tmp_path).argv)
    assert found.model == wanted.target.model
    assert (found.dtype, found.kv_cache_dtype, found.generation_config) == ("bfloat16", "fp8", "vllm")
    assert (found.tensor_parallel_size, found.enable_expert_parallel) == (tensor, expert > 1)
    assert (found.max_num_seqs, found.max_num_queued_reqs) == (256, 256)
    assert found.quantization == ("fp8" if precision == "fp8-online" else None)
    assert found.speculative_config["num_speculative_tokens"] == 7
    assert found.speculative_config.keys() <= SpeculativeConfig.__dataclass_fields__.keys()
    assert found.speculative_config.get("enable_adaptive_verification", False) is (gpu in LARGE)


def test_vllms_own_configuration_takes_it(models: dict[str, Path], tmp_path: Path) -> None:
    """As far as a CPU can resolve it."""
    wanted = deployment(models, hardware={"gpu": "none"}, limits={"max_batch_size": 16})
    backend = VLLMBackend()
    backend.launch(wanted).prepare(tmp_path)
    config = engine_args(backend.launch(wanted).command(tmp_path).argv).create_engine_config()
    spec = config.speculative_config
    assert (spec.method, spec.num_speculative_tokens, spec.uses_dynamic_speculative_decoding()) == ("dflash", 7, True)
    assert spec.num_speculative_tokens_per_batch_size == [(1, 1, 7), (2, 2, 3), (3, 3, 1), (4, 16, 0)]
    assert config.scheduler_config.max_num_scheduled_tokens == 8192
    assert config.scheduler_config.max_num_batched_tokens == 8192 + 16 * 7
    assert spec.draft_model_config.hf_config.is_causal is False
    assert spec.draft_model_config.architectures == ["DFlashDraftModel"]


def test_vllms_halves_take_each_other(models: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's own hash, which NIXL's handshake compares; a drafter on one half, or at another path, changes it."""
    metadata = import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    utils = import_module("vllm.config.kv_transfer")

    def half(role: str, folder: str = "prepared", **more: Any) -> Any:
        wanted = deployment(models, hardware={"gpu": "none"}, role=role, pair={}, **more)
        launch = VLLMBackend().launch(wanted)
        launch.prepare(tmp_path / folder)
        return engine_args(launch.command(tmp_path / folder).argv).create_engine_config()

    def compared(config: Any) -> str:
        found: str = metadata.compute_nixl_compatibility_hash(config, "CPU_ATTN")
        return found

    prefill, decode = half("prefill"), half("decode")
    for config, role, produces in ((prefill, "kv_producer", True), (decode, "kv_consumer", False)):
        transfer = config.kv_transfer_config
        assert isinstance(transfer, utils.KVTransferConfig)
        assert (transfer.kv_connector, transfer.kv_role) == ("NixlConnector", role)
        assert (transfer.is_kv_producer, transfer.is_kv_consumer) == (produces, not produces)
        assert config.speculative_config.num_speculative_tokens_per_batch_size is None
        assert config.speculative_config.num_speculative_tokens == 7
        assert config.num_lookahead_tokens == 8
    assert compared(prefill) == compared(decode)
    assert compared(half("decode", "elsewhere")) != compared(prefill)
    assert compared(half("decode", speculation={"width": "off"})) != compared(prefill)


def graphs(argv: tuple[str, ...], trimmed: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """vLLM's managers of the target's and the drafter's graphs on an H100, with all that they would capture."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.vllm import VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    monkeypatch.setattr(type(current_platform), "is_device_capability_family", lambda *_: False)
    told = engine_args(argv)
    slots, mode = told.speculative_config["num_speculative_tokens"], CUDAGraphMode.FULL_AND_PIECEWISE
    schedule = told.speculative_config.get("num_speculative_tokens_per_batch_size")
    config = Mock(
        compilation_config=Mock(cudagraph_mode=mode, cudagraph_capture_sizes=told.cudagraph_capture_sizes,
                                max_cudagraph_capture_size=None, compile_sizes=None),
        scheduler_config=Mock(max_num_seqs=told.max_num_seqs, max_num_batched_tokens=told.max_num_batched_tokens),
        speculative_config=Mock(num_speculative_tokens_per_batch_size=schedule),
        model_config=Mock(enforce_eager=False), num_speculative_tokens=slots, uniform_decode_query_len=slots + 1,
        update_sizes_for_sequence_parallelism=lambda sizes: sizes,
    )  # fmt: skip
    VllmConfig._set_cudagraph_sizes(config)
    monkeypatch.setattr("vllm.v1.worker.gpu.cudagraph_utils.get_pp_group", Mock)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)
    target = CudaGraphManager(config, None, mode, slots + 1, varlen_decode=trimmed)
    target._graphs_captured = True  # so that it looks them up
    return target, CudaGraphManager(config, None, CUDAGraphMode.FULL_DECODE_ONLY, slots + 1)


@pytest.mark.skipif(RELEASES.numbers(version("vllm")) != (0, 33), reason="0.32 chooses other sizes")
@pytest.mark.parametrize(
    ("block", "gpu", "captured", "most_drafted"),
    [(16, "h100", (51, 32), 32), (10, "h100", (53, 41), 50), (8, "h100", (51, 48), 64),
     (16, None, (166, 166), 256), (10, None, (131, 131), 256), (8, None, (184, 184), 256)],
)  # fmt: skip
def test_graphs_are_captured_for_every_width_and_few_others(
    block: int, gpu: str | None, captured: tuple[int, int], most_drafted: int,
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    drafter = write_paper_drafter(tmp_path / "drafter", block_size=block)
    wanted = deployment(models, drafter={"model": str(drafter)}, hardware={"gpu": gpu})
    plan = VLLMBackend().launch(wanted)
    target, drafting = graphs(plan.command(tmp_path).argv, gpu is not None, monkeypatch)
    full = [one._capture_descs[type(one.cudagraph_mode).FULL] for one in (target, drafting)]
    assert tuple(map(len, full)) == captured
    assert max(graph.num_reqs for graph in full[1]) == most_drafted
    without = [
        (width, requests)
        for width in plan.widths
        for requests in range(1, 257)
        if requests * width <= 512 - 512 % block
        and target.dispatch(requests, requests * width, width, 0, width).cg_mode.name != "FULL"
    ]
    assert without == ([(5, 51)] if (block, gpu) == (10, None) else [])  # a full batch's 256 rows stand between


def test_our_schedulers_override_what_is_there() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from dflash_vllm.plugin.scheduler import AsyncWidthScheduler, WidthScheduler

    assert issubclass(WidthScheduler, Scheduler)
    assert issubclass(AsyncWidthScheduler, AsyncScheduler)
    assert {"req_ids", "sampled_token_ids"} <= ModelRunnerOutput.__dataclass_fields__.keys()
    assert list(inspect.signature(Scheduler.update_from_output).parameters)[1:] == [
        "scheduler_output",
        "model_runner_output",
    ]
    source = inspect.getsource(Scheduler)
    for name in ("self.dynamic_sd_lookup[", "self.running"):
        assert name in source


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", NAMES)
def test_the_golden_launches_are_taken_by_vllms_own_parser(tmp_path: Path, name: str) -> None:
    file = GOLDEN / f"{name}.yaml"
    dry_run = ["serve", str(file), "--backend", "vllm", "--dry-run", "--json", "--folder", str(tmp_path)]
    told = json.loads(CliRunner().invoke(app, dry_run).stdout)
    deployed = yaml.safe_load(file.read_text())
    copies = deployed.get("parallel", {}).get("data", 1)
    assert [problem["where"] for problem in told["problems"]] == ([] if copies == 1 else ["parallel.data"])
    assert parsed_words(tuple(told["command"])).model_tag == deployed["target"]["model"]
    found = engine_args(tuple(told["command"]))  # which has put the cached folder in the hub id's place
    assert found.tensor_parallel_size == deployed.get("parallel", {}).get("tensor", 1)
    given = deployed.get("engine_args", {}).get("vllm", {})
    assert found.gpu_memory_utilization == given.get("gpu-memory-utilization", 0.92)
    if "compilation-config" in given:
        assert found.compilation_config.cudagraph_mode.name == given["compilation-config"]["cudagraph_mode"]


def test_the_pinned_flags_are_those_of_the_installed_vllm() -> None:
    """Pinned for one release; another may differ, and is then asked itself."""
    if RELEASES.numbers(version("vllm")) != RELEASES.numbers(PINNED_RELEASE):
        pytest.skip(f"pinned for {PINNED_RELEASE}")
    installed, pinned = _parser(), pinned_parser(PINNED)
    assert set(installed.names) == set(pinned.names)
    for name in pinned.names:
        action, other = installed.action(name), pinned.action(name)
        assert action is not None
        assert other is not None
        assert (action.dest, action.nargs) == (other.dest, other.nargs), name
        assert sorted(map(str, action.choices or ())) == sorted(map(str, other.choices or ())), name


def test_every_name_that_we_know_is_one_of_vllms() -> None:
    parser = _parser()
    assert {*KEYS, *OUR_SCHEDULER} <= {action.dest for action in parser._actions}
    for flag, names in (("reasoning-parser", PARSERS.reasoning), ("tool-call-parser", PARSERS.tool_call)):
        action = parser.action(flag)
        assert action is not None
        assert set(names.values()) <= set(action.choices or ())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gpu-memory-utilization", "much", "invalid float value"),
        ("scheduling-policy", "best", "invalid choice"),
        ("compilation-config", "{", "compilation-config"),
        ("gpu-memory-utilisation", 0.9, "did you mean gpu-memory-utilization?"),
        ("tensor_parallel_size", 2, "set parallel.tensor"),
    ],
)
def test_arguments_are_held_against_the_installed_parser(
    models: dict[str, Path], name: str, value: object, said: str
) -> None:
    (problem,) = VLLMBackend().launch(deployment(models, engine_args={"vllm": {name: value}})).problems
    assert said in str(problem)


def test_false_turns_off_what_true_turns_on() -> None:
    """Every flag of a pair, under each of its names: since 0.33 `--enable-x` has `--disable-x` and a hidden `--no-`."""
    parser, table = _parser(), ArgumentTable("vllm", "vLLM", _parser, {})
    assert parser.complaint([]) is None  # from here on it requires nothing

    def reads(name: str, dest: str, value: bool) -> object:
        return getattr(parser.parse_args(table.words({name: value})), dest)

    assert reads("enable-chunked-prefill", "enable_chunked_prefill", True) is True
    assert reads("enable-chunked-prefill", "enable_chunked_prefill", False) is False
    for name in parser.names:
        action = parser.action(name)
        if isinstance(action, BooleanOptionalAction):
            assert {reads(name, action.dest, value) for value in (True, False)} == {True, False}, name


@pytest.mark.parametrize(
    ("family", "architecture", "captured"),
    [
        ("mamba2", "Mamba2ForCausalLM", False),
        ("llava", "LlavaForConditionalGeneration", True),
        ("qwen2_moe", "Qwen2MoeForCausalLM", False),
        ("unheard_of", "UnheardOfForCausalLM", False),
    ],
)
def test_vllm_is_asked_whether_a_family_that_we_do_not_know_hands_out_hidden_states(
    family: str, architecture: str, captured: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    other = write_paper_target(tmp_path / family, model_type=family, architectures=[architecture])
    found = VLLMBackend().launch(deployment(models, target={"model": str(other)})).problems
    assert [problem.where for problem in found] == ([] if captured else ["target.model"])


def test_keys_are_read_from_their_file_and_are_in_no_log(models: dict[str, Path], tmp_path: Path) -> None:
    moved = RELEASES.numbers(version("vllm")) == (0, 33)
    logs = import_module("vllm.entrypoints.common.startup" if moved else "vllm.entrypoints.serve.utils.api_utils")
    (tmp_path / "keys").write_text("# ours\nsecret-one\nsecret-two\n")
    keyed = deployment(models, serving={"api_key_file": str(tmp_path / "keys")})
    backend = VLLMBackend()
    backend.launch(keyed).prepare(tmp_path / "prepared")
    command = backend.launch(keyed).command(tmp_path / "prepared")
    assert "secret-" not in " ".join([*command.argv, *command.env.values()])
    parsed = parsed_words(command.argv)
    assert parsed.api_key == ["secret-one", "secret-two"]
    assert "secret-" not in str(logs.redact_sensitive_args(vars(parsed)))


def test_a_key_closes_every_route_of_vllms_own_server_but_health_and_metrics(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application that vLLM builds from our command, web sockets included; behind it is no engine."""
    pytest.importorskip("orjson", reason="0.33's Python alone has not all that its server imports")
    (tmp_path / "keys").write_text("secret-one\nsecret-two\n")
    keyed = deployment(models, serving={"api_key_file": str(tmp_path / "keys")})
    VLLMBackend().launch(keyed).prepare(tmp_path / "prepared")
    parsed = parsed_words(VLLMBackend().launch(keyed).command(tmp_path / "prepared").argv)
    app = import_module("vllm.entrypoints.launchers.app").build_app(parsed, ("generate", "realtime"), None)
    every = set(routes_of(app.routes))
    assert {("POST", "/invocations"), ("POST", "/tokenize"), ("WEBSOCKET", "/v1/realtime")} <= every
    assert {path for _, path in open_to(app, None)} == {"/health", "/metrics"}
    assert {path for _, path in open_to(app, "wrong")} == {"/health", "/metrics"}
    assert open_to(app, "secret-two") == every
    by_hand = parsed_words(
        (*VLLMBackend().launch(deployment(models)).command(tmp_path).argv, "--middleware", KEYS_MIDDLEWARE)
    )
    monkeypatch.setenv("VLLM_API_KEY", "secret-three")
    app = import_module("vllm.entrypoints.launchers.app").build_app(by_hand, ("generate",), None)
    assert {path for _, path in open_to(app, "secret-two")} == {"/health", "/metrics"}
    assert {path for _, path in open_to(app, "secret-three")} > {"/health", "/metrics"}


@pytest.mark.parametrize("gpu", GPUS)
def test_a_step_has_as_many_rows_as_vllm_would_choose(
    gpu: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = import_module("vllm.engine.arg_utils")
    platform = Mock(is_cpu=lambda: False, is_tpu=lambda: False, is_device_capability=lambda _: False)
    platform.get_device_total_memory.return_value = GPUS[gpu].memory
    platform.get_device_name.return_value = f"NVIDIA {gpu}"
    monkeypatch.setattr(arguments, "current_platform", platform)
    server = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    rows = arguments.AsyncEngineArgs.get_batch_defaults(1)[0][server]
    assert VLLMBackend().launch(deployment(models, hardware={"gpu": gpu})).rows == rows


def test_where_vllm_cannot_trim_blocks_its_attention_has_no_graph_for_queries_of_any_lengths() -> None:
    """Adaptive verification beside such attention ends vLLM's start, after the weights were loaded."""
    local = import_module("vllm.model_executor.layers.attention.chunked_local_attention")
    triton = import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
    chunks = local.create_chunked_local_attention_backend(triton, 8192)
    support = [one.get_builder_cls().get_cudagraph_support(None, None).name for one in (triton, chunks)]
    assert support == ["ALWAYS", "NEVER"]
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    sparse = (Path(package.origin).parent / "models/minimax_m3/common/sparse_attention.py").read_text()
    assert "_cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH" in sparse
    assert "get_varlen_cudagraph_max_query_len" not in sparse
    named = import_module("vllm").ModelRegistry.models
    assert all(any(name.startswith(prefix) for name in named) for prefix in UNIFORM_ATTENTION)
