"""What the simulator of the width policy replays: how far whole blocks of the bundled drafter are accepted.

    python -m benchmarks.record_acceptance [--prompts 20] [--output benchmarks/policy/accepted.json]

The target answers prompts of three tasks; then the drafter drafts behind every token of each answer, all in one pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.simulator import DATA
from dflash_serve import LLM, SamplingParams
from dflash_serve.models.loader import load_drafter
from dflash_serve.training.blocks import SlotForward, lay_out
from dflash_serve.training.data import target_features
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import Messages, chat, human_eval, word_problems

SOURCE = (
    "SmolLM2-135M-Instruct with the bundled drafter (B = {block_size}), float32, greedy, {tokens} tokens at most. "
    "For every token of each answer: how many drafted tokens of a whole block behind it the target agrees with; one "
    "string of digits an answer. `python -m benchmarks.record_acceptance` writes it."
)


def main(
    prompts: Annotated[int, typer.Option(help="Of each task.")] = 20,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 160,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = DATA / "accepted.json",
) -> None:
    """Record all tasks."""
    engine = LLM("smollm2", max_batch_size=prompts, max_model_len=1024, dtype="float32").engine
    assert isinstance(engine, EmbeddedEngine)
    recorder = Recorder(engine, tokens)
    tasks = {"word problems": word_problems(prompts), "HumanEval": human_eval(prompts), "chat": chat(prompts)}
    report = {
        "source": SOURCE.format(block_size=recorder.config.block_size, tokens=tokens),
        "tasks": {name: recorder.task(name, asked) for name, asked in tasks.items()},
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class Recorder:
    """Target and drafter, loaded once."""

    def __init__(self, engine: EmbeddedEngine, tokens: int) -> None:
        self.engine, self.target = engine, engine.scheduler.target
        self.params = SamplingParams(temperature=0, max_tokens=tokens)
        drafter = load_drafter("smollm2", dtype=torch.float32)
        self.config, self.forward = drafter.config, SlotForward(drafter, self.target.embedding, dtype=torch.float32)

    def task(self, name: str, prompts: list[Messages]) -> list[str]:
        """A string of digits a prompt."""
        stream = self.engine.stream(prompts, [self.params] * len(prompts))
        for _ in stream:
            pass
        answers = [(output.prompt_token_ids, output.token_ids) for output in stream.outputs()]
        return [self.accepted(torch.tensor(asked), torch.tensor(said)) for asked, said in track(answers, name)]

    @torch.inference_mode()
    def accepted(self, prompt: Tensor, answer: Tensor) -> str:
        """For every token of an answer, the drafted tokens behind it that are the answer's own; none behind its end."""
        tokens = torch.cat([prompt, answer])
        anchors = torch.arange(len(prompt), len(tokens) - 1)
        blocks = lay_out([tokens], [anchors], self.config.block_size, self.config.rows())
        features = target_features(self.target, [tokens], self.config.target_layer_ids)
        drafted = self.target.logits(self.forward(blocks, features).hidden).argmax(-1)
        right = (drafted == blocks.targets) & blocks.valid
        return "".join(map(str, right.long().cumprod(1).sum(1).tolist())) + "0"


if __name__ == "__main__":
    typer.run(main)
