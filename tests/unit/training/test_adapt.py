"""`adapt`: a drafter that learnt from logged traffic passes the gate, and one that got worse does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dflash_serve.adapting.gate import Change, GateVerdict, judge
from dflash_serve.adapting.run import compare
from dflash_serve.adapting.traffic import read_traffic, split
from dflash_serve.answers.prompts import BUNDLED, labelled_prompts
from dflash_serve.common.files import sha256
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.training.data import read_excluded, said_by_user
from tests.support.command_line import call
from tests.support.tiny import edit_json

SECRET = "sk-a-key-that-no-file-of-ours-may-hold"


def write(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chat(*turns: str, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)], **more}


def messages_of(lines: Sequence[Mapping[str, object]]) -> list[str]:
    return [json.dumps(line["messages"]) for line in lines]


def test_every_form_of_a_log_is_read_and_nothing_but_its_messages(tmp_path: Path) -> None:
    body = chat("Hi", "Ho", "And?", model="m", user=SECRET, temperature=0.3)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    log = [
        {"prompt": "Why?", "language": "en"},
        body,
        {"request": chat("Pair", model="m"), "response": {"choices": []}, "headers": {"authorization": SECRET}},
        {"custom_id": SECRET, "method": "POST", "body": chat("Batch", "its answer", model="m")},
        {"messages": [{"role": "user", "content": parts}], "thinking": False},
        {"prompt": "Why?", "language": "en"},
        {"model": "m", "prompt": "raw text"},
        chat("With tools", tools=[{"type": "function"}]),
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ]
    traffic = read_traffic([write(tmp_path / "log.jsonl", log)])
    said = [[turn["content"] for turn in one.line["messages"]] for one in traffic.requests]
    assert said == [["Why?"], ["Hi", "Ho", "And?"], ["Pair"], ["Batch"], ["ab"]]
    assert SECRET not in "".join(one.text for one in traffic.requests)
    assert [one.line.get("thinking") for one in traffic.requests][-1] is False
    assert sum(traffic.left_out.values()) == 4, traffic.left_out


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ("[1]", "no request"), ('{"messages": []}', "no request"), ("", "no requests in it")],
)
def test_a_line_that_is_no_request_is_one_error(text: str, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        read_traffic([path])


def test_no_conversation_is_on_both_sides(tmp_path: Path) -> None:
    """Turns of a chat share its opening; a log's own name joins chats whose beginning was cut off."""
    log: list[object] = []
    for number in range(30):
        turns = [f"opening {number % 12}", "yes", f"more {number}"]
        log += [chat(turns[0]), chat(*turns), chat(f"cut {number}", conversation=number % 5)]
    requests = read_traffic([write(tmp_path / "log.jsonl", log)]).requests
    training, held_out = split(requests, 0.3)
    assert len(training) + len(held_out) == len(requests)
    assert training
    assert held_out
    assert not {name for one in training for name in one.names} & {name for one in held_out for name in one.names}
    assert split([*reversed(requests)], 0.3)[1] == [one for one in reversed(requests) if one in held_out]


def one(before: float, after: float, low: float, high: float) -> Change:
    return Change(prompts=9, steps=99, before=before, after=after, gain_95=(low, high))


BETTER, SAME, WORSE = one(2, 2.5, 0.3, 0.7), one(2, 2.0, -0.05, 0.05), one(2, 1.5, -0.7, -0.3)
WIDE = one(2, 2.1, -0.5, 0.7)
UNKNOWN = Change(prompts=1, steps=3, before=2, after=2, gain_95=None)


@pytest.mark.parametrize(
    ("traffic", "general", "groups", "verdict", "said"),
    [
        (BETTER, SAME, {}, GateVerdict.swap, "τ 2.000 to 2.500"),
        (WORSE, SAME, {}, GateVerdict.keep, "got worse"),
        (BETTER, WORSE, {}, GateVerdict.keep, "general prompts"),
        (WIDE, WORSE, {}, GateVerdict.keep, "general prompts"),
        (BETTER, SAME, {"language": {"de": WORSE}}, GateVerdict.keep, "language de"),
        (BETTER, SAME, {"language": {"de": WIDE, "fr": UNKNOWN}}, GateVerdict.swap, ""),
        (BETTER, WIDE, {}, GateVerdict.unknown, "--general"),
        (BETTER, UNKNOWN, {}, GateVerdict.unknown, "--general"),
        (WIDE, SAME, {}, GateVerdict.unknown, "more traffic"),
        (UNKNOWN, SAME, {}, GateVerdict.unknown, "more traffic"),
    ],
)
def test_the_gate(
    traffic: Change, general: Change, groups: Mapping[str, Mapping[str, Change]], verdict: GateVerdict, said: str
) -> None:
    found, reason = judge({"all": {"all": traffic}, **groups}, {"all": {"all": general}}, allowed=0.05)
    assert found is verdict
    assert said in reason


def test_a_drafter_learns_from_a_log_and_the_gate_refuses_the_way_back(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = [{"request": chat(f"the quick brown fox {n}", model="m", user=SECRET), "language": "en"} for n in range(30)]
    traffic = write(tmp_path / "log.jsonl", log)
    general = write(tmp_path / "general.jsonl", [{"prompt": f"the lazy dog {n}"} for n in range(10)])
    output, served = tmp_path / "out", sha256(pair[1] / "model.safetensors")
    given = ("--traffic", traffic, "--output", output, "--target", pair[0], "--drafter", pair[1], "--general", general)
    asked = (*given, "--steps", 60, "--max-tokens", 24, "--device", "cpu")
    assert call(monkeypatch, "adapt", *asked, "--dry-run") == 0
    assert not output.exists()
    told = capfd.readouterr().out
    assert "24 to train on, 6 held out" in told
    assert "training: 60 steps" in told
    code = call(monkeypatch, "adapt", *asked, "--json")
    report = json.loads(capfd.readouterr().out)
    assert (code, report["verdict"]) == (0, "swap"), report["reason"]
    whole = report["on_traffic"]["all"]["all"]
    assert whole["after"] > whole["before"]
    assert {*report["on_traffic"]} == {"all", "task", "length", "language", "thinking"}
    assert report["on_traffic"]["language"]["en"] == whole
    assert report["traffic"] == {"log.jsonl": sha256(traffic)}
    assert sha256(pair[1] / "model.safetensors") == served, "the served drafter is as it was"
    for path in output.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    assert {*load_file(output / "drafter" / "model.safetensors")} == {*load_file(pair[1] / "model.safetensors")}

    assert call(monkeypatch, "adapt", *asked) == 2
    assert "not empty" in (said := capfd.readouterr().err) or "finished" in said

    back = Deployment.model_validate(
        {
            "target": {"model": str(pair[0])},
            "drafter": {"model": str(output / "drafter")},
            "speculation": {"width": 4},
            "limits": {"max_batch_size": 4, "max_model_len": 128},
        }
    )
    sets = [labelled_prompts(path, task="x") for path in (output / "traffic" / "held-out.jsonl", general)]
    on_traffic, on_general = (answered.changes() for answered in compare(back, pair[1], sets, 24))
    assert judge(on_traffic, on_general, 0.05)[0] is GateVerdict.keep


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--traffic", "{missing}"), "no such file"),
        (("--traffic", "{traffic}"), "given twice"),
        (("--general", "{ids}"), "token ids"),
        (("--traffic", "{labels}"), "labels.jsonl:1: language is no text"),
        (("--device", "tpu"), "no device"),
        (("--steps", 3, "--minutes", 1), "--steps says how long to train"),
        (("--drafter", "{other}"), "drafter.init"),
        (("--max-tokens", 250), "0 conversations are too few"),
    ],
)
def test_what_cannot_be_adapted_is_one_line_and_nothing_is_written(
    given: tuple[object, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(pair[1], other := tmp_path / "other")
    edit_json(other / "config.json", {"rms_norm_eps": 0.5})
    files = {
        "traffic": write(tmp_path / "log.jsonl", [chat(f"the fox {n}") for n in range(6)]),
        "ids": write(tmp_path / "ids.jsonl", [{"token_ids": [5, 6]}]),
        "labels": write(tmp_path / "labels.jsonl", [chat("the fox", language=3)]),
        "missing": tmp_path / "missing.jsonl",
        "other": other,
    }
    output = tmp_path / "out"
    words = [str(word).format(**files) for word in given]
    fixed = ("--traffic", files["traffic"], "--output", output, "--target", pair[0], "--drafter", pair[1])
    assert call(monkeypatch, "adapt", *fixed, "--max-tokens", 24, *words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1
    assert not output.exists()


def test_the_bundled_general_prompts_can_be_kept_out_of_training() -> None:
    """One of them is a conversation of several turns."""
    excluded = read_excluded([str(BUNDLED)])
    for prompt in labelled_prompts(BUNDLED, task="general"):
        assert said_by_user(prompt.prompt) in excluded
    assert "the quick brown fox" not in excluded
