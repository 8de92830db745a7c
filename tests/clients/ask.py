"""What LangChain's and LiteLLM's users do with a server, each once; prints what came of it as JSON.

Run by `test_other_clients.py` in the environment of those libraries, which has nothing of ours: `ask.py URL MODEL`.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import operator
import sys
from functools import reduce
from typing import Any, Literal

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "the fox?"


@tool
def get_time(zone: Literal["UTC"]) -> str:
    """What time it is."""
    return f"noon in {zone}"


class Digit(BaseModel):
    """An answer with a form."""

    n: int = Field(ge=0, le=9)


def langchain(url: str, model: str) -> dict[str, Any]:
    """LangChain's ChatOpenAI, as its pages show it."""
    chat = ChatOpenAI(base_url=url, api_key="any", model=model, temperature=0, max_tokens=170, max_retries=0)
    answer = chat.invoke(QUESTION)
    calling = chat.bind_tools([get_time], tool_choice="any", parallel_tool_calls=False)
    called, pieces = calling.invoke(QUESTION), list(calling.stream(QUESTION))
    (call,) = called.tool_calls
    result = ToolMessage(get_time.invoke(call["args"]), tool_call_id=call["id"])
    after = chat.bind_tools([get_time], tool_choice="none").invoke([HumanMessage(QUESTION), called, result])
    thinking = chat.bind(extra_body={"chat_template_kwargs": {"enable_thinking": False}}).invoke(QUESTION)
    return {
        "text": answer.content,
        "streamed": "".join(piece.content for piece in chat.stream(QUESTION)),
        "tokens": answer.usage_metadata["output_tokens"],
        "call": [call["name"], call["args"]],
        "finish_reason": called.response_metadata["finish_reason"],
        "streamed_call": [[each["name"], each["args"]] for each in reduce(operator.add, pieces).tool_calls],
        "after_the_result": bool(after.content),
        "form": chat.with_structured_output(Digit, method="json_schema").invoke(QUESTION).n,
        "form_by_tool": chat.with_structured_output(Digit, method="function_calling").invoke(QUESTION).n,
        "prompt_tokens": [one.usage_metadata["input_tokens"] for one in (answer, thinking)],
    }


def lite_llm(url: str, model: str) -> dict[str, Any]:
    """LiteLLM, which takes the server for OpenAI's and for vLLM's."""
    messages = [{"role": "user", "content": QUESTION}]
    given = {"api_base": url, "api_key": "any", "messages": messages, "temperature": 0, "max_tokens": 170}
    zone = {"properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    schema = {"type": "object", **zone, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": schema}}]
    found: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm"):
        asked = {**given, "model": f"{provider}/{model}", "num_retries": 0}
        forced = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        (called,) = litellm.completion(**forced).choices
        built = litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True)))
        streamed = litellm.completion(**asked, stream=True)
        found[provider] = {
            "text": litellm.completion(**asked).choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
            "finish_reason": called.finish_reason,
            "calls": [[c.function.name, c.function.arguments] for c in called.message.tool_calls],
            "streamed_calls": [[c.function.name, c.function.arguments] for c in built.choices[0].message.tool_calls],
        }
    try:
        litellm.completion(**{**given, "model": f"openai/{model}", "temperature": 9})
    except litellm.BadRequestError as error:
        found["refused"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps({"langchain": langchain(*sys.argv[1:]), "litellm": lite_llm(*sys.argv[1:])}))
