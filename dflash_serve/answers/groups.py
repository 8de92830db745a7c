"""Acceptance by groups: context length of each step, language and thinking of each prompt.

Language and thinking are fields of the prompt's own line; a prompt without the field is in the group `unknown`. Context
length is counted for each step: the tokens before its anchor, in ranges that end at powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dflash_serve.answers.engine import Conversation, Prompt, RequestOutput
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics

UNKNOWN = "unknown"
SHORTEST = 128
"""End of the first range of context lengths: a chat's first answer seldom begins behind it."""
THINKING = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on and off (Qwen3; DeepSeek-V3.1)."""


class Dimension(StrEnum):
    """Property of steps or prompts by which acceptance is grouped."""

    task = "task"
    length = "length"
    language = "language"
    thinking = "thinking"


@dataclass(frozen=True)
class LabelledPrompt:
    """A prompt and the groups that it belongs to."""

    prompt: Prompt
    task: str = UNKNOWN
    language: str = UNKNOWN
    thinking: str = UNKNOWN  # `on`, `off` or `unknown`


def labelled(
    prompt: Prompt, fields: Mapping[str, Any], variables: Mapping[str, Any], *, where: str, task: str = UNKNOWN
) -> LabelledPrompt:
    """A prompt with the labels of its line.

    `thinking` of a line is given to the chat template as `enable_thinking`, so that the label and the answer agree.

    Args:
        fields: the line's; `language`, `thinking`, `task` and `chat_template_kwargs` are read.
        variables: of the chat template, for all prompts; a line's own come first.

    Raises:
        UserError: a field of another kind, or variables for a prompt that no template writes.
    """
    language, thinking, own = (fields.get(key) for key in ("language", "thinking", "chat_template_kwargs"))
    if language is not None and not (isinstance(language, str) and language.strip()):
        raise UserError("language is no text", where=where, do='give one such as "de", or leave it out')
    if thinking is not None and not isinstance(thinking, bool):
        raise UserError("thinking is not true or false", where=where, do="correct it, or leave it out")
    if own is not None and not isinstance(own, dict):
        raise UserError("chat_template_kwargs is no object", where=where, do="correct it, or leave it out")
    given = {**variables, **(own or {})}
    if thinking is not None:
        name = next((name for name in THINKING if name in given), THINKING[0])
        given[name] = thinking
    if given:
        if isinstance(prompt, str) or not all(isinstance(turn, Mapping) for turn in prompt):
            raise UserError("no chat template writes it, so none can read the variables", where=where)
        prompt = Conversation([turn for turn in prompt if isinstance(turn, Mapping)], given)
    told = next((given[name] for name in THINKING if name in given), None)
    state = UNKNOWN if told is None else "on" if told else "off"
    named = fields.get("task")
    return LabelledPrompt(prompt, named if isinstance(named, str) else task, (language or UNKNOWN).lower(), state)


def length_range(tokens: int) -> str:
    """The range that a context of so many tokens is in: `0-127`, `128-255`, `256-511`, ..."""
    if tokens < SHORTEST:
        return f"0-{SHORTEST - 1}"
    first = 1 << (tokens.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


def by_length(output: RequestOutput) -> dict[str, AcceptanceStatistics]:
    """Acceptance of one answer's steps, by the context length of each."""
    found: dict[str, AcceptanceStatistics] = {}
    context = len(output.prompt_token_ids)
    for width, accepted in output.steps:
        found.setdefault(length_range(context), AcceptanceStatistics()).record(width, accepted)
        context += accepted + 1
    return found


def grouped(
    prompts: Sequence[LabelledPrompt], outputs: Sequence[RequestOutput], by: Dimension
) -> dict[str, dict[int, AcceptanceStatistics]]:
    """Group -> number of the prompt -> its acceptance there; groups in the order in which they are read."""
    found: dict[str, dict[int, AcceptanceStatistics]] = {}
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        own = {} if by is Dimension.length else {str(getattr(prompt, by.value)): output.statistics}
        for group, counts in (own or by_length(output)).items():
            found.setdefault(group, {})[number] = counts
    if by is Dimension.length:
        return {group: found[group] for group in sorted(found, key=lambda group: int(group.partition("-")[0]))}
    return {group: found[group] for group in sorted(found)}
