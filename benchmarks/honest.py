"""Verdicts of `verify` on engines that are sound: none may be "not lossless".

    .venv/bin/python -m benchmarks.honest embedded --runs 16
    .venv-sglang/bin/python -m benchmarks.honest sglang --runs 12
    .venv-vllm/bin/python -m benchmarks.honest vllm --runs 12

SmolLM2 with the bundled drafter in float32 on a CPU, whole blocks beside plain decoding. Every run has four prompts
of its own, chosen by its number from `benchmarks/prompts`. An engine's runs replace its earlier ones in the results.
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

from dflash_serve.backend import ServerBackend
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.provenance import environment
from dflash_serve.common.store import Store
from dflash_serve.deployment import Deployment
from dflash_serve.prompts import jsonl_prompts
from dflash_serve.server_adapter import running_server
from dflash_serve.verify.questions import FEWEST, VerifyPlan
from dflash_serve.verify.subjects import SubjectPair, engine_in_process, two_servers
from dflash_serve.verify.verification import Verification

PROMPTS = Path(__file__).parent / "prompts"
RESULTS = Path(__file__).parent / "results" / "honest.json"
PLAN = VerifyPlan(
    prompts=4, prompts_sha256="", max_tokens=24, samples=FEWEST, sample_tokens=4, long_tokens=64, dtype="float32"
)
IN_FLIGHT = 16
PATIENCE = 900.0  # seconds until a server must be ready


@contextmanager
def opened(engine: str) -> Iterator[SubjectPair]:
    """The engine with and without speculation."""
    if engine == "embedded":
        fields = {"target": {"model": "smollm2"}, "drafter": {"model": "smollm2"}, "hardware": {"dtype": "float32"}}
        limits = {"max_batch_size": IN_FLIGHT, "max_model_len": 1024}
        yield engine_in_process(Deployment.model_validate({**fields, "limits": limits, "speculation": {"width": 8}}))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        sides: list[tuple[ServerBackend, Deployment]]
        if engine == "sglang":
            from tests.support import sglang_server

            plain = sglang_server.OnCpu("--disable-overlap-schedule")
            sides = [(sglang_server.OnCpu(), sglang_server.smollm2(8)), (plain, sglang_server.smollm2("off"))]
        else:
            from tests.support import vllm_server

            sides = [(vllm_server.OnCpu(), vllm_server.smollm2(width)) for width in (8, "off")]
        urls = [
            stack.enter_context(running_server(backend, deployment, folder / str(number), patience=PATIENCE))
            for number, (backend, deployment) in enumerate(sides)
        ]
        yield two_servers(*(Endpoint(url, concurrency=IN_FLIGHT) for url in urls))


def main(
    engine: Annotated[str, typer.Argument(help="embedded, sglang or vllm.")],
    runs: Annotated[int, typer.Option(help="Verifications, each with prompts of its own.")] = 10,
    output: Annotated[Path, typer.Option(help="JSON file of the results of all engines.")] = RESULTS,
) -> None:
    """Verifies again and again, and counts the verdicts."""
    every = [prompt for path in sorted(PROMPTS.glob("*.jsonl")) for prompt in jsonl_prompts(path)]
    found: list[dict[str, Any]] = []
    with opened(engine) as pair:
        for number in range(runs):
            chosen = Random(number).sample(every, PLAN.prompts)
            start = monotonic()
            messages = [[{"role": "user", "content": text}] for text in chosen]
            said = Verification(PLAN, messages, pair, Store(None, {})).run()
            seconds = round(monotonic() - start)
            found.append({"run": number, "headline": said.headline, "reasons": said.reasons, "seconds": seconds})
            Console().print(f"{engine} {number}: {said.headline} {'; '.join(said.reasons)} ({seconds} s)")
    kept = json.loads(output.read_text()) if output.is_file() else {}
    kept[engine] = {"environment": environment().model_dump(), "runs": found}
    output.write_text(json.dumps(kept, indent=1) + "\n")
    Console().print(Counter(one["headline"].split(":")[0] for one in found))


if __name__ == "__main__":
    typer.run(main)
