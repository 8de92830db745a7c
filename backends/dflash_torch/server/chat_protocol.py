"""POST /v1/chat/completions as OpenAI's clients send it: messages, tools, and what the chat template is told."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from dflash_serve.speculation.params import SamplingParams

from .api_errors import ApiError
from .protocol import Generation, Strict


class TextPart(Strict):
    """Text; images and files are not for these models."""

    type: Literal["text"]
    text: str


class Function(Strict):
    """What a tool is called, what it is for, and what it takes."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of its arguments; without one it takes any object."""
    strict: bool = False
    """Taken and ignored: the schema is always enforced."""


class Tool(Strict):
    """A function that the answer may ask the client to call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Of the tool that must be called."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """A call of an earlier turn."""

    name: str
    arguments: str = "{}"
    """A JSON object, as text."""


class EarlierCall(Strict):
    """A call of an earlier turn, and the id by which its result refers to it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it: the arguments an object.

        Raises:
            ApiError: they are none.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            what = f"the arguments of the call {self.id or self.function.name!r} are no JSON object"
            raise ApiError(400, what, param="messages", code="invalid_value")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Strict):
    """One turn; what the target's template makes of it is the target's business."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str = ""
    refusal: None = None
    tool_calls: list[EarlierCall] = Field(default_factory=list, max_length=128)
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """Its content, parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def plain(self) -> dict[str, Any]:
        """The message as the chat template takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message | ({"name": self.name} if self.role == "tool" and self.name else {})


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = Field(True, description="whether one answer may call several times")
    reasoning_effort: str | None = Field(None, max_length=64, description="handed to the target's chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the target's chat template, such as enable_thinking"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="most tokens to generate; as max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20, description="of so many most probable tokens; needs logprobs: true")

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two of them have one name")
        if not names and self.tool_choice not in ("auto", "none"):
            raise ValueError("tool_choice: there are no tools to call")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name!r}")
        if self.offered and (self.forms or self.min_tokens):
            raise ValueError(f"tools: not together with {(*self.forms, 'min_tokens')[0]}")
        return self

    @property
    def offered(self) -> list[Function]:
        """The functions that the answer may call."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool.function for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    def sampling_params(self) -> SamplingParams:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        logprobs = self.top_logprobs if self.logprobs else None
        fields = {name: getattr(self, name) for name in SamplingParams.model_fields}
        return SamplingParams(**{**fields, "logprobs": logprobs, "max_tokens": min(limits, default=None)})
