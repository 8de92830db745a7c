"""Verdicts of `verify` on engines that are sound: none may be "not lossless".

    .venv/bin/python -m benchmarks.honest embedded --runs 20
    .venv-sglang/bin/python -m benchmarks.honest sglang --runs 10
    .venv-vllm/bin/python -m benchmarks.honest vllm --runs 10

Two servers on a CPU in float32, one verifying whole blocks and one without a drafter. Every run has prompts of its
own, chosen by its number. The embedded server and SGLang's have tiny models (the embedded engine's drafts are likely
tokens, so that many are accepted, and SGLang's drafter is random); vLLM's has SmolLM2 with the bundled drafter. An
engine's runs replace its earlier ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.answers.prompts import jsonl_prompts
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.provenance import environment
from dflash_serve.common.reports import write_json
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import FEWEST, VerifyPlan
from dflash_serve.verify.subjects import two_servers
from dflash_serve.verify.verification import Verification

PROMPTS = Path(__file__).parent / "prompts"
RESULTS = Path(__file__).parent / "results" / "honest.json"
PLAN = VerifyPlan(
    prompts=4, prompts_sha256="", max_tokens=24, samples=FEWEST, sample_tokens=4, long_tokens=64, dtype="float32"
)
IN_FLIGHT = 16
PATIENCE = 900.0  # seconds until a server must be ready
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "name",
    "value",
    "list",
    "true",
    "false",
]
Urls = tuple[str, str]


def of_words() -> list[str]:
    """Prompts for the tiny models, which know these words only."""
    return [" ".join(Random(number).choices(WORDS, k=2 + number % 4)) for number in range(100)]


def chosen_prompts(every: list[str], number: int) -> list[list[dict[str, str]]]:
    """The conversations of a run."""
    return [[{"role": "user", "content": text}] for text in Random(number).sample(every, PLAN.prompts)]


@contextmanager
def embedded(folder: Path, every: list[str], runs: int) -> Iterator[Urls]:
    """The embedded engine's own server."""
    from tests.support.broken_loops import guessing_engine, likely_tokens, sharp_pair
    from tests.support.embedded import tiny_engine
    from tests.support.serving import running

    folders, params = sharp_pair(folder), SamplingParams(temperature=0, max_tokens=PLAN.max_tokens)
    asked: list[Any] = [(one, params) for number in range(runs) for one in chosen_prompts(every, number)]
    engine = guessing_engine(folders, likely_tokens(folders, asked))
    with (
        running(engine, queue=64) as speculating,
        running(tiny_engine(folders, width=1, max_batch_size=IN_FLIGHT), queue=64) as plain,
    ):
        yield speculating.url, plain.url


@contextmanager
def started(folder: Path, sides: list[tuple[ServerBackend, Deployment]]) -> Iterator[Urls]:
    """Another engine's servers."""
    with ExitStack() as stack:
        speculating, plain = (
            stack.enter_context(running_server(backend, deployment, folder / str(number), patience=PATIENCE))
            for number, (backend, deployment) in enumerate(sides)
        )
        yield speculating, plain


@contextmanager
def opened(engine: str, every: list[str], runs: int) -> Iterator[Urls]:
    """Addresses of the engine's servers, with and without speculation."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if engine == "embedded":
            with embedded(folder, every, runs) as urls:
                yield urls
            return
        if engine == "sglang":
            from tests.support import sglang_server as sglang
            from tests.support.tiny import write_tiny_drafter

            target, config = sglang.tiny_pair(folder, 4)
            models = target, write_tiny_drafter(folder / "drafter", config)
            plain = sglang.OnCpu("--disable-overlap-schedule")
            sides: list[tuple[ServerBackend, Deployment]] = [
                (sglang.OnCpu(), sglang.deployment(models, requests=IN_FLIGHT, width=4)),
                (plain, sglang.deployment(models, requests=IN_FLIGHT, width="off")),
            ]
        else:
            from tests.support import vllm_server as vllm

            sides = [(vllm.OnCpu(), vllm.smollm2(width)) for width in (8, "off")]
        with started(folder, sides) as urls:
            yield urls


def main(
    engine: Annotated[str, typer.Argument(help="embedded, sglang or vllm.")],
    runs: Annotated[int, typer.Option(help="Verifications, each with prompts of its own.")] = 10,
    output: Annotated[Path, typer.Option(help="JSON file of the results of all engines.")] = RESULTS,
) -> None:
    """Verifies again and again, and counts the verdicts."""
    bundled = [prompt for path in sorted(PROMPTS.glob("*.jsonl")) for prompt in jsonl_prompts(path)]
    every, found = bundled if engine == "vllm" else of_words(), list[dict[str, Any]]()
    with opened(engine, every, runs) as urls:
        for number in range(runs):
            start, pair = monotonic(), two_servers(*(Endpoint(url, concurrency=IN_FLIGHT) for url in urls))
            said = Verification(PLAN, chosen_prompts(every, number), pair, Store(None, {})).run()
            row = {"run": number, "headline": said.headline, "reasons": said.reasons}
            found.append({**row, "seconds": round(monotonic() - start)})
            Console().print(engine, found[-1])
    kept = json.loads(output.read_text()) if output.is_file() else {}
    kept[engine] = {"environment": environment().model_dump(), "runs": found}
    write_json(output, kept)
    Console().print(Counter(one["headline"].split(":")[0] for one in found))


if __name__ == "__main__":
    typer.run(main)
