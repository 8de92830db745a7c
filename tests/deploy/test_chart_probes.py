"""The scripts that the chart mounts: a pod is ready once its drafter was seen to accept; `helm test` gets answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_group

from dflash_serve.cli.main import app
from tests.support.chart import CHART, case, config, pods, render, server
from tests.support.embedded import tiny_engine
from tests.support.fake_trtllm_serve import FakeTrtllmServe
from tests.support.serving import MODEL, running

READY, ASK, ACCEPTANCE = (CHART / "files" / f"{name}.py" for name in ("ready", "ask", "acceptance"))
Answer = tuple[int, object]


def script(file: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output, as a kubelet gets them."""
    done = subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def ready(url: str, seen: Path, backend: str, *, route: str = "/health_generate", width: str = "8", **more: str) -> Any:
    flags = {"backend": backend, "ready": route, "model": MODEL, "width": width, "url": url, "seen": str(seen)}
    flags |= more
    return script(READY, *(f"--{name}={value}" for name, value in flags.items()))


class Engine:
    """A server that says what it is told to, and writes down what it was asked."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers, self.asked = answers, list[tuple[str, Any, str | None]]()

    @contextmanager
    def listening(self) -> Iterator[str]:
        listener = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            listener.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                engine.asked.append((self.path, body, self.headers.get("Authorization")))
                status, content = engine.answers[self.path]
                text = content if isinstance(content, str) else json.dumps(content)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


def sglang(proposed: int, correct: int) -> Engine:
    meta = {"spec_num_proposed_drafts": proposed, "spec_num_correct_drafts": correct}
    return Engine({"/health_generate": (200, ""), "/generate": (200, {"text": " 17", "meta_info": meta})})


def tensorrt_llm(drafted: int, accepted: int) -> Engine:
    labels = '{model_name="m",engine_type="undefined"}'
    page = f"""# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{labels} {drafted}.0
trtllm_spec_decode_num_accepted_tokens_total{labels} {accepted}.0
"""
    answers: dict[str, Answer] = {
        "/health_generate": (200, ""),
        "/v1/completions": (200, {}),
        "/prometheus/metrics": (200, page),
    }
    return Engine(answers)


def vllm(drafted: int, accepted: int) -> Engine:
    labels = '{engine="0",model_name="m"}'
    page = f"""# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{labels} {drafted}.0
vllm:spec_decode_num_draft_tokens_created{labels} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{labels} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}.0
"""
    return Engine({"/health_generate": (200, ""), "/v1/completions": (200, {}), "/metrics": (200, page)})


ENGINES: dict[str, Callable[[int, int], Engine]] = {"sglang": sglang, "tensorrt-llm": tensorrt_llm, "vllm": vllm}
EACH = pytest.mark.parametrize("backend", ENGINES)


@EACH
def test_an_engine_whose_drafter_accepts_is_ready_and_is_asked_once(backend: str, tmp_path: Path) -> None:
    engine = ENGINES[backend](40, 12)
    with engine.listening() as url:
        assert ready(url, tmp_path / "seen", backend) == (0, "")
        questions = len(engine.asked)
        assert ready(url, tmp_path / "seen", backend) == (0, "")
    assert [path for path, _, _ in engine.asked[questions:]] == ["/health_generate"]


@EACH
def test_a_drafter_that_accepts_nothing_is_said_and_asked_again(backend: str, tmp_path: Path) -> None:
    with ENGINES[backend](40, 0).listening() as url:
        for _ in range(2):
            code, said = ready(url, tmp_path / "seen", backend, late="0")
            assert (code, said.strip()) == (
                1,
                "the drafter accepted none of 40 drafted tokens: it does not fit this target",
            )


@EACH
def test_speculation_that_is_silently_off_is_not_ready_but_auto_may_choose_it(backend: str, tmp_path: Path) -> None:
    with ENGINES[backend](0, 0).listening() as url:
        code, said = ready(url, tmp_path / "seen", backend, width="8", late="0")
        assert (code, "silently off" in said) == (1, True)
        chooses = backend != "tensorrt-llm"  # it always drafts whole blocks
        assert ready(url, tmp_path / "seen", backend, width="auto", late="0")[0] == (0 if chooses else 1)


@EACH
def test_an_engine_that_is_not_ready_is_asked_nothing(backend: str, tmp_path: Path) -> None:
    engine = ENGINES[backend](40, 12)
    engine.answers["/health_generate"] = (503, "")
    with engine.listening() as url:
        code, said = ready(url, tmp_path / "seen", backend)
    assert (code, "/health_generate says HTTP Error 503" in said) == (1, True)
    assert len(engine.asked) == 1


def test_tensorrt_llm_is_ready_only_when_an_accepted_token_was_counted(tmp_path: Path) -> None:
    """The counters come late: a gate that read them once would see nothing, and passed at the default width."""
    command = server(render(case("tensorrt-llm-on-a-dgx")))["readinessProbe"]["exec"]["command"]
    assert {"--ready=/health", "--width=auto"} <= set(command)
    engine = FakeTrtllmServe(late=2.0)
    with engine.listening() as url:
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route="/health", width="auto") == (0, "")
    assert engine.asked.count("/v1/completions") == 1
    assert engine.asked.count("/prometheus/metrics") > 2


def test_a_full_queue_takes_no_readiness_from_tensorrt_llm(tmp_path: Path) -> None:
    """Earlier requests have shown that the drafter accepts, so the probe sends none of its own."""
    engine = FakeTrtllmServe(late=0.1)
    with engine.listening() as url:
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route="/health", width="auto") == (0, "")
        engine.seconds = 600.0  # an answer that is not over while we look, and a queue behind it
        for _ in range(8):
            threading.Thread(target=engine.answer, daemon=True).start()
        engine.asked.clear()
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route="/health", width="auto") == (0, "")
        assert ready(url, tmp_path / "another", "tensorrt-llm", route="/health", width="auto") == (0, "")
    assert "/v1/completions" not in engine.asked
    assert "/health_generate" not in engine.asked


def test_a_process_that_was_started_again_must_show_it_again(tmp_path: Path) -> None:
    """The marker outlives a container in the pod's volume; the process that made it does not."""
    engine, seen = sglang(40, 12), tmp_path / "seen"
    with engine.listening() as url:
        ready(url, seen, "sglang")
        seen.write_text("another")
        ready(url, seen, "sglang")
    assert [path for path, _, _ in engine.asked].count("/generate") == 2


def test_no_server_is_one_line(tmp_path: Path) -> None:
    code, said = ready("http://127.0.0.1:9", tmp_path / "seen", "sglang")
    assert (code, said.count("\n"), said.startswith("not ready: URLError")) == (1, 1, True)


def test_the_embedded_server_says_that_a_random_drafter_does_not_fit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The probe uses the first key of the file."""
    keys = tmp_path / "keys"
    keys.write_text("# clients\n\nfirst\nsecond\n")
    with running(tiny_engine(pair, width=4), api_key_file=keys) as tiny:
        flags = {"route": "/ready", "width": "4"}
        code, said = ready(tiny.url, tmp_path / "seen", "torch", **flags, keys=str(keys))
        assert (code, "the drafter accepted none of " in said) == (1, True), said
        code, said = ready(tiny.url, tmp_path / "seen", "torch", **flags)
        assert (code, "401" in said) == (1, True), said


def test_an_answer_that_breaks_off_or_is_empty_fails_helm_test() -> None:
    events = 'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
    for body, words in ((events, "ended without [DONE]"), ("data: [DONE]\n\n", "empty"), ("{}", "without [DONE]")):
        with Engine({"/v1/chat/completions": (200, body)}).listening() as url:
            code, said = script(ASK, f"--url={url}", "--model=x", "--stream")
        assert (code, words in said) == (1, True), said
    with Engine({"/v1/chat/completions": (200, {"choices": [{"message": {"content": None}}]})}).listening() as url:
        assert script(ASK, f"--url={url}", "--model=x")[0] == 1


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_reasoning_is_an_answer_under_the_name_that_an_engine_gives_it(key: str) -> None:
    """vLLM's is `reasoning`; 32 tokens of a reasoning model have no content yet."""
    said = {"content": None, key: "one"}
    events = f"data: {json.dumps({'choices': [{'delta': said}]})}\n\ndata: [DONE]\n\n"
    for body, flags in ((events, ["--stream"]), ({"choices": [{"message": said}]}, [])):
        with Engine({"/v1/chat/completions": (200, body)}).listening() as url:
            assert script(ASK, f"--url={url}", "--model=x", *flags) == (0, "one\n")


def test_helm_tests_commands_get_whole_and_streamed_answers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """With the pods' own arguments, except address, model and the path of the key."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    manifests = render(case("torch-on-a-cpu"))
    mounted = config(manifests)
    assert (mounted["ready.py"], mounted["ask.py"]) == (READY.read_text(), ASK.read_text())
    commands = [pod["spec"]["containers"][0]["command"] for name, pod in pods(manifests) if name.startswith("Pod ")]
    assert [command[:2] for command in commands] == [["python3", "/etc/dflash-serve/ask.py"]] * 2
    with running(tiny_engine(pair, width=4), api_key_file=keys) as tiny:
        local = {
            "--url=http://trial-dflash-serve.serving:8080": f"--url={tiny.url}",
            "--model=smollm2": f"--model={MODEL}",
        }
        local |= {"--keys=/etc/dflash-serve-keys/keys": f"--keys={keys}", "--stream": "--stream"}
        for command in commands:
            code, said = script(ASK, *(local[word] for word in command[2:]))
            assert (code, bool(said.strip())) == (0, True), said
        assert script(ASK, f"--url={tiny.url}", f"--model={MODEL}")[0] == 1  # without a key


@pytest.mark.parametrize(("name", "more"), [("torch-on-a-cpu", "--api-key-file"), ("sglang", "--no-penalties")])
def test_verify_is_asked_in_words_it_knows(name: str, more: str) -> None:
    given = case(name)
    given["tests"] = {"verify": {"enabled": True, "without": "http://plain.serving"}}
    (pod,) = [pod for label, pod in pods(render(given)) if label == "Pod trial-dflash-serve-test-verify"]
    program, verb, *flags = pod["spec"]["containers"][0]["command"]
    parameters = get_group(app).commands["verify"].params
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    assert (program, verb) == ("dflash-serve", "verify")
    assert {flag.split("=")[0] for flag in flags} == {"--url", "--without-url", "--output", more}
    assert {flag.split("=")[0] for flag in flags} <= known
    assert flags[0].startswith("--url=http://trial-dflash-serve.serving:80")


def test_the_acceptance_gate_opens_at_the_baseline_and_not_below(pair: tuple[Path, Path]) -> None:
    """A random drafter gains next to nothing, which is enough for a baseline of 1 and not for one of 3."""
    with running(tiny_engine(pair, width=4)) as tiny:
        asked = [f"--url={tiny.url}", f"--model={MODEL}", "--tokens=8"]
        code, said = script(ACCEPTANCE, *asked, "--at-least=1")
        assert (code, "tokens per verification; the minimum is 1.00" in said) == (0, True), said
        code, said = script(ACCEPTANCE, *asked, "--at-least=3")
        assert (code, "tokens per verification; the minimum is 3.00" in said) == (1, True), said
    code, said = script(ACCEPTANCE, *asked, "--at-least=1")
    assert (code, said.startswith("no acceptance: ")) == (1, True), said
