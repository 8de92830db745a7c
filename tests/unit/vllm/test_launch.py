"""Problems that are found before vLLM starts, and its command line; no vLLM and no GPU needed."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL, given_survival
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_vllm import VLLMBackend, kv_groups
from dflash_vllm.checks import PLUG_INS_VARIABLE, RUST_VARIABLE
from dflash_vllm.drafter_rules import V1_VARIABLE
from dflash_vllm.engine_arguments import _parser
from tests.support.heads import HEADS
from tests.support.paper_models import PAPER_DRAFTER, write_paper_drafter, write_paper_target
from tests.support.tiny import (
    FULL,
    SLIDING,
    SLIDING_BOTH_WAYS,
    edit_json,
    tiny_drafter_config,
    write_tiny_drafter,
)


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def deployed(fields: dict[str, Any], **more: Any) -> Deployment:
    """`a__b=c` sets one key of a section, `a={...}` all of it."""
    changed = dict(fields)
    for path, value in more.items():
        section, _, key = path.partition("__")
        changed[section] = {**changed.get(section, {}), key: value} if key else value
    return Deployment.model_validate(changed)


def whats(fields: dict[str, Any], **more: Any) -> str:
    found = VLLMBackend().launch(deployed(fields, **more)).problems
    assert all(problem.what and problem.where and problem.do for problem in found)
    return "\n".join(map(str, found))


def flags(fields: dict[str, Any], **more: Any) -> dict[str, str]:
    """Flag -> value; "" where it takes none."""
    argv = VLLMBackend().launch(deployed(fields, **more)).command(Path("/prepared")).argv[5:]
    pairs = zip(argv, [*argv[1:], "--"], strict=True)
    return {word: "" if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


def speculative(fields: dict[str, Any], **more: Any) -> Any:
    return json.loads(flags(fields, **more)["--speculative-config"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation__draft_window": 64}, "no window for drafters that were trained without one"),
        ({"parallel__context": 2}, "context parallelism"),
        ({"parallel__nodes": 2, "parallel__tensor": 2, "hardware__count": 2}, "several nodes"),
        ({"parallel__tensor": 16, "hardware__count": 16}, "use fewer, or --backend sglang"),
        ({"parallel__attention_data": True}, "cannot agree on a width, and it drops the schedule"),
        ({"parallel__tensor": 3, "hardware__count": 3}, "16 attention heads cannot be split over 3 devices"),
        ({"parallel__data": 2, "hardware__count": 2}, "`dflash-serve deploy` makes 2 replicas of it"),
        ({"drafter__quantization": "fp8"}, "the drafter's checkpoint is not quantised, not fp8"),
        ({"kv_cache__dtype": "nvfp4"}, "NVFP4 keys and values are not covered"),
        ({"kv_cache__memory_fraction": 0.5}, "not of which GPU"),
        ({"limits__max_num_tokens": 64}, "256 blocks of 8 slots are 2048 rows a step, max_num_tokens is 64"),
        ({"role": "decode", "speculation__width": 4}, "whole blocks of 8 slots on one half of a pair, not 4"),
        ({"role": "decode", "engine_args__vllm": {"kv-transfer-config": "{}"}}, "sets itself; set role"),
        ({"engine_args__vllm": {"async-scheduling": False}}, "leave it out: `width: auto` needs our scheduler"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(change: dict[str, Any], message: str, fields: dict[str, Any]) -> None:
    assert message in whats(fields, **change)


def test_halves_with_drafters_and_targets_that_break_vllm_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_drafter_config(**{**PAPER_DRAFTER, **HEADS["vanilla Markov, fill-in"]})
    dspark = write_tiny_drafter(tmp_path / "dspark", config, dialect="modelopt")
    assert "crashed on prefill halves" in whats(fields, role="prefill", drafter={"model": str(dspark)})
    assert "crashed on prefill halves" not in whats(fields, drafter={"model": str(dspark)})
    recurrent = write_paper_target(
        tmp_path / "recurrent",
        layer_types=["linear_attention", "full_attention"] * 4,
    )
    assert "vllm#57032" in whats(fields, role="decode", target={"model": str(recurrent)})


def test_a_half_says_what_only_its_operator_can_do(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's own address is localhost, and its handshake compares the paths of the drafters."""
    variable = "VLLM_NIXL_SIDE_CHANNEL_HOST"
    monkeypatch.delenv(variable, raising=False)
    told = " ".join(VLLMBackend().launch(deployed(fields, role="decode")).notes)
    assert f"set {variable} to an address of this machine" in told
    assert "start both halves with the same --folder" in told
    assert "one rejected block more for each request of a decode half" in told
    assert "one rejected block more" not in notes(fields, role="prefill")
    monkeypatch.setenv(variable, "10.0.0.1")
    assert variable not in " ".join(VLLMBackend().launch(deployed(fields, role="decode")).notes)


def test_a_half_whose_address_is_taken_is_refused_before_vllm_hangs(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second half on one machine is, at vLLM's own port."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(other.getsockname()[1]))
        (taken,) = VLLMBackend().launch(deployed(fields, role="decode")).problems_of_start
        assert VLLMBackend().launch(deployed(fields)).problems_of_start == []
    assert (taken.where, "vLLM would hang at its start" in taken.what) == ("VLLM_NIXL_SIDE_CHANNEL_PORT", True)
    assert VLLMBackend().launch(deployed(fields, role="decode")).problems_of_start == []
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "many")
    (wrong,) = VLLMBackend().launch(deployed(fields, role="decode")).problems_of_start
    assert "'many' is no port" in str(wrong)


def notes(fields: dict[str, Any], **more: Any) -> str:
    return " ".join(VLLMBackend().launch(deployed(fields, **more)).notes)


@pytest.mark.parametrize("name", ["kv-offloading-size", "kv_offloading_size", "kv-transfer-config"])
def test_kv_outside_the_gpus_is_said_to_stay_unused_where_the_drafters_are_missing(
    name: str, fields: dict[str, Any]
) -> None:
    value = 4 if "size" in name else '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
    assert "vllm#47890" in notes(fields, engine_args__vllm={name: value})
    assert "vllm#47890" not in notes(fields)
    assert "vllm#47890" not in notes(fields, speculation__width="off", engine_args__vllm={name: value})


def hybrid(folder: Path) -> dict[str, Any]:
    """A target with recurrent layers, and a drafter with one full layer and sliding ones."""
    target = write_paper_target(
        folder / "hybrid",
        layer_types=["linear_attention", "full_attention"] * 4,
        linear_num_value_heads=4,
        linear_value_head_dim=16,
        linear_key_head_dim=16,
    )
    drafter = write_paper_drafter(folder / "mixed", layers=(SLIDING, FULL))
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def test_the_installed_vllm_is_asked_for_the_kv_groups_of_the_models_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[kv_groups.Layer]] = []

    def group(layers: list[kv_groups.Layer], **_: object) -> kv_groups.Grouping:
        asked.append(layers)
        return kv_groups.Grouping(len(layers), len(layers) << 30)

    monkeypatch.setattr(kv_groups, "group_layers", group)
    monkeypatch.setattr(kv_groups, "RELEASES", SimpleNamespace(**RELEASED))
    told = notes(hybrid(tmp_path))
    alone, both = asked
    assert [sum(bool(layer.state) for layer in alone), len(alone), len(both)] == [4, 8, 10]
    assert [layer.window for layer in both[8:]] == [SLIDING.window, None]
    assert {layer.state for layer in alone} == {0, 4 * 16 * 16 * 4}
    assert "10 K/V groups of target and drafter, 8 of the target alone" in told
    assert "10.0 GiB of a GPU, 8.0 without the drafter" in told


def test_nothing_is_said_of_kv_groups_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {**RELEASED, "installed": lambda: None, "supports": lambda _: False}
    monkeypatch.setattr(kv_groups, "RELEASES", SimpleNamespace(**absent))
    assert "K/V groups" not in notes(hybrid(tmp_path))


RELEASED = {"installed": lambda: "0.32.0", "supports": lambda _: True, "import_problem": lambda: None}
SILENT: dict[str, tuple[dict[str, object], str]] = {
    "mask token beyond the vocabulary": ({"dflash_config.mask_token_id": 96}, "mask_token_id 96 is outside"),
    "layer beyond the target": ({"dflash_config.target_layer_ids": [1, 3, 9], "num_target_layers": None}, "name [9]"),
    "a layer twice": ({"dflash_config.target_layer_ids": [1, 3, 3]}, "name a layer twice"),
    "more layers than tensors": (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "tensor layers.2."),
    "fewer layers than tensors": ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "tensor layers.1."),
    "another vocabulary": ({"vocab_size": 90}, "vocab_size is 90, the target's is 96"),
    "an embedding scale": ({"input_embedding_scale": 8.0}, "which vLLM ignores"),
    "a shifted head": ({"dflash_config.shift_label": True}, "keep the right one"),
    "another head": ({"dflash_config.projector_type": "domino"}, "Domino head"),
    "an unknown key": ({"dflash_config.temperature_head": 1}, "unknown key dflash_config.temperature_head"),
    "two sayings of causality": ({"dflash_config.causal": True}, "is_causal is False"),
}  # fmt: skip
"""Edits of config.json with which vLLM alone comes up healthy; `tests/support/vllm_faults.py` has what it then does."""


@pytest.mark.parametrize("fault", SILENT)
def test_what_vllm_would_swallow_is_refused_before_launch(fault: str, fields: dict[str, Any]) -> None:
    change, message = SILENT[fault]
    edit_json(Path(fields["drafter"]["model"]) / "config.json", change)
    assert message in whats(fields)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("release", "gpu", "rope", "served"),
    [("0.33.0", "b200", None, True), ("0.33.0", "b200", YARN, False), ("0.33.0", "none", None, False),
     ("0.32.0", "b200", None, False)],
)  # fmt: skip
def test_a_short_rope_table_is_refused_where_vllm_does_not_make_it_longer(
    release: str, gpu: str, rope: object, served: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_serve.adapter.facts.version", lambda _: release)
    edit_json(Path(fields["drafter"]["model"]) / "config.json", {"max_position_embeddings": 128, "rope_scaling": rope})
    assert ("RoPE table has 128 positions" in whats(fields, hardware__gpu=gpu)) is not served


@pytest.mark.parametrize("tensor", ["fc.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_found_before_launch(tensor: str, fields: dict[str, Any]) -> None:
    weights = Path(fields["drafter"]["model"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(f'"{tensor}"'.encode(), f'"{tensor[:-1]}x"'.encode()))
    assert f"tensor {tensor}" in whats(fields)


@pytest.mark.parametrize("layers", [(FULL, SLIDING), (FULL, SLIDING_BOTH_WAYS)])
@pytest.mark.parametrize("gpu", ["none", "b200"])
def test_mixed_windows_need_the_second_model_runner(
    layers: tuple[AttentionKind, ...], gpu: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields["drafter"] = {"model": str(write_paper_drafter(tmp_path / "mixed", layers=layers))}
    if layers[1].causal or gpu == "none":
        assert ("V1 model runner" in whats(fields, hardware__gpu=gpu)) is (gpu == "none")
    monkeypatch.setenv(V1_VARIABLE, "0")
    assert "V1 model runner" in whats(fields, hardware__gpu=gpu)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (PLUG_INS_VARIABLE, "lora_filesystem_resolver", "leaves dflash_serve out"),
        (PLUG_INS_VARIABLE, "other,dflash_serve", ""),
        (RUST_VARIABLE, "1", "runs no stat logger"),
        (COST_TABLE, "/nowhere.json", "no cost table"),
        (SURVIVAL, "0.2,0.4", "is no survival"),
    ],
)
def test_an_environment_that_spoils_a_launch_is_found_before_it(
    variable: str, value: str, message: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = whats(fields)
    assert message in found
    assert bool(found) is bool(message)
    assert whats(fields, speculation__width="off") == ""


@pytest.mark.parametrize("text", ["", "0.5,0.6", "1.2", "half", "0.5,-0.1"])
def test_a_survival_that_is_none_is_named(text: str) -> None:
    with pytest.raises(UserError, match="is no survival"):
        given_survival({SURVIVAL: text})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"model_type": "gemma4"}, "gemma4 scales its embedding, and vLLM hands it to DFlash drafters unscaled"),
    ],
)
def test_a_target_that_vllm_serves_badly_is_refused(
    target: dict[str, Any], message: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    fields["target"] = {"model": str(write_paper_target(tmp_path / "other", **target))}
    assert message in whats(fields, hardware__gpu="h100")


def test_a_key_that_vllm_would_take_for_a_flag_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sound\n-odd\n")
    found = whats(fields, serving__api_key_file=str(tmp_path / "keys"))
    assert "a key that begins with -" in found
    assert "odd" not in found


def test_a_server_of_vllms_that_checks_no_key_is_refused_where_a_key_is_asked_for(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("sound\n")
    keyed = {"serving__api_key_file": str(tmp_path / "keys")}
    assert "checks no API key" not in whats(fields, **keyed)
    assert "checks no API key" not in whats(fields, engine_args__vllm={"grpc": True})
    assert "with --grpc this engine checks no API key" in whats(fields, engine_args__vllm={"grpc": True}, **keyed)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "with VLLM_USE_RUST_FRONTEND this engine checks no API key" in whats(fields, **keyed)


def test_beside_a_release_that_is_not_supported_arguments_are_held_against_the_pinned_list(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its parser stands is not known; that the release is not supported is all there is to say."""
    monkeypatch.setattr("dflash_serve.adapter.facts.version", lambda _: "0.34.0")
    _parser.cache_clear()
    found = whats(fields, engine_args__vllm={"enable-lora": True}, serving__reasoning_parser="qwen3")
    _parser.cache_clear()
    assert found == "vllm: vLLM 0.34.0 is not supported, tested 0.32-0.33; pip install 'vllm==0.33.*'"


def test_a_parser_that_a_plug_in_of_the_users_brings_is_taken(fields: dict[str, Any]) -> None:
    plugged = {"tool-parser-plugin": "mine.py"}
    assert whats(fields, engine_args__vllm=plugged, serving__tool_call_parser="mine") == ""


@pytest.mark.parametrize("dtype", ["fp8", "auto"])
def test_the_speculative_configuration_is_exact_and_inherits_no_keys_and_values(
    dtype: str, fields: dict[str, Any]
) -> None:
    found = speculative(fields, hardware__gpu="b200", kv_cache__dtype=dtype)
    assert found["num_speculative_tokens"] == 7, "vLLM counts no anchor"
    assert (found["draft_sample_method"], found["rejection_sample_method"]) == ("greedy", "standard")
    assert found["disable_eagle_block_drop"] is True, "else a cached prompt's last block is not used"
    assert found["kv_cache_dtype"] == "bfloat16"
    assert speculative(fields, speculation__block_size=4)["num_speculative_tokens"] == 3


@pytest.mark.parametrize(("gpu", "kernels"), [("gb10", "TRITON_ATTN"), ("rtx-5090", None), ("none", None)])
def test_a_gb10_drafts_with_other_kernels_than_vllm_chooses(
    gpu: str, kernels: str | None, fields: dict[str, Any]
) -> None:
    assert speculative(fields, hardware__gpu=gpu).get("attention_backend") == kernels
    assert ("vllm#50707" in notes(fields, hardware__gpu=gpu)) is (kernels is not None)


@pytest.mark.parametrize(
    ("width", "batch", "schedule"),
    [
        (8, 256, None),  # whole blocks need none
        (3, 256, [[1, 256, 2]]),
        ("auto", 256, [[1, 1, 7], [2, 2, 3], [3, 3, 1], [4, 256, 0]]),
        ("auto", 3, [[1, 1, 7], [2, 2, 3], [3, 3, 0]]),
        ("auto", 2, [[1, 1, 7], [2, 2, 0]]),
        ("auto", 1, None),
    ],
)  # without adaptive verification, because no GPU is named
def test_auto_lists_every_width_because_graphs_are_captured_of_those(
    width: object, batch: int, schedule: object, fields: dict[str, Any]
) -> None:
    limited: dict[str, Any] = {"speculation__width": width, "limits__max_batch_size": batch}
    assert speculative(fields, **limited).get("num_speculative_tokens_per_batch_size") == schedule
    assert ("--scheduler-cls" in flags(fields, **limited)) is (width == "auto" and batch > 1)


LATENT: dict[str, object] = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("more", "target", "reason"),
    [
        ({}, {}, None),
        ({"hardware__gpu": "b300", "limits__max_batch_size": 1}, {}, None),
        ({"hardware__gpu": "none"}, {}, "V1 model runner"),
        ({"hardware__gpu": None}, {}, "which one serves is not known"),
        ({"engine_args__vllm": {"enable_lora": True}}, {}, "may not run beside enable-lora"),
        ({"engine_args__vllm": {"no-enable-lora": False}}, {}, "may not run beside enable-lora"),
        ({"engine_args__vllm": {"enable_lora": False, "enforce-eager": False}}, {}, None),
        ({}, {"layer_types": ["linear_attention", "full_attention"] * 4}, "recurrent layers"),
        ({}, LATENT, "latent attention"),
        ({}, {"architectures": ["Llama4ForConditionalGeneration"]}, "attention of Llama4"),
        ({}, {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}, "attention of MiniMaxM3"),
    ],
)
def test_auto_lets_vllm_trim_drafted_blocks_where_it_can_and_says_who_decides(
    more: dict[str, Any], target: dict[str, Any], reason: str | None, fields: dict[str, Any], tmp_path: Path
) -> None:
    fields |= {"target": {"model": str(write_paper_target(tmp_path / "other", **target))}, "hardware": {"gpu": "h100"}}
    config, batch = speculative(fields, **more), more.get("limits__max_batch_size", 256)
    assert config.get("enable_adaptive_verification", False) is (reason is None)
    assert len(config["num_speculative_tokens_per_batch_size"]) == (4 if reason else 1)
    assert reason or config["num_speculative_tokens_per_batch_size"] == [[1, batch, 7]]
    assert "--scheduler-cls" in flags(fields, **more), "vLLM cannot stop drafting, our scheduler can"
    told = VLLMBackend().launch(deployed(fields, **more))
    (chosen,) = (choice for choice in told.choices if choice.key == "speculation.width")
    assert chosen.value == "auto"
    assert (reason or "verifies those slots that pay (adaptive verification); our scheduler") in chosen.why
    assert any("counts drafted tokens that vLLM did not verify" in note for note in told.notes) is (reason is None)


def test_costs_of_whole_blocks_keep_vllm_from_trimming(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cost.json").write_text(FLAT_THEN_STEEP.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    assert "enable_adaptive_verification" not in speculative(fields, hardware__gpu="h100")
    assert "enable_adaptive_verification" not in speculative(fields, hardware__gpu="h100", speculation__width=8)


def test_a_number_of_requests_is_that_of_all_copies_together(fields: dict[str, Any]) -> None:
    copies = deployed(fields, hardware__count=8, parallel__data=8, limits__max_batch_size=1536)
    argv = VLLMBackend().launch(copies).command(Path("/prepared")).argv
    assert argv[argv.index("--max-num-seqs") + 1] == "192"


def test_drafted_slots_have_rows_of_their_own(fields: dict[str, Any]) -> None:
    found = flags(fields, limits__max_num_tokens=512, limits__max_batch_size=16)
    assert (found["--max-num-scheduled-tokens"], found["--max-num-batched-tokens"]) == ("512", str(512 + 16 * 7))


@pytest.mark.parametrize(("gpu", "batch", "rows"), [("h200", 256, 8192), ("b200", 256, 16384), ("b200", 4096, 32768)])
def test_a_step_has_as_many_rows_as_vllm_gives_it_on_that_gpu(
    gpu: str, batch: int, rows: int, fields: dict[str, Any]
) -> None:
    found = flags(fields, hardware__gpu=gpu, limits__max_batch_size=batch)
    assert found["--max-num-scheduled-tokens"] == str(rows)


@pytest.mark.parametrize("off", [{"enable-chunked-prefill": False}, {"no_enable_chunked_prefill": True}])
def test_a_prompt_that_is_not_to_be_cut_fits_into_one_step(
    off: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    """Else vLLM refuses to start: its own number of rows is never below max_model_len then."""
    target, drafter = (
        write(tmp_path / write.__name__, max_position_embeddings=40960)
        for write in (write_paper_target, write_paper_drafter)
    )
    fields |= {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    assert flags(fields, engine_args__vllm=off)["--max-num-scheduled-tokens"] == "40960"
    assert flags(fields, engine_args__vllm=off, limits__max_model_len=1024)["--max-num-scheduled-tokens"] == "8192"
    assert flags(fields, engine_args__vllm={"enable-chunked-prefill": True})["--max-num-scheduled-tokens"] == "8192"


def test_a_cpu_computes_in_float32_and_in_turns(fields: dict[str, Any]) -> None:
    found = flags(fields, hardware__gpu="none")
    assert (found["--dtype"], found["--enforce-eager"]) == ("float32", "")
    assert found["--scheduler-cls"] == "dflash_vllm.plugin.scheduler.WidthScheduler"
    assert "kv_cache_dtype" not in json.loads(found["--speculative-config"])
    assert flags(fields)["--scheduler-cls"] == "dflash_vllm.plugin.scheduler.AsyncWidthScheduler"
    compiled = flags(fields, hardware__gpu="none", engine_args__vllm={"enforce-eager": False})
    assert {"--no-enforce-eager", "--enforce-eager"} & compiled.keys() == {"--no-enforce-eager"}


MEASURED = (0.627, 0.347, 0.202, 0.119, 0.093, 0.073, 0.052)
"""The bundled drafter's survival."""
FLAT_THEN_STEEP = CostModel(target={1: 1.0, 8: 1.0, 256: 32.0}, draft={1: 0.05, 16: 0.05})


def test_costs_and_a_survival_give_a_static_schedule_without_a_scheduler_of_ours(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cost.json").write_text(FLAT_THEN_STEEP.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    assert "--scheduler-cls" in flags(fields)
    monkeypatch.setenv(SURVIVAL, ",".join(map(str, MEASURED)))
    assert "--scheduler-cls" not in flags(fields)
    rows = speculative(fields)["num_speculative_tokens_per_batch_size"]
    assert [row[0] for row in rows] == [1, *(row[1] + 1 for row in rows[:-1])]
    assert (rows[0][2], rows[-1][1], rows[-1][2]) == (7, 256, 0), "whole blocks for one request, none for all"
    assert speculative(fields, speculation__width=3)["num_speculative_tokens_per_batch_size"] == [[1, 256, 2]]


def test_a_preview_says_what_is_chosen_and_what_follows(fields: dict[str, Any], tmp_path: Path) -> None:
    told = VLLMBackend().launch(deployed(fields))
    chosen = {choice.key: choice for choice in told.choices}
    assert chosen["limits.max_batch_size"].value == "256"
    assert "our scheduler inside vLLM chooses 1, 2, 4, 8" in chosen["speculation.width"].why
    assert [file.name for file in told.files(tmp_path)] == ["draft/config.json", "draft/model.safetensors"]
    assert any("min_p" in note for note in told.notes)
    narrow = VLLMBackend().launch(deployed(fields, speculation__width=3))
    assert "below a whole block vLLM drafts without CUDA graphs; speculation.block_size: 3 has them" in narrow.notes
    plain = VLLMBackend().launch(deployed(fields, speculation__width="off"))
    assert (plain.files(tmp_path), plain.notes) == ([], [])
