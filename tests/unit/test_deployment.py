"""Deployment: flag > environment > YAML > default, unknown keys refused, one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dflash_serve.deployment import description as deployment
from dflash_serve.deployment import layers
from dflash_serve.deployment.description import INSTEAD, SECRET, Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_serve.deployment.layers import load_deployment, load_layers
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
    "target: {model: x}\nspeculation: {width: on}": "speculation.width: a width is a number",
    "target: {model: x}\nspeculation: {block_size: off}": "speculation.block_size: Input should be a valid integer",
    "target: {model: x}\nlimits: {max_batch_size: on}": "(given: 'the boolean true')",
    "target: {model: x}\nhardware: {count: true}": "hardware.count: Input should be a valid integer",
    "target: {model: x}\nparallel: {tensor: yes}": "parallel.tensor: Input should be a valid integer",
    "target: {model: x}\nkv_cache: {memory_fraction: on}": "kv_cache.memory_fraction: Input should be a valid number",
    "target: {model: x}\nlimits: {max_batch_size: 99999999999999999999}": "less than 2147483648",
    "target: {model: x}\nengine_args: {tensorrt_llm: {a: 1}}": "no backend of this name; did you mean tensorrt-llm?",
    "target: {model: x}\nengine_args: {sglan: {a: 1}}": "no backend of this name; did you mean sglang?",
    "target: {model: x}\nengine_args: {acme: {a: 1}}": "there are: sglang, tensorrt-llm, torch, vllm",
    "target: {model: x}\nengine_args: {sglang: {a-b: 1, a_b: 2}}": "a-b and a_b are one argument: leave one out",
    "target: {model: x}\nserving: {served_model_name: --foo}": "begins with no dash",
    "target: {model: x}\nserving: {served_model_name: ''}": "one line of visible characters",
    'target: {model: x}\nserving: {served_model_name: "a\\nb"}': "one line of visible characters",
    "drafter: {model: x}": "bad.yaml: target is missing",
    "target: {model: x}\ndrafter: x": "drafter: not a mapping (given: 'x'); its keys are model, revision, quantization",
    "target: {model: x}\nlimits: {}\nlimits: {}": "the key 'limits' is given twice, in lines 2 and 3",
    "target: {model: x}\nlimts: {}": "unknown key limts; did you mean limits?",
    "target: {model: x}\nlimts:": "unknown key limts; did you mean limits?",
    "target: {model: x}\nserving: {api_key_fle: }": "serving.api_key_fle; did you mean serving.api_key_file?",
    "target: {model: x}\nserving: {api_key_file: {}}": "serving.api_key_file: Input should be a valid string",
    "target: {model: x}\nserving: {api_key_file: {path: }}": "serving.api_key_file: Input should be a valid string",
    "target: {model: x}\ndrafter: {model: }": "drafter.model is missing",
    "target: {model: x}\nengine_args: {sglan: }": "no backend of this name; did you mean sglang?",
    "target: {model: x}\nlimits: {max_model_len: 20:48}": "limits.max_model_len: Input should be a valid integer",
    "target: {model: x,\n  revision: a,\n  'model': y}": "the key 'model' is given twice, in lines 1 and 3",
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


def test_a_null_is_not_given_under_a_known_key_and_a_value_inside_engine_args(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(
        "target: {model: x}\ndrafter:\nlimits: {max_batch_size: 8, max_queued_requests: }\nparallel: {tensor: }\n"
        "engine_args: {sglang: , vllm: {hf-overrides: {rope_scaling: null, a: {}}, kept: null}}"
    )
    monkeypatch.setenv("DFLASH_SERVE_LIMITS", '{"max_batch_size": null}')
    found = load_deployment(path, {"drafter": {"model": None}, "engine_args": {"vllm": {"other": 1}}})
    assert found.drafter is None
    assert found.parallel.tensor == 1
    assert (found.limits.max_batch_size, "max_queued_requests" in found.limits.model_fields_set) == (8, False)
    given: dict[str, Any] = {"hf-overrides": {"rope_scaling": None, "a": {}}, "kept": None, "other": 1}
    assert found.engine_args == {"sglang": {}, "vllm": given}


@pytest.mark.parametrize("variable", ["SERVING", "LIMITS"])
def test_an_unknown_key_with_a_null_in_the_environment_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(f"DFLASH_SERVE_{variable}", '{"api_key_fle": null}')
    with pytest.raises(UserError, match="api_key_fle"):
        load_deployment(file)


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
    "tensorrt-llm": {"storage": "", "stores": "", "credentials": ""},
}


@pytest.mark.parametrize(
    ("engine", "name", "do"), [(engine, *item) for engine, names in SECRET_ARGUMENTS.items() for item in names.items()]
)
def test_a_secret_is_refused_before_all_else_and_never_shown(tmp_path: Path, engine: str, name: str, do: str) -> None:
    nested = {"auth_token": "s3cr3t"}
    value = {"storage": nested, "stores": [nested], "api_key": ["s3cr3t"]}.get(name, "s3cr3t")
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


@pytest.mark.parametrize("off", ["off", "'off'", "OFF"])
def test_yaml_reads_off_as_a_boolean_and_the_width_is_off(tmp_path: Path, off: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"target: {{model: x}}\nspeculation: {{width: {off}}}\nparallel: {{attention_data: on}}")
    found = load_deployment(path)
    assert (found.speculation.width, found.parallel.attention_data) == ("off", True)


def test_text_of_a_variable_or_an_option_is_still_read_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_LIMITS__MAX_BATCH_SIZE", "8")
    monkeypatch.setenv("DFLASH_SERVE_KV_CACHE__MEMORY_FRACTION", "0.5")
    found = load_deployment(flags={"target": {"model": "x"}, "hardware": {"count": "2"}})
    assert (found.limits.max_batch_size, found.kv_cache.memory_fraction, found.hardware.count) == (8, 0.5, 2)


def test_merged_keys_of_a_mapping_may_be_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("target: &one {model: x, revision: a}\ndrafter: {<<: *one, model: y}")
    found = load_deployment(path)
    assert found.drafter is not None
    assert (found.drafter.model, found.drafter.revision) == ("y", "a")


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [
        ("TARGET", "Qwen/Qwen3-4B", "TARGET__MODEL"),
        ("HARDWARE", "b200", "HARDWARE__GPU"),
        ("LIMITS", "abc", "LIMITS__MAX_BATCH_SIZE"),
        ("ENGINE_ARGS", "{sglang", "ENGINE_ARGS__SGLANG"),
        ("LIMITS", '{"max_batch_size": 1, "max_batch_size": 2}', "LIMITS__MAX_BATCH_SIZE"),
    ],
)
def test_a_variable_of_a_section_that_is_no_json_is_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, section: str, value: str, key: str
) -> None:
    monkeypatch.setenv(f"DFLASH_SERVE_{section}", value)
    with pytest.raises(UserError, match=rf"^DFLASH_SERVE_{section}: not valid JSON .* DFLASH_SERVE_{key}=\.\.\.$"):
        load_deployment(file)


def test_a_variable_and_an_option_override_an_argument_in_its_other_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("target: {model: x}\nengine_args: {sglang: {a-b: 1, c_d: 2}, tensorrt-llm: {e: 3}}")
    monkeypatch.setenv("DFLASH_SERVE_ENGINE_ARGS__SGLANG__A_B", "4")
    monkeypatch.setenv("DFLASH_SERVE_ENGINE_ARGS__TENSORRT_LLM__E", "5")
    found = load_deployment(path, {"engine_args": {"sglang": {"c-d": 6}}})
    assert found.engine_args == {"sglang": {"a-b": 4, "c_d": 6}, "tensorrt-llm": {"e": 5}}


def test_a_backend_of_others_may_have_arguments_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"target": {"model": "x"}, "engine_args": {"acme": {"a": 1}}}
    monkeypatch.setattr(deployment, "entry_points", lambda group: [SimpleNamespace(name="acme")])
    assert load_deployment(flags=flags).engine_args == {"acme": {"a": 1}}


def test_paths_of_a_file_are_taken_from_its_folder_and_those_of_flags_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("files/models/mine", "files/drafter", "here/models/mine", "here/smollm2"):
        (tmp_path / folder).mkdir(parents=True)
    path = tmp_path / "files" / "deployment.yaml"
    path.write_text(
        "target: {model: models/mine}\ndrafter: {model: drafter}\nserving: {api_key_file: secrets/keys}\n"
        "engine_args: {sglang: {model-loader-extra-config: ./x}}"
    )
    monkeypatch.chdir(tmp_path / "here")
    from_file = load_deployment(Path("../files/deployment.yaml"))
    below = tmp_path / "here" / ".." / "files"
    assert Path(from_file.target.model) == below / "models/mine"
    assert from_file.drafter is not None
    assert Path(from_file.drafter.model) == below / "drafter"
    assert from_file.serving.api_key_file == str(below / "secrets/keys")
    assert from_file.serving.served_model_name == "models/mine", "clients see the name that was given"
    assert from_file.engine_args == {"sglang": {"model-loader-extra-config": "./x"}}, "the engine's own"
    written = tmp_path / "elsewhere.yaml"
    written.write_text(yaml.safe_dump(from_file.model_dump(mode="json")))
    assert load_deployment(written) == from_file, "a copy in another folder means the same"

    from_flag = load_deployment(path, {"target": {"model": "models/mine"}, "serving": {"served_model_name": "own"}})
    assert from_flag.target.model == str(tmp_path / "here/models/mine")
    assert from_flag.serving.served_model_name == "own"
    monkeypatch.setenv("DFLASH_SERVE_TARGET__MODEL", "./nothing/is/here")
    assert load_deployment(path).target.model == str(tmp_path / "here/nothing/is/here")


PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX 6000D": "rtx-6000d",
    "NVIDIA GB10": "gb10",
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_auto_is_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    assert {*PRODUCTS.values()} == {*GPUS}
    monkeypatch.setattr(layers, "query_gpus", lambda field: [product] * 8)
    flags = {"target": {"model": "smollm2"}, "hardware": {"gpu": "AUTO", "count": 8}}
    assert load_deployment(None, flags).hardware.gpu == PRODUCTS[product]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "nvidia-smi finds no GPU"),
        (["NVIDIA H200", "NVIDIA B200"], "there are several kinds: NVIDIA B200, NVIDIA H200"),
        (
            ["NVIDIA GeForce RTX 5090 Laptop GPU"],
            "this machine's NVIDIA GeForce RTX 5090 Laptop GPU",
        ),
        (["NVIDIA A100-SXM4-40GB"], "nothing is known of this machine's NVIDIA A100-SXM4-40GB"),
        (["NVIDIA GH200 480GB"], "nothing is known of this machine's NVIDIA GH200 480GB"),
        (["NVIDIA L40S-24C"], "nothing is known of this machine's NVIDIA L40S-24C"),
        (["NVIDIA H200-1-18C"], "nothing is known of this machine's NVIDIA H200-1-18C"),
        (["NVIDIA H200 MIG 1g.18gb"], "nothing is known of this machine's NVIDIA H200 MIG 1g.18gb"),
        (["NVIDIA RTX PRO 6000 Blackwell DC-48C"], "machine's NVIDIA RTX PRO 6000 Blackwell DC-48C"),
    ],
)
def test_auto_where_no_known_gpu_is_says_so(monkeypatch: pytest.MonkeyPatch, found: list[str], message: str) -> None:
    monkeypatch.setattr(layers, "query_gpus", lambda field: found)
    with pytest.raises(UserError, match=rf"hardware\.gpu: .*{message}; name one: a100, l40s, .*; or leave it out"):
        load_deployment(None, {"target": {"model": "smollm2"}, "hardware": {"gpu": "auto"}})


@pytest.mark.parametrize(
    ("memory", "slices", "message"),
    [
        (["143771"], ["Disabled"], None),
        (["[N/A]"], ["[N/A]"], None),
        ([], [], None),
        (["143771", "18432"], ["Disabled", "Disabled"], "has 18 GiB, a whole h200 has 139 GiB"),
        (["143771"], ["Enabled"], "has MIG slices, a whole h200 has 139 GiB"),
    ],
)
def test_auto_takes_no_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, memory: list[str], slices: list[str], message: str | None
) -> None:
    told = {"name": ["NVIDIA H200"], "memory.total": memory, "mig.mode.current": slices}
    monkeypatch.setattr(layers, "query_gpus", told.__getitem__)
    flags = {"target": {"model": "smollm2"}, "hardware": {"gpu": "auto"}}
    if message is None:
        assert load_deployment(None, flags).hardware.gpu == "h200"
        return
    with pytest.raises(UserError, match=rf"hardware\.gpu: this machine's NVIDIA H200 {message}; leave it out"):
        load_deployment(None, flags)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "smollm2", "Qwen3-8B", "~/models/x"])
def test_a_name_that_is_no_folder_beside_the_file_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/smollm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "deployment.yaml").write_text(f"target: {{model: {name}}}")
    for found in (load_deployment(tmp_path / "deployment.yaml"), load_deployment(flags={"target": {"model": name}})):
        assert (found.target.model, found.serving.served_model_name) == (name, None)


def test_a_folder_that_only_the_working_folder_has_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/models/mine").mkdir(parents=True)
    (tmp_path / "deployment.yaml").write_text("target: {model: x}\ndrafter: {model: models/mine}")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError) as caught:
        load_deployment(tmp_path / "deployment.yaml")
    assert str(caught.value) == (
        f"{tmp_path}/deployment.yaml drafter.model: models/mine is a folder of the working folder, and not of the"
        f" file's; give {tmp_path}/here/models/mine"
    )


def test_every_value_that_is_not_the_files_has_its_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_layers(file).given == ()
    monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", "off")
    monkeypatch.setenv("DFLASH_SERVE_ROLE", "prefill")
    monkeypatch.setenv("DFLASH_SERVE_LIMITS", '{"max_batch_size": 8, "max_model_len": 64}')
    monkeypatch.setenv("DFLASH_SERVE_ENGINE_ARGS__TENSORRT_LLM__MAX_A", "5")
    monkeypatch.setenv("DFLASH_SERVE_ENGINE_ARGS__VLLM__B", "6")
    monkeypatch.setenv("DFLASH_SERVE_SURVIVAL", "0.5")
    monkeypatch.setenv("DFLASH_SERVE_API_KEY", "secret")
    flags = {"limits": {"max_model_len": 128}, "engine_args": {"tensorrt-llm": {"max-a": 1}, "vllm": {}}, "role": None}
    found = {key: (value, source) for key, value, source in load_layers(file, flags).given}
    assert found == {
        "limits.max_model_len": (128, "command line"),
        "engine_args.tensorrt-llm.max-a": (1, "command line"),
        "limits.max_batch_size": (8, "DFLASH_SERVE_LIMITS"),
        "speculation.width": ("off", "DFLASH_SERVE_SPECULATION__WIDTH"),
        "role": ("prefill", "DFLASH_SERVE_ROLE"),
        "engine_args.vllm.b": (6, "DFLASH_SERVE_ENGINE_ARGS__VLLM__B"),
        "survival": ("0.5", "DFLASH_SERVE_SURVIVAL"),
    }
