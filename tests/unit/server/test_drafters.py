"""`swap` against a running server: under load, where it is not allowed, and taken back where it does not help."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_serve.adapter.registry import backend, installed
from dflash_serve.adapting import swap as exchange
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.client import endpoint as clients
from dflash_serve.common.prometheus import Scrape
from dflash_serve.deployment.description import Deployment
from dflash_serve.speculation.params import SamplingParams
from dflash_torch import swapping
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.scheduler import Scheduler
from tests.support.broken_loops import WIDTH, LikelySpeculator, StaleDecoder, likely_tokens, sharp_pair
from tests.support.command_line import call
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running, until
from tests.support.tiny import write_tiny_drafter

Folders = tuple[Path, Path]
Likely = dict[tuple[int, ...], int]
TEXTS = ["the quick brown fox", "a lazy dog", "over the", "true false"]
pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 48
KEY = "sk-of-this-test"
UPDATE = exchange.UPDATE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target, its drafter, and beside it another one, `new`."""
    target, drafter = sharp_pair(tmp_path_factory.mktemp("sharp"))
    write_tiny_drafter(drafter.parent / "new", read_config(drafter)[0], seed=9)
    return target, drafter


@pytest.fixture(scope="module")
def likely(folders: Folders) -> Likely:
    """The answers to the chats of `TEXTS`, token by token."""
    engine = tiny_engine(folders, width=1)
    prompts = [[{"role": "user", "content": text}] for text in TEXTS]
    return likely_tokens(folders, [(engine.tokenize(one), greedy()) for one in prompts])


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def described(engine: EmbeddedEngine, folders: Folders) -> EmbeddedEngine:
    engine.deployment = Deployment.model_validate(
        {
            "target": {"model": str(folders[0])},
            "drafter": {"model": str(folders[1])},
            "speculation": {"width": WIDTH},
            "hardware": {"gpu": "none", "dtype": "float32"},
            "engine_args": {"torch": {"operators": "plain"}},
        }
    )
    return engine


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def becomes(monkeypatch: pytest.MonkeyPatch, likely: Likely, *folders: str) -> None:
    """Drafters of folders of these names draft likely tokens; others draft as their random weights do."""
    put = swapping.DrafterSwap.put

    def likelier(self: swapping.DrafterSwap, loaded: swapping.LoadedDrafter) -> swapping.Swapped:
        if Path(loaded.name.model).name in folders:
            speculator = loaded.speculator
            speculator.__class__, speculator.likely = LikelySpeculator, likely  # type: ignore[attr-defined]
        return put(self, loaded)

    monkeypatch.setattr(swapping.DrafterSwap, "put", likelier)


def counters(server: Running) -> dict[str, float]:
    """Steps of each revision by the server's metrics."""
    samples = Scrape(lambda _: httpx.get(f"{server.url}/metrics").text).samples()
    found: dict[str, float] = {}
    for labels, count in samples.named("dflash_serve:steps_total"):
        found[labels["drafter_revision"]] = found.get(labels["drafter_revision"], 0) + count
    return found


def answered(server: Running, body: dict[str, Any]) -> str:
    common = {"model": MODEL, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=common | body, timeout=120) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]", events
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


BODIES: list[dict[str, Any]] = [
    {"prompt": [9 + n, 8, 7], **({"temperature": 0} if n % 2 else {"temperature": 0.9, "seed": n})} for n in range(6)
]


def test_under_load_no_answer_changes_and_none_is_lost(folders: Folders) -> None:
    """Six streams in four entries: four are in flight when the drafter is replaced, two wait; then it is taken back."""
    with running(tiny_engine(folders, width=1)) as plain:
        expected = [answered(plain, body) for body in BODIES]
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine, swap_from=folders[1].parent) as server, ThreadPoolExecutor(len(BODIES)) as pool:
        for asked in ({"model_path": "new"}, {"back": True}):
            answers = [pool.submit(answered, server, body) for body in BODIES]
            until(lambda: server.worker.running == 4)
            done = httpx.post(f"{server.url}{UPDATE}", json=asked, timeout=60)
            assert done.status_code == 200, done.text
            assert done.json()["undrafted"] > 0
            assert [one.result(120) for one in answers] == expected
            until(server.idle)
        assert [answered(server, body) for body in BODIES] == expected
        info = httpx.get(f"{server.url}{exchange.INFO}").json()
        assert [Path(one["drafter"]).name for one in info["drafters"]] == ["drafter", "new", "drafter"]
        steps = {str(one["revision"]): one["steps"] for one in info["drafters"]}
        assert counters(server) == steps
        assert all(steps.values())


def test_a_better_drafter_is_kept_and_a_worse_one_is_taken_back(
    folders: Folders,
    likely: Likely,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    becomes(monkeypatch, likely, "new")
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine, swap_from=folders[1].parent) as server:
        given = ("--url", server.url, "--prompts", prompts, "--num-prompts", 2, "--max-tokens", TOKENS)
        assert call(monkeypatch, "swap", "new", *given, "--json") == 0
        first = json.loads(capsys.readouterr().out)
        assert (first["verdict"], first["kept"], first["revision"]) == ("lossless", True, 1)
        assert first["after"] > 1.3 * first["before"]
        assert call(monkeypatch, "swap", "drafter", *given) == 1
        told = capsys.readouterr().out
        assert "taken back: tokens per step fell from" in told
        assert "by more than 10%" in told
        assert "revision 3 serves" in told
        info = httpx.get(f"{server.url}{exchange.INFO}").json()["drafters"]
        assert Path(info[-1]["drafter"]).name == "new"
        assert call(monkeypatch, "swap", "--back", "--url", server.url) == 0
        assert f"serves: {folders[1]} (revision 4)" in capsys.readouterr().out


def test_a_drafter_after_which_verification_fails_is_taken_back(
    folders: Folders, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is in the loop here: it keeps the K/V of rejected tokens while the new drafter serves."""
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    put = swapping.DrafterSwap.put

    def spoilt(swap: swapping.DrafterSwap, loaded: swapping.LoadedDrafter) -> swapping.Swapped:
        engine.scheduler.__class__ = StaleDecoder if Path(loaded.name.model).name == "new" else Scheduler
        return put(swap, loaded)

    monkeypatch.setattr(swapping.DrafterSwap, "put", spoilt)
    with running(engine, swap_from=folders[1].parent) as server:
        few = ("--num-prompts", 1, "--max-tokens", 16, "--allowed-loss", "1")
        assert call(monkeypatch, "swap", "new", "--url", server.url, "--prompts", prompts, *few) == 1
        told = capsys.readouterr().out
        assert "taken back: not lossless" in told
        assert "revision 2 serves" in told


def test_a_swap_that_breaks_off_is_taken_back(folders: Folders, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    engine = described(tiny_engine(folders, width=WIDTH), folders)
    monkeypatch.setattr(exchange, "verified", interrupted)
    with running(engine, swap_from=folders[1].parent) as server:
        given = ("--url", server.url, "--prompts", prompts, "--allowed-loss", "1")
        assert call(monkeypatch, "swap", "new", *given) == 130
        info = httpx.get(f"{server.url}{exchange.INFO}").json()["drafters"]
        assert [Path(one["drafter"]).name for one in info] == ["drafter", "new", "drafter"]


def test_a_second_exchange_is_refused_while_the_first_one_loads(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, load = threading.Event(), threading.Event(), swapping.DrafterSwap.load

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return load(*given)

    monkeypatch.setattr(swapping.DrafterSwap, "load", slow)
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine, swap_from=folders[1].parent) as server, ThreadPoolExecutor(1) as pool:
        url, body = f"{server.url}{UPDATE}", {"model_path": "new"}
        first = pool.submit(httpx.post, url, json=body, timeout=60)
        assert begun.wait(30)
        assert httpx.post(url, json=body).status_code == 409
        go_on.set()
        assert first.result(60).status_code == 200


def test_the_routes_need_the_key_and_a_setting(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    settings: dict[str, Any] = {"api_key_file": tmp_path / "keys", "swap_from": folders[1].parent}
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine, **settings) as server:
        asked: tuple[Callable[..., httpx.Response], ...] = (
            lambda **more: httpx.post(f"{server.url}{UPDATE}", json={"model_path": "new"}, **more),
            lambda **more: httpx.get(f"{server.url}{exchange.INFO}", **more),
        )
        for ask in asked:
            assert [ask().status_code, ask(headers={"Authorization": "Bearer x"}).status_code] == [401, 401]
            assert ask(headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    with running(engine) as server:
        assert [ask().status_code for ask in asked] == [404, 200]
        known = httpx.get(f"{server.url}{exchange.INFO}").json()
        assert {name for name, value in known.items() if value is not None} == {"served_model_name"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "model_path: give it, or back: true"),
        ({"model_path": "new", "back": True}, "model_path: give it, or back: true"),
        ({"model_path": "../../etc"}, "no folder with a drafter"),
        ({"model_path": "target"}, "target"),
        ({"model_path": "new", "weights": "x"}, "weights"),
        ({"back": True}, "no drafter before"),
    ],
)
def test_a_wrong_request_is_a_400_that_says_why(folders: Folders, body: dict[str, Any], said: str) -> None:
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine, swap_from=folders[1].parent) as server:
        refused = httpx.post(f"{server.url}{UPDATE}", json=body)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]


def test_the_verb_names_what_stands_in_its_way(
    folders: Folders, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = described(tiny_engine(folders, width=WIDTH), folders)
    with running(engine) as server:
        given = ("--url", server.url, "--prompts", prompts)
        assert call(monkeypatch, "swap", "new", *given) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "its drafter may not be replaced; start it with engine_args.torch.swap-from: FOLDER" in line
        assert call(monkeypatch, "swap", *given) == 2
        assert "DRAFTER or --back" in capsys.readouterr().err
        assert call(monkeypatch, "swap", "--back", *given) == 2
        assert "--prompts: with --back nothing is measured" in capsys.readouterr().err
    with running(described(tiny_engine(folders, width=2), folders), swap_from=folders[1].parent) as server:
        monkeypatch.setattr(clients, "_drafted", lambda _: (0, 0))
        assert call(monkeypatch, "swap", "new", "--url", server.url, "--prompts", prompts) == 2
        assert "it drafts for no request now; swap when it drafts" in capsys.readouterr().err


@pytest.mark.parametrize("engine", [name for name in installed() if name != "torch"])
def test_other_engines_are_refused_in_one_line_that_names_the_restart(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is posted to them: SGLang's route would load a drafter into the target."""
    facts = backend(engine).facts
    with running_metrics(facts.metrics.generated, facts.metrics.path) as (url, posted):
        assert call(monkeypatch, "swap", "new", "--url", url) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(facts.no_swap) in line
    assert "deployment.drafter.model, and `helm upgrade` rolls the pods" in line
    assert posted == []


@contextmanager
def running_metrics(generated: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """A server that has an engine's metrics and nothing else; with the requests that were posted to it."""
    posted: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f'# TYPE {generated.removesuffix("_total")} counter\n{generated}{{model_name="m"}} 5\n'.encode()
            pages = {"/metrics": b"[]", path: text}  # TensorRT-LLM has its iterations beside Prometheus' text
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def do_POST(self) -> None:
            posted.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", posted
    finally:
        server.shutdown()
        server.server_close()
