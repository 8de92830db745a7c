"""Every field of a Deployment reaches the engine that a verb starts, or the verb refuses it by its name.

An engine is stopped where it would load its models, and what it was given is looked at; `serve` and `deploy` hand on a
file, which is read. Other engines' launches are looked at in `tests/unit/adapters/test_no_field_is_dropped.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml

from dflash_serve.adapter.last_run import LastRun
from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.common.settings import overlay
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.doctor import examiner
from dflash_serve.doctor.examiner import reference_deployment
from dflash_serve.errors import raise_problems
from tests.support.command_line import call
from tests.unit.adapters.test_no_field_is_dropped import fields_of

KEY = "key.txt"  # A file of API keys beside the deployment
COMMIT = "1" * 40  # A folder has no commits
CHANGED: Mapping[str, object] = {
    "target.model": "another target", "target.revision": COMMIT, "target.quantization": "fp8",
    "drafter.model": "another drafter", "drafter.revision": COMMIT, "drafter.quantization": "fp8",
    "speculation.block_size": 3, "speculation.width": 2, "speculation.draft_window": 64,
    "parallel.tensor": 2, "parallel.data": 2, "parallel.expert": 2, "parallel.pipeline": 2, "parallel.context": 2,
    "parallel.attention_data": True, "parallel.nodes": 2,
    "limits.max_batch_size": 1, "limits.max_model_len": 48, "limits.max_queued_requests": 7,
    "limits.max_num_tokens": 512,
    "kv_cache.dtype": "fp8", "kv_cache.block_reuse": True, "kv_cache.memory_fraction": 0.5,
    "serving.served_model_name": "x", "serving.api_key_file": KEY, "serving.reasoning_parser": "qwen3",
    "serving.tool_call_parser": "qwen3", "serving.log_format": "json",
    "serving.otlp_traces_endpoint": "http://a:4317",
    "hardware.gpu": "none", "hardware.count": 2, "hardware.dtype": "bfloat16",
    "engine_args": {"torch": {"operators": "plain"}}, "role": "prefill",
    "pair": {"decode": {"gpus": 2}},
}  # fmt: skip
LIMITS = {"max_batch_size": 2, "max_model_len": 64}
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "serve": ("{file}", "--folder", "served"),
    "deploy": ("{file}", "--backend", "torch", "--render", "helm", "--output", "values.yaml"),
    "generate": ("hello", "--deployment", "{file}", "--max-tokens", "8"),
    "evaluate": ("{file}", "--task", "own={prompts}", "--max-tokens", "8"),
    "verify": ("{file}", "--samples", "0", "--output", "{output}"),
    "doctor": ("{file}", "--prompts", "{prompts}", "--max-tokens", "8", "--output", "{output}"),
    "bench": ("{file}", "--variants", "fixed", "--dataset", "{prompts}", "--output", "{output}"),
    "certify": ("{file}", "--dataset", "{prompts}", "--output", "{output}"),
}
PURPOSE = {"bench": {"speculation.width"}, "certify": {"speculation.width"}, "generate": {"limits.max_batch_size"}}
"""Fields that a verb's purpose sets: the widths that are measured (`--variants`), and one prompt at a time."""


class Reached(Exception):  # noqa: N818
    """Carries the deployment that an engine or a server was to be started with."""


@pytest.fixture
def folders(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything lies; engines and servers are stopped before they start."""

    def stop(deployment: Deployment, *_: object) -> NoReturn:
        raise Reached(deployment)

    @contextmanager
    def server(backend: ServerBackend, deployment: Deployment, *_: object, **__: object) -> Any:
        raise_problems(backend.launch(deployment).problems)
        stop(deployment)
        yield

    for word, place in zip(("target", "drafter"), pair, strict=True):
        (tmp_path / f"another {word}").symlink_to(place)
    (tmp_path / KEY).write_text("sk-of-a-test\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the fox"}\n{"prompt": "a dog"}\n')
    monkeypatch.chdir(tmp_path)

    def become(*_: object) -> NoReturn:
        stop(Deployment.model_validate_json(Path("served", "deployment.json").read_text()))

    monkeypatch.setattr("dflash_torch.engine.start_engine", stop)
    monkeypatch.setattr("dflash_serve.cli.serve.become", become)
    for room in ("bench.runner", "certify.certification"):
        monkeypatch.setattr(f"dflash_serve.{room}.running_server", server)
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", list)
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_aiperf", list)
    return tmp_path


def described(pair: tuple[Path, Path], field: str | None = None) -> dict[str, Any]:
    target, drafter = ({"model": str(folder)} for folder in pair)
    fields: dict[str, Any] = {"target": target, "drafter": drafter, "limits": LIMITS, "speculation": {"width": 3}}
    section, _, key = (field or "").partition(".")
    if field is None:
        return fields
    return dict(overlay(fields, {section: {key: CHANGED[field]} if key else CHANGED[field]}))


def value(deployment: Deployment, field: str) -> object:
    found: Any = deployment
    for part in field.split("."):
        found = getattr(found, part)
    return found


def started(verb: str, fields: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment | None:
    """The deployment of the engine that the verb starts; None = it is refused, on stderr."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(dict(fields)))
    places = {"file": file, "prompts": folder / "prompts.jsonl", "output": Path(mkdtemp(dir=folder)) / "report"}
    try:
        code = call(monkeypatch, verb, *(word.format(**places) for word in COMMANDS[verb]))
    except Reached as reached:
        found: Deployment = reached.args[0]
        return found
    if code == 0 and verb == "deploy":
        return Deployment.model_validate(yaml.safe_load(Path("values.yaml").read_text())["deployment"])
    assert code == 2
    return None


def test_every_field_has_another_value() -> None:
    assert set(fields_of(Deployment.model_fields)) == CHANGED.keys()


@pytest.mark.parametrize("verb", COMMANDS)
def test_each_field_reaches_the_engine_or_is_refused_by_its_name(
    verb: str, pair: tuple[Path, Path], folders: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    usual = started(verb, described(pair), folders, monkeypatch)
    assert usual is not None, capsys.readouterr().err
    dropped = {}
    for field in CHANGED:
        fields = described(pair, field)
        capsys.readouterr()
        found = started(verb, fields, folders, monkeypatch)
        said = capsys.readouterr().err
        told = noted(fields) if verb == "doctor" and found is not None else ""
        by_name = field in said or (field.endswith(".revision") and COMMIT in said) or field in told
        if not by_name and (found is None or value(found, field) == value(usual, field)):
            dropped[field] = said
    assert dropped.keys() == PURPOSE.get(verb, set()), dropped


def noted(fields: Mapping[str, Any]) -> str:
    """The doctor's notes on settings that its reference does without."""
    return " ".join(reference_deployment(load_deployment(flags=fields), ["the fox", "a dog"], 8)[1])


def test_the_doctors_reference_has_the_commits_of_its_deployment(
    pair: tuple[Path, Path], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot's folder is named by its commit, so a folder of that name has that revision."""
    fields = described(pair)
    for name in ("target", "drafter"):
        (folders / name).mkdir()
        (folders / name / COMMIT).symlink_to(fields[name]["model"])
        copied = folders / name / COMMIT
        fields[name] = {"model": str(copied), "revision": copied.resolve().name}
    found = started("doctor", fields, folders, monkeypatch)
    assert found is not None
    assert (found.target.revision, found.drafter and found.drafter.revision) == ("target", "drafter")


@pytest.mark.parametrize("change", [
    {"model": "b"}, {"revision": COMMIT}, {"quantization": "fp8"},
])  # fmt: skip
def test_a_run_with_another_target_is_another_record(change: dict[str, Any], tmp_path: Path) -> None:
    usual, other = ({"model": "a", **more} for more in ({}, change))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    paths = {LastRun(tmp_path, Model.model_validate(fields)).path for fields in (usual, other)}
    assert len(paths) == 2


def test_an_interrupted_examination_of_another_commit_is_not_gone_on_with(
    pair: tuple[Path, Path], folders: Path
) -> None:
    engine: Any = SimpleNamespace(block_size=4, dtype="float32")
    made = []
    for revision in (None, COMMIT):
        deployment = Deployment.model_validate(described(pair))
        target = deployment.target.model_copy(update={"revision": revision})
        made.append(examiner._made_by(deployment.model_copy(update={"target": target}), ["a"], 8, engine, None))
    assert json.dumps(made[0]) != json.dumps(made[1])
