"""Every engine's dry run reads the files of a local target and drafter as far as their weights' data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_serve.adapter.registry import server_backend
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.deployment.description import BACKENDS, Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_target, load_tokenizer
from tests.support.tiny import edit_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECONDS = 120
"""A check that opens a pipe would wait without end."""
OTHERS = tuple(name for name in BACKENDS if name != "torch")
every_engine = pytest.mark.parametrize("engine", BACKENDS)


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folders(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    target, drafter = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair)
    return target, drafter


def problems(engine: str, folders: tuple[Path, Path], **more: object) -> str:
    target, drafter = ({"model": str(folder)} for folder in folders)
    deployment = Deployment.model_validate({"target": target, "drafter": drafter, **more})
    try:
        return "\n".join(map(str, server_backend(engine).launch(deployment).problems))
    except UserError as error:
        return str(error)


def share_out(folder: Path, *, missing: bool = False, stray: bool = False) -> None:
    """Makes two shards and their index of the weights."""
    tensors = load_file(folder / WEIGHTS)
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    if missing:
        (folder / names[min(names)]).unlink()
    if stray:
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / WEIGHTS)
    else:
        (folder / WEIGHTS).unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


WHOLE = "not a whole safetensors file"
HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, WHOLE),
    "empty": (lambda path: path.write_bytes(b""), WHOLE),
    "a pipe": (replace(os.mkfifo), f"{WHOLE} (not a regular file)"),
    "a device": (replace(lambda path: path.symlink_to("/dev/zero")), f"{WHOLE} (not a regular file)"),
    "a link to nothing": (replace(lambda path: path.symlink_to("nowhere")), f"{WHOLE} (missing)"),
}


@every_engine
def test_sound_files_have_no_problem(engine: str, folders: tuple[Path, Path]) -> None:
    assert problems(engine, folders) == ""
    share_out(folders[0])
    (folders[0] / "consolidated.safetensors").write_bytes(b"Mistral's second copy, which no engine reads")
    assert problems(engine, folders) == ""


@every_engine
@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize("harm", HARM)
def test_weights_that_are_not_whole_are_a_problem(
    engine: str, which: str, harm: str, folders: tuple[Path, Path]
) -> None:
    change, said = HARM[harm]
    path = folders[which == "drafter"] / WEIGHTS
    change(path)
    assert f"{path}: {said}" in problems(engine, folders)


@every_engine
@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_pipe_is_refused_before_it_is_opened(engine: str, which: str, name: str, folders: tuple[Path, Path]) -> None:
    path = folders[which == "drafter"] / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{path}: not a regular file" in problems(engine, folders)


@every_engine
def test_a_shard_that_is_missing_is_a_problem(engine: str, folders: tuple[Path, Path]) -> None:
    share_out(folders[0], missing=True)
    assert "shard 'model-00001-of-00002.safetensors' is missing" in problems(engine, folders)


@every_engine
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_weights_beside_those_of_the_index_are_a_problem(engine: str, which: str, folders: tuple[Path, Path]) -> None:
    share_out(folders[which == "drafter"], stray=True)
    assert f"{WEIGHTS} beside the weights is no part of them" in problems(engine, folders)


def test_the_weights_of_the_index_are_read_beside_a_stray_file(folders: tuple[Path, Path]) -> None:
    share_out(folders[0], stray=True)
    with pytest.raises(UserError, match="beside the weights"):
        load_target(str(folders[0]))


@every_engine
@pytest.mark.parametrize("content", [None, "", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_target_without_a_tokenizer_is_a_problem(
    engine: str, content: str | None, folders: tuple[Path, Path]
) -> None:
    path = folders[0] / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    said = f"{folders[0]}: no tokenizer" if content is None else f"{path}: not (a JSON object|valid JSON)"
    assert re.search(said, problems(engine, folders))
    with pytest.raises(UserError, match=r"tokenizer"):
        load_tokenizer(str(folders[0]))


def test_a_tokenizer_from_elsewhere_will_do(folders: tuple[Path, Path]) -> None:
    (folders[0] / "tokenizer.json").unlink()
    for engine, name in (("sglang", "tokenizer-path"), ("vllm", "tokenizer"), ("tensorrt-llm", "tokenizer")):
        assert problems(engine, folders, engine_args={engine: {name: "a/b"}}) == ""


@pytest.mark.parametrize("engine", OTHERS)
def test_layers_out_of_order_are_put_in_order_with_the_columns_of_fc(engine: str, folders: tuple[Path, Path]) -> None:
    """These engines hand out the outputs of layers in the order of layers, whatever the drafter lists."""
    target, drafter = folders
    before = load_file(drafter / WEIGHTS)["fc.weight"]
    edit_json(drafter / "config.json", {"dflash_config.target_layer_ids": [2, 0]})
    assert problems(engine, folders) == ""
    deployment = Deployment.model_validate({"target": {"model": str(target)}, "drafter": {"model": str(drafter)}})
    server_backend(engine).launch(deployment).prepare(target.parent / "prepared")
    (folder,) = (path.parent for path in (target.parent / "prepared").rglob(WEIGHTS))
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [0, 2]
    first, second = before.chunk(2, dim=1)
    after = load_file(folder / WEIGHTS)["fc.weight"]
    assert torch.equal(after.float(), torch.cat([second, first], dim=1).to(after.dtype).float())


@pytest.mark.parametrize("engine", OTHERS)
def test_a_layer_that_is_listed_twice_is_a_problem(engine: str, folders: tuple[Path, Path]) -> None:
    edit_json(folders[1] / "config.json", {"dflash_config.target_layer_ids": [2, 2]})
    assert "target_layer_ids [2, 2] name a layer twice" in problems(engine, folders)


def test_a_converted_drafter_keeps_the_order_of_its_layers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    edit_json(folders[1] / "config.json", {"dflash_config.target_layer_ids": [2, 0]})
    checkpoint = open_checkpoint(folders[1])
    assert checkpoint.config is not None
    write_drafter(tmp_path / "out", checkpoint.config, load_tensors(checkpoint))
    again = open_checkpoint(tmp_path / "out")
    assert again.config is not None
    assert again.config.target_layer_ids == (2, 0)
    assert torch.equal(load_tensors(again)["fc.weight"], load_tensors(checkpoint)["fc.weight"])
