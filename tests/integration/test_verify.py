"""`verify` on real engines: it passes honest ones, names what is wrong with broken ones, and survives interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.source import target_folder
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.verify import verification
from dflash_serve.verify.questions import GREEDY, SAMPLED, WITHOUT, Question, VerifyPlan
from dflash_serve.verify.report import FaultKind, Findings, VerifyReport
from dflash_serve.verify.subjects import ONE_SERVER, EngineSubject, SubjectPair, server_started_twice
from dflash_serve.verify.subjects import two_servers as servers_of
from dflash_serve.verify.verification import Verification
from dflash_torch.backend import EmbeddedBackend
from dflash_torch.engine import EmbeddedEngine
from tests.support import broken_loops
from tests.support.broken_loops import Break, guessing_engine, likely_tokens, sharp_pair
from tests.support.command_line import call
from tests.support.embedded import tiny_engine
from tests.support.serving import running, until

pytestmark = pytest.mark.usefixtures("one_thread")
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return sharp_pair(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def settings(**more: Any) -> VerifyPlan:
    chosen: dict[str, Any] = {
        "samples": SAMPLES,
        "max_tokens": TOKENS,
        "long_tokens": 64,
        "dtype": "float32",
        "same_seeds": True,
    }
    return VerifyPlan(prompts=len(PROMPTS), prompts_sha256="", **{**chosen, **more})


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
    assert (found.verdict, found.faults, found.reasons) == ("lossless", {}, ())
    assert found.acceptance_length is not None
    assert found.acceptance_length > 1.1
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
    assert (found.verdict, list(found.faults)) == ("not lossless", [fault])
    if fault == FaultKind.DISTRIBUTION:  # which seeds give away without any sample
        assert verified(engine, plain, settings(samples=0)).faults.keys() == {FaultKind.SEEDS}


@dataclass
class Command:
    """The command with a report of its own; `said` is all that the last call printed."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    output: Path
    said: str = ""

    def __call__(self, *arguments: object) -> int:
        code = call(self.monkeypatch, "verify", *arguments, "--output", self.output)
        self.said = "".join(self.capsys.readouterr())
        return code

    def report(self) -> VerifyReport:
        """The report; nothing else is left beside it."""
        assert list(self.output.parent.iterdir()) == [self.output]
        return VerifyReport.model_validate_json(self.output.read_text())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    (tmp_path / "reports").mkdir()
    return Command(monkeypatch, capsys, tmp_path / "reports" / "report.json")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text("sesame")
    return path


@pytest.fixture(scope="module")
def plain_server(plain_engine: EmbeddedEngine, key: Path) -> Iterator[str]:
    with running(plain_engine, queue=64, api_key_file=key) as server:
        yield server.url


@contextmanager
def two_servers(speculating: EmbeddedEngine, plain: str, file: Path, key: Path | None) -> Iterator[list[object]]:
    """The arguments that compare a server of this engine with the one at `plain`."""
    with running(speculating, queue=64, api_key_file=key) as server:
        urls = ["--url", server.url, "--without-url", plain, *(["--api-key-file", key] if key else [])]
        yield [*urls, "--prompts", file, "--raw", "--dtype", "float32"]


def test_a_broken_server_is_not_lossless_and_the_position_is_shown(
    folders: Folders, likely: Likely, file: Path, key: Path, plain_server: str, command: Command
) -> None:
    engine = guessing_engine(folders, likely)
    broken_loops.stale_state(engine, command.monkeypatch)
    with two_servers(engine, plain_server + "/v1", file, key) as given:
        assert command(*given, "--max-tokens", 24, "--samples", 0) == 1
    report = command.report()
    assert report.findings.faults.keys() == {FaultKind.STALE_STATE}
    faults = [one for one in report.findings.greedy[0].differences if one.kind == "fault"]
    assert faults
    assert all(one.gap is not None and one.gap > report.noise for one in faults)
    assert report.findings.faults[FaultKind.STALE_STATE].endswith(f"position {faults[0].position}")
    assert report.findings.headline in command.said
    assert "sesame" not in command.output.read_text()


@pytest.mark.parametrize("broken", [False, True])
def test_one_server_is_asked_with_speculation_and_without(
    folders: Folders, likely: Likely, file: Path, command: Command, broken: bool
) -> None:
    engine = guessing_engine(folders, likely)
    if broken:
        broken_loops.stale_state(engine, command.monkeypatch)
    with running(engine, queue=64) as server:
        assert command("--url", server.url, "--prompts", file, "--raw", "--dtype", "float32", "--samples", 0) == broken
    report = command.report()
    assert report.subjects[WITHOUT]["speculative"] == "off"
    assert (ONE_SERVER in report.findings.headline) is not broken


def test_one_server_without_the_switch_needs_a_second_one(
    folders: Folders, file: Path, plain_server: str, key: Path, command: Command
) -> None:
    given = ("--url", plain_server, "--prompts", file, "--raw", "--api-key-file", key, "--samples", 0)
    assert command(*given) == 2
    assert "a request cannot switch speculation off: it drafts for no request" in command.said
    assert "give --without-url" in command.said


def test_two_servers_that_speculate_are_never_called_lossless(
    folders: Folders, likely: Likely, file: Path, command: Command
) -> None:
    with running(guessing_engine(folders, likely)) as other:
        with two_servers(guessing_engine(folders, likely), other.url, file, None) as given:
            assert command(*given, "--samples", 0) == 2
        assert f"{other.url}: it speculates, too" in command.said
    assert not command.output.exists()


def test_servers_that_tell_nothing_of_their_speculation_are_asked_nothing(
    folders: Folders, plain_engine: EmbeddedEngine, file: Path, command: Command
) -> None:
    command.monkeypatch.setattr("dflash_torch.server.worker.ServerMetrics.render", lambda self: b"")
    with running(tiny_engine(folders, width=1)) as other, two_servers(plain_engine, other.url, file, None) as given:
        assert command(*given, "--samples", 0, "--max-tokens", 8) == 2
    assert "shows no metrics of an engine that is known here" in command.said
    assert "--metrics-url" in command.said
    assert not command.output.exists()


@pytest.mark.thorough
def test_an_honest_server_is_lossless_and_everything_was_tested(tmp_path: Path) -> None:
    """Fields, streams, choices and long prompts of the embedded server; `test_verify_cheats` has those that cheat."""
    folders, prompts = sharp_pair(tmp_path, positions=640), [[{"role": "user", "content": text}] for text in PROMPTS]
    greedy = GREEDY[0].params.model_copy(update={"max_tokens": TOKENS})
    engine = guessing_engine(folders, likely_tokens(folders, [(prompt, greedy) for prompt in prompts]))
    plain = tiny_engine(folders, width=1, max_batch_size=16)
    with running(engine, queue=64) as speculating, running(plain, queue=64) as other:
        pair = servers_of(Endpoint(speculating.url), Endpoint(other.url))
        found = Verification(settings(same_seeds=False), prompts, pair, Store(None, {})).run()
    assert (found.headline, found.reasons) == ("lossless: greedy and sampled", ())
    assert all(one.honoured and one.answers for one in found.rules)


def test_a_server_is_started_twice_and_stopped_again(folders: Folders, tmp_path: Path) -> None:
    target, drafter = map(str, folders)
    fields: dict[str, Any] = {"target": {"model": target}, "drafter": {"model": drafter}, "speculation": {"width": 4}}
    described = Deployment.model_validate({**fields, "limits": {"max_batch_size": 4}})
    pair = server_started_twice(EmbeddedBackend(), described, tmp_path, patience=120, concurrency=4)
    found = Verification(settings(samples=0, max_tokens=16), PROMPTS, pair, Store(None, {})).run()
    assert all(one.identical == len(PROMPTS) for one in found.greedy)
    assert {path.name for path in tmp_path.iterdir()} == {"with", "without"}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            assert f"{tmp_path}/with".encode() not in path.read_bytes()


def test_the_command_goes_on_where_it_was_interrupted_and_says_that_the_embedded_backend_is_lossless(
    folders: Folders, file: Path, command: Command
) -> None:
    given = ["--target", folders[0], "--drafter", folders[1], "--width", 4]
    arguments = [*map(str, given), "--prompts", str(file), "--max-tokens", "16", "--samples", "64"]
    child = subprocess.Popen(
        [sys.executable, "-c", "from dflash_serve.cli.main import run; run()", "verify", *arguments,
         "--output", str(command.output)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    kept_file = command.output.with_name("report.json.partial.jsonl")
    until(lambda: kept_file.exists() and kept_file.read_text().count("\n") > 40, seconds=120)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "--resume" in said
    assert not command.output.exists()
    assert command(*arguments) == 2  # never overwritten unasked
    asked, honest = list[Question](), EngineSubject.answers

    def counting(self: EngineSubject, questions: Sequence[Question], **more: Any) -> Any:
        asked.extend(questions)
        return honest(self, questions, **more)

    command.monkeypatch.setattr(EngineSubject, "answers", counting)
    assert command(*arguments, "--resume") == 0
    report = command.report()
    greedy = GREEDY[0].params.model_copy(update={"max_tokens": 16})
    first = [one for one in asked if one.params == greedy and len(one.prompt) == 1]  # no second turns
    assert len(first) == len(PROMPTS)  # the plain side's were kept
    assert report.findings.verdict == "lossless"
    assert (report.plan.dtype, report.plan.same_seeds) == ("float32", True)
    assert report.subjects["with"]["drafter"] == str(folders[1])
    assert "lossless" in command.said


def test_speculation_that_accepts_nothing_could_not_be_told(folders: Folders, tmp_path: Path, command: Command) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "the"}\n')
    given = [
        "--target",
        folders[0],
        "--drafter",
        folders[1],
        "--width",
        2,
        "--prompts",
        one,
        "--max-tokens",
        2,
        "--long-tokens",
        0,
    ]
    assert command(*given, "--samples", 0, "--no-same-seeds") == 3
    assert "no drafted token was accepted" in command.said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--without-url", "http://a"], "a server with speculation is verified; give --url, too"),
        (["--url", "http://a", "--without-url", "http://a/v1"], "both are the same server"),
        (["--url", "http://a", "--without-url", "http://b", "--width", "8"], "running servers have their own"),
        (["--url", "http://127.0.0.1:9", "--without-url", "http://127.0.0.1:19"], "no answer"),
        (["--width", "off"], "does not speculate"),
        (["--samples", "63"], "63 samples a side show nothing; give 64 or more"),
        (["--dtype", "float16", "--url", "http://127.0.0.1:9", "--without-url", "http://b", "--model", "m"], "float32"),
    ],
)
def test_what_cannot_be_verified_is_one_clear_line(command: Command, arguments: list[str], message: str) -> None:
    assert command(*arguments) == 2
    assert message in command.said
    assert list(command.output.parent.iterdir()) == []


@pytest.mark.model
@pytest.mark.thorough
def test_the_bundled_pair_is_lossless(command: Command) -> None:
    try:
        target_folder("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    assert command("--width", 8, "--num-prompts", 2, "--max-tokens", 32, "--samples", 0, "--long-tokens", 96) == 0
    assert (command.report().findings.acceptance_length or 0) > 1.2
