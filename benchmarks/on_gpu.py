"""The work of one visit to a GPU, by this project's own commands.

    python benchmarks/on_gpu.py L1 --seconds 540 --output build/gpu
    python benchmarks/on_gpu.py L1 --seconds 120 --output build/dry --dry    # the same commands at tiny sizes, on a CPU

L1: the embedded engine (tests, `verify`, speed); L2: answers to train on; L3: training on the answers of `--bring`;
L23: both; L4: SGLang; L5: vLLM. Each step is a process that gets a share of the time that is left, and is ended after
it. The output folder has `report.json` (written anew after every step), `table.txt`, a log and the results of each
step, and a trained drafter. The exit code is 1 if a step failed. `verify` exits with 3 where no draft was accepted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NamedTuple

import typer

from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import commit, now, query_gpus, versions

ROOT = Path(__file__).parents[1]
CLI = (sys.executable, "-c", "from dflash_serve.cli.main import run; run()")
LAST_SECONDS, GRACE_SECONDS = 15.0, 10.0  # time kept for the end, and from an interrupt to a kill
RECIPE = """
seed: 1
target: {{model: {target}}}
data:
  prompts:
    - {{kind: synthesised, name: questions, count: {count}, temperature: 0.9, max_new_tokens: {turn},
       openers: ["What is", "How", "Write a Python function that", "Explain", "A shop sells"]}}
  answers: {{max_new_tokens: {new}, max_batch_size: {batch}, max_minutes: {data_minutes:.3f}}}
  validation_share: 0.02
drafter: {{num_layers: {layers}, block_size: 8, mask_token_id: 16, num_features: {features}, init: target}}
training: {{minutes: {minutes:.3f}, sequences: {sequences}, lr: 1.5e-3, reduced_vocabulary: true, log_every: 10}}
"""
BURSTS, IN_FLIGHT = "--burst --concurrency 1,8,32,64,128 --rounds 4", "--concurrency 1,8,32,64 --steps 60"
PROMPTS_A_SECOND = 100  # of a lease: the target makes up some 500 a second on an H100 (estimated)
SERVED = "--users 1,8,32 --turns 4 --seconds 3"
SIZES = {"turn": 48, "new": 160, "batch": 512, "layers": 3, "features": 5, "sequences": 32}
DRY_SIZES = {"turn": 8, "new": 16, "batch": 4, "layers": 1, "features": 2, "sequences": 2}


class Lease(StrEnum):
    """The kinds of work."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L23 = "L23"
    L4 = "L4"
    L5 = "L5"


class Step(NamedTuple):
    """A process; `share` is its part of the time beside those of the steps after it."""

    name: str
    argv: tuple[str, ...]
    share: float
    env: tuple[tuple[str, str], ...] = ()


class Work(NamedTuple):
    """Settings of the steps of a lease."""

    seconds: float
    output: Path
    dry: bool
    target: str
    drafter: str
    bring: Path | None = None

    def steps(self, lease: Lease) -> list[Step]:
        """The steps of a lease, the most valuable first."""
        if lease is Lease.L1:
            return [*self._embedded()]
        if lease in (Lease.L4, Lease.L5):
            return [*self._server("sglang" if lease is Lease.L4 else "vllm")]
        return [*self._training(lease)]

    def _embedded(self) -> Iterator[Step]:
        pytest, on_cuda = (sys.executable, "-m", "pytest", "-q"), (("DFLASH_SERVE_TEST_DEVICE", "cuda"),)
        names = (f"tests/unit/dflash_torch/test_{name}.py" for name in ("block_step", "model_runner", "scheduler"))
        if not self.dry:
            yield Step("tests", (*pytest, "tests/gpu"), 1.0)
            yield Step("unit tests on the GPU", (*pytest, *names), 1.0, env=on_cuda)
        yield self._verify("torch", "auto", "float32", samples=64)
        short = "--rounds 1 --steps 4 --max-model-len 200"
        yield self._measured("bursts", "steady", f"--burst --concurrency 1,2 {short}" if self.dry else BURSTS)
        yield self._measured("in flight", "steady", f"--concurrency 2 {short}" if self.dry else IN_FLIGHT)
        yield from self._training(Lease.L23, 60.0)

    def _server(self, backend: str) -> Iterator[Step]:
        for width in ("auto",) if self.dry else ("auto", "8"):
            yield self._verify(backend, width, "auto", samples=0)
        load = "--users 1,2 --turns 1 --seconds 1" if self.dry else SERVED
        for way in ("off", "fixed", "auto"):  # one at a time: a server takes most of the memory
            yield self._measured(f"served, {way}", "served", f"--backend {backend} --ways {way} --dtype auto {load}")

    def _measured(self, name: str, benchmark: str, options: str) -> Step:
        argv = (sys.executable, "-m", f"benchmarks.{benchmark}", *self._pair, *options.split())
        return Step(name, (*argv, "--output", str(self.output / file_name(name, "json"))), 2.0)

    def _verify(self, backend: str, width: str, dtype: str, samples: int) -> Step:
        size = "--num-prompts 2 --max-tokens 8 --samples 0" if self.dry else f"--num-prompts 12 --samples {samples}"
        options, name = f"--backend {backend} --width {width} --dtype {dtype} {size} --quiet", f"verify, width {width}"
        argv = (*CLI, "verify", *self._pair, *options.split())
        return Step(name, (*argv, "--output", str(self.output / file_name(name, "json"))), 1.5)

    @property
    def _pair(self) -> tuple[str, ...]:
        return "--target", self.target, "--drafter", self.drafter

    def _training(self, lease: Lease, seconds: float | None = None) -> Iterator[Step]:
        """Answers, training or both, in `train`'s own time limits; loading and validation take some beside them."""
        minutes = (self.seconds if seconds is None else seconds) / 60
        answers = {Lease.L2: 0.8, Lease.L23: 0.35}.get(lease, 0.001)
        training = {Lease.L3: 0.75, Lease.L23: 0.35}.get(lease, 0.1)
        sizes = DRY_SIZES if self.dry else SIZES
        sizes = {**sizes, "count": 8 if self.dry else round(PROMPTS_A_SECOND * 60 * minutes)}
        text = RECIPE.format(target=self.target, data_minutes=answers * minutes, minutes=training * minutes, **sizes)
        recipe, folder = self.output / "recipe.yaml", self.bring or self.output / "train"
        write_whole(recipe, text)
        argv = (*CLI, "train", str(recipe), "--output", str(folder), "--quiet")
        resume = ("--resume",) if self.bring else ()
        if lease is not Lease.L3:
            yield Step("answers", (*argv, *resume, "--stage", "data"), 1.0)
        if lease is not Lease.L2:
            yield Step("training", (*argv, "--resume"), 1.0)


def file_name(step: str, ending: str) -> str:
    """The name of a step's log or result."""
    return f"{step.replace(', ', '-').replace(' ', '-')}.{ending}"


def main(
    lease: Annotated[Lease, typer.Argument(help="The work to do.")],
    output: Annotated[Path, typer.Option(help="Folder for the report, results and logs.")],
    seconds: Annotated[float, typer.Option(help="Time until everything must be written.", min=20.0)] = 540.0,
    dry: Annotated[bool, typer.Option("--dry", help="Tiny sizes on a CPU.")] = False,
    target: Annotated[str, typer.Option(help="Target.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Drafter.")] = "smollm2",
    bring: Annotated[
        Path | None, typer.Option(help="Folder of an earlier `train`, to go on from (L2, L3, L23).")
    ] = None,
) -> None:
    """Do the work of a lease."""
    if lease is Lease.L3 and bring is None:
        raise typer.BadParameter("L3 trains on answers: name the folder of an earlier L2 or L23", param_hint="--bring")
    began, output = monotonic(), output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    steps = Work(seconds, output, dry, target, drafter, bring).steps(lease)
    report: dict[str, Any] = {
        "lease": lease,
        "dry": dry,
        "commit": commit(),
        "at": now(),
        "machine": machine(),
        "steps": [],
    }
    for number, step in enumerate(steps):
        left = seconds - LAST_SECONDS - (monotonic() - began)
        allowed = left * step.share / sum(each.share for each in steps[number:])
        found = run_step(step, output, allowed)
        report["steps"].append(found)
        report["seconds"] = round(monotonic() - began, 1)
        write_whole(output / "report.json", json.dumps(report, indent=1) + "\n")
        table = "\n".join(line for each in report["steps"] for line in rows(each)) + "\n"
        write_whole(output / "table.txt", table)
        print("\n".join(rows(found)), flush=True)
    raise typer.Exit(int(any(each["outcome"] != "ok" for each in report["steps"])))


def run_step(step: Step, output: Path, allowed: float) -> dict[str, Any]:
    """Runs a step for at most `allowed` seconds; its outcome, its result and the end of its log if it failed."""
    log, result, began = output / file_name(step.name, "log"), output / file_name(step.name, "json"), monotonic()
    paths = [str(ROOT), str(ROOT / "backends"), str(ROOT / "engines"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **dict(step.env)}
    outcome = "no time was left"
    if allowed >= 1:
        with log.open("wb") as out:
            both: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(step.argv, **both, env=env, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(allowed)
            outcome = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {allowed:.0f} s"
        finally:
            end(process)
    found: dict[str, Any] = {"step": step.name, "outcome": outcome, "seconds": round(monotonic() - began, 1)}
    if result.is_file():
        found["result"] = json.loads(result.read_text(encoding="utf-8"))
    if outcome != "ok" and log.exists():
        found["log"] = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, which ends its servers; then kills what is left of it."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(found: dict[str, Any]) -> Iterator[str]:
    """Lines of the table: the step, and a line for each load that it measured."""
    yield f"{found['step']:24s} {found['outcome']:>20s} {found['seconds']:8.1f} s"
    result = found.get("result") or {}
    for row in result.get("results", []) if isinstance(result, dict) else []:
        if "tokens_per_second" in row:
            speeds = "  ".join(f"{way} {speed:,.0f}" for way, speed in row["tokens_per_second"].items())
            ratio = row.get("auto_over_better")
            ratio = ratio["ratio"] if isinstance(ratio, dict) else ratio
            better = f"  auto / better {ratio:.3f}" if ratio else ""
            yield f"    {row.get('users', row.get('concurrency')):>4} at once, tokens/s: {speeds}{better}"


def machine() -> dict[str, Any]:
    """The GPU with its driver, and versions; None where there is no GPU."""
    gpu = "; ".join(query_gpus("name,memory.total,driver_version")) or None
    return {"gpu": gpu, "versions": versions("torch", "transformers", "sglang", "vllm", "dflash-serve")}


if __name__ == "__main__":
    typer.run(main)
