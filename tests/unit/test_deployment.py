"""Deployment: flag > environment > YAML > default, unknown keys refused, one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflash_serve.deployment import INSTEAD, SECRET, Deployment, load_deployment
from dflash_serve.errors import UserError

ROOT = Path(__file__).parents[2]
YAML = """
target: {model: Qwen/Qwen3-8B, revision: abc}
drafter: {model: z-lab/Qwen3-8B-DFlash-b16}
speculation: {block_size: 16, width: 8}
hardware: {gpu: b200, count: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(YAML)
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_deployment(file).limits.max_batch_size is None
    assert load_deployment(file).speculation.width == 8
    monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", "off")
    assert load_deployment(file).speculation.width == "off"
    assert load_deployment(file, {"speculation": {"width": "4"}}).speculation.width == 4
    assert load_deployment(file, {"speculation": {"width": None}}).speculation.width == "off"
    assert load_deployment(file).speculation.block_size == 16


MISTAKES = {
    "target: {model: x, quantisation: fp8}": "unknown key target.quantisation",
    "target: {model: x, quantization: int3}": "target.quantization",
    "target: {model: x}\nspeculation: {width: 0}": "width",
    "target: {model: x}\nspeculation: {width: wide}": "`auto` or `off`",
    "target: {model: x}\nspeculation: {block_size: 1}": "speculation.block_size",
    "target: {model: x}\nparallel: {tensor: 0}": "parallel.tensor",
    "target: {model: x": "not valid YAML",
    "- a list": "not a mapping",
    b"\xff\xfe\x00model": "not UTF-8 text",
    "target: {model: x}\nparalel: {tensor: 1}": "unknown key paralel; did you mean parallel?",
    "target: {model: x}\nparallel: {tensr: 1}": "unknown key parallel.tensr; did you mean parallel.tensor?",
    "targt: {model: x}": "unknown key targt; did you mean target?",
    "target: {model: x}\nzzz: 1": "unknown key zzz",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_line_that_names_file_and_field_and_the_key_that_was_meant(
    tmp_path: Path, text: str | bytes
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_deployment(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert MISTAKES[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_deployment(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DFLASH_SERVE_SPECULATON__WIDTH", "did you mean DFLASH_SERVE_SPECULATION__WIDTH?"),
        ("DFLASH_SERVE_SPECULATION__WIDHT", "did you mean DFLASH_SERVE_SPECULATION__WIDTH?"),
        ("DFLASH_SERVE_SPECULATION_WIDTH", "did you mean DFLASH_SERVE_SPECULATION__WIDTH?"),
        ("DFLASH_SERVE_QQQ__ZZZ", "unset it"),
        ("DFLASH_SERVE_COST_TABEL", "did you mean DFLASH_SERVE_COST_TABLE?"),
        ("DFLASH_SERVE_SURVIVALS", "did you mean DFLASH_SERVE_SURVIVAL?"),
    ],
)
def test_a_misspelt_variable_is_named_never_ignored(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setenv(variable, "off")
    with pytest.raises(UserError) as caught:
        load_deployment(file)
    assert str(caught.value) == f"{variable}: names no key of the deployment; {hint}"


def test_variables_of_others_are_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours for the HTTP server and clients, and those that Kubernetes makes of a service of our name."""
    for name in ("HTTP_PORT", "API_KEY", "PORT", "SERVICE_HOST", "PORT_80_TCP_ADDR", "COST_TABLE"):
        monkeypatch.setenv(f"DFLASH_SERVE_{name}", "tcp://10.0.0.1:80")
    assert load_deployment(file).speculation.width == 8


def test_a_bad_value_names_the_layer_that_gave_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^command line: speculation.width"):
        load_deployment(file, {"speculation": {"width": "wide"}})
    monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", "wide")
    with pytest.raises(UserError, match=r"^DFLASH_SERVE_SPECULATION__WIDTH: speculation.width"):
        load_deployment(file)


def test_engine_args_come_from_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("target: {model: x}\nengine_args: {sglang: {a: 1, b: 2}, tensorrt-llm: {c: {4: 3}}}")
    monkeypatch.setenv("DFLASH_SERVE_ENGINE_ARGS", '{"sglang": {"b": 3}}')
    found = load_deployment(path, {"engine_args": {"sglang": {"d": True}}})
    assert found.engine_args == {"sglang": {"a": 1, "b": 3, "d": True}, "tensorrt-llm": {"c": {"4": 3}}}


SECRET_ARGUMENTS = {
    "sglang": {
        "api-key": "serving.api_key_file",
        "admin-api-key": "serving.api_key_file",
        "ssl-keyfile-password": "without a password",
    },
    "vllm": {"api_key": "serving.api_key_file", "hf-token": "HF_TOKEN"},
    "tensorrt-llm": {"storage": ""},
}


@pytest.mark.parametrize(
    ("engine", "name", "do"), [(engine, *item) for engine, names in SECRET_ARGUMENTS.items() for item in names.items()]
)
def test_a_secret_is_refused_before_all_else_and_never_shown(tmp_path: Path, engine: str, name: str, do: str) -> None:
    value: object = {"auth_token": "s3cr3t"} if name == "storage" else ["s3cr3t"] if name == "api_key" else "s3cr3t"
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({"engine_args": {engine: {name: value}}, "hardware": {"count": 0}}))  # and no target
    for read in (load_deployment, lambda file: Deployment.model_validate(yaml.safe_load(file.read_text()))):
        with pytest.raises(UserError) as refused:
            read(path)
        assert str(refused.value).startswith(f"engine_args.{engine}.{name}")
        assert do in str(refused.value)
        assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("name", ["tokenizer", "hf-token", "allow-credentials", "bucket-time-to-first-token"])
def test_what_only_sounds_like_a_secret_is_taken(name: str) -> None:
    value = True if name in ("hf-token", "allow-credentials") else "x"
    arguments = {"vllm": {name: value}}
    assert Deployment.model_validate({"target": {"model": "x"}, "engine_args": arguments}).engine_args == arguments


def test_every_secret_argument_of_an_engine_is_known() -> None:
    names = {name for backend in ("sglang", "vllm", "tensorrt_llm") for name in _flags(backend) if SECRET.search(name)}
    assert names == {"api-key", "admin-api-key", "hf-token", "ssl-keyfile-password"} == INSTEAD.keys()


def _flags(backend: str) -> list[str]:
    rows = json.loads((ROOT / f"backends/dflash_{backend}/flags.json").read_text())
    return [name.removeprefix("--") for row in rows if row.get("takes", 1) != 0 for name in row["names"]]
