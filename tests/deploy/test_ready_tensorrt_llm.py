"""TensorRT-LLM gets traffic once its drafter was seen to accept, and keeps it however long its queue is."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.deploy.test_chart_probes import ready
from tests.support.chart import case, render, server
from tests.support.fake_trtllm_serve import FakeTrtllmServe

ROUTE = "/health"


def test_the_chart_asks_the_shallow_route() -> None:
    container = server(render(case("tensorrt-llm-on-a-dgx")))
    assert f"--ready={ROUTE}" in container["readinessProbe"]["exec"]["command"]
    assert "--width=auto" in container["readinessProbe"]["exec"]["command"]


def test_it_is_ready_only_when_an_accepted_token_was_counted(tmp_path: Path) -> None:
    """The counters come late: a gate that read them once would see nothing, and passed at the default width."""
    engine = FakeTrtllmServe(late=2.0)
    with engine.listening() as url:
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route=ROUTE, width="auto") == (0, "")
    assert engine.asked.count("/v1/completions") == 1
    assert engine.asked.count("/prometheus/metrics") > 2


def test_no_draft_is_no_readiness_at_the_default_width(tmp_path: Path, monkeypatch: object) -> None:
    with FakeTrtllmServe(drafted=0, late=0).listening() as url:
        code, said = ready(url, tmp_path / "seen", "tensorrt-llm", route=ROUTE, width="auto", late="1")
    assert (code, "silently off" in said) == (1, True), said


def test_a_drafter_that_accepts_nothing_is_said(tmp_path: Path) -> None:
    with FakeTrtllmServe(accepted=0, late=0).listening() as url:
        code, said = ready(url, tmp_path / "seen", "tensorrt-llm", route=ROUTE, width="auto", late="1")
    assert (code, "accepted none of 40 drafted tokens" in said) == (1, True), said


def test_a_full_queue_takes_no_readiness_away(tmp_path: Path) -> None:
    """Earlier requests have shown that the drafter accepts, so the probe sends none of its own."""
    engine = FakeTrtllmServe(late=0.1)
    with engine.listening() as url:
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route=ROUTE, width="auto") == (0, "")
        engine.seconds = 600.0  # an answer that is not over while we look, and a queue behind it
        for _ in range(8):
            threading.Thread(target=engine.answer, daemon=True).start()
        engine.asked.clear()
        assert ready(url, tmp_path / "seen", "tensorrt-llm", route=ROUTE, width="auto") == (0, "")
        assert ready(url, tmp_path / "another", "tensorrt-llm", route=ROUTE, width="auto") == (0, "")
    assert "/v1/completions" not in engine.asked
    assert "/health_generate" not in engine.asked
