"""Chats are recorded only where a folder is named, without secrets, within limits, and `adapt` reads them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dflash_serve.adapting.traffic import read_traffic
from dflash_serve.errors import UserError
from dflash_torch.server.api import ChatRequest
from dflash_torch.server.recording import DAY, Recorder
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running

Folders = tuple[Path, Path]
SECRET = "sk-a-key-that-no-record-may-hold"
CHAT = {"model": MODEL, "max_tokens": 6, "ignore_eos": True, "temperature": 0}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def ask(server: Running, text: str, **more: Any) -> httpx.Response:
    body = {**CHAT, "messages": [{"role": "user", "content": text}], **more}
    key = {"Authorization": f"Bearer {SECRET}"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_chats_are_recorded_as_adapt_reads_them_and_nothing_else_of_them(pair: Folders, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{SECRET}\n")
    folder = tmp_path / "records"
    hidden = {"user": SECRET, "metadata": {"a": SECRET}, "safety_identifier": SECRET, "prompt_cache_key": SECRET}
    with running(tiny_engine(pair), record_to=folder, api_key_file=tmp_path / "keys") as server:
        answer = ask(server, "the fox", **hidden, seed=5).json()["choices"][0]["message"]["content"]
        ask(server, "a stream", stream=True, chat_template_kwargs={"enable_thinking": False})
        ask(server, "two answers", n=2)
        ask(server, "kept out", store=False)
        ask(server, "kept in", store=True)
        ask(server, "a form", response_format={"type": "json_object"})
        plain = {**CHAT, "prompt": "no chat"}
        key = {"Authorization": f"Bearer {SECRET}"}
        assert httpx.post(f"{server.url}/v1/completions", json=plain, headers=key).status_code == 200
        refused = {**CHAT, "messages": [{"role": "user", "content": "x"}], "temperature": 9}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=refused, headers=key).status_code == 400
    said = lines(folder)
    assert [one["request"]["messages"][0]["content"] for one in said] == [
        "the fox",
        "a stream",
        "two answers",
        "kept in",
    ]
    assert said[0]["response"]["choices"][0]["message"] == {"role": "assistant", "content": answer}
    assert {*said[0]["request"]} == {"messages"}
    assert said[1]["request"]["chat_template_kwargs"] == {"enable_thinking": False}
    (file,) = folder.iterdir()
    assert SECRET not in file.read_text()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file, folder)] == [0o600, 0o700]
    traffic = read_traffic([folder])
    assert traffic.requests[0].line["messages"][0]["content"] == "the fox"
    assert (len(traffic.requests), traffic.left_out) == (4, {})
    assert {*traffic.files} == {file.name}


def test_without_a_folder_nothing_is_recorded(pair: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with running(tiny_engine(pair)) as server:
        ask(server, "the fox", store=True)
        assert server.handler.recorder is None
    assert [*tmp_path.iterdir()] == []


def chat(text: str) -> tuple[ChatRequest, Any]:
    body = ChatRequest.model_validate({**CHAT, "messages": [{"role": "user", "content": text}]})
    return body, SimpleNamespace(text="an answer", request=SimpleNamespace(finish_reason="stop", failure=None))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_limit_on_size_holds_and_the_newest_chats_stay(tmp_path: Path) -> None:
    now = 1e9
    recorder, most = Recorder(tmp_path, 16_000, DAY, lambda: now), 0
    foreign = tmp_path / "dflash-traffic-mine.jsonl"
    foreign.write_text("of the operator\n")
    for number in range(300):
        now += 1
        recorder.add(*chat(f"chat {number} {'x' * 100}"))
        most = max(most, size(tmp_path) - foreign.stat().st_size)
    assert 12_000 < most <= 16_000
    foreign.unlink()
    kept = [int(one["request"]["messages"][0]["content"].split()[1]) for one in lines(tmp_path)]
    assert kept == [*range(kept[0], 300)]
    assert len([*tmp_path.iterdir()]) >= 7
    recorder.add(*chat("y" * 20_000))  # alone beyond the limit
    assert size(tmp_path) <= 16_000


def test_no_chat_is_kept_beyond_its_age(tmp_path: Path) -> None:
    now = 1e9
    recorder = Recorder(tmp_path, 10**6, 10 * DAY, lambda: now)
    times: dict[str, float] = {}
    for number in range(60):
        now += DAY / 2
        recorder.add(*chat(f"chat {number}"))
        times[f"chat {number}"] = now
        ages = [now - times[one["request"]["messages"][0]["content"]] for one in lines(tmp_path)]
        assert max(ages) < 10 * DAY
    assert len(ages) > 10
    now += 10 * DAY
    Recorder(tmp_path, 10**6, 10 * DAY, lambda: now).expire()  # a server that starts again
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start_and_a_warning_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"record-to .*cannot be recorded there"):
        Recorder(tmp_path / "file" / "below", 1000, DAY)
    recorder = Recorder(tmp_path / "gone", 10_000, DAY)
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        recorder.add(*chat("lost"))
    assert len([one for one in caplog.records if "chats are not recorded" in one.message]) == 1
    (tmp_path / "gone").mkdir()
    recorder.add(*chat("kept"))
    assert len(lines(tmp_path / "gone")) == 1


def test_a_link_in_the_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    folder = tmp_path / "records"
    recorder = Recorder(folder, 10_000, DAY, lambda: 1e9)
    recorder.add(*chat("first"))
    (path,) = folder.iterdir()
    path.unlink()
    path.symlink_to(outside)
    recorder.add(*chat("second"))
    assert outside.read_text() == ""
