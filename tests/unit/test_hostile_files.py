"""Seeded mutations of a drafter and of a deployment: every answer is an answer or one short line, and nothing is left.

HOSTILE_MUTATIONS=5000 pytest tests/unit/test_hostile_files.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_serve.adapter.arguments import own_parser
from dflash_serve.adapter.last_run import LastRun
from dflash_serve.answers.prompts import jsonl_prompts
from dflash_serve.checkpoint import writer
from dflash_serve.checkpoint.files import read_headers, read_manifest
from dflash_serve.checkpoint.quantization import find_recipe
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import PROVENANCE, recorded_survival
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.documents import read_json, read_yaml
from dflash_serve.common.files import whole_folder
from dflash_serve.common.http import Connection, read_keys
from dflash_serve.common.store import Store, read_record
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import LONGEST, MOST_LINES, Problem, UserError, listed
from dflash_serve.models.drafter import read_hot_tokens
from dflash_serve.speculation.costs import CostModel
from dflash_serve.training import shards
from tests.support.tiny import write_tiny_drafter

MUTATIONS = int(os.environ.get("HOSTILE_MUTATIONS", "640"))
LONGEST_LINE = 4 * LONGEST
DEEP = 100_000
VALUES: tuple[object, ...] = (
    *(None, True, -1, 0, 2**63, 10**400, 1e308, float("inf"), float("nan"), "", "\ud800", "a\nb: c"),
    *("\x1b[2J\x07", "\0", "x" * 10_000, [], {}, [[]], {"a": {"b": []}}, [1] * 500, {str(n): n for n in range(500)}),
)
YAMLS = (
    "[" * DEEP,
    "- " * DEEP + "1",
    "{a: " * DEEP,
    "when: 2026-13-45",
    "when: 2026-01-01T99:99:99",
    "n: " + "9" * 5_000,
    "n: 0x_",
    "a: &a [*a]",
    "a: &a {b: *a}",
    "&a [*a]: 1",
    "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]),
    "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12))]),
    "\n".join(f"k{n}: 1" for n in range(100_000)),
    "x: " + "y" * 2**21,
    '"\\ud800": 1',
    "target: !!python/object/apply:os.system [true]",
    "- {? [1]: 2}",
    "\x1b[2J: 1",
)
JSONS = (
    *("[" * DEEP, '{"a":' * DEEP, "[" * 100 + "]" * 100, "9" * 5_000, "1" + "0" * 400),
    *('"\\ud800"', "", "{", "\0", "NaN]"),
)


def one_line(message: str) -> None:
    assert message.isprintable(), message
    assert len(message) < LONGEST_LINE


def answers(ask: Callable[[], object]) -> None:
    """An answer, or one line; never another exception."""
    try:
        ask()
    except UserError as error:
        one_line(str(error))


def mutate(document: object, chance: random.Random) -> object:
    """A copy in which one value, of any depth, is another, is gone, or has a stranger beside it."""
    copy = json.loads(json.dumps(document))
    at = copy
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = chance.choice(keys)
        if not isinstance(at[key], dict | list) or not at[key] or chance.random() < 0.4:
            break
        at = at[key]
    kind = chance.random()
    if kind < 0.1:
        del at[key]
    elif kind < 0.2 and isinstance(at, dict):
        at[chance.choice(["x" * 5_000, "a\nb", "\x1b[2J", "\ud800", ""])] = chance.choice(VALUES)
    else:
        at[key] = chance.choice(VALUES)
    return copy


def header_of(weights: bytes) -> tuple[object, bytes]:
    (length,) = struct.unpack("<Q", weights[:8])
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def with_header(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


def _last_survival(path: Path) -> object:
    run = LastRun(path.parent, Model(model="target"))
    run.path = path
    return run.survival()


def test_mutated_drafters_are_read_or_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    config, weights = (folder / "config.json").read_text(), (folder / "model.safetensors").read_bytes()
    header, data = header_of(weights)
    chance = random.Random(53)

    def convert() -> None:
        checkpoint = open_checkpoint(folder)
        for line in listed(checkpoint.problems):
            one_line(line)
        tensors = load_tensors(checkpoint)
        assert checkpoint.config is not None
        write_drafter(tmp_path / "out", checkpoint.config, tensors, dialect=chance.choice(["zlab", "speculators"]))

    for number in range(MUTATIONS // 2):
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        if number % 4 == 0:
            (folder / "config.json").write_text(json.dumps(mutate(json.loads(config), chance)))
        elif number % 4 == 1:
            (folder / "model.safetensors").write_bytes(with_header(json.dumps(mutate(header, chance)), data))
        elif number % 4 == 2:
            (folder / "model.safetensors").write_bytes(with_header(chance.choice(JSONS), data))
        else:
            (folder / "config.json").write_text(chance.choice(JSONS))
        answers(convert)
        whole = {"config.json", "model.safetensors"}
        assert not (tmp_path / "out").exists() or {path.name for path in (tmp_path / "out").iterdir()} == whole
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert {path.name for path in tmp_path.iterdir()} == {"drafter"}


DEPLOYMENT = {
    "target": {"model": "Qwen/Qwen3-8B", "revision": "main"},
    "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"},
    "speculation": {"width": "auto", "block_size": 16},
    "hardware": {"gpu": "h100", "count": 2, "dtype": "bfloat16"},
    "limits": {"max_batch_size": 32, "max_model_len": 4096},
    "serving": {"served_model_name": "qwen", "log_format": "text"},
    "engine_args": {"sglang": {"mem-fraction-static": 0.8}},
}


def test_mutated_deployments_are_read_or_refused(tmp_path: Path) -> None:
    chance, path = random.Random(53), tmp_path / "deployment.yaml"
    load_deployment(_written(path, json.dumps(DEPLOYMENT)))
    for number in range(MUTATIONS // 2):
        mutated = mutate(DEPLOYMENT, chance)
        text = json.dumps(mutated) if number % 2 else yaml.safe_dump(mutated)
        answers(lambda text=text: load_deployment(_written(path, text)))  # type: ignore[misc]


@pytest.mark.parametrize("text", YAMLS, ids=range(len(YAMLS)))
def test_hostile_yaml_is_one_line_in_seconds(text: str, tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(UserError) as caught:
        load_deployment(_written(tmp_path / "deployment.yaml", text))
    one_line(str(caught.value))
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("text", JSONS, ids=range(len(JSONS)))
def test_hostile_json_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_json(_written(tmp_path / "report.json", text))
    one_line(str(caught.value))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a record of the cache": ("record.json", lambda path: read_record(path, CostModel)),
    "survival of the last run": ("survival.json", _last_survival),
    "survival of the training": (PROVENANCE, lambda path: recorded_survival(path.parent)),
    "a manifest of a build": ("manifest.json", lambda path: read_manifest(path.parent)),
    "a manifest of training data": ("manifest.json", lambda path: shards.read_manifest(path.parent)),
    "a drafter's list of tokens": ("hot_tokens.json", lambda path: read_hot_tokens(path.parent, 96)),
    "kept results": ("report.json.partial.jsonl", lambda path: Store(path, {})),
    "prompts": ("prompts.jsonl", jsonl_prompts),
    "a target": ("config.json", lambda path: read_target_layout(path.parent, Model(model="x"))),
    "a quantisation": ("hf_quant_config.json", lambda path: find_recipe([], path.parent)),
}
"""Files of others, or that a crash may have damaged: name -> reader."""


@pytest.mark.parametrize(
    "content", [*(text.encode() for text in JSONS), b"\xff\xfe\0", None], ids=range(len(JSONS) + 2)
)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_one_line_or_counts_as_absent(reader: str, content: bytes | None, tmp_path: Path) -> None:
    name, read = READERS[reader]
    if content is None and reader != "kept results":  # a store is a file of ours: it is appended to
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).write_bytes(content or b"")
    answers(lambda: read(tmp_path / name))


@pytest.mark.parametrize("text", ["a" * 10_000, "\x1b" * 500, "é\n" * 5_000])
def test_a_message_that_was_cut_is_not_cut_again(text: str) -> None:
    found = Problem(text, text, text)
    assert found.error().problem() == found
    assert f"({len(text):,} characters)" in found.what
    one_line(str(found))


def test_a_tokenizer_without_a_limit_is_read(tmp_path: Path) -> None:
    """transformers writes this into most tokenizer_config.json files."""
    limit = 1000000000000000019884624838656
    assert read_json(_written(tmp_path / "a.json", f'{{"model_max_length": {limit}}}')) == {"model_max_length": limit}


def test_an_alias_that_is_used_twice_is_read(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.yaml", "a: &a {x: [1]}\nb: *a\nc: {<<: *a, y: 2}")
    assert read_yaml(path) == {"a": {"x": [1]}, "b": {"x": [1]}, "c": {"x": [1], "y": 2}}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("20:48", "20:48"), ("010", 10), ("-017", -17), ("0o17", 15), ("0x1F", 31), ("1e-5", 1e-5), ("1.5", 1.5)),
        *(("0b11", "0b11"), ("1:30.5", "1:30.5"), ("2026-01-01", "2026-01-01"), (".inf", float("inf")), ("12", 12)),
    ],
)
def test_numbers_are_read_as_yaml_1_2_has_them(written: str, value: object, tmp_path: Path) -> None:
    assert read_yaml(_written(tmp_path / "a.yaml", f"a: {written}")) == {"a": value}


MARKED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a deployment": ("target: {model: x}", load_deployment),
    "a report": ('{"a": 1}', read_json),
    "prompts": ('{"prompt": "a"}\n', jsonl_prompts),
    "keys": ("secret\n", read_keys),
}


@pytest.mark.parametrize("kind", MARKED)
def test_a_byte_order_mark_is_no_part_of_a_text(kind: str, tmp_path: Path) -> None:
    text, read = MARKED[kind]
    plain, marked = (_written(tmp_path / name, content) for name, content in (("a", text), ("b", f"\ufeff{text}")))
    assert read(marked) == read(plain)


def test_a_key_of_json_that_is_given_twice_is_named(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.json", '{"a": {"b": 1, "c": 2, "c": 3}}')
    with pytest.raises(UserError, match=r"a\.json: not valid JSON \(the key 'c' is given twice\)"):
        read_json(path)


@pytest.mark.parametrize("read", [read_yaml, read_keys])
def test_an_endless_file_is_refused(read: Callable[[Path], object]) -> None:
    with pytest.raises(UserError, match="larger than"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("shard", ["x" * 300, "a\0b", "../model.safetensors", "\x1b[2J"])
def test_a_hostile_name_of_a_shard_is_a_problem(shard: str, tmp_path: Path) -> None:
    _written(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": {"a": shard}}))
    problems: list[Problem] = []
    assert read_headers(tmp_path, problems) == {}
    one_line(str(problems[0]))


def test_problems_are_at_most_twenty_lines_and_a_count() -> None:
    lines = listed([Problem(f"fault {n}\n\x1b[2J") for n in range(100_000)])
    assert (len(lines), lines[-1]) == (MOST_LINES + 1, "and 99,980 more")
    assert lines[0] == r"fault 0\n\x1b[2J"


@pytest.mark.parametrize("url", ["http://a\r\nb", "http://[", "http://" + "a" * 65_536])
def test_a_hostile_address_is_one_line(url: str) -> None:
    with pytest.raises(UserError) as caught:
        Connection(url).json("GET", "/v1/models")
    one_line(str(caught.value))


def test_a_full_disk_is_an_error_of_the_system_also_from_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    checkpoint = open_checkpoint(write_tiny_drafter(tmp_path / "drafter"))
    assert checkpoint.config is not None
    monkeypatch.setattr(writer, "_write_tensors", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_drafter(tmp_path / "out", checkpoint.config, load_tensors(checkpoint))
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    with pytest.raises(OSError, match="No space left"), whole_folder(tmp_path / "out"):
        full()


def test_a_half_installed_engine_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> object:
        raise ModuleNotFoundError("No module named 'triton'")

    pinned = Path(__file__).parents[2] / "backends" / "dflash_sglang" / "flags.json"
    assert own_parser("SGLang", build, pinned).names  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "triton" in said


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path
