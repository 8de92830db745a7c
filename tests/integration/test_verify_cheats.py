"""No server that cheats is called lossless, and no honest one is called anything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import Connection
from dflash_serve.common.store import Store
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify import verification
from dflash_serve.verify.questions import CONTINUED, VerifyPlan
from dflash_serve.verify.report import FaultKind, Findings
from dflash_serve.verify.subjects import two_servers
from dflash_serve.verify.verification import Verification
from tests.support.broken_loops import guessing_engine, likely_tokens, sharp_pair
from tests.support.cheating_server import CHEATS, CheatingConnection, CheatingServer
from tests.support.embedded import tiny_engine
from tests.support.serving import running

PROMPTS = ["the quick brown fox", "a lazy dog", "over the", "true false", "[1, 2", "jumps"]
MESSAGES = [[{"role": "user", "content": text}] for text in PROMPTS]
PLAN = VerifyPlan(prompts=6, prompts_sha256="", max_tokens=40, samples=64, long_tokens=192, dtype="float32")


class Servers(NamedTuple):
    """A server that can cheat and one that does not speculate, and the latter's answers."""

    cheating: CheatingServer
    urls: tuple[str, str]
    plain: dict[str, object]

    def verify(self, plan: VerifyPlan = PLAN) -> Findings:
        store = Store(None, {})
        store.values |= self.plain
        found = Verification(plan, MESSAGES, two_servers(*map(Endpoint, self.urls)), store).run()
        answers = [
            name
            for name in store.values
            if name.startswith("without/") and not any(case.name in name for case in CONTINUED.values())
        ]
        kept = [name for name in answers if not name.endswith("/again")]  # these depend on the cheat
        self.plain.update({name: store[name] for name in kept})
        return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folders = sharp_pair(tmp_path_factory.mktemp("sharp"), positions=640)  # room for long prompts
    greedy = SamplingParams(temperature=0, max_tokens=40)
    engine = guessing_engine(folders, likely_tokens(folders, [(prompt, greedy) for prompt in MESSAGES]))
    cheating = CheatingServer(engine)

    def connection(url: str, key: str | None, timeout: float, connections: int) -> Connection:
        cheats = cheating if url == speculating.url else None
        return CheatingConnection(url, key, timeout, connections, cheats)

    with (
        running(tiny_engine(folders, width=1, max_batch_size=16), queue=64) as plain,
        running(engine, queue=64) as speculating,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("dflash_serve.client.endpoint.Connection", connection)
        patch.setattr(verification, "smallest_deviation", lambda *_: None)
        yield Servers(cheating, (speculating.url, plain.url), {})


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
    assert fault in found.faults


def test_seeds_that_were_not_promised_stand_in_the_verdict(servers: Servers) -> None:
    servers.cheating.begin(CHEATS["seeds ignored"][0])
    assert servers.verify().headline.endswith("not tested: seed (kept without speculation only)")
