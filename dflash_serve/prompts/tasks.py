"""The paper's evaluation tasks (table 1), in z-lab's wording (dflash 0.1.0, `benchmark.py`), and any others by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_serve.errors import UserError
from dflash_serve.prompts.sources import HUB, HUB_FORM, hub_options, hub_prompts, human_eval_stubs, jsonl_prompts

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMAN_EVAL = "humaneval"
STUB = "Complete the following Python function:\n```python\n{}```"


@dataclass(frozen=True)
class HubTask:
    """Questions of a dataset on the hub, each put into a template."""

    repository: str
    column: str
    subset: str | None = None
    split: str = "test"
    template: str = "{}"


TASKS = {
    "gsm8k": HubTask("openai/gsm8k", "question", subset="main", template=BOXED),
    "math500": HubTask("HuggingFaceH4/MATH-500", "problem", template=BOXED),
    "mbpp": HubTask("google-research-datasets/mbpp", "prompt", subset="sanitized"),
    "mt-bench": HubTask("HuggingFaceH4/mt_bench_prompts", "prompt", split="train"),
}
"""Tasks by name; of MT-Bench the first turns.

LiveCodeBench's repository is a script, which is never run: export it to JSONL.
"""


def task_prompts(text: str) -> tuple[str, list[str]]:
    """A task by what the user calls it -> its name and prompts.

    Args:
        text: `humaneval` (from its package), one of `TASKS`, NAME=FILE.jsonl, or NAME=hf:ORG/NAME,...

    Raises:
        UserError: nobody knows it, or its prompts cannot be had.
    """
    name, _, source = text.partition("=")
    where = f"task {name}"
    if source.startswith(HUB):
        repository, options = hub_options(source, where)
        return name, hub_prompts(repository, where=where, **options)
    if source:
        return name, jsonl_prompts(Path(source), do="check the prompts' path")
    if name == HUMAN_EVAL:
        return name, human_eval_prompts(where)
    if name not in TASKS:
        known = ", ".join((HUMAN_EVAL, *TASKS))
        do = f"give NAME=FILE.jsonl, NAME={HUB_FORM}, or one of {known}"
        raise UserError(f"{text!r} is no task", where="--task", do=do)
    task = TASKS[name]
    found = hub_prompts(task.repository, subset=task.subset, split=task.split, column=task.column, where=where)
    return name, [task.template.format(prompt) for prompt in found]


def human_eval_prompts(where: str) -> list[str]:
    """HumanEval's stubs as a user asks for them.

    Raises:
        UserError: its package is not installed.
    """
    return [STUB.format(stub) for stub in human_eval_stubs(where)]
