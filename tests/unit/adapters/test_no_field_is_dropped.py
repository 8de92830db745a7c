"""SGLang, vLLM and TensorRT-LLM drop no field of a Deployment: its values differ in the launch, or are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from dflash_serve.common.settings import fields_below, overlay
from dflash_serve.deployment.description import Deployment, Quantization
from dflash_serve.errors import UserError
from tests.support.golden_deployments import hub
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.unit.adapters.test_promises import ENGINES, adapter, every_engine

__all__ = ["hub"]
pytestmark = pytest.mark.usefixtures("hub")
Fields = Mapping[str, Any]
REVISIONS = (None, "1" * 40)  # The hub has no such commit
DRAFTERS = {"Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16", "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash"}


def on(count: int = 1, gpu: str | None = "b200", target: str = "Qwen/Qwen3-8B", **sections: Any) -> Fields:
    hardware = {"count": count} if gpu is None else {"count": count, "gpu": gpu}
    return overlay({"target": {"model": target}, "hardware": hardware}, sections)


OSS = on(8, target="openai/gpt-oss-120b", parallel={"tensor": 8}, limits={"max_model_len": 8192})
UNTOLD: Fields = {"target": {"model": "Qwen/Qwen3-8B"}}
# Field, deployment, two values or more that mean different things; None = the field is left out.
ROWS: list[tuple[str, Fields, tuple[object, ...]]] = [
    ("target.model", on(), ("Qwen/Qwen3-8B", "openai/gpt-oss-120b")),
    ("target.revision", on(), REVISIONS),
    ("target.quantization", on(), get_args(Quantization)),
    ("drafter.model", on(), ("z-lab/Qwen3-8B-DFlash-b16", "z-lab/Qwen3-4B-DFlash-b16")),
    ("drafter.revision", on(), REVISIONS),
    ("drafter.quantization", on(), get_args(Quantization)),
    ("speculation.block_size", on(), (None, 8, 4)),
    ("speculation.width", on(), ("off", 4, 16)),
    ("speculation.draft_window", on(), (None, 512, 256)),
    ("parallel.tensor", on(2), (1, 2)),
    ("parallel.data", on(2), (1, 2)),
    ("parallel.expert", OSS, (1, 2, 8)),
    ("parallel.pipeline", on(2), (1, 2)),
    ("parallel.context", on(2), (1, 2)),
    ("parallel.attention_data", OSS, (False, True)),
    ("parallel.attention_data", on(), (False, True)),
    ("parallel.nodes", OSS, (1, 2)),
    ("limits.max_batch_size", on(), (None, 8, 4)),
    ("limits.max_model_len", on(), (None, 1024, 512)),
    ("limits.max_queued_requests", on(), (256, 8)),
    ("limits.max_num_tokens", on(limits={"max_batch_size": 8}), (None, 1024, 512)),
    ("kv_cache.dtype", on(), ("auto", "fp8", "nvfp4")),
    ("kv_cache.block_reuse", on(), (True, False)),
    ("kv_cache.block_reuse", on(role="decode"), (False, True)),
    ("kv_cache.memory_fraction", on(), (None, 0.5, 0.4)),
    ("kv_cache.memory_fraction", UNTOLD, (None, 0.5, 0.4)),
    ("hardware.gpu", on(), ("none", "b200")),
    ("hardware.count", on(), (1, 2)),
    ("hardware.dtype", on(), ("bfloat16", "float32")),
    ("serving.served_model_name", on(), (None, "x", "y")),
    ("serving.api_key_file", on(), (None, "/dev/null")),
    ("serving.reasoning_parser", on(), (None, "qwen3", "deepseek-r1")),
    ("serving.tool_call_parser", on(), (None, "qwen3", "qwen3_coder")),
    ("serving.log_format", on(), ("text", "json")),
    ("serving.otlp_traces_endpoint", on(), (None, "http://a:4317", "http://b:4317")),
    ("engine_args", on(), ({}, {engine: {"nonsense": 1} for engine in ENGINES})),
    ("role", on(), ("whole", "prefill", "decode")),
    ("pair", on(2, parallel={"tensor": 2}, role="decode"), (None, {"decode": {"gpus": 1}}, {"decode": {"gpus": 4}})),
]


def fields_of(model: Mapping[str, FieldInfo], prefix: str = "") -> Iterator[str]:
    for name, field in model.items():
        below = None if name == "pair" else fields_below(field)  # its keys: test_pair.py
        yield from [prefix + name] if below is None else fields_of(below, f"{prefix}{name}.")


def test_every_field_has_a_row() -> None:
    assert set(fields_of(Deployment.model_fields)) == {field for field, _, _ in ROWS}


def launched(engine: str, fields: Fields) -> str | None:
    """All that the engine is launched with; None = the deployment is refused."""
    folder = Path("/prepared")
    try:
        launch = adapter(engine).launch(Deployment.model_validate(fields))
        if launch.problems:
            return None
        files = [(file.name, file.text) for file in launch.files(folder)]
        return f"{launch.command(folder)} {files}"
    except UserError:
        return None


@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "no drafter"])
@pytest.mark.parametrize(("field", "base", "values"), ROWS, ids=[field for field, _, _ in ROWS])
def test_its_values_differ_in_the_launch_or_are_refused(
    field: str, base: Fields, values: tuple[object, ...], drafts: bool
) -> None:
    section, _, key = field.partition(".")
    if section == "drafter" and not drafts:
        pytest.skip("there is none")
    if drafts:
        base = overlay(base, {"drafter": {"model": DRAFTERS[base["target"]["model"]]}})
    deployments = [overlay(base, {section: {key: value} if key else value}) for value in values]
    served, dropped = 0, set()
    for engine in ENGINES:
        launches = [launch for fields in deployments if (launch := launched(engine, fields)) is not None]
        served += len(launches)
        if len(set(launches)) < len(launches):
            dropped.add(engine)
    assert served or drafts, "no engine serves any of them: the row tests nothing"
    assert not dropped


@every_engine
def test_each_entry_of_its_table_is_a_problem_that_names_the_key(engine: str) -> None:
    for one in adapter(engine).facts.refusals:
        values = next((values for field, _, values in ROWS if field == one.key), ())
        section, _, key = one.key.partition(".")
        for value in one.values or values[-1:]:
            fields = overlay(on(), {"drafter": {"model": DRAFTERS["Qwen/Qwen3-8B"]}})
            fields = overlay(fields, {section: {key: value} if key else value})
            problems = adapter(engine).launch(Deployment.model_validate(fields)).problems
            told = [(problem.what, problem.do) for problem in problems if problem.where == one.key]
            texts = [(every.what, every.do) for every in adapter(engine).facts.refusals if every.key == one.key]
            assert {(what.format(value=value), do.format(value=value)) for what, do in texts} & {*told}


@every_engine
@pytest.mark.parametrize(("field", "recipe", "said"), [
    ("hardware.dtype", None, "the checkpoint's number format, which is float16"),
    ("kv_cache.dtype", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "asks for quantised K/V"),
])  # fmt: skip
def test_bfloat16_is_honoured_for_a_checkpoint_in_another_format(
    engine: str, field: str, recipe: Fields | None, said: str, tmp_path: Path
) -> None:
    target = write_paper_target(tmp_path / "target", recipe=recipe, torch_dtype="float16")
    drafter = write_paper_drafter(tmp_path / "drafter")
    section, _, key = field.partition(".")
    models = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "hardware": {"gpu": "h200"}}
    fields = overlay(models, {section: {key: "bfloat16"}})
    problems = adapter(engine).launch(Deployment.model_validate(fields)).problems
    if engine == "tensorrt-llm":
        assert [problem.where for problem in problems] == [field]
        assert said in problems[0].what
    else:
        assert problems == []
        option = {"hardware.dtype": "--dtype", "kv_cache.dtype": "--kv-cache-dtype"}[field]
        argv = adapter(engine).launch(Deployment.model_validate(fields)).command(tmp_path).argv
        assert argv[argv.index(option) + 1] == "bfloat16"


@every_engine
@pytest.mark.parametrize("recipe", [
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"},
    {"quant_method": "fp8"}, {"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 8, "group_size": 128},
])  # fmt: skip
def test_no_engine_serves_a_quantised_target_in_another_format_without_a_word(
    engine: str, recipe: Fields, tmp_path: Path
) -> None:
    folder = write_paper_target(tmp_path / "target", recipe=recipe)
    models = {"target": {"model": str(folder)}, "drafter": {"model": str(write_paper_drafter(tmp_path / "drafter"))}}
    served = [
        format
        for format in get_args(Quantization)
        if launched(engine, overlay({**models, "hardware": {"gpu": "b200"}}, {"target": {"quantization": format}}))
    ]
    own = {"fp8": ["fp8"], "mxfp4": ["mxfp4"], "gptq": ["w8a16"]}.get(str(recipe["quant_method"]), [])
    assert served == ["none", *own]
