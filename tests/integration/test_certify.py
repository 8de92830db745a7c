"""`certify` over real sockets at tiny sizes: the verdict names a lossy server, a slow one and a damaged drafter."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.answers.engine import template_variables
from dflash_serve.bench.aiperf import Aiperf, Job
from dflash_serve.certify import budget, certification
from dflash_serve.checkpoint.source import record_survival
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.progress import Work
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.doctor.examiner import examine_apart
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_torch.engine import EmbeddedEngine
from tests.support import broken_loops
from tests.support.bench_sites import instant
from tests.support.broken_loops import guessing_engine, likely_tokens, sharp_pair
from tests.support.command_line import call
from tests.support.embedded import tiny_engine
from tests.support.serving import running
from tests.support.tiny import edit_json

Folders = tuple[Path, Path]
pytestmark = pytest.mark.skipif(find_spec("aiperf") is None, reason="pip install 'dflash-serve[bench]'")
PROMPTS = ["the quick brown fox", "a lazy dog", "over the", "true false", "jumps over"]
TOKENS = 24
GAIN = {"off": 1.0, "fixed-4": 1.5, "auto": 1.6}
ARGUMENTS = f"server_args={{'aux_hidden_state_capture': None, 'cuda_graph_max_bs': None{', ' * 300}}}"  # as SGLang logs
Start = Callable[[], EmbeddedEngine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return sharp_pair(tmp_path_factory.mktemp("certify"))


@pytest.fixture(scope="module")
def likely(folders: Folders) -> dict[tuple[int, ...], int]:
    asked: Any = [
        ([{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=TOKENS)) for prompt in PROMPTS
    ]
    return likely_tokens(folders, asked)


class Site:
    """A deployment of the tiny pair whose servers run in this process, and a load generator that needs no time."""

    def __init__(self, folder: Path, folders: Folders, speculating: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.jobs, self.gain = folder, list[Job](), dict[str, float](GAIN)
        self.started, self.most = list[str](), 0
        self.start_seconds = self.passed = 0.0  # of a start, and those that passed beside the real ones
        self.stop_after: int | None = None
        self.monkeypatch = monkeypatch
        plain = tiny_engine(folders, width=1, max_batch_size=broken_loops.SLOTS)
        alive = 0

        @contextmanager
        def server(
            _backend: Any, one: Deployment, place: Path, *, env: Mapping[str, str], patience: float
        ) -> Iterator[str]:
            nonlocal alive
            self.passed += min(patience, self.start_seconds)
            if patience < self.start_seconds:
                raise UserError(f"the server is not ready after {patience:g} s", where=str(place / "server.log"))
            place.mkdir(parents=True, exist_ok=True)
            (place / "server.log").write_text(f"captured 3 CUDA graphs in 0.1 s\n{ARGUMENTS}\n")
            self.started.append(str(one.speculation.width))
            with running(plain if one.speculation.width == "off" else speculating(), queue=64) as served:
                alive += 1
                self.most = max(self.most, alive)
                yield served.url
            alive -= 1

        measure = instant(self.rate, self.jobs)

        def run(aiperf: Any, job: Job) -> Any:
            if self.stop_after is not None and len(self.jobs) >= self.stop_after:
                raise KeyboardInterrupt
            params = SamplingParams(temperature=0, max_tokens=8)
            asked = [([{"role": "user", "content": prompt}], params) for prompt in PROMPTS[:2]]
            list(Endpoint(job.url, concurrency=job.concurrency).complete_all(asked))
            return measure(aiperf, job)

        monkeypatch.setattr(certification, "running_server", server)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.passed)
        monkeypatch.setattr(certification, "time", clock)
        monkeypatch.setattr(Aiperf, "run", run)
        monkeypatch.setattr(budget, "SAMPLES", ())  # greedy decoding alone: `verify` has tests of its own
        self.file, self.prompts = folder / "deployment.yaml", folder / "prompts.jsonl"
        self.file.write_text(
            f"target: {{model: {folders[0]}}}\ndrafter: {{model: {folders[1]}}}\n"
            "limits: {max_batch_size: 2}\nhardware: {dtype: float32}\n"
        )
        self.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def rate(self, job: Job) -> float:
        found = re.match(r"(.*)-c\d+-r(\d)", job.folder.name)
        assert found is not None
        return 20.0 * self.gain[found[1]] * (1 + 0.01 * int(found[2]))

    def certify(self, *more: object, minutes: float = 60, quiet: bool = True) -> int:
        given = ("--concurrency", "1,2", "--max-tokens", TOKENS, "--dataset", self.prompts, "--minutes", minutes)
        last = ("--output", self.folder / "out", *(["--quiet"] if quiet else []), *more)
        return call(self.monkeypatch, "certify", self.file, *given, *last)

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "certificate.json").read_text())
        return found


MakeSite = Callable[..., Site]


@pytest.fixture
def site(
    tmp_path: Path, folders: Folders, likely: dict[tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch
) -> MakeSite:
    def make(speculating: Start | None = None, pair: Folders = folders) -> Site:
        return Site(tmp_path, pair, speculating or (lambda: guessing_engine(folders, likely)), monkeypatch)

    return make


def test_a_sound_deployment_is_accepted_one_pair_of_servers_at_a_time(
    site: MakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    found = site()
    assert found.certify() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == found.report["lines"]
    assert lines[0] == "lossless: fixed 4, auto; greedy"
    assert "1.60" in lines[2]
    assert "accepted; recommended: width auto" in lines[3]
    assert (found.started, found.most) == (["4", "off", "auto"], 2)
    assert found.report["servers"]["auto"]["graphs"] == ["captured 3 CUDA graphs in 0.1 s"]
    assert "acceptance" in found.report["servers"]["fixed 4"]["metrics"]
    assert "accepted" in (found.folder / "out" / "certificate.html").read_text()
    certificate = found.folder / "out" / "certificate.json"
    of_a_plan = {"environment.hardware": "1 x NVIDIA B200", "served.Variants": "engine: SGLang 0.5.23"}
    edit_json(certificate, of_a_plan)
    given = ("--gpu", "b200", "--isl", "64", "--osl", "64", "--calibrate", certificate)
    assert call(found.monkeypatch, "plan", found.file, *given, "--output", found.folder / "plan") == 0
    assert "calibrated: fixed 4, 2 users: measured 61 tokens/s" in capsys.readouterr().out


def test_servers_that_run_already_are_asked_at_the_width_that_they_have(
    site: MakeSite,
    folders: Folders,
    likely: dict[tuple[int, ...], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = site()
    plain = tiny_engine(folders, width=1, max_batch_size=broken_loops.SLOTS)
    speculating = guessing_engine(folders, likely)
    with running(plain, queue=64) as off, running(speculating, queue=64) as on:
        other = on.url.replace("127.0.0.1", "localhost")  # as a router's address, it is not that of the metrics
        assert found.certify("--url", other, "--without-url", off.url, "--metrics-url", on.url) == 0
        for wrong, said in ((), "give --without-url, too"), (("--without-url", other), "both are the same server"):
            assert found.certify("--url", other, *wrong) == 2
            assert said in capsys.readouterr().err
    assert found.started == []
    assert found.report["lines"][0] == "lossless: auto; greedy"
    assert "accepted; recommended: width auto" in found.report["lines"][2]
    assert found.report["servers"]["auto"]["url"] == other
    assert found.report["environment"]["hardware"] is None


@pytest.mark.thorough
def test_one_server_runs_at_a_time_where_they_do_not_fit_together(site: MakeSite) -> None:
    found = site()
    assert found.certify("--in-turn") == 0
    assert found.most == 1


def test_a_lossy_server_is_refused_and_its_fault_is_named(
    site: MakeSite, folders: Folders, likely: dict[tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> EmbeddedEngine:
        engine = guessing_engine(folders, likely)
        broken_loops.stale_state(engine, monkeypatch)
        return engine

    found = site(broken)
    assert found.certify() == 1
    assert found.report["lines"][0].startswith("not lossless: fixed 4: stale state")


@pytest.mark.thorough
def test_a_slow_server_is_refused(site: MakeSite) -> None:
    found = site()
    found.gain |= {"fixed-4": 0.7, "auto": 0.8}
    assert found.certify() == 1
    assert "0.80" in found.report["lines"][2]
    assert "refused; recommended: width off" in found.report["lines"][3]


def test_a_certification_keeps_its_minutes_and_says_what_it_needs(
    site: MakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starts of 100 s: three of them took five minutes of the three, and `auto` was recommended with no measurement."""
    found = site()
    found.start_seconds = 100.0
    assert found.certify(minutes=3, quiet=False) == 3
    assert found.started == ["4"]
    assert found.report["minutes"] < 4
    assert (found.report["width"], found.report["points"]) == (None, [])
    _, *_, verdict, wrong, untested = found.report["lines"]
    assert re.fullmatch(
        r"could not tell; nothing is recommended; a verdict needs at least \d+ minutes here \(--minutes\)", verdict
    )
    assert wrong == "wrong: not known, no load was measured"
    assert "fixed 4, users at once: 1, 2" in untested
    assert "the fewest runs of aiperf take 4.0 minutes; what exceeds 3 is left out" in capsys.readouterr().err


def test_a_first_server_that_takes_all_of_the_time_is_an_error(
    site: MakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    found = site()
    found.start_seconds = 400.0
    assert found.certify(minutes=5) == 2
    told = capsys.readouterr().err
    assert "the server is not ready after" in told
    assert "give it more --minutes" in told


def test_it_tells_what_is_done_how_far_and_how_long(
    site: MakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[str]()

    def step(work: Work, part: str) -> None:
        vars(work)["step"] = part
        seen.append(str(work))

    monkeypatch.setattr(Work, "part", property(lambda work: vars(work)["step"], step), raising=False)
    assert site().certify(quiet=False) == 0
    for one in (
        "starting the server of fixed 4",
        "asking off for its speed",
        r"verifying auto: \d+ of about \d+ answers",
        "measuring fixed 4: round 3 of at most 5",
    ):
        assert any(re.fullmatch(f"certifying in 60 minutes: {one}", each) for each in seen), one
    answers = [tuple(map(int, found)) for found in re.findall(r"verifying auto: (\d+) of about (\d+)", "\n".join(seen))]
    assert 0.6 * answers[-1][1] < answers[-1][0] <= answers[-1][1]
    told = capsys.readouterr().err
    assert re.search(r"^at \d+ tokens/s a verdict takes about \d+\.\d minutes of 60$", told, re.MULTILINE)
    assert re.search(r"^verify auto: .* about \d+ answers and \d+\.\d minutes$", told, re.MULTILINE)


Examined = list[tuple[Deployment, list[Any], dict[str, Any]]]


def stand_in(examined: Examined) -> Callable[..., None]:
    """In place of the doctor's process, which has tests of its own and takes a minute."""
    real = signature(examine_apart)

    def examine(*given: Any, **more: Any) -> None:
        asked = real.bind(*given, **more).arguments  # as the real one takes it
        examined.append((asked["deployment"], asked["prompts"], more))
        healthy = asked.get("url") is not None
        said = "the server is healthy" if healthy else "the checkpoint: rope"
        asked["output"].write_text(json.dumps({"verdict": "healthy" if healthy else "fault", "sentences": [said]}))

    return examine


@pytest.mark.thorough
def test_the_low_acceptance_of_a_damaged_drafter_is_seen_and_the_doctor_asked(
    site: MakeSite, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor judges the certified deployment: the deployment whole, and prompts with the template's variables."""
    drafter = tmp_path / "damaged"  # random weights that claim the acceptance of trained ones
    drafter.mkdir()
    for file in folders[1].iterdir():
        (drafter / file.name).write_bytes(file.read_bytes())
    record_survival(drafter, [0.9, 0.8, 0.7])
    pair = (folders[0], drafter)
    examined: Examined = []
    monkeypatch.setattr(certification, "examine_apart", stand_in(examined))
    found = site(lambda: tiny_engine(pair, max_batch_size=broken_loops.SLOTS), pair)
    variables = {"enable_thinking": False}
    assert found.certify("--chat-template-kwargs", json.dumps(variables)) == 1
    wrong = found.report["lines"][4]
    assert "acceptance length 1." in wrong
    assert "3.40 published (the drafter's provenance.json)" in wrong
    assert "doctor: the server is healthy" in wrong
    assert "doctor: the checkpoint: rope" in wrong
    asked: Any = load_deployment(found.file)
    whole = asked.model_copy(update={"speculation": asked.speculation.model_copy(update={"width": 4})})
    assert [deployment for deployment, _, _ in examined] == [whole, whole]
    assert ["url" in more for _, _, more in examined] == [True, False]
    assert all(template_variables(prompt) == variables for _, prompts, _ in examined for prompt in prompts)
    plans = [verified["plan"] for verified in found.report["verifications"].values()]
    assert [plan["chat_template_kwargs"] for plan in plans] == [variables] * len(plans)
    assert found.report["request"]["chat_template_kwargs"] == variables


@pytest.mark.thorough
def test_an_interrupted_certification_goes_on(site: MakeSite) -> None:
    found = site()
    found.stop_after = 5
    assert found.certify() == 130
    done = [job.folder.name for job in found.jobs]
    found.stop_after = None
    assert found.certify() == 2  # an interrupted one is there: --resume, or remove it
    assert found.certify("--resume") == 0
    names = [job.folder.parent.parent.name + job.folder.name for job in found.jobs]
    assert len(names) == len(set(names)) > len(done)
    assert not (found.folder / "out" / "certificate.json.partial.jsonl").exists()
    assert found.started[:2] == ["4", "off"]  # verified before the interruption; later runs start what they measure
