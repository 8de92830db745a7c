"""What we write, held against what SGLang itself makes of it: its real parser and resolution, without a GPU."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter.arguments import pinned_parser
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_sglang import SGLangBackend
from dflash_sglang.engine_arguments import PINNED, _parser
from dflash_sglang.settings import draft_kernels
from tests.support.golden_deployments import FOLDER as GOLDEN
from tests.support.golden_deployments import NAMES, hub
from tests.support.heads import HEADS
from tests.support.paper_models import FP8, NVFP4, PAPER_DRAFTER, write_paper_drafter, write_paper_target
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

pytest.importorskip("sglang")
__all__ = ["hub"]

BACKEND = SGLangBackend()
SM120 = {"has_flashinfer": True, "is_sm120": True, "is_blackwell": True}
FACTS = {
    "h200": {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "device_sm": 90, "device_capability": (9, 0)},
    "b200": {
        "is_sm100": True,
        "is_sm100_or_sm110": True,
        "is_blackwell": True,
        "device_sm": 100,
        "device_capability": (10, 0),
    },
    "rtx-5090": {**SM120, "device_sm": 120, "device_capability": (12, 0)},
    "gb10": {**SM120, "device_sm": 121, "device_capability": (12, 1)},
    "l40s": {"has_flashinfer": True, "device_sm": 89, "device_capability": (8, 9)},
    "a100": {"has_flashinfer": True, "device_sm": 80, "device_capability": (8, 0)},
}
LARGE = ("h200", "b200")
KERNELS = {"h200": "fa3", "b200": "trtllm_mha"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor": 2},
    "tp8": {"tensor": 8},
    "tp8ep8": {"tensor": 8, "expert": 8},
    "tp8dp8": {"tensor": 8, "attention_data": True},
    "two-nodes": {"tensor": 16, "nodes": 2},
}
MATRIX = [
    *((gpu, "none", layout) for gpu in LARGE for layout in LAYOUTS),
    *((gpu, precision, layout) for gpu in LARGE for precision in ("fp8", "fp8-online") for layout in ("one", "tp8ep8")),
    *((gpu, "none", "one") for gpu in FACTS if gpu not in LARGE),
    *(("b200", "nvfp4", layout) for layout in ("one", "tp8ep8")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    recipes = {"none": None, "fp8": FP8, "fp8-online": None, "nvfp4": NVFP4}
    found = {name: write_paper_target(folder / name, recipe=recipe) for name, recipe in recipes.items()}
    found |= {f"{name}-experts": write_paper_target(folder / f"{name}-experts", experts=16, recipe=recipe)
              for name, recipe in recipes.items()}  # fmt: skip
    return {**found, "drafter": write_paper_drafter(folder / "drafter")}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's resolution, told that it runs on a GPU."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    monkeypatch.setattr(type(current_platform), "is_out_of_tree", lambda _: False)

    def resolve(argv: tuple[str, ...], gpu: str) -> Any:
        assert argv[1:3] == ("-m", "sglang.launch_server")
        with override_platform(is_cuda=True, **FACTS.get(gpu, FACTS["b200" if GPUS[gpu].is_sm100 else "h200"])):
            server_args = prepare_server_args([*argv[3:], "--device", "cuda"])
            server_args.resolve_once()
            server_args.check_server_args()
            return resolving_view(server_args)

    return resolve


def deployment(
    models: dict[str, Path], gpu: str = "h200", precision: str = "none", layout: str = "one", **changes: Any
) -> Deployment:
    parallel = LAYOUTS[layout]
    target = models[f"{precision}-experts" if "expert" in parallel else precision]
    fields: dict[str, Any] = {
        "target": {"model": str(target), "quantization": precision.removesuffix("-online")},
        "drafter": {"model": str(models["drafter"])},
        "speculation": {"width": 8},
        "parallel": parallel,
        "hardware": {"gpu": gpu, "count": parallel.get("tensor", 1)},
    }
    merged = {
        key: {**fields.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return Deployment.model_validate({**fields, **merged})


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEADER_ADDRESS": "dflash-0.dflash", "GROUP_SIZE": "2", "WORKER_INDEX": "1"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)


@pytest.mark.usefixtures("leader")
@pytest.mark.parametrize(("gpu", "precision", "layout"), MATRIX)
def test_sglang_understands_what_we_write(
    models: dict[str, Path], on_gpu: Any, tmp_path: Path, gpu: str, precision: str, layout: str
) -> None:
    wanted, parallel = deployment(models, gpu, precision, layout), LAYOUTS[layout]
    assert BACKEND.launch(wanted).problems == []
    BACKEND.launch(wanted).prepare(tmp_path)
    resolved = on_gpu(BACKEND.launch(wanted).command(tmp_path).argv, gpu)
    assert resolved.speculative_algorithm == "DFLASH"
    assert resolved.speculative_num_draft_tokens == 8
    assert resolved.speculative_draft_model_quantization is None
    assert resolved.speculative_draft_kv_cache_dtype == "bfloat16"
    kernels = KERNELS.get(gpu, "flashinfer")
    assert resolved.speculative_draft_attention_backend == (draft_kernels(GPUS[gpu]) or kernels)
    assert resolved.attention_backend == kernels, "SGLang's own choice"
    assert (resolved.tp_size, resolved.ep_size) == (parallel.get("tensor", 1), parallel.get("expert", 1))
    assert resolved.attn_dp_size == (8 if "attention_data" in parallel else 1)
    assert (resolved.nnodes, resolved.node_rank) == ((2, 1) if "nodes" in parallel else (1, 0))
    assert resolved.max_running_requests == 48, "SGLang's own number, as the dry-run says"
    if precision in ("none", "fp8-online"):  # else the checkpoint itself says it, sooner or later
        assert resolved.quantization == ("fp8" if precision == "fp8-online" else None)


@pytest.mark.parametrize(("gpu", "kernels"), [("h200", "fa3"), ("b200", "trtllm_mha")])
def test_a_target_runs_on_the_same_kernels_with_dspark(
    models: dict[str, Path], on_gpu: Any, tmp_path: Path, gpu: str, kernels: str
) -> None:
    config = tiny_drafter_config(**{**PAPER_DRAFTER, **HEADS["vanilla Markov"]})
    drafter = write_tiny_drafter(tmp_path / "drafter", config, dialect="modelopt")
    wanted = deployment(models, gpu, drafter={"model": str(drafter)}, speculation={"width": "auto"})
    BACKEND.launch(wanted).prepare(tmp_path)
    resolved = on_gpu(BACKEND.launch(wanted).command(tmp_path).argv, gpu)
    assert (resolved.speculative_algorithm, resolved.attention_backend) == ("DSPARK", kernels)


@pytest.mark.parametrize(("gpu", "kernels"), [("h200", "triton"), ("b200", "trtllm_mha")])
def test_a_target_runs_on_the_kernels_that_it_needs(
    models: dict[str, Path], on_gpu: Any, tmp_path: Path, gpu: str, kernels: str
) -> None:
    gemma: dict[str, Any] = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "global_head_dim": 16}
    target = write_paper_target(tmp_path / "target", **gemma)
    wanted = deployment(models, gpu, target={"model": str(target)})
    BACKEND.launch(wanted).prepare(tmp_path)
    assert on_gpu(BACKEND.launch(wanted).command(tmp_path).argv, gpu).attention_backend == kernels


@pytest.mark.usefixtures("leader")
@pytest.mark.parametrize(
    "change",
    [
        {"parallel": {"pipeline": 2}},
        {"kv_cache": {"dtype": "nvfp4"}},
        {"speculation": {"draft_window": 4}},
        {"parallel": {"nodes": 3}},
        {"role": "decode", "engine_args": {"sglang": {"disaggregation-decode-enable-radix-cache": True}}},
        {"role": "prefill", "engine_args": {"sglang": {"disaggregation-transfer-backend": "fake"}}},
    ],
)
def test_what_sglang_refuses_we_refuse_first(
    models: dict[str, Path], on_gpu: Any, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWS_GROUP_SIZE", "3")
    BACKEND.launch(deployment(models, "b200", layout="tp8")).prepare(tmp_path)
    bad = deployment(models, "b200", layout="tp8", **change)
    assert BACKEND.launch(bad).problems
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        on_gpu(BACKEND.launch(bad).command(tmp_path).argv, "b200")


@pytest.mark.parametrize(
    ("kv_dtype", "told", "window", "role"),
    [
        ("auto", "auto", None, "whole"),
        ("bfloat16", "bfloat16", 64, "prefill"),
        ("fp8", "fp8_e4m3", 64, "whole"),
        ("fp8", "fp8_e4m3", None, "decode"),
    ],
)
def test_cache_window_and_role_arrive(
    models: dict[str, Path], on_gpu: Any, tmp_path: Path, kv_dtype: str, told: str, window: int | None, role: str
) -> None:
    wanted = deployment(
        models,
        kv_cache={"dtype": kv_dtype, "block_reuse": role == "prefill", "memory_fraction": 0.5},
        speculation={"draft_window": window},
        limits={"max_num_tokens": 64},
        role=role,
    )
    assert BACKEND.launch(wanted).problems == []
    BACKEND.launch(wanted).prepare(tmp_path)
    resolved = on_gpu(BACKEND.launch(wanted).command(tmp_path).argv, "h200")
    assert resolved.kv_cache_dtype == told
    assert resolved.speculative_draft_window_size == window
    assert resolved.disable_radix_cache is (role != "prefill")
    assert resolved.mem_fraction_static == pytest.approx(0.5, abs=0.01)
    assert resolved.chunked_prefill_size == 64
    assert resolved.disaggregation_mode == {"whole": "null"}.get(role, role)


def test_the_draft_folder_is_what_sglangs_own_parser_expects(models: dict[str, Path], tmp_path: Path) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    BACKEND.launch(deployment(models)).prepare(tmp_path)
    parsed = parse_dflash_draft_config(draft_hf_config=get_config(str(tmp_path / "draft"), trust_remote_code=False))
    assert parsed.block_size == 8
    assert parsed.mask_token_id == 7
    assert tuple(parsed.target_layer_ids) == (1, 3, 5)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", NAMES)
def test_the_golden_launches_are_taken_by_sglangs_own_parser(on_gpu: Any, tmp_path: Path, name: str) -> None:
    file = GOLDEN / f"{name}.yaml"
    dry_run = ["serve", str(file), "--backend", "sglang", "--dry-run", "--json", "--folder", str(tmp_path)]
    told = json.loads(CliRunner().invoke(app, dry_run).stdout)
    assert told["problems"] == []
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(told["files"][0]["text"])
    deployed = yaml.safe_load(file.read_text())
    weights = drafter_folder(deployed["drafter"]["model"]) / "model.safetensors"
    (tmp_path / "draft" / "model.safetensors").symlink_to(weights)  # a header and a hole: what `prepare` would load
    resolved = _parser().parse_args(told["command"][3:])
    if deployed["target"].get("quantization") != "mxfp4":  # whose kernels SGLang registers on a real GPU only
        resolved = on_gpu(tuple(told["command"]), deployed["hardware"]["gpu"])
    serving, parallel = deployed.get("serving", {}), deployed.get("parallel", {})
    assert resolved.reasoning_parser == serving.get("reasoning_parser")
    assert resolved.tool_call_parser == {"qwen3": "qwen"}.get(
        serving.get("tool_call_parser"), serving.get("tool_call_parser")
    )
    assert resolved.served_model_name in (serving.get("served_model_name"), deployed["target"]["model"])
    assert (resolved.tp_size, resolved.dp_size) == (parallel.get("tensor", 1), parallel.get("data", 1))
    given = deployed.get("engine_args", {}).get("sglang", {})
    assert {name: getattr(resolved, name.replace("-", "_")) for name in given} == given


def test_the_pinned_list_is_that_of_the_installed_sglang() -> None:
    """Pinned for 0.5.23; another release may differ, and is then asked itself."""
    if version("sglang") != "0.5.23":
        pytest.skip("pinned for 0.5.23")
    installed, pinned = _parser(), pinned_parser(PINNED)
    assert set(installed._option_string_actions) == set(pinned._option_string_actions)
    for option, action in installed._option_string_actions.items():
        other = pinned._option_string_actions[option]
        assert (action.dest, action.nargs) == (other.dest, other.nargs), option
        assert sorted(map(str, action.choices or ())) == sorted(map(str, other.choices or ())), option


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mem-fraction-static", "much", "invalid float value"),
        ("schedule-policy", "best", "invalid choice"),
        ("mem-fraction-statc", 0.9, "did you mean mem-fraction-static?"),
        ("speculative-adaptive", True, "for EAGLE only"),
        ("speculative-draft-sink-size", 4, "SGLang's DFLASH ignores it"),
    ],
)
def test_arguments_are_held_against_the_installed_parser(
    models: dict[str, Path], name: str, value: object, said: str
) -> None:
    (problem,) = BACKEND.launch(deployment(models, "b200", engine_args={"sglang": {name: value}})).problems
    assert said in str(problem)


def test_the_key_is_read_from_its_file(models: dict[str, Path], on_gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsecret-one\n")
    keyed = deployment(models, "b200", serving={"api_key_file": str(tmp_path / "keys")})
    BACKEND.launch(keyed).prepare(tmp_path / "prepared")
    assert on_gpu(BACKEND.launch(keyed).command(tmp_path / "prepared").argv, "b200").api_key == "secret-one"
