"""Promises that the adapters of SGLang, vLLM and TensorRT-LLM all keep."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter.checks import BUILT, BUILT_OF_DRAFTERS
from dflash_serve.adapter.protocol import InProcessBackend, ServerBackend
from dflash_serve.adapter.registry import backend, server_backend
from dflash_serve.checkpoint import reader
from dflash_serve.checkpoint.files import read_headers
from dflash_serve.checkpoint.source import record_survival, recorded_survival
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.cli import serve
from dflash_serve.cli.main import app
from dflash_serve.common import processes
from dflash_serve.deployment.description import Deployment, Model, Quantization
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL
from dflash_serve.errors import UserError
from tests.support.built import flip_last_byte, seal
from tests.support.paper_models import write_paper_target
from tests.support.tiny import edit_json, write_tiny_drafter

ENGINES = ("sglang", "vllm", "tensorrt-llm")
READ_WHOLE = ("sglang", "vllm")
"""Engines for which `check` reads the drafter's tensor headers, too; TensorRT-LLM's reads its config.json alone."""
LARGE: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
    "num_attention_heads": 64, "head_dim": 128,
}  # fmt: skip
every_engine = pytest.mark.parametrize("engine", ENGINES)
whole_readers = pytest.mark.parametrize("engine", READ_WHOLE)


def adapter(engine: str) -> ServerBackend:
    return server_backend(engine)


def problems(engine: str, fields: dict[str, Any], **more: Any) -> str:
    found = adapter(engine).launch(Deployment.model_validate({**fields, **more})).problems
    assert all(problem.what and problem.where and problem.do and "\n" not in str(problem) for problem in found)
    return "\n".join(map(str, found))


def notes(engine: str, fields: dict[str, Any]) -> list[str]:
    return list(adapter(engine).launch(Deployment.model_validate(fields)).notes)


@every_engine
def test_it_is_a_server_that_has_no_engine_in_this_process(engine: str) -> None:
    assert adapter(engine).name == engine
    assert not isinstance(backend(engine), InProcessBackend)


@every_engine
def test_a_sound_deployment_has_no_problems_with_and_without_speculation(engine: str, fields: dict[str, Any]) -> None:
    assert problems(engine, fields) == ""
    nowhere = {"drafter": {"model": "/nowhere"}, "speculation": {"width": "off"}}
    assert problems(engine, fields, **nowhere) == "", "a drafter that is not used does not matter"


@every_engine
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculation": {"block_size": 16}}, "block_size 16 is larger than the drafter's 8"),
        ({"speculation": {"width": 9}}, "width 9 is larger than the block of 8 slots"),
        ({"limits": {"max_model_len": 4096}}, "4096 is more than the target's 256 positions"),
        ({"limits": {"max_model_len": 7}}, "limits.max_model_len: 7 tokens cannot hold one block of 8 slots"),
        ({"limits": {"max_num_tokens": 7}}, "limits.max_num_tokens: 7 tokens cannot hold one block of 8 slots"),
        (
            {"parallel": {"tensor": 16}, "hardware": {"count": 16}},
            "16 GPUs (hardware.count) on 1 node, but a node of h200 has at most 8",
        ),
        ({"parallel": {"tensor": 2}}, "hardware.count is 1"),
        ({"parallel": {"expert": 2, "tensor": 2}, "hardware": {"count": 2}}, "no experts"),
        ({"hardware": {"dtype": "float32", "gpu": "h200"}}, "hardware.dtype"),
        ({"parallel": {"pipeline": 2}, "hardware": {"count": 2}}, "parallel.pipeline"),
        ({"target": {"quantization": "nvfp4"}}, "target.quantization"),
    ],
)
def test_a_fault_is_found_and_says_what_to_do(
    engine: str, change: dict[str, Any], said: str, fields: dict[str, Any]
) -> None:
    change = {key: {**fields.get(key, {}), **value} for key, value in change.items()}
    assert said in problems(engine, fields, **change)


@every_engine
@pytest.mark.parametrize("format", [one for one in get_args(Quantization) if one != "none"])
def test_a_format_of_a_plain_target_is_refused_or_converted_to(
    engine: str, format: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    target = {**fields["target"], "quantization": format}
    found = problems(engine, fields, target=target)
    launch = adapter(engine).launch(Deployment.model_validate({**fields, "target": target}))
    argv = launch.command(tmp_path).argv  # a dry run shows it beside the problems
    assert ("--quantization" in argv) == (found == "") == (engine != "tensorrt-llm" and format == "fp8")
    assert ("dflash-serve build" in found) == (found != "" and format in ("fp8", "nvfp4"))


@every_engine
@pytest.mark.parametrize(("format", "recipe"), [
    ("fp8-block", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ("w4a16", {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                                           "symmetric": True}}}}),
])  # fmt: skip
def test_a_quantised_target_may_be_called_by_its_own_format(
    engine: str, format: str, recipe: dict[str, object], fields: dict[str, Any], tmp_path: Path
) -> None:
    target = {"model": str(write_paper_target(tmp_path / "quantised", recipe=recipe)), "quantization": format}
    if engine == "tensorrt-llm" and format == "w4a16":
        assert "its weights are compressed-tensors in integers" in problems(engine, fields, target=target)
        return
    assert problems(engine, fields, target=target) == ""
    called = [Model.model_validate({**target, "quantization": one}) for one in (format, "none")]
    sizes = {read_target_layout(Path(one.model), one).weight_bytes for one in called}
    assert len(sizes) == 1, "naming the format changes no memory"
    found = problems(engine, fields, target={**target, "quantization": "int8"})
    assert "target.quantization: " in found
    assert "int8" in found
    assert f" {format}" in found


def test_build_makes_the_formats_that_it_is_advised_for() -> None:
    recipes = pytest.importorskip("dflash_engines.recipe")
    assert set(BUILT) == set(get_args(recipes.Format))
    assert set(BUILT_OF_DRAFTERS) == {*get_args(recipes.Format), *get_args(recipes.Integers)}


@every_engine
def test_more_gpus_than_a_node_has_are_answered_with_what_the_engine_can_do(
    engine: str, fields: dict[str, Any]
) -> None:
    found = problems(engine, fields, parallel={"tensor": 8}, hardware={"count": 8, "gpu": "gb300"})
    many = "8 GPUs (hardware.count) on 1 node, but a node of gb300 has at most 4"
    single = f"hardware.count: {many}; use fewer, or --backend sglang"
    assert (single if engine == "vllm" else f"parallel.nodes: {many}; set it to 2 or more") in found


@every_engine
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [(COST_TABLE, "/nowhere.json", "no cost table"), (SURVIVAL, "1.5", "'1.5' is no survival")],
)
def test_measurements_that_auto_cannot_read_are_found(
    engine: str, variable: str, value: str, said: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert said in problems(engine, fields)
    assert problems(engine, fields, speculation={"width": 8}) == "", "no other width reads them"


@every_engine
def test_a_wrong_cost_table_names_its_key(
    engine: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cost.json").write_text('{"target": {"1": 0.1}}')
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    assert "no cost table (draft is missing)" in problems(engine, fields)


@every_engine
def test_a_target_that_hands_out_no_features_or_is_anothers_is_found(engine: str, fields: dict[str, Any]) -> None:
    target = Path(fields["target"]["model"]) / "config.json"
    family = "qwen2" if engine == "tensorrt-llm" else "mamba2"
    edit_json(target, {"model_type": family, "architectures": ["Mamba2ForCausalLM"]})
    if engine == "vllm":  # the installed vLLM is asked: tests/contract
        assert any(note.startswith("not checked: whether vLLM's model for 'mamba2'") for note in notes(engine, fields))
    else:
        assert "target.model" in problems(engine, fields)
    edit_json(target, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 48})
    assert "hidden_size is 64, the target's is 48" in problems(engine, fields)


@whole_readers
def test_a_renamed_tensor_is_found_before_launch(engine: str, fields: dict[str, Any]) -> None:
    from safetensors.torch import load, save_file

    path = Path(fields["drafter"]["model"]) / "model.safetensors"
    save_file({name.replace("fc.", "project."): tensor for name, tensor in load(path.read_bytes()).items()}, path)
    assert "fc.weight" in problems(engine, fields)


@whole_readers
def test_experts_are_shared_by_all_devices_or_none(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    fields["target"] = {"model": str(write_paper_target(tmp_path / "experts", experts=16))}
    fields["hardware"]["count"] = 8
    assert problems(engine, fields, parallel={"tensor": 8, "expert": 8}) == ""
    assert "shares experts among all" in problems(engine, fields, parallel={"tensor": 8, "expert": 4})


@every_engine
def test_a_target_too_large_for_its_devices_is_found(engine: str, tmp_path: Path) -> None:
    fields = {"target": {"model": str(write_paper_target(tmp_path / "large", **LARGE))}}
    one = problems(engine, fields, hardware={"gpu": "h100"})
    assert "more devices" in one
    assert "GiB" in one
    assert problems(engine, fields, hardware={"gpu": "h100", "count": 4}, parallel={"tensor": 4}) == ""


@whole_readers
def test_a_context_that_leaves_no_room_is_found(engine: str, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "long", **{**LARGE, "max_position_embeddings": 1_000_000})
    found = problems(
        engine, {"target": {"model": str(target)}}, hardware={"gpu": "h100", "count": 4}, parallel={"tensor": 4}
    )
    assert "1000000 tokens, but after the weights there is room" in found


@pytest.mark.parametrize(
    ("engine", "version", "fits"),
    [
        *(("sglang", version, fits) for version, fits in (("0.5.22", False), ("0.5.23", True), ("0.6.0", False))),
        *(("sglang", version, fits) for version, fits in (("0.5.23.post1", True), ("0.5.23rc1", True))),
        *(("vllm", version, fits) for version, fits in (("0.31.2", False), ("0.32.0+cpu", True), ("0.33.1", True))),
        *(("vllm", version, fits) for version, fits in (("0.34", False), ("main", False))),
    ],
)
def test_only_tested_releases_pass(
    engine: str, version: str, fits: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_serve.adapter.facts.version", lambda _: version)
    releases = import_releases(engine)
    assert [problem.what for problem in releases.problems(version)] == (
        [] if fits else [f"{releases.title} {version} is not supported, tested {adapter(engine).releases}"]
    )


def import_releases(engine: str) -> Any:
    import dflash_sglang.facts
    import dflash_vllm.facts

    return {"sglang": dflash_sglang.facts.RELEASES, "vllm": dflash_vllm.facts.RELEASES}[engine]


@every_engine
@pytest.mark.parametrize("dialect", ["zlab", "speculators", "modelopt"])
def test_the_draft_folder_is_the_drafter_whatever_it_came_in(
    engine: str, dialect: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config, _ = reader.read_config(fields["drafter"]["model"])
    fields["drafter"] = {"model": str(write_tiny_drafter(tmp_path / dialect, config, dialect=dialect))}
    for _ in range(2):  # and again, over the first
        adapter(engine).launch(Deployment.model_validate(fields)).prepare(tmp_path / "prepared")
    written = reader.open_checkpoint(tmp_path / "prepared" / "draft")
    assert (written.problems, written.config) == ([], config)
    assert written.dialect is not None
    assert written.dialect.name == "zlab"


@every_engine
def test_nothing_is_prepared_of_a_bad_deployment(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    bad = Deployment.model_validate({**fields, "speculation": {"block_size": 16}})
    with pytest.raises(UserError, match="block_size 16 is larger"):
        adapter(engine).launch(bad).prepare(tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


@every_engine
@pytest.mark.parametrize("file", ["target/config.json", "drafter/config.json", "drafter/model.safetensors"])
def test_a_flipped_byte_of_any_built_file_is_caught_before_anything_is_written(
    engine: str, file: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    for model in ("target", "drafter"):
        seal(Path(fields[model]["model"]))
    adapter(engine).launch(Deployment.model_validate(fields)).prepare(tmp_path / "sound")
    if file.endswith(".json"):  # a space more: still the same configuration, but not the one that was built
        (tmp_path / file).write_text((tmp_path / file).read_text() + " ")
    else:
        flip_last_byte(tmp_path / file)
    with pytest.raises(UserError, match=r"sha256 differs|its manifest says") as caught:
        adapter(engine).launch(Deployment.model_validate(fields)).prepare(tmp_path / "out")
    assert caught.value.where == str(tmp_path / file)
    assert not (tmp_path / "out").exists()


@whole_readers
def test_a_recorded_survival_goes_with_the_draft(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    record_survival(Path(fields["drafter"]["model"]), [0.5, 0.25])
    adapter(engine).launch(Deployment.model_validate(fields)).prepare(tmp_path / "prepared")
    assert recorded_survival(tmp_path / "prepared" / "draft") == [0.5, 0.25]


@whole_readers
def test_keys_go_through_a_private_file(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret-one\n# not one\n")
    deployment = Deployment.model_validate({**fields, "serving": {"api_key_file": str(tmp_path / "keys")}})
    launch = adapter(engine).launch(deployment)
    assert launch.problems == []
    launch.prepare(tmp_path / "prepared")
    said, secrets = launch.command(tmp_path / "prepared"), tmp_path / "prepared" / "secrets.yaml"
    assert said.argv[said.argv.index("--config") + 1] == str(secrets)
    key = yaml.safe_load(secrets.read_text())["api-key"]
    assert key == ("secret-one" if engine == "sglang" else ["secret-one"])
    assert secrets.stat().st_mode & 0o077 == 0
    assert "secret-one" not in f"{said} {launch.files(tmp_path)} {launch.choices} {launch.notes}"


@every_engine
def test_host_and_port_are_told(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    argv = adapter(engine).launch(Deployment.model_validate(fields)).command(tmp_path, host="0.0.0.0", port=30000).argv
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    assert argv[argv.index("--port") + 1] == "30000"


@every_engine
@pytest.mark.parametrize("width", ["off", 1])
def test_without_speculation_nothing_of_it_is_told(
    engine: str, width: object, fields: dict[str, Any], tmp_path: Path
) -> None:
    launch = adapter(engine).launch(Deployment.model_validate({**fields, "speculation": {"width": width}}))
    told = f"{launch.command(tmp_path)} {[(file.name, file.text) for file in launch.files(tmp_path)]}"
    assert "speculative" not in told
    assert "draft" not in told


@every_engine
def test_the_command_goes_with_the_folder_that_was_prepared(
    engine: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    launch = adapter(engine).launch(Deployment.model_validate(fields))
    launch.prepare(tmp_path / "prepared")
    before = launch.command(tmp_path / "prepared")
    edit_json(Path(fields["drafter"]["model"]) / "config.json", {"block_size": 4})
    assert launch.command(tmp_path / "prepared") == before


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Times that each file of the models was opened, and that tensor headers were read."""
    counted: Counter[str] = Counter()
    opened: Callable[..., Any] = io.open

    def counting(file: Any, *args: Any, **more: Any) -> Any:
        path = Path(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
        if path is not None and path.parent.parent == tmp_path:
            counted[f"{path.parent.name}/{path.name}"] += 1
        return opened(file, *args, **more)

    monkeypatch.setattr(io, "open", counting)

    def headers(*given: Any) -> Any:
        counted["headers"] += 1
        return read_headers(*given)

    monkeypatch.setattr(reader, "read_headers", headers)
    return counted


@every_engine
@pytest.mark.parametrize("dry", [True, False])
def test_serve_reads_target_and_drafter_once(
    engine: str, dry: bool, fields: dict[str, Any], tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deployment.yaml").write_text(json.dumps(fields))
    started: list[Any] = []
    monkeypatch.setattr(serve, "become", lambda command, _: started.append(command))
    monkeypatch.setattr(processes, "require_program", lambda *_: None)
    words = ["serve", str(tmp_path / "deployment.yaml"), "--backend", engine, "--folder", str(tmp_path / "prepared")]
    told = CliRunner().invoke(app, [*words, "--dry-run"] if dry else words)
    assert told.exception is None, told.output
    assert bool(started) is not dry
    assert reads["target/config.json"] == 1
    if engine in READ_WHOLE:
        assert (reads["drafter/config.json"], reads["headers"]) == (1, 1)
