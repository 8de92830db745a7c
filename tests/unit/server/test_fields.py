"""Every field that the installed `openai` client can send is one of ours, or is refused on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    chat_completion_stream_options_param,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel

from dflash_torch.server.api import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Function,
    StreamOptions,
    TextPart,
    Tool,
)

CHANGES_THE_ANSWER = {"audio", "function_call", "functions", "moderation", "web_search_options"}
"""Fields of OpenAI that would change an answer, and that this server does not have."""


def fields_of(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in getattr(kind, "model_fields", None) or kind.__annotations__}


def messages() -> Iterator[Any]:
    """The kinds of messages; `function` is what became `tool`."""
    kinds = get_args(ChatCompletionMessageParam)
    yield from (kind for kind in kinds if "Function" not in kind.__name__)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, (chat_create_params.CompletionCreateParamsStreaming,)),
        (CompletionRequest, (completion_create_params.CompletionCreateParamsStreaming,)),
        (ChatMessage, (*messages(), ChatCompletionMessage)),
        (TextPart, (ChatCompletionContentPartTextParam,)),
        (Tool, (ChatCompletionFunctionToolParam,)),
        (Function, (FunctionDefinition,)),
        (StreamOptions, (chat_completion_stream_options_param.ChatCompletionStreamOptionsParam,)),
    ],
)
def test_a_field_of_the_openai_client_is_known_or_refused_on_purpose(
    ours: type[BaseModel], theirs: tuple[Any, ...]
) -> None:
    assert fields_of(*theirs) - ours.model_fields.keys() <= CHANGES_THE_ANSWER
    assert len(fields_of(*theirs)) >= 2


def test_what_is_refused_on_purpose_is_still_a_field_of_the_client() -> None:
    known = fields_of(chat_create_params.CompletionCreateParamsStreaming)
    assert known >= CHANGES_THE_ANSWER
    assert not ChatRequest.model_fields.keys() & CHANGES_THE_ANSWER
