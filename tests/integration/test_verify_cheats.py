"""No server that cheats is called lossless, and no honest one is called anything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from io import StringIO
from typing import NamedTuple

import httpx
import pytest
from rich.console import Console

from dflash_serve.adapter.own_width import WAYS
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import MetricsSource, ServerReading
from dflash_serve.common.http import Connection, RefusedError
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify import subjects, verification
from dflash_serve.verify.questions import CONTINUED, Question, VerifyPlan
from dflash_serve.verify.report import FaultKind, Findings, report_of, show
from dflash_serve.verify.subjects import ONE_SERVER, ServerSubject, SubjectPair, SwitchedSubject, one_server
from dflash_serve.verify.verification import Verification
from tests.house import ROOT
from tests.support.cheating_server import CHEATS, CheatingConnection, CheatingServer, alone, told_of_one_server
from tests.support.toy_model import CONTEXT, ToyModel

PROMPTS = ["the quick brown fox", "a lazy dog", "over the", "true false", "[1, 2", "jumps"]
MESSAGES = [[{"role": "user", "content": text}] for text in PROMPTS]
PLAN = VerifyPlan(prompts=6, prompts_sha256="", max_tokens=40, samples=64, long_tokens=192, dtype="float32")
DAILY = {"wrong under load", "top_k ignored", "usage differs from the tokens", "hotter in second turns"}
NAMES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.thorough) for name in CHEATS]
ALIKE = [name if name in DAILY else pytest.param(name, marks=pytest.mark.thorough) for name in CHEATS if alone(name)]
FEW_PAIRS = PLAN.model_copy(update={"pairs": 4})  # Both sides give equal answers, or plainly unequal ones
URLS = SPECULATING, PLAIN = "http://speculating", "http://plain"


class ToySubject(ServerSubject):
    """A server whose metrics are known."""

    def acceptance(self) -> AcceptanceStatistics:
        return self._reading().acceptance

    def _reading(self) -> ServerReading:
        speculates = self.endpoint.url == SPECULATING
        return ServerReading(0.0, AcceptanceStatistics(10, 70, 30) if speculates else AcceptanceStatistics())


class Servers(NamedTuple):
    """A server that can cheat, and the answers of one that does not."""

    cheating: CheatingServer
    plain: dict[str, object]

    def verify(self, plan: VerifyPlan = PLAN) -> Findings:
        store = Store(None, {})
        store.values |= self.plain
        speculating, plain = (lambda url=url: nullcontext(ToySubject(Endpoint(url))) for url in URLS)
        pair = SubjectPair(speculating, plain, context=lambda: CONTEXT)
        found = Verification(plan, MESSAGES, pair, store).run()
        kept = [
            name
            for name in store.values
            if not name.startswith("with/")
            and not name.endswith("/again")  # these depend on the cheat
            and not any(case.name in name for case in CONTINUED.values())
        ]
        self.plain.update({name: store[name] for name in kept if name != "acceptance"})
        return found


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    model = ToyModel()
    sides = {SPECULATING: CheatingServer(model), PLAIN: CheatingServer(model)}

    def connection(url: str, key: str | None, timeout: float, connections: int) -> Connection:
        return CheatingConnection(url, key, timeout, connections, sides[url])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_serve.client.endpoint.Connection", connection)
        patch.setattr(verification, "smallest_deviation", lambda *_: None)
        yield Servers(sides[SPECULATING], {})


def test_an_honest_server_is_lossless_and_everything_was_tested(servers: Servers) -> None:
    found = servers.verify()
    assert (found.headline, found.reasons) == ("lossless: greedy and sampled", ())
    assert all(one.honoured and one.answers for one in found.rules)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheating_server_is_not_lossless(servers: Servers, name: str) -> None:
    cheat, fault = CHEATS[name]
    servers.cheating.begin(cheat)
    found = servers.verify(PLAN.model_copy(update={"same_seeds": fault is FaultKind.SEEDS}))
    assert found.verdict == "not lossless"
    assert fault is None or fault in found.faults


@pytest.fixture
def switched(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> CheatingServer:
    """The cheating server alone, whose metrics count drafts. Its requests may switch speculation off."""
    server = servers.cheating

    def reading(_: object) -> ServerReading:
        return ServerReading(0.0, AcceptanceStatistics(server.drafts, 7 * server.drafts, 3 * server.drafts))

    monkeypatch.setattr(subjects, "BETWEEN_READINGS", 0)
    monkeypatch.setattr(MetricsSource, "require", lambda *_: None)
    monkeypatch.setattr(ServerSubject, "_reading", reading)
    server.begin(lambda server, body: server.ask(body))
    return server


def verify_alone(fault: FaultKind | None = None, plan: VerifyPlan = PLAN) -> Findings:
    plan = plan.model_copy(update={"same_seeds": fault is FaultKind.SEEDS})
    return Verification(plan, MESSAGES, one_server(Endpoint(SPECULATING)), Store(None, {})).run()


def test_one_honest_server_is_lossless_and_the_limit_is_told(switched: CheatingServer) -> None:
    assert verify_alone().headline == f"lossless: greedy and sampled; not tested: {ONE_SERVER}"


@pytest.mark.parametrize("name", NAMES)
def test_one_server_that_cheats_where_it_speculates_is_not_lossless(switched: CheatingServer, name: str) -> None:
    cheat, fault = CHEATS[name]
    switched.begin(cheat)
    found = verify_alone(fault)
    assert found.verdict == "not lossless"
    assert fault is None or fault in found.faults


@pytest.mark.parametrize("name", ALIKE)
def test_one_server_that_cheats_alike_in_both_ways_is_seen_where_the_table_says_so(
    switched: CheatingServer, name: str
) -> None:
    cheat, fault = CHEATS[name]
    switched.begin(cheat)
    switched.shared = cheat
    assert verify_alone(fault, FEW_PAIRS).verdict == alone(name)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (("deaf",), "a request cannot switch speculation off: it drafts all the same; start a second one"),
        (("deaf", "lies"), "switch speculation off: it drafts all the same, or others use it meanwhile; start a sec"),
        (("remembers",), "a request cannot switch speculation off: it drafts all the same; start a second one"),
    ],
)
def test_one_server_that_cannot_be_asked_both_ways_is_refused(
    switched: CheatingServer, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...], told: str
) -> None:
    """It ignores the switch, it also tells that it does not, or something before it gives kept answers again."""
    for fault in faults:
        monkeypatch.setattr(switched, fault, True)
    with pytest.raises(UserError, match=told):
        verify_alone()


def test_the_page_lists_what_one_server_can_hide() -> None:
    page = " ".join((ROOT / "docs" / "verify.md").read_text(encoding="utf-8").split())
    for sentence in told_of_one_server():
        assert sentence in page, f"docs/verify.md should say: {sentence}"


@pytest.fixture
def silent(switched: CheatingServer, monkeypatch: pytest.MonkeyPatch) -> CheatingServer:
    """The cheating server: its metrics tell what was drafted, its answers do not."""
    monkeypatch.setattr(switched, "tells", False)
    return switched


PROBE = Question("the quick brown fox", SamplingParams(temperature=0, max_tokens=4))


@pytest.mark.parametrize("way", WAYS)
def test_the_way_to_switch_is_found_where_only_metrics_tell_what_is_drafted(
    silent: CheatingServer, monkeypatch: pytest.MonkeyPatch, way: dict[str, object]
) -> None:
    monkeypatch.setattr(silent, "way", way)
    subject = SwitchedSubject(Endpoint(SPECULATING))
    assert subject.speculates(PROBE) is False
    before = silent.drafts
    assert len(list(subject.answers([PROBE, PROBE]))) == 2
    assert silent.drafts == before
    monkeypatch.setattr(silent, "way", {})  # from now on it drafts for all of them
    with pytest.raises(UserError, match="it drafts all the same, or others use it meanwhile"):
        list(subject.answers([PROBE]))


def test_metrics_that_count_drafts_for_plain_answers_are_believed_before_the_answers(
    switched: CheatingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SwitchedSubject(Endpoint(SPECULATING))
    assert subject.speculates(PROBE) is False
    assert len(list(subject.answers([PROBE, PROBE]))) == 2
    assert subject.speculates() is False
    monkeypatch.setattr(switched, "deaf", True)
    monkeypatch.setattr(switched, "lies", True)
    assert {reply.drafted for _, reply in subject.answers([PROBE] * 8)} == {0}
    with pytest.raises(UserError, match="it drafts all the same, or others use it meanwhile"):
        subject.speculates()


def test_metrics_that_begin_anew_or_vanish_show_nothing_of_plain_answers(
    switched: CheatingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SwitchedSubject(Endpoint(SPECULATING))
    assert subject.speculates(PROBE) is False
    list(subject.answers([PROBE] * 2))
    monkeypatch.setattr(switched, "drafts", 0)
    assert subject.speculates() is None
    monkeypatch.setattr(ServerSubject, "_reading", lambda _: ServerReading.unknown())
    assert subject.speculates() is None


def test_the_reason_of_a_server_that_refuses_the_switch_is_told(
    silent: CheatingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: CheatingServer, path: str, body: dict[str, object]) -> httpx.Response:
        if "custom_params" in body:
            raise RefusedError("HTTP 400: custom_params.speculative: whole blocks", where=path, status=400)
        return answer(self, path, body)

    answer = CheatingServer.answer
    monkeypatch.setattr(silent, "deaf", True)
    monkeypatch.setattr(CheatingServer, "answer", refuses)
    with pytest.raises(UserError, match=r"switch speculation off: HTTP 400: custom_params\.speculative: whole blocks"):
        SwitchedSubject(Endpoint(SPECULATING)).speculates(PROBE)


@pytest.mark.parametrize("name", ["seeds ignored", "seeds ignored in streams"])
def test_seeds_that_were_not_promised_stand_in_the_verdict_as_changed_and_not_as_untested(
    servers: Servers, name: str
) -> None:
    servers.cheating.begin(CHEATS[name][0])
    found = servers.verify()
    changed = "6 of 6 seeded answers changed when repeated with speculation, and not without"
    assert found.headline.startswith(f"lossless: greedy and sampled; {changed}")
    console = Console(record=True, width=200, file=StringIO())
    show(report_of(PLAN, {}, found), console)
    told = console.export_text()
    assert changed in told
    assert "broken" not in told
