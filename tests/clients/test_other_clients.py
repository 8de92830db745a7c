"""LangChain's and LiteLLM's own clients against the embedded server: text, streams, tools, forms and refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, running
from tests.support.tiny_target import write_tiny_pair

ASK = Path(__file__).parent / "ask.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `ask.py` says. The clients look for no proxy and fetch nothing."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONPATH": ""}
    with running(tiny_engine(write_tiny_pair(tmp_path_factory.mktemp("pair")))) as server:
        done = subprocess.run(
            [os.environ["CLIENTS_PYTHON"], str(ASK), f"{server.url}/v1", MODEL],
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_langchain_chats_streams_calls_tools_and_gets_forms(found: dict[str, Any]) -> None:
    told = found["langchain"]
    assert told["text"]
    assert told["streamed"] == told["text"]
    assert told["tokens"] <= 170
    assert told["finish_reason"] == "tool_calls"
    for name, arguments in (told["call"], *told["streamed_call"]):
        assert (name, arguments["zone"]) == ("get_time", "UTC")  # the schema allows more, and a random target adds it
    assert len(told["streamed_call"]) == 1
    assert told["after_the_result"]
    assert told["form"] in range(10)
    assert told["form_by_tool"] in range(10)
    plain, quick = told["prompt_tokens"]
    assert quick > plain  # the tiny template says so where enable_thinking is false


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chats_streams_and_calls_tools(found: dict[str, Any], provider: str) -> None:
    told = found["litellm"][provider]
    assert told["text"]
    assert told["streamed"] == told["text"]
    assert told["finish_reason"] == "tool_calls"
    for calls in (told["calls"], told["streamed_calls"]):
        ((name, arguments),) = calls
        # For vLLM it takes additionalProperties out of the schema: a random target adds some.
        assert (name, json.loads(arguments)["zone"]) == ("get_time", "UTC")


def test_litellm_takes_a_refusal_for_what_it_is(found: dict[str, Any]) -> None:
    assert "temperature" in found["litellm"]["refused"]
