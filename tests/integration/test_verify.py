"""`verify` on real engines: it passes honest ones, names what is wrong with broken ones, and survives interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve.checkpoint.source import target_folder
from dflash_serve.cli.main import run
from dflash_serve.client.endpoint import Reply
from dflash_serve.common.store import Store
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.verify import verification
from dflash_serve.verify.questions import GREEDY, SAMPLED, Question, VerifyPlan
from dflash_serve.verify.report import FaultKind, Findings, VerifyReport, read_report
from dflash_serve.verify.subjects import EngineSubject, SubjectPair, server_started_twice
from dflash_serve.verify.verification import Verification
from dflash_torch.backend import EmbeddedBackend
from dflash_torch.engine import EmbeddedEngine
from tests.support import broken_loops
from tests.support.broken_loops import Break, guessing_engine, likely_tokens, sharp_pair
from tests.support.embedded import tiny_engine
from tests.support.serving import running, until

Folders = tuple[Path, Path]
Likely = dict[tuple[int, ...], int]
PROMPTS = ["the quick brown fox", "a lazy dog", "over the", "true false", "[1, 2", "jumps"]
SAMPLES, TOKENS = 64, 40
BROKEN: dict[FaultKind, Break] = {
    FaultKind.STALE_STATE: broken_loops.stale_state,
    FaultKind.PENALTIES: broken_loops.frozen_penalties,
    FaultKind.GREEDY_SAMPLING: broken_loops.greedy_verification,
    FaultKind.DISTRIBUTION: broken_loops.wrong_residual,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are done before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return sharp_pair(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def settings(**more: Any) -> VerifyPlan:
    chosen: dict[str, Any] = {"samples": SAMPLES, "max_tokens": TOKENS, "dtype": "float32", "same_seeds": True, **more}
    return VerifyPlan(prompts=len(PROMPTS), prompts_sha256="", **chosen)


class RememberingSubject(EngineSubject):
    """An engine that is asked nothing twice: the same question has the same answer."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.known: dict[str, Reply] = {}

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        keys = [f"{one.prompt!r} {one.params!r} {top_logprobs}" for one in questions]
        new = [index for index, key in enumerate(keys) if key not in self.known]
        for index, reply in super().answers([questions[index] for index in new], top_logprobs=top_logprobs):
            self.known[keys[new[index]]] = reply
        yield from ((index, self.known[key]) for index, key in enumerate(keys))


@pytest.fixture(scope="module")
def plain_engine(folders: Folders) -> EmbeddedEngine:
    return tiny_engine(folders, width=1, max_batch_size=broken_loops.SLOTS)


@pytest.fixture(scope="module")
def plain(plain_engine: EmbeddedEngine) -> RememberingSubject:
    return RememberingSubject(plain_engine)


def verified(engine: EmbeddedEngine, plain: RememberingSubject, plan: VerifyPlan) -> Findings:
    pair = SubjectPair(lambda: nullcontext(EngineSubject(engine)), lambda: nullcontext(plain))
    return Verification(plan, PROMPTS, pair, Store(None, {})).run()


@pytest.fixture(scope="module")
def likely(folders: Folders) -> Likely:
    """Drafts for everything that a verification asks, from seeds that it does not use."""
    greedy = [(prompt, case.params.model_copy(update={"max_tokens": TOKENS})) for prompt in PROMPTS for case in GREEDY]
    sampled = [
        (prompt, case.params.model_copy(update={"max_tokens": 8, "seed": 10**6 + n}))
        for prompt, case in zip(PROMPTS, SAMPLED, strict=False)
        for n in range(64)
    ]
    return likely_tokens(folders, greedy + sampled)


def test_an_honest_loop_that_accepts_drafts_is_lossless(
    folders: Folders, likely: Likely, plain: RememberingSubject
) -> None:
    found = verified(guessing_engine(folders, likely), plain, settings())
    assert (found.verdict, found.faults, found.reasons) == ("lossless", (), ())
    assert found.acceptance_length is not None
    assert found.acceptance_length > 1.3
    assert all(one.identical == len(PROMPTS) for one in found.greedy)
    assert found.seeded is not None
    assert found.seeded.identical == len(PROMPTS)
    assert any(one.smallest_deviation for one in found.sampled)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_loop_is_not_lossless_and_its_fault_is_named(
    folders: Folders, likely: Likely, plain: RememberingSubject, monkeypatch: pytest.MonkeyPatch, fault: FaultKind
) -> None:
    engine = guessing_engine(folders, likely)
    BROKEN[fault](engine, monkeypatch)
    monkeypatch.setattr(verification, "smallest_deviation", lambda *_: None)  # told of what is sound
    # Seeds would give every one of them away; engines of others promise nothing of the kind.
    chosen = {"samples": 384, "penalties": False} if fault == FaultKind.DISTRIBUTION else {}
    found = verified(engine, plain, settings(same_seeds=False, **chosen))
    assert found.verdict == "not lossless"
    assert found.faults == (fault,)


def test_seeds_give_a_wrong_residual_away_at_once(
    folders: Folders, likely: Likely, plain: RememberingSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = guessing_engine(folders, likely)
    broken_loops.wrong_residual(engine, monkeypatch)
    assert verified(engine, plain, settings(samples=0)).faults == (FaultKind.SEEDS,)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-serve", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        run()
    return int(stopped.value.code or 0)


def quick(folders: Folders, file: Path) -> list[object]:
    pair = ["--target", folders[0], "--drafter", folders[1], "--width", 4]
    return [*pair, "--prompts", file, "--max-tokens", 16, "--samples", 64]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text("sesame")
    return path


@pytest.fixture(scope="module")
def plain_server(plain_engine: EmbeddedEngine, key: Path) -> Iterator[str]:
    with running(plain_engine, queue=64, api_key_file=key) as server:
        yield server.url


def test_two_servers_are_compared_over_real_sockets(
    folders: Folders,
    likely: Likely,
    file: Path,
    key: Path,
    plain_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "report.json"
    with running(guessing_engine(folders, likely), queue=64, api_key_file=key) as speculating:
        urls = ["--with", speculating.url, "--without", plain_server + "/v1", "--api-key-file", key]
        given = ["--prompts", file, "--raw", "--dtype", "float32", "--max-tokens", 16, "--samples", 64]
        assert call(monkeypatch, *urls, *given, "--same-seeds", "--output", output) == 0
    report = read_report(output)
    assert report.findings.accepted
    assert report.findings.seeded is not None
    assert report.findings.seeded.identical == len(PROMPTS)
    assert "sesame" not in output.read_text()


def test_a_broken_server_is_not_lossless_and_the_position_is_shown(
    folders: Folders,
    likely: Likely,
    file: Path,
    key: Path,
    plain_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = guessing_engine(folders, likely)
    broken_loops.stale_state(engine, monkeypatch)
    with running(engine, queue=64, api_key_file=key) as speculating:
        urls = ["--with", speculating.url, "--without", plain_server, "--api-key-file", key]
        given = ["--prompts", file, "--raw", "--dtype", "float32", "--max-tokens", 24, "--samples", 0]
        assert call(monkeypatch, *urls, *given, "--output", tmp_path / "r.json") == 1
    report = read_report(tmp_path / "r.json")
    assert report.findings.faults == (FaultKind.STALE_STATE,)
    faults = [one for one in report.findings.greedy[0].differences if one.kind == "fault"]
    assert faults
    assert all(one.gap is not None and one.gap > report.noise for one in faults)
    assert f"position {faults[0].position}" in capsys.readouterr().out


def test_two_servers_that_speculate_are_never_called_lossless(
    folders: Folders,
    likely: Likely,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(guessing_engine(folders, likely)) as one, running(guessing_engine(folders, likely)) as other:
        given = ["--with", one.url, "--without", other.url, "--prompts", file, "--raw", "--samples", 0]
        assert call(monkeypatch, *given, "--output", tmp_path / "r.json") == 2
    assert f"{other.url}: it speculates, too" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_servers_that_tell_nothing_of_their_speculation_could_not_be_told(
    plain_engine: EmbeddedEngine,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dflash_torch.server.worker.ServerMetrics.render", lambda self: b"")
    with running(plain_engine) as one, running(plain_engine.plain()) as other:
        given = ["--with", one.url, "--without", other.url, "--prompts", file, "--raw", "--samples", 0]
        assert call(monkeypatch, *given, "--max-tokens", 8, "--output", tmp_path / "r.json") == 3
    said = capsys.readouterr().out
    assert "nothing shows that the side with speculation speculates" in said
    assert "nothing shows that the side without speculation does not speculate" in said


def test_a_server_is_started_twice_and_stopped_again(folders: Folders, tmp_path: Path) -> None:
    target, drafter = map(str, folders)
    fields: dict[str, Any] = {"target": {"model": target}, "drafter": {"model": drafter}, "speculation": {"width": 4}}
    described = Deployment.model_validate({**fields, "limits": {"max_batch_size": 4}})
    pair = server_started_twice(EmbeddedBackend(), described, tmp_path, patience=120, concurrency=4)
    found = Verification(settings(samples=0, max_tokens=16), PROMPTS, pair, Store(None, {})).run()
    assert all(one.identical == len(PROMPTS) for one in found.greedy)
    assert {path.name for path in tmp_path.iterdir()} == {"with", "without"}
    assert _listening(tmp_path) == []


def _listening(folder: Path) -> list[str]:
    """Command lines of processes that still mention the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{folder}/with" in line:
            found.append(line)
    return found


def test_the_command_goes_on_where_it_was_interrupted_and_signs_that_the_embedded_backend_is_lossless(
    folders: Folders, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    kept_file = tmp_path / "report.json.partial.jsonl"
    arguments = [*map(str, quick(folders, file)), "--output", str(output)]
    child = subprocess.Popen(
        [sys.executable, "-c", "from dflash_serve.cli.main import run; run()", "verify", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until(lambda: kept_file.exists() and kept_file.read_text().count("\n") > 40, seconds=120)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "--resume" in said
    assert not output.exists()
    kept = kept_file.read_text().splitlines()
    assert call(monkeypatch, *arguments) == 2  # never overwritten unasked
    asked = _count_answers(monkeypatch)
    assert call(monkeypatch, *arguments, "--resume") == 0
    finished = sum('"name": "with' in line for line in kept)
    report: VerifyReport = read_report(output)
    token_answers = 3 * len(PROMPTS)
    sampled = sum(one.samples for one in report.findings.sampled)
    assert asked[0] == 2 * (token_answers + sampled) - finished
    assert list(tmp_path.iterdir()) == [output]
    assert report.findings.verdict == "lossless"
    assert (report.plan.dtype, report.plan.same_seeds) == ("float32", True)
    assert report.subjects["with"]["drafter"] == str(folders[1])
    assert "lossless" in capsys.readouterr().out


def _count_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts, from now on, what engines in this process are asked."""
    asked = [0]
    honest = EngineSubject.answers

    def counting(self: EngineSubject, questions: Any, **more: Any) -> Any:
        asked[0] += len(questions)
        return honest(self, questions, **more)

    monkeypatch.setattr(EngineSubject, "answers", counting)
    return asked


def test_nobody_there_could_not_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["--with", "http://127.0.0.1:9", "--without", "http://127.0.0.1:19"]
    assert call(monkeypatch, *urls, "--output", tmp_path / "r.json") == 2
    assert "no answer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_speculation_that_accepts_nothing_could_not_be_told(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "the"}\n')
    given = ["--target", folders[0], "--drafter", folders[1], "--width", 2, "--prompts", one, "--max-tokens", 2]
    assert call(monkeypatch, *given, "--samples", 0, "--no-same-seeds", "--output", tmp_path / "r.json") == 3
    assert "no drafted token was accepted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "http://a"], "give --without"),
        (["--with", "http://a", "--without", "http://a/v1"], "both are the same server"),
        (["--with", "http://a", "--without", "http://b", "--width", "8"], "running servers have their own"),
        (["--width", "off"], "does not speculate"),
        (["--samples", "63"], "63 samples a side show nothing; give 64 or more"),
        (["--dtype", "float16", "--with", "http://127.0.0.1:9", "--without", "http://b", "--model", "m"], "float32"),
    ],
)
def test_what_cannot_be_verified_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert call(monkeypatch, *arguments, "--output", tmp_path / "r.json") == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_the_bundled_pair_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        target_folder("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    given = ["--width", 8, "--num-prompts", 2, "--max-tokens", 32, "--samples", 0, "--output", tmp_path / "r.json"]
    assert call(monkeypatch, *given) == 0
    report = read_report(tmp_path / "r.json")
    assert report.findings.acceptance_length is not None
    assert report.findings.acceptance_length > 1.2
