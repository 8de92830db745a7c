"""OpenAI's requests and errors as pydantic models. Unknown fields and wrong types are refused, null means the default.

Sampling fields are inherited from `SamplingParams`, which has their ranges and meanings.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dflash_serve.speculation.params import SamplingParams

AcceptanceMetrics = Literal["none", "summary", "detailed"]
Form = Literal["json_schema", "regex", "lark"]  # of a grammar: the methods of `Grammars`

# Limits on fields that make every step slower, for other requests as well.
MAX_BIASED_TOKENS = 1024
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_FIELDS = 256  # of one object; every unknown one would be an error of its own
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is its only error: a body of 4 MiB may have two million, which take 20 s to tell."""
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorDetail(BaseModel):
    """Message, type, field and code of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An OpenAI error."""

    error: ErrorDetail


class ApiError(Exception):
    """An error that a request is answered with.

    Args:
        param: the field of the request that is at fault.
        code: a word for programs, such as `context_length_exceeded`.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def _without_nulls(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if len(data) > MAX_FIELDS:
        raise ValueError(f"{len(data):,} fields, at most {MAX_FIELDS} are taken")
    return {key: value for key, value in data.items() if value is not None}


class Strict(BaseModel):
    """Base of request models: unknown fields and wrong types are refused, null fields count as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return _without_nulls(data)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False  # the last chunk has the usage and no choices
    include_obfuscation: bool = False  # accepted and ignored: padding against traffic analysis


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Strict):
    """A JSON schema in OpenAI's wrapping."""

    name: str
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: str = ""
    strict: bool = False  # accepted and ignored: the schema is always enforced


class JsonSchema(Strict):
    """JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Regex(Strict):
    """Text that matches from beginning to end; an extension of OpenAI's formats."""

    type: Literal["regex"]
    pattern: str


ResponseFormat = Annotated[PlainFormat | JsonSchema | Regex, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's field for constrained answers; one of the three is given."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = Field(None, min_length=1, max_length=1024)


class WithoutEffect(Strict):
    """Fields that change no token here; they are accepted and ignored. Other values than these are refused.

    A test holds the list against the installed `openai` client's own types.
    """

    user: str = ""
    safety_identifier: str = ""
    request_id: str = Field("", description="vLLM's; the answer has an id of its own")
    metadata: Annotated[dict[str, str], BeforeValidator(_without_nulls)] = Field(default_factory=dict)
    service_tier: str = "auto"
    prompt_cache_key: str = Field("", description="prefixes are cached in any case")
    prompt_cache_retention: str = ""
    prompt_cache_options: dict[str, Any] = Field(default_factory=dict)
    prediction: dict[str, Any] = Field(default_factory=dict, description="only makes OpenAI's own drafts better")
    modalities: Listed[Literal["text"]] = Field(default_factory=list)
    verbosity: Literal["medium"] = "medium"
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""
    skip_special_tokens: Literal[True] = Field(True, description="this and the next are vLLM's, with its defaults")
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    use_beam_search: Literal[False] = False
    priority: Literal[0] = 0
    no_stop_trim: Literal[False] = Field(False, description="from here on, what routers add to requests they pass on")
    return_hidden_states: Literal[False] = False
    separate_reasoning: bool = Field(True, description="only where a server parses reasoning, which this one does not")
    stream_reasoning: Literal[True] = True
    include_reasoning: Literal[True] = True


class Cacheable(Strict):
    """Marks of a prefix that a provider should cache, as LangChain and LiteLLM send them; they change no token."""

    cache_control: dict[str, Any] = Field(default_factory=dict, description="accepted and ignored")


class Generation(SamplingParams, WithoutEffect):
    """Fields of chat and plain completions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    n: int = Field(1, ge=1, description="answers to one prompt")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = PlainFormat(type="text")
    structured_outputs: StructuredOutputs | None = Field(None, description="as with vLLM")
    regex: str | None = Field(None, description="the answer matches it from beginning to end, as with SGLang")
    return_token_ids: bool = Field(False, description="choices carry token_ids, as with vLLM and SGLang")
    store: bool | None = Field(None, description="false: not recorded, where the server records chats for training")
    cache_salt: str = Field("", max_length=256, description="only requests of the same salt share prefixes")
    acceptance_metrics: AcceptanceMetrics | None = Field(None, description="metrics.speculative_decoding; n = 1 only")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = _without_nulls(data)
        biases = data.get("logit_bias")
        if isinstance(biases, dict) and len(biases) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias: {len(biases)} tokens, at most {MAX_BIASED_TOKENS} are taken")
        return data

    @model_validator(mode="after")
    def _within_reason(self) -> Generation:
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_token_ids: {len(self.stop_token_ids)}, at most {MAX_STOP_TOKENS} are taken")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in self.stop):
            raise ValueError(f"stop: a stop string has at most {MAX_STOP_CHARACTERS} characters")
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        if len(self.forms) > 1:
            raise ValueError(f"{' and '.join(self.forms)}: only one of them can be obeyed")
        if self.forms and self.min_tokens:
            raise ValueError(f"min_tokens: not with {next(iter(self.forms))}, which says when an answer is complete")
        return self

    @property
    def forms(self) -> dict[str, tuple[Form, Any]]:
        """The given fields that constrain the answer: by name, the form of a grammar and its source."""
        wanted, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        given: dict[str, tuple[Form, Any]] = {}
        if isinstance(wanted, Regex):
            given["response_format"] = ("regex", wanted.pattern)
        elif isinstance(wanted, JsonSchema):
            given["response_format"] = ("json_schema", wanted.json_schema.schema_)
        elif wanted.type == "json_object":
            given["response_format"] = ("json_schema", {"type": "object"})
        if outputs.choice is not None:
            given["structured_outputs.choice"] = ("lark", f"start: {' | '.join(map(json.dumps, outputs.choice))}")
        given["structured_outputs.json"] = ("json_schema", outputs.json_)
        given["structured_outputs.regex"], given["regex"] = ("regex", outputs.regex), ("regex", self.regex)
        return {name: form for name, form in given.items() if form[1] is not None}

    def sampling_params(self) -> SamplingParams:
        """The fields that the engine takes."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.model_fields})


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    max_tokens: int | None = Field(16, ge=1, description="most tokens to generate")
    echo: bool = Field(False, description="the prompt's text comes before the answer's; not with logprobs")

    @model_validator(mode="after")
    def _defaults_agree(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not with logprobs, which the prompt's tokens have none of here")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [entry for entry in self.prompt if isinstance(entry, int)]
        return [tokens] if tokens else [entry for entry in self.prompt if not isinstance(entry, int)]


class TextPart(Cacheable):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] = Field(default_factory=dict, description="accepted and ignored")


class Function(Cacheable):
    """Name, description and arguments of a tool."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False  # accepted and ignored: the schema is always enforced


class FunctionName(Strict):
    """The name of the tool that must be called."""

    name: str


class Tool(Cacheable):
    """A function that the answer may ask the client to call."""

    type: Literal["function"]
    function: Function


class Call(Strict):
    """Name and arguments of a function that the client is or was asked to call."""

    name: str
    arguments: str = "{}"  # a JSON object, as text


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None = it is none, or nested too deeply to be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class ToolCall(Strict):
    """A call, and the id by which its result refers to it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Call
    index: int | None = None  # accepted and ignored: clients send back what a stream gave them

    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it, with its arguments as an object.

        Raises:
            ApiError: the arguments are no JSON object.
        """
        if (arguments := json_object(self.function.arguments or "{}")) is None:
            what = f"the arguments of the call {self.id or self.function.name!r} are no JSON object"
            raise ApiError(400, what, param="messages", code="invalid_value")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Cacheable):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] = ""
    name: str = ""
    reasoning_content: str = Field("", validation_alias=AliasChoices("reasoning_content", "reasoning"))
    refusal: None = None
    annotations: Listed[Any] = Field(default_factory=list, description="of an answer that is sent back; ignored")
    tool_calls: Listed[ToolCall] = Field(default_factory=list, max_length=128)
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """The content, with its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def plain(self) -> dict[str, Any]:
        """The message as the chat template takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message | ({"name": self.name} if self.name else {})


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(min_length=1)
    tools: Listed[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = Field(True, description="whether one answer may call several times")
    reasoning_effort: str | None = Field(None, max_length=64, description="handed to the target's chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the target's chat template, such as enable_thinking"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="most tokens to generate; as max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20, description="number of most probable tokens; needs logprobs: true")

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
