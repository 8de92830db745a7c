"""Requests that the OpenAPI document allows, and some that it does not, never get a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dflash_torch.server.app import ERRORS
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, running, until

# Not `positive_data_acceptance`: a token id outside the vocabulary fits the schema and is wrong.
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


GENERATES = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture(scope="module")
def schema(tiny_folders: tuple[Path, Path]) -> Iterator[Any]:
    engine = tiny_engine(tiny_folders, max_batch_size=8)
    engine.scheduler.capacity = 48  # answers without a limit stay short
    with running(engine, queue=256) as server:
        document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
        assert "422" not in str(document["paths"])
        for name in ("ChatRequest", "CompletionRequest"):  # or all would end at an unknown model
            document["components"]["schemas"][name]["properties"]["model"]["enum"] = [MODEL]
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.url)
        yield schema
        until(server.idle)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", GENERATES)
def test_no_request_makes_a_5xx_or_leaves_the_documented_shapes(schema: Any, path: str, mode: GenerationMode) -> None:
    """Positive = as the document says, negative = not quite."""

    documented = {200, *(status for status in ERRORS if isinstance(status, int))}

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call_and_validate(checks=CHECKS, timeout=60)
        assert answer.status_code in documented  # 4XX is there too, and would allow any

    check()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/live", "/metrics"])
def test_what_takes_no_body_answers_as_documented(schema: Any, path: str) -> None:
    schema[path]["GET"].Case().call_and_validate(checks=CHECKS)
