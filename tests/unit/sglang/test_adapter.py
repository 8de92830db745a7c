"""SGLang's refusals, command lines and choices for a deployment; no SGLang and no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from dflash_sglang.plugin import width_problems
from dflash_sglang.settings import DRAFT_KERNELS, WIDTH_VARIABLE
from tests.support.heads import HEADS
from tests.support.paper_models import FP8, NVFP4, PAPER_DRAFTER, write_paper_drafter, write_paper_target
from tests.support.tiny import edit_json, tiny_drafter_config, write_tiny_drafter

BACKEND = SGLangBackend()


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def deployed(fields: dict[str, Any], **more: Any) -> Deployment:
    merged = {
        key: {**fields.get(key, {}), **value} if isinstance(value, dict) else value for key, value in more.items()
    }
    return Deployment.model_validate({**fields, **merged})


def problems(fields: dict[str, Any], **more: Any) -> str:
    found = BACKEND.launch(deployed(fields, **more)).problems
    assert all(problem.what and problem.where and problem.do for problem in found)
    return "\n".join(map(str, found))


def command(fields: dict[str, Any], **more: Any) -> str:
    assert problems(fields, **more) == ""
    return " ".join(BACKEND.launch(deployed(fields, **more)).command(Path("/prepared")).argv) + " "


def given(*flags: str, **values: Any) -> dict[str, Any]:
    """Arguments of SGLang's own."""
    return {"engine_args": {"sglang": {**dict.fromkeys(flags, True), **values}}}


KEEPING = given("disaggregation-decode-enable-radix-cache")


def devices(count: int, gpu: str = "b200", **parallel: Any) -> dict[str, Any]:
    return {"parallel": parallel, "hardware": {"gpu": gpu, "count": count}}


def test_lmcache_beside_a_drafter_is_said_to_keep_the_targets_kv_alone(fields: dict[str, Any]) -> None:
    def told(*flags: str, **more: Any) -> bool:
        return "sglang#21125" in " ".join(BACKEND.launch(deployed(fields, **given(*flags), **more)).notes)

    assert told("enable-lmcache")
    assert not told("enable-hierarchical-cache")
    assert not told("enable-lmcache", speculation={"width": "off"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation": {"draft_window": 4}}, "draft_window 4 is smaller than the block of 8 slots"),
        (devices(2, context=2), "context parallelism"),
        (devices(3, tensor=3), "16 attention heads cannot be split over 3 devices"),
        (devices(8, tensor=8, nodes=3), "8 devices cannot be shared evenly"),
        (devices(16, data=2, tensor=8, nodes=2), "one node"),
        (devices(4, data=2, tensor=2, attention_data=True), "exclude each other"),
        (devices(1, "none"), "runs on GPUs"),
        ({"drafter": {"quantization": "fp8"}}, "the drafter's checkpoint is not quantised, not fp8"),
        ({"kv_cache": {"dtype": "nvfp4"}, **devices(1)}, "refuses DFlash on NVFP4 keys and values"),
        ({"kv_cache": {"dtype": "nvfp4"}, **devices(1, "h200")}, "h200 has no FP4"),
        ({"kv_cache": {"memory_fraction": 0.5}}, "kv_cache.memory_fraction: a share of the memory is asked for"),
        ({"kv_cache": {"block_reuse": True}, "role": "decode"}, "SGLang's decode servers keep no prefixes"),
        (
            {"kv_cache": {"block_reuse": False}, "role": "decode", "drafter": None, **KEEPING},
            "keeps prefixes with --disaggregation",
        ),
        ({"role": "decode", **KEEPING}, "SGLang's decode servers keep no prefixes with DFLASH; leave it out"),
        ({"kv_cache": {"block_reuse": True}, "role": "decode", **KEEPING}, "keep no prefixes with DFLASH"),
        ({"role": "decode", **given(**{"disaggregation-transfer-backend": "fake"})}, "fake transfers no K/V"),
        (
            {"role": "prefill", "speculation": {"width": "off"}},
            "speculation.width: with width off a prefill half loads no drafter: beside it a decode half drafts without",
        ),
        ({"role": "prefill", "speculation": {"width": 1}}, "with width 1 a prefill half loads no drafter"),
        ({"role": "prefill", "drafter": None}, "drafter: a prefill half without one: beside it a decode half drafts"),
        ({"kv_cache": {"block_reuse": True}, **given("enable-mis")}, "SGLang keeps no prefixes with --enable-mis"),
        ({"limits": {"max_queued_requests": 9}, "role": "prefill"}, "SGLang has no limit of its queue there"),
        ({"limits": {"max_batch_size": 10}, **devices(4, data=4)}, "10 requests cannot be shared evenly by 4 copies"),
        (
            {"limits": {"max_batch_size": 10}, **devices(4, tensor=4, attention_data=True)},
            "10 requests cannot be shared evenly by 4 ranks of data-parallel attention",
        ),
        (devices(16, data=16), "16 GPUs (hardware.count) on 1 node, but a node of b200 has at most 8; use fewer"),
        ({"speculation": {"draft_window": 64, "width": 1}}, "with speculation.width 1 no drafter is loaded; remove"),
    ],
)
def test_a_fault_is_found_and_says_what_to_do(fields: dict[str, Any], change: dict[str, Any], message: str) -> None:
    assert message in problems(fields, **change)


def test_a_file_with_two_keys_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    assert "has 2 keys" in problems(fields, serving={"api_key_file": str(tmp_path / "keys")})


@pytest.mark.parametrize("given", [{"grpc-mode": True}, {"grpc-port": 50051}, {"tokenizer-worker-num": 2}])
def test_a_server_of_sglangs_that_checks_no_key_is_refused_where_a_key_is_asked_for(
    given: dict[str, Any], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("one\n")
    keyed = {"serving": {"api_key_file": str(tmp_path / "keys")}}
    assert "checks no API key" not in problems(fields, engine_args={"sglang": given})
    assert f"with --{next(iter(given))} this engine checks no API key" in problems(
        fields, engine_args={"sglang": given}, **keyed
    )
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert "with SGLANG_RUST_SERVER this engine checks no API key" in problems(fields, **keyed)


def test_nvfp4_on_hopper_is_told(fields: dict[str, Any], tmp_path: Path) -> None:
    target = {"model": str(write_paper_target(tmp_path / "fp4", recipe=NVFP4))}
    on = {gpu: deployed(fields, target=target, hardware={"gpu": gpu}) for gpu in ("h100", "b200")}
    assert [BACKEND.launch(one).problems for one in on.values()] == [[], []]
    notes = {gpu: " ".join(BACKEND.launch(one).notes) for gpu, one in on.items()}
    assert "h100 has no FP4 arithmetic: NVFP4 weights are unpacked at each use" in notes["h100"]
    assert "FP4" not in notes["b200"]


def test_formats_and_kernels_follow_the_gpu(fields: dict[str, Any], tmp_path: Path) -> None:
    targets = {
        name: str(write_paper_target(tmp_path / name, recipe=recipe)) for name, recipe in (("fp4", NVFP4), ("fp8", FP8))
    }
    unpacked, kernels = {}, {}
    for gpu in GPUS:
        made = [deployed(fields, target={"model": one}, hardware={"gpu": gpu}) for one in targets.values()]
        notes = [" ".join(BACKEND.launch(one).notes) for one in made]
        unpacked[gpu] = [
            f"{gpu} has no {kind} arithmetic" in told for kind, told in zip(("FP4", "FP8"), notes, strict=True)
        ]
        argv = BACKEND.launch(made[0]).command(tmp_path).argv
        kernels[gpu] = argv[argv.index(f"--{DRAFT_KERNELS}") + 1] if f"--{DRAFT_KERNELS}" in argv else None
    assert [gpu for gpu, (fp4, _) in unpacked.items() if fp4] == ["a100", "l40s", "h100", "h200"]
    assert [gpu for gpu, (_, fp8) in unpacked.items() if fp8] == ["a100"]
    assert {gpu for gpu, name in kernels.items() if name == "fa4"} == {"b200", "b300", "gb200", "gb300"}
    assert {gpu for gpu, name in kernels.items() if name is None} == {"rtx-pro-6000", "rtx-5090", "rtx-6000d", "gb10"}


def test_a_gpu_that_is_named_is_not_asked_for_where_its_kernels_have_no_sinks(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target": {"model": str(write_paper_target(tmp_path / "target"))}}
    fields["drafter"] = {"model": str(write_paper_drafter(tmp_path / "drafter", attention_sinks=True))}
    at, have = f"engine_args.sglang.{DRAFT_KERNELS}: attention sinks", "fa3, fa4, triton, trtllm_mha"
    found = {gpu: problems(fields, hardware={"gpu": gpu}) for gpu in (*GPUS, None)}
    assert {gpu for gpu, said in found.items() if said} == {"rtx-pro-6000", "rtx-5090", "rtx-6000d", "gb10", None}
    assert f"{have}, and gb10 has none by default; name one of these" in found["gb10"]
    assert "hardware.gpu" not in found["gb10"]
    assert at in found[None]
    assert "an unknown GPU has none by default; name one of these, or hardware.gpu" in found[None]
    flashinfer = problems(fields, hardware={"gpu": "gb10"}, **given(**{DRAFT_KERNELS: "flashinfer"}))
    assert flashinfer.endswith(f"{have}, not in flashinfer; name one of these")
    assert problems(fields, hardware={"gpu": "gb10"}, **given(**{DRAFT_KERNELS: "triton"})) == ""


def test_slices_of_fp8_experts_are_whole_blocks(fields: dict[str, Any], tmp_path: Path) -> None:
    made = write_paper_target(tmp_path / "fp8", experts=16, recipe=FP8, moe_intermediate_size=768)
    target = {"model": str(made)}
    found = problems(fields, target=target, **devices(4, tensor=4))
    assert "an expert's 6 FP8 blocks cannot be shared evenly by 4 devices; set parallel.expert to 4, or use" in found
    assert problems(fields, target=target, **devices(4, tensor=4, expert=4)) == ""
    assert problems(fields, target=target, **devices(2, tensor=2)) == ""


def test_a_format_that_the_checkpoint_has_not_is_to_be_left_out(fields: dict[str, Any], tmp_path: Path) -> None:
    recipe = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    target = {"model": str(write_paper_target(tmp_path / "mixed", recipe=recipe)), "quantization": "nvfp4"}
    assert "nvfp4 is asked for, but the checkpoint is modelopt; leave it out" in problems(fields, target=target)


def test_a_model_that_does_not_fit_a_gpu_is_advised_to_be_split(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "head_dim": 1024}
    found = problems({"target": {"model": str(write_paper_target(tmp_path / "large", **sizes))}}, **devices(8))
    assert "set parallel.tensor to 8" in found
    assert "parallel.data to" not in found


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"causal": True}, {"window": 8}], "some layers are causal and others not"),
        ([{"window": 8, "causal": True}, {"window": 16, "causal": True}], "different windows (8, 16)"),
        ([{"window": 8, "causal": True}, {}], ""),
        ([{"window": 8}, {"window": 8}], ""),
    ],
)
def test_attention_that_sglang_cannot_be_told_of_is_found(
    fields: dict[str, Any], tmp_path: Path, layers: list[dict[str, Any]], message: str
) -> None:
    config = tiny_drafter_config(**{**PAPER_DRAFTER, "layers": layers})
    with pytest.MonkeyPatch.context() as patch:  # no dialect has words for it: the plan is made as if one had
        checkpoint = Checkpoint(tmp_path, config=config)
        patch.setattr("dflash_serve.adapter.launch.open_checkpoint", lambda *_, **__: checkpoint)
        found = problems(fields)
    assert message in found
    assert bool(found) == bool(message)


def test_a_drafter_beyond_its_positions_is_found(fields: dict[str, Any], tmp_path: Path) -> None:
    short = {"model": str(write_paper_drafter(tmp_path / "short", max_position_embeddings=128))}
    assert "its RoPE was made for 128 positions" in problems(fields, drafter=short)
    assert problems(fields, drafter=short, limits={"max_model_len": 128}) == ""


RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
LORA = given("enable-lora", **{"lora-paths": ["a=/x/a"], "max-lora-rank": 64})
REPLAY = "enable-linear-replayssm-spec"
FLASHINFER = given(**{"mamba-backend": "flashinfer"})


@pytest.mark.parametrize(
    ("config", "change", "part"),
    [
        ({}, devices(8, tensor=8, attention_data=True), "data-parallel attention"),
        ({**RECURRENT, "model_type": "lfm2"}, {}, "recurrent layers in the target"),
        ({}, LORA, "LoRA"),
        ({}, given(**{"lora_paths": ["a=/x/a"]}), "LoRA"),
        ({}, given("enable-two-batch-overlap"), "--enable-two-batch-overlap"),
        ({}, given("enable-pdmux"), "--enable-pdmux"),
        ({}, given(**{"attn-cp-size": "2"}), "context-parallel attention"),
        (RECURRENT, given(REPLAY), f"--{REPLAY}"),
        ({**RECURRENT, "model_type": "nemotron_h"}, FLASHINFER, "--mamba-backend flashinfer"),
    ],
)
def test_auto_verifies_whole_blocks_where_no_other_width_is_served(
    fields: dict[str, Any], config: dict[str, Any], change: dict[str, Any], part: str
) -> None:
    edit_json(Path(fields["target"]["model"]) / "config.json", config)
    assert problems(fields, **change) == ""
    shown = BACKEND.launch(deployed(fields, **change))
    assert f"SGLang verifies whole blocks of 8 slots with {part}: auto changes nothing" in shown.notes
    assert shown.never_narrow == f"whole blocks with {part}"
    assert ("speculation.width", "8") in [(choice.key, choice.value) for choice in shown.choices]
    assert problems(fields, **change, speculation={"width": 8}) == ""
    assert ("speculation.width", "SGLang's own DFlash: the width never changes") in [
        (choice.key, choice.why) for choice in shown.choices
    ]
    found = problems(fields, **change, speculation={"width": 3})
    assert f"SGLang verifies whole blocks of 8 slots with {part}, not 3" in found


@pytest.mark.parametrize(
    "change",
    [
        given(**{"enable-lora": False, "enable-two-batch-overlap": False, "attn-cp-size": 1}),
        given(REPLAY),  # changes nothing without recurrent layers
        FLASHINFER,
        given("enable-mis"),
    ],
)
def test_arguments_that_change_nothing_leave_the_width_to_our_worker(
    fields: dict[str, Any], change: dict[str, Any]
) -> None:
    assert " --speculative-algorithm DFLASH " in command(fields, **change)
    assert BACKEND.launch(deployed(fields, **change)).command(Path("/prepared")).env[WIDTH_VARIABLE] == "auto"


@pytest.mark.parametrize("width", ["auto", 8])
def test_with_lora_the_plug_in_is_asked_for_whole_blocks_and_agrees(
    fields: dict[str, Any], width: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = BACKEND.launch(deployed(fields, **LORA, speculation={"width": width})).command(Path("/prepared"))
    asked = started.argv[started.argv.index("--speculative-num-draft-tokens") + 1]
    arguments = SimpleNamespace(
        enable_lora=True, lora_paths=None, speculative_num_draft_tokens=int(asked), speculative_dflash_block_size=None
    )
    for name, text in started.env.items():
        monkeypatch.setenv(name, text)
    assert width_problems(arguments) == []


@pytest.mark.parametrize("drafter", [None, "vanilla Markov"])
def test_prefixes_are_kept_on_a_decode_server_where_sglang_is_told_to(
    fields: dict[str, Any], tmp_path: Path, drafter: str | None
) -> None:
    half = {**fields, "drafter": None} if drafter is None else headed(fields, tmp_path, drafter)
    told = command(half, kv_cache={"block_reuse": True}, role="decode", **KEEPING)
    assert " --disaggregation-decode-enable-radix-cache " in told
    assert "--disable-radix-cache" not in told


@pytest.mark.parametrize("width", ["auto", 4, 8, "off", 1])
@pytest.mark.parametrize("config", [{}, RECURRENT])
def test_sglangs_own_algorithm_is_told_the_width(fields: dict[str, Any], config: dict[str, Any], width: object) -> None:
    edit_json(Path(fields["target"]["model"]) / "config.json", config)
    speculation = {"width": width, "block_size": 8}
    drafts = width not in ("off", 1)
    told = command(fields, speculation=speculation)
    assert (" --speculative-algorithm DFLASH " in told) is drafts
    assert (" --speculative-num-draft-tokens 8 " in told) is drafts
    environment = BACKEND.launch(deployed(fields, speculation=speculation)).command(Path("/prepared")).env
    assert environment == ({"DFLASH_SERVE_SPECULATION__WIDTH": str(width)} if drafts else {})


def test_a_smaller_block_and_half_of_a_pair_are_told(fields: dict[str, Any]) -> None:
    told = command(fields, role="decode", speculation={"block_size": 4})
    for words in ("--disaggregation-mode decode", "--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"):
        assert f" {words} " in told


def test_a_prefill_half_runs_what_the_decode_half_runs(fields: dict[str, Any]) -> None:
    """Both store K/V of the drafter. A pair without one says so; one with a method of SGLang's names that."""
    assert " --disaggregation-mode prefill " in command(fields, role="prefill")
    assert " --speculative-algorithm DFLASH " in command(fields, role="prefill")
    alone = {**fields, "drafter": None}
    assert "--speculative" not in command(alone, role="prefill", speculation={"width": "off"})
    eagle = given(**{"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "/x"})
    assert " --speculative-algorithm EAGLE3 " in command(alone, role="prefill", **eagle)


@pytest.mark.parametrize("role", ["whole", "prefill", "decode"])
def test_the_way_of_the_kv_is_told_where_it_is_left_to_sglang(fields: dict[str, Any], role: str) -> None:
    key, way = "pair.transfer", given(**{"disaggregation-transfer-backend": "nixl"})
    for more, is_told in (({}, role != "whole"), (way, False)):
        choices = BACKEND.launch(deployed(fields, role=role, **more)).choices
        assert [(one.key, one.value) for one in choices if one.key == key] == [(key, "mooncake")] * is_told
    assert " --disaggregation-transfer-backend nixl " in command(fields, role=role, **way)


def test_a_draft_never_inherits_the_targets_quantisation(fields: dict[str, Any]) -> None:
    told = command(fields, target={"quantization": "fp8"}, kv_cache={"dtype": "fp8"})
    assert " --quantization fp8 --kv-cache-dtype fp8_e4m3 " in told
    assert " --speculative-draft-model-quantization unquant --speculative-draft-kv-cache-dtype bfloat16 " in told


@pytest.mark.parametrize(
    ("penalty", "width", "told"), [(1.05, 8, True), (1.0, 8, False), (1.05, "off", False), (1.05, "auto", False)]
)
def test_a_models_own_penalties_are_not_asked_for_where_they_cannot_be_counted(
    penalty: float, width: object, told: bool, fields: dict[str, Any]
) -> None:
    defaults = Path(fields["target"]["model"]) / "generation_config.json"
    defaults.write_text(json.dumps({"repetition_penalty": penalty}))
    assert (" --sampling-defaults openai " in command(fields, speculation={"width": width})) is told


def test_on_several_nodes_the_environment_says_which(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    two = devices(16, tensor=16, nodes=2)
    with pytest.raises(UserError, match="LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX is not set"):
        command(fields, **two)
    for name, value in {"LEADER_ADDRESS": "pod-0.pods", "GROUP_SIZE": "2", "WORKER_INDEX": "1"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)
    assert " --nnodes 2 --node-rank 1 --dist-init-addr pod-0.pods:20000 " in command(fields, **two)
    monkeypatch.setenv("LWS_GROUP_SIZE", "3")
    with pytest.raises(UserError, match="2 nodes, but LWS_GROUP_SIZE is 3"):
        command(fields, **two)


def test_copies_of_the_model_are_sglangs_data_parallelism(fields: dict[str, Any]) -> None:
    assert " --tp-size 2 --dp-size 4 " in command(fields, **devices(8, data=4, tensor=2))


def test_a_number_of_requests_is_that_of_all_copies_together(fields: dict[str, Any]) -> None:
    limits = {"max_batch_size": 1536}
    assert " --max-running-requests 192 " in command(fields, limits=limits, **devices(8, data=8))
    ranks = devices(8, tensor=8, attention_data=True)  # among which SGLang divides it itself
    assert " --max-running-requests 1536 " in command(fields, limits=limits, **ranks)
    choices = BACKEND.launch(deployed(fields, **devices(8, data=8))).choices
    (requests,) = (choice for choice in choices if choice.key == "limits.max_batch_size")
    assert requests.value == str(8 * 48)
    assert "48 on each copy of the model" in requests.why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention-backend", "flashinfer"),
        ("speculative-draft-attention-backend", "flashinfer"),
        ("speculative-draft-kv-cache-dtype", "fp8_e4m3"),
    ],
)
def test_the_users_kernels_and_formats_take_the_place_of_ours(fields: dict[str, Any], name: str, value: str) -> None:
    told = command(fields, **devices(1), engine_args={"sglang": {name: value}})
    assert told.count(f" --{name} ") == told.count(f" --{name} {value} ") == 1


@pytest.mark.parametrize(("more", "told"), [({}, True), (given(REPLAY), False), ({"speculation": {"width": 1}}, False)])
def test_the_states_of_gated_delta_nets_are_told(fields: dict[str, Any], more: dict[str, Any], told: bool) -> None:
    sizes = {"linear_num_value_heads": 64, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
    edit_json(Path(fields["target"]["model"]) / "config.json", {**RECURRENT, **sizes})
    if told:
        more = devices(2, tensor=2)
    notes = " ".join(BACKEND.launch(deployed(fields, **more)).notes)
    each = 9 * 2 * 64 * 128 * 128 * 4 / 2 / 2**30
    assert (f"each request keeps 9 recurrent states on a device, {each:.1f} GiB; with engine_args" in notes) == told


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_sglang_chooses_the_targets_kernels_by_model(fields: dict[str, Any], gpu: str) -> None:
    told = command(fields, hardware={"gpu": gpu})
    assert " --attention-backend " not in told, "trtllm_mha or fa3 crash with Inkling, and on Hopper with Gemma 4"
    assert f" --speculative-draft-attention-backend {'fa4' if gpu == 'b200' else 'fa3'} " in told


def test_where_no_number_of_requests_is_given_it_is_sglangs_own(fields: dict[str, Any]) -> None:
    assert "--max-running-requests" not in command(fields)
    choices = {choice.key: choice for choice in BACKEND.launch(deployed(fields)).choices}
    assert choices["limits.max_batch_size"].value == "48"
    assert "SGLang's own number" in choices["limits.max_batch_size"].why


def headed(fields: dict[str, Any], folder: Path, name: str, **speculation: Any) -> dict[str, Any]:
    """The fields with a drafter of such heads."""
    config = tiny_drafter_config(**{**PAPER_DRAFTER, **HEADS[name]})
    dialect = "speculators" if config.draft_vocabulary else "modelopt"
    drafter = write_tiny_drafter(folder / "headed", config, dialect=dialect)
    return {**fields, "drafter": {"model": str(drafter)}, "speculation": speculation}


@pytest.mark.parametrize("name", ["vanilla Markov", "gated Markov", "rnn Markov", "vanilla Markov, fill-in"])
def test_dspark_is_started_with_both_counts(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    fields = headed(fields, tmp_path, name)
    told = command(fields)
    assert " --speculative-algorithm DSPARK " in told
    assert " --speculative-num-draft-tokens 8 --speculative-dspark-block-size 7 " in told
    BACKEND.launch(deployed(fields)).prepare(tmp_path / "prepared")
    raw = json.loads((tmp_path / "prepared" / "draft" / "config.json").read_text())
    shifted = "fill-in" not in name
    expected = {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": shifted, "block_size": 7 if shifted else 8}
    assert expected.items() <= raw.items()
    assert raw["markov_rank"] == 6, "where SGLang's models/dspark.py looks"
    choices = BACKEND.launch(deployed(fields)).choices
    assert ("speculation.width", "8") in [(choice.key, choice.value) for choice in choices]


@pytest.mark.parametrize("name", ["DFlash2", "convolution"])
def test_the_others_are_dflash(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    fields = headed(fields, tmp_path, name)
    told = command(fields)
    assert " --speculative-algorithm DFLASH " in told
    assert " --speculative-num-draft-tokens 8 " in told
    assert "dspark" not in told
    assert problems({**fields, "speculation": {"width": 3}}) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("anchor-first", "anchor-first slots without a Markov head"),
        ("Markov, reduced", "SGLang would skip d2t and lm_head"),
    ],
)
def test_heads_that_sglang_would_get_wrong_are_refused(
    name: str, words: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert words in problems(headed(fields, tmp_path, name))


ON_TWO = devices(2, tensor=2)
NO_SPARED_HEAD = {"recipe": {**NVFP4, "ignore": []}}


@pytest.mark.parametrize(
    ("name", "target", "change", "words"),
    [
        ("plain", NO_SPARED_HEAD, devices(1), ""),
        ("plain", NO_SPARED_HEAD, ON_TWO, "a plain drafter drafts on one device, not 2"),
        ("convolution", NO_SPARED_HEAD, ON_TWO, "a plain drafter drafts on one device, not 2"),
        ("DFlash2", NO_SPARED_HEAD, ON_TWO, ""),
        ("vanilla Markov", NO_SPARED_HEAD, ON_TWO, ""),
        ("plain", {"recipe": NVFP4}, ON_TWO, ""),
        ("plain", {"model_type": "gemma4"}, devices(1), ""),
        ("DFlash2", {"model_type": "gemma4"}, devices(1), "SGLang's DFlash2 cannot draft through (sglang#39362)"),
        ("vanilla Markov", {"model_type": "gemma4"}, devices(1), "SGLang's DSpark cannot draft through"),
    ],
)
def test_a_drafter_is_refused_only_with_a_head_that_sglang_cannot_draft_through(
    name: str, target: dict[str, Any], change: dict[str, Any], words: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    headless = write_paper_target(tmp_path / "other", **target)
    found = problems(headed(fields, tmp_path, name), target={"model": str(headless)}, **change)
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("family", "scale", "fine"), [("gemma4", 8.0, True), ("gemma4", 4.0, False), ("qwen3", 8.0, False)]
)
def test_an_embedding_scale_other_than_the_targets_is_refused(
    family: str, scale: float, fine: bool, fields: dict[str, Any], tmp_path: Path
) -> None:
    target = write_paper_target(tmp_path / "other", model_type=family)
    drafter = write_paper_drafter(tmp_path / "scaled", embedding_scale=scale)
    found = problems(fields, target={"model": str(target)}, drafter={"model": str(drafter)})
    assert ("SGLang scales by the target's" in found) is not fine


@pytest.mark.parametrize(
    ("family", "architecture", "name", "fine"),
    [
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", "plain", True),
        ("mellum", "MellumForCausalLM", "plain", True),
        ("minimax_m2", "MiniMaxM2ForCausalLM", "plain", False),
        ("qwen2", "Qwen2ForCausalLM", "plain", False),
        ("kimi_linear", "KimiLinearForCausalLM", "plain", False),
        ("kimi_linear", "KimiLinearForCausalLM", "vanilla Markov", True),
    ],
)
def test_a_target_that_hands_out_no_hidden_states_is_refused(
    family: str, architecture: str, name: str, fine: bool, fields: dict[str, Any], tmp_path: Path
) -> None:
    target = write_paper_target(tmp_path / "other", architectures=[architecture], model_type=family)
    found = problems(headed(fields, tmp_path, name), target={"model": str(target)})
    assert ("does not hand out hidden states" in found) is not fine
