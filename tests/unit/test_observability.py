"""Logs as JSON and traces by OTLP: one key each, in every engine's own words, or refused by name."""

from __future__ import annotations

import json
import logging
import logging.config
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.adapter.registry import server_backend
from dflash_serve.common.json_log import JsonFormatter
from dflash_serve.deployment.description import Deployment
from tests.support.paper_models import write_paper_drafter, write_paper_target

TRACES = "http://collector.monitoring:4317"


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "hardware": {"gpu": "b200"}}


def served(name: str, fields: dict[str, Any], **serving: str) -> tuple[ServerBackend, Deployment]:
    return server_backend(name), Deployment.model_validate({**fields, "serving": serving})


def refusals(name: str, fields: dict[str, Any], key: str, **serving: str) -> list[str]:
    backend, deployment = served(name, fields, **serving)
    return [problem.what for problem in backend.launch(deployment).problems if problem.where == f"serving.{key}"]


@pytest.mark.parametrize(("name", "variable"), [("sglang", "SGLANG"), ("vllm", "VLLM")])
def test_an_engine_finds_its_logging_in_the_prepared_folder(
    name: str, variable: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    backend, deployment = served(name, fields, log_format="json")
    assert refusals(name, fields, "log_format", log_format="json") == []
    backend.launch(deployment).prepare(tmp_path / "prepared")
    file = backend.launch(deployment).command(tmp_path / "prepared").env[f"{variable}_LOGGING_CONFIG_PATH"]
    logging_of = "import json, logging.config, pathlib, sys\nlogging.config.dictConfig(json.load(open(sys.argv[1])))\n"
    asked = f"{logging_of}logging.getLogger('{name}').warning('two\\nlines')"
    done = subprocess.run([sys.executable, "-c", asked, file], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("WARNING", name, "two\nlines")


@pytest.mark.parametrize("name", ["sglang", "vllm", "torch"])
def test_text_is_what_it_was(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    backend, deployment = served(name, fields)
    command = backend.launch(deployment).command(tmp_path)
    assert not [word for word in (*command.argv, *command.env) if "log" in word.lower() or "otlp" in word]


def test_trtllm_serve_has_no_such_logs_and_the_embedded_engine_no_traces(fields: dict[str, Any]) -> None:
    assert refusals("tensorrt-llm", fields, "log_format", log_format="json") == ["trtllm-serve logs text alone"]
    one_gpu = {**fields, "hardware": {"gpu": "none"}}
    assert refusals("torch", one_gpu, "otlp_traces_endpoint", otlp_traces_endpoint=TRACES)
    assert refusals("torch", one_gpu, "log_format", log_format="json") == []


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sglang", ["--enable-trace", "--otlp-traces-endpoint", TRACES]),
        ("vllm", ["--otlp-traces-endpoint", TRACES]),
        ("tensorrt-llm", ["--otlp_traces_endpoint", TRACES]),
    ],
)
def test_a_collector_is_named_in_the_engines_own_flags(
    name: str, flags: list[str], fields: dict[str, Any], tmp_path: Path
) -> None:
    backend, deployment = served(name, fields, otlp_traces_endpoint=TRACES)
    argv = list(backend.launch(deployment).command(tmp_path).argv)
    at = argv.index(flags[0])
    assert argv[at : at + len(flags)] == flags


def test_a_collector_is_an_address_with_a_port() -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint"):
        Deployment.model_validate({"target": {"model": "x"}, "serving": {"otlp_traces_endpoint": "collector"}})


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "%s failed", ("it",), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert (found["message"], found["exception"].splitlines()[-1]) == ("it failed", "ValueError: bad")
    assert found["time"].endswith("+00:00")
