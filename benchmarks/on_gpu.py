"""The work of one visit to a GPU, by this project's own commands.

    python benchmarks/on_gpu.py L1 --seconds 540 --output build/gpu
    python benchmarks/on_gpu.py L3 --seconds 540 --output build/more --bring build/gpu
    python benchmarks/on_gpu.py L1 --seconds 120 --output build/dry --dry    # the same commands at tiny sizes, on a CPU

L1: the embedded engine (tests, `verify`, speed); L2: answers to train on; L3: training on the answers of `--bring`
(without it, L23); L23: both; L4: SGLang; L5: vLLM. Each step is a process that gets a share of the time that is left,
and is ended after it. The exit code is 1 if a step failed. `verify` exits with 3 where no draft was accepted.

The output folder gets at most four files of at most 15 MB, so that all of them can be carried away: `report.json`,
written anew after every step, with results and table; the trained drafter, a tar in the parts `drafter.tar.1` and
`drafter.tar.2`; and `answers.tar.xz`, the answers with their recipe. Logs, checkpoints and what is too large for these
files stay in `OUTPUT.work`.

Training goes on from the drafter (`--fresh`: from the target's layers). `--bring` takes the output of an earlier visit,
its `answers.tar.xz` alone, or a folder of `train`. Its recipe is taken over, with more minutes; a checkpoint is gone on
from, or else a brought drafter.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from lzma import LZMAError
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from dflash_serve.checkpoint.reader import read_config
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import commit, now, query_gpus, versions
from dflash_serve.common.reports import write_json

ROOT = Path(__file__).parents[1]
CLI = (sys.executable, "-c", "from dflash_serve.cli.main import run; run()")
LOG_CHARACTERS = 20_000  # of a failed step's log, in the report
LAST_SECONDS, GRACE_SECONDS = 15.0, 10.0  # time kept for the end, and from an interrupt to a kill
MOST_BYTES, MOST_PARTS = 15_000_000, 2  # of a file, and of a drafter's files
UNWRITTEN = 2_000_000  # bytes of a shard of answers (0.3 MB) and of what the compressor holds back (0.2 MB), and more
REPORT, ANSWERS, DRAFTER, RECIPE = "report.json", "answers.tar.xz", "drafter.tar", "recipe.yaml"
OPENERS = ["What is", "How", "Write a Python function that", "Explain", "A shop sells"]
BURSTS, IN_FLIGHT = "--burst --concurrency 1,8,32,64,128 --rounds 4", "--concurrency 1,8,32,64 --steps 60"
PROMPTS_A_SECOND = 100  # of the answers' time: the target makes up some 500 a second on an H100 (estimated)
SERVED = "--users 1,8,32 --turns 4 --seconds 3"
SIZES = {"turn": 48, "new": 160, "batch": 512, "sequences": 32}
DRY_SIZES = {"turn": 8, "new": 16, "batch": 4, "sequences": 2}


DRY_MINUTES = 0.02  # of training


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
    fresh: bool = False

    @property
    def folder(self) -> Path:
        """The folder of logs, results and training, beside the output."""
        return self.output.with_name(f"{self.output.name}.work")

    @property
    def train(self) -> Path:
        """The folder of `train`."""
        return self.folder / "train"

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
            yield Step("tests", (*pytest, "tests/gpu"), 2.0)  # they compile and capture
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
        return Step(name, (*argv, "--output", str(self.folder / file_name(name, "json"))), 2.0)

    def _verify(self, backend: str, width: str, dtype: str, samples: int) -> Step:
        size = "--num-prompts 2 --max-tokens 8 --samples 0" if self.dry else f"--num-prompts 12 --samples {samples}"
        options, name = f"--backend {backend} --width {width} --dtype {dtype} {size} --quiet", f"verify, width {width}"
        argv = (*CLI, "verify", *self._pair, *options.split())
        return Step(name, (*argv, "--output", str(self.folder / file_name(name, "json"))), 1.5)

    @property
    def _pair(self) -> tuple[str, ...]:
        return "--target", self.target, "--drafter", self.drafter

    def _training(self, lease: Lease, seconds: float | None = None) -> Iterator[Step]:
        """Answers, training or both, in `train`'s own time limits; loading and validation take some beside them."""
        minutes = (self.seconds if seconds is None or self.dry else seconds) / 60  # a slow CPU's answers take long
        if lease is Lease.L3 and not (self.train / "data").is_dir():
            lease = Lease.L23
        answers = {Lease.L2: 0.8, Lease.L23: 0.35}.get(lease, 0.0) * minutes
        training = DRY_MINUTES if self.dry else {Lease.L3: 0.75, Lease.L23: 0.35}.get(lease, 0.1) * minutes
        for name, wanted in (("answers", answers), ("training", 0.0)):
            recipe = self._recipe(wanted, training)
            write_whole(self.folder / f"{name}.yaml", yaml.safe_dump(recipe, sort_keys=False))
        shutil.copyfile(self.folder / "answers.yaml", self.train / RECIPE)
        if answers:
            yield self._train("answers", "--stage", "data")
        if lease is not Lease.L2:  # on the answers that are there by then
            yield self._train("training", "--resume")

    def _train(self, name: str, *options: str) -> Step:
        recipe = str(self.folder / f"{name}.yaml")
        return Step(name, (*CLI, "train", recipe, "--output", str(self.train), "--quiet", *options), 1.0)

    def _recipe(self, answers: float, training: float) -> dict[str, Any]:
        """The brought recipe or one of our own, with so many minutes more than were spent already; 0 = no answers."""
        self.train.mkdir(parents=True, exist_ok=True)
        kept, spent = self.train / RECIPE, spent_minutes(self.train)
        recipe = yaml.safe_load(kept.read_text(encoding="utf-8")) if kept.is_file() else self._own_recipe(answers)
        recipe["data"]["answers"]["max_minutes"] = spent["answers"] + answers if answers else 0.001
        recipe["training"]["minutes"] = spent["training"] + training
        if not spent["training"]:
            start = self.train / "start"
            recipe["drafter"]["init"] = "target" if self.fresh else str(start) if start.is_dir() else self.drafter
        return dict(recipe)

    def _own_recipe(self, answers: float) -> dict[str, Any]:
        sizes, prompts = DRY_SIZES if self.dry else SIZES, [*self.train.glob("data/prompts-*.jsonl")]
        count = 8 if self.dry else max(1, round(PROMPTS_A_SECOND * 60 * answers))
        if prompts:  # brought without their recipe
            count = max(1, len(prompts[0].read_text(encoding="utf-8").splitlines()))
        source = {"kind": "synthesised", "name": "questions", "count": count, "temperature": 0.9}
        config = read_config(self.drafter)[0]
        own = {"block_size", "mask_token_id", "target_layer_ids", "intermediate_size", "slots"}
        heads = {"markov", "confidence", "convolution"}
        drafter = config.model_dump(mode="json", include=own | heads, exclude_none=True)
        return {
            "seed": 1,
            "target": {"model": self.target},
            "data": {
                "prompts": [{**source, "max_new_tokens": sizes["turn"], "openers": OPENERS}],
                "answers": {"max_new_tokens": sizes["new"], "max_batch_size": sizes["batch"]},
                "validation_share": 0.02,
            },
            "drafter": {"num_layers": len(config.layers), **drafter},
            "training": {"sequences": sizes["sequences"], "lr": 1.5e-3, "reduced_vocabulary": True, "log_every": 10},
        }

    def pack(self, step: str) -> list[str]:
        """Packs what a step has made into the output; returns lines about what is left out."""
        left_out = [pack_drafter(self.train / "drafter", self.output)] if step == "training" else []
        if step == "answers" or (step == "training" and not (self.output / ANSWERS).exists()):
            left_out.append(pack_answers(self.train, self.output / ANSWERS))
        return [line for line in left_out if line]


def spent_minutes(train: Path) -> dict[str, float]:
    """Minutes that a folder of `train` has spent on answers and on training; 0 where it has none."""
    found = {"answers": [train / "data" / "manifest.json"], "training": [*train.glob("checkpoint-*/progress.json")]}
    return {
        what: max((json.loads(path.read_text())["seconds"] for path in paths if path.is_file()), default=0.0) / 60
        for what, paths in found.items()
    }


def take_in(bring: Path, train: Path, *, fresh: bool) -> None:
    """Fills a folder of `train` with what an earlier visit left. Its drafter is the first weights, in `start`.

    Args:
        bring: the visit's output folder, its packed answers, or a folder of `train`.
        fresh: leave out drafter and checkpoints.
    """
    packs = [bring] if bring.is_file() else [bring / ANSWERS] if (bring / ANSWERS).is_file() else []
    parts = sorted(bring.glob(f"{DRAFTER}.*"))
    try:
        if (bring / "data").is_dir():
            shutil.copytree(bring, train)
        elif not packs and not parts:
            raise typer.BadParameter(f"{bring} is no output of this script, nor a folder of `train`")
        for pack in packs:
            with tarfile.open(pack, "r:xz") as tar:
                tar.extractall(train, filter="data")
        if parts:
            with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts)), mode="r:") as tar:
                tar.extractall(train / "drafter", filter="data")
    except (OSError, EOFError, tarfile.TarError, LZMAError) as error:
        raise typer.BadParameter(f"{bring} does not unpack ({error})") from None
    if fresh:
        for path in (train / "drafter", train / "start", *train.glob("checkpoint-*")):
            shutil.rmtree(path, ignore_errors=True)
    elif (train / "drafter").is_dir() and not spent_minutes(train)["training"]:
        shutil.rmtree(train / "start", ignore_errors=True)
        (train / "drafter").rename(train / "start")


def pack_drafter(folder: Path, output: Path) -> str | None:
    """Writes a drafter's folder as a tar in parts; a line if it is too large for them, None if not."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    data = raw.getvalue()
    if len(data) > MOST_PARTS * MOST_BYTES:
        return f"the drafter has {len(data) / 1e6:.0f} MB and stays in {folder}"
    for number, first in enumerate(range(0, len(data), MOST_BYTES), start=1):
        write_whole(output / f"{DRAFTER}.{number}", data[first : first + MOST_BYTES])
    return None


def pack_answers(train: Path, to: Path) -> str | None:
    """Writes recipe, prompts and answers as one file; a line if some are left out for its size, None if not."""
    data, raw, kept = train / "data", io.BytesIO(), list[dict[str, Any]]()
    if not (data / "manifest.json").is_file():
        return "there are no answers"
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    with tarfile.open(fileobj=raw, mode="w:xz", preset=1) as tar:  # 10 MB a second and core
        tar.add(train / RECIPE, RECIPE)
        for path in sorted(data.glob("prompts-*.jsonl")):
            tar.add(path, f"data/{path.name}")
        for shard in manifest["shards"]:
            if raw.tell() > MOST_BYTES - UNWRITTEN:
                break
            tar.add(data / shard["file"], f"data/{shard['file']}")
            kept.append(shard)
        missing = manifest["shards"][len(kept) :]
        text = json.dumps({**manifest, "shards": kept, "finished": manifest["finished"] and not missing}).encode()
        entry = tarfile.TarInfo("data/manifest.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    if len(raw.getvalue()) > MOST_BYTES:
        return f"the prompts alone are too large: all stays in {train}"
    write_whole(to, raw.getvalue())
    count = sum(shard["answers"] for shard in missing)
    return f"{count} answers are left out and stay in {data}" if missing else None


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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train from the target's layers, not from the drafter.")
    ] = False,
    bring: Annotated[
        Path | None, typer.Option(help="What an earlier L2, L3, L23 left: its output, its answers, or its `train`.")
    ] = None,
) -> None:
    """Do the work of a lease."""
    began, output = monotonic(), output.resolve()
    work = Work(seconds, output, dry, target, drafter, fresh)
    begin(work, bring)
    if lease is Lease.L3 and not (work.train / "data").is_dir():
        print("L3: no answers were brought (--bring), so it makes them first, as L23", flush=True)
    steps = work.steps(lease)
    report: dict[str, Any] = {
        "lease": lease,
        "dry": dry,
        "commit": commit(),
        "at": now(),
        "machine": machine(),
        "table": [],
        "steps": [],
    }
    for number, step in enumerate(steps):
        left = seconds - LAST_SECONDS - (monotonic() - began)
        allowed = left * step.share / sum(each.share for each in steps[number:])
        found = run_step(step, work.folder, allowed)
        if found["outcome"] == "ok" or step.name == "answers":  # a part of the answers is of use, too
            found["left_out"] = work.pack(step.name)
        report["steps"].append(found)
        report["table"] += rows(found)
        report["seconds"] = round(monotonic() - began, 1)
        write_json(output / REPORT, report)
        print("\n".join(rows(found)), flush=True)
    raise typer.Exit(int(any(each["outcome"] != "ok" for each in report["steps"])))


def begin(work: Work, bring: Path | None) -> None:
    """Makes the folders, with what is brought; a folder that an earlier visit filled is left as it is."""
    if any((work.output / name).exists() for name in (ANSWERS, f"{DRAFTER}.1")):
        raise typer.BadParameter(f"{work.output} has what an earlier visit left: give another", param_hint="--output")
    work.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=work.output.parent) as name:
        coming = Path(name) / "new"
        coming.mkdir()
        if bring is not None:
            take_in(bring, coming / "train", fresh=work.fresh)
        shutil.rmtree(work.folder, ignore_errors=True)  # only now: it may have been brought
        coming.rename(work.folder)
    work.output.mkdir(exist_ok=True)


def run_step(step: Step, folder: Path, allowed: float) -> dict[str, Any]:
    """Runs a step for at most `allowed` seconds; its outcome, its result and the end of its log if it failed."""
    log, result, began = folder / file_name(step.name, "log"), folder / file_name(step.name, "json"), monotonic()
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
        found["log"] = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
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
    yield from (f"    {line}" for line in found.get("left_out", ()))
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
