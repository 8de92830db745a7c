"""Prompts to measure on: real ones only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.errors import UserError
from dflash_serve.prompts.sources import HUB, hub_options, hub_prompts, jsonl_prompts
from dflash_serve.prompts.tasks import HUMAN_EVAL, human_eval_prompts

AIPERF_FILES, AIPERF_PUBLIC = "speed_bench_", ("spec_al_", "spec_bench")
SYNTHETIC = {"synthetic", "random", "sonnet", "shakespeare"}


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
    where = f"--dataset {text}"
    if text.startswith(HUB):
        repository, options = hub_options(text, where)
        return Dataset(repository, tuple(hub_prompts(repository, where=where, **options)))
    if name.startswith(AIPERF_FILES):
        return _speed_bench(name, rest)
    if text.startswith(AIPERF_PUBLIC):
        return Dataset(text, loader=text)
    if text == HUMAN_EVAL:
        return Dataset("HumanEval", tuple(human_eval_prompts(where)))
    do = f"give FILE.jsonl, {HUMAN_EVAL}, hf:ORG/NAME or speed_bench_coding=FILE.jsonl"
    return Dataset(Path(text).name, tuple(jsonl_prompts(Path(text), where=where, do=do)))


def _speed_bench(name: str, file: str) -> Dataset:
    source = Path(file)
    if not file or not source.is_file():
        do = "give speed_bench_CATEGORY=FILE.jsonl; specdec_bench of NVIDIA's Model-Optimizer fetches the prompts"
        raise UserError(f"cannot be read ({file or 'no file given'})", where=f"--dataset {name}", do=do)
    return Dataset(f"SPEED-Bench, {name.removeprefix(AIPERF_FILES)}", loader=name, source=source)
