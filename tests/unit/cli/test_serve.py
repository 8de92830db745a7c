"""`serve` checks a deployment and becomes the engine's own server; `--dry-run` shows it and writes nothing."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen, check_output, run
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.common.files import temporary_folder
from dflash_serve.errors import UserError
from dflash_torch import launch
from tests.support.tiny_target import write_tiny_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(folders: tuple[Path, Path]) -> tuple[str, ...]:
    return "--target", str(folders[0]), "--drafter", str(folders[1])


class Became(Exception):  # noqa: N818 - nothing went wrong
    """The process would be another one now."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def execvpe(file: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        seen.update(file=file, argv=argv, env=env)
        raise Became

    monkeypatch.setattr(os, "execvpe", execvpe)
    return seen


def serve(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(app, ["serve", *arguments]).exception


def dry_run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
    assert result.exception is None, result.output
    return result.stdout


BROKEN = {
    "torch": ("torch", "2.13.0", "PyTorch"),
    "sglang": ("sglang", "0.5.23", "SGLang 0.5.23"),
    "vllm": ("vllm", "0.32.0", "vLLM 0.32.0"),
    "tensorrt-llm": ("tensorrt_llm", "1.4.0", "TensorRT-LLM 1.4"),
}


def broken_site(folder: Path, package: str, version: str) -> dict[str, str]:
    """An environment in which a package is installed and its libraries are missing."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    (folder / f"{package}-{version}.dist-info").mkdir()
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


COMMAND = (sys.executable, "-c", "from dflash_serve.cli.main import run; run()")


@pytest.mark.parametrize("engine", BROKEN)
def test_an_engine_that_is_installed_and_cannot_be_imported_is_a_problem_of_the_dry_run(
    engine: str, pair: tuple[str, ...], tmp_path: Path
) -> None:
    package, version, named = BROKEN[engine]
    words = (*COMMAND, "serve", *pair, "--backend", engine, "--dry-run")
    ended = run(words, env=broken_site(tmp_path, package, version), capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"{named} is installed and cannot be imported here (OSError: libcudart.so.13" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_convert_names_a_pytorch_that_cannot_be_imported(folders: tuple[Path, Path], tmp_path: Path) -> None:
    words, env = (
        (*COMMAND, "convert", str(folders[1]), str(tmp_path / "new"), "--to", "zlab"),
        broken_site(tmp_path, *BROKEN["torch"][:2]),
    )
    ended = run(words, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("dflash-serve: torch: PyTorch is installed and cannot be imported here (OSError")
    assert ended.stderr.count("\n") == 1


def test_it_becomes_the_embedded_server_of_the_merged_deployment_as_a_dry_run_says(
    folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]
) -> None:
    file, folder = tmp_path / "deployment.yaml", tmp_path / "a folder"
    file.write_text(f"target: {{model: {folders[0]}}}\nspeculation: {{width: auto}}\nlimits: {{max_batch_size: 2}}\n")
    words = [str(file), "--drafter", str(folders[1]), "--width", "3", "--port", "9001", "--drain-seconds", "7"]
    words += ["--folder", str(folder)]
    printed = shlex.split(dry_run(*words, "--quiet"))
    assert (folder.exists(), became) == (False, {})
    assert isinstance(serve(*words), Became)
    assert became["argv"][1:] == ("-m", "dflash_torch.server", str(folder / "deployment.json"))
    http = {key: value for key, value in became["env"].items() if key.startswith("DFLASH_SERVE_HTTP_")}
    assert http == {
        "DFLASH_SERVE_HTTP_HOST": "127.0.0.1",
        "DFLASH_SERVE_HTTP_PORT": "9001",
        "DFLASH_SERVE_HTTP_DRAIN_SECONDS": "7.0",
    }
    assert {f"{key}={value}" for key, value in http.items()} <= set(printed)
    assert printed[-len(became["argv"]) :] == list(became["argv"])
    written = json.loads((folder / "deployment.json").read_text())
    assert (written["target"]["model"], written["drafter"]["model"]) == (str(folders[0]), str(folders[1]))
    assert (written["speculation"]["width"], written["limits"]["max_batch_size"]) == (3, 2)


def test_a_folder_and_a_relative_path_are_told_as_what_they_are(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "a folder, no deployment; give a deployment.yaml, or --target" in str(serve(str(folders[0])))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployment.yaml").write_text("target: {model: ./models/mine}")
    assert f"{tmp_path}/models/mine: no such folder; give" in str(serve("deployment.yaml"))
    assert f"{tmp_path}/models/mine: no such folder; give" in str(serve("--target", "./models/mine"))
    assert f"nowhere.yaml: cannot be read (No such file or directory, below {tmp_path})" in str(serve("nowhere.yaml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--width", "9"), "width 9"),
        (("--backend", "sglang", "--drain-seconds", "1"), "--drain-seconds: only the embedded engine's"),
        (("--backend", "nothing"), "installed are: sglang, tensorrt-llm, torch, vllm"),
        (("--backend", "sglng"), "did you mean sglang?"),
        (("--backend", "sglang"), "sglang: not installed in this environment"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_is_written_or_replaced(
    pair: tuple[str, ...], words: tuple[str, ...], said: str, tmp_path: Path, became: dict[str, Any]
) -> None:
    error = serve(*pair, *words, "--folder", str(tmp_path / "served"))
    assert isinstance(error, UserError)
    assert said in str(error)
    assert (became, (tmp_path / "served").exists()) == ({}, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--acceptance-metrics", "bogus"), ["engine_args.torch: acceptance_metrics: Input should be"]),
        (("--drain-seconds", "-1"), ["engine_args.torch: drain_seconds: Input should be"]),
        (("--api-key-file", "/nowhere"), ["serving.api_key_file: /nowhere cannot be read"]),
        (("--", "--max-bodi-bytes", "1"), ["did you mean max-body-bytes?"]),
        (("--", "--port", "1"), ["--port of `dflash-serve serve`"]),
        (  # every problem, not the first
            ("--block-size", "99", "--width", "100"),
            ["larger than the drafter's", "width 100 is larger than the block"],
        ),
    ],
)
def test_a_dry_run_lets_no_bad_value_through(pair: tuple[str, ...], words: tuple[str, ...], said: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *pair, *words])
    assert result.exit_code == 2
    assert [word for word in said if word not in result.stdout] == []


@pytest.mark.parametrize("flags", [("--width", "3"), ("--block-size", "4")])
def test_a_width_without_a_drafter_is_refused(pair: tuple[str, ...], flags: tuple[str, ...]) -> None:
    assert "but there is no drafter; name a drafter, or leave it out" in str(serve(*pair[:2], *flags))


def test_words_after_two_dashes_are_the_engines_own(pair: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"target: {{model: {pair[1]}}}\nengine_args: {{sglang: {{stream-interval: 2}}}}")
    words = dry_run(str(file), "--backend", "sglang", "--quiet", "--", "--mem-fraction-static", "0.9", "--enable-lora")
    assert "--stream-interval 2 --mem-fraction-static 0.9 --enable-lora --host" in words
    words = dry_run(*pair, "--backend", "torch", "--quiet", "--", "--drain-seconds", "5")
    assert "DFLASH_SERVE_HTTP_DRAIN_SECONDS=5" in words, "without a file, too"


def test_what_clients_see_is_a_key_of_the_deployment(pair: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    file = tmp_path / "deployment.yaml"
    serving = f"{{served_model_name: mine, api_key_file: {tmp_path / 'keys'}}}"
    file.write_text(f"target: {{model: {pair[1]}}}\nserving: {serving}")
    words = shlex.split(dry_run(str(file), "--quiet"))
    assert f"DFLASH_SERVE_HTTP_API_KEY_FILE={tmp_path / 'keys'}" in words
    assert "DFLASH_SERVE_HTTP_SERVED_MODEL_NAME=mine" in words
    words = shlex.split(dry_run(str(file), "--quiet", "--served-model-name", "yours"))
    assert "DFLASH_SERVE_HTTP_SERVED_MODEL_NAME=yours" in words


def test_the_embedded_engine_takes_as_many_requests_as_memory_holds(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, became: dict[str, Any]
) -> None:
    told = {}
    for free in (10**12, 6 * 10**6):
        monkeypatch.setattr(launch, "free_bytes", lambda free=free: free)
        report = json.loads(dry_run(*pair, "--json"))
        told[free] = next(one for one in report["chosen"] if one["key"] == "limits.max_batch_size")
    assert told[10**12]["value"] == "32"
    assert 1 < int(told[6 * 10**6]["value"]) < 32
    assert "fits into a quarter of the CPU's free memory" in told[10**12]["why"]
    assert "weights and K/V take up to 0.0 GiB of the 931.3 GiB that are free" in told[10**12]["why"]
    assert "at the start" in told[10**12]["why"], "it is decided again, on the machine and by the process that serve"
    result = CliRunner().invoke(app, ["serve", *pair, "--folder", str(tmp_path / "served")])
    assert isinstance(result.exception, Became)
    assert f"limits.max_batch_size = {told[6 * 10**6]['value']}" in result.stderr, "the command says it, too"
    monkeypatch.setattr(launch, "free_bytes", lambda: 1000)
    (note,) = json.loads(dry_run(*pair, "--json"))["notes"]
    assert note.startswith("on this machine, limits: weights and K/V need")


def test_nothing_named_is_the_bundled_pair_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["serve", "--dry-run", "--json"])
    assert result.exception is None, result.output
    described = json.loads(result.stdout)["deployment"]
    assert (described["target"]["model"], described["drafter"]["model"]) == ("smollm2", "smollm2")
    assert "nothing is named: it serves the bundled pair" in result.stderr
    for words in (["--backend", "sglang"], ["--drafter", "smollm2"]):
        result = CliRunner().invoke(app, ["serve", "--dry-run", *words])
        assert "nothing to serve" in str(result.exception), words
    monkeypatch.setenv("DFLASH_SERVE_DRAFTER__MODEL", "smollm2")
    assert "nothing to serve" in str(CliRunner().invoke(app, ["serve", "--dry-run"]).exception)


def test_a_gpu_that_is_not_here_is_a_problem_of_serving_here_alone(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"target: {{model: {folders[0]}}}\nhardware: {{gpu: b200}}\n")
    for driver in (True, False):
        monkeypatch.setattr(launch, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
        result = CliRunner().invoke(app, ["serve", str(file), "--dry-run"])
        assert ("b200 is asked for, but this machine has no NVIDIA driver" in result.stdout) == (not driver)
        assert result.exit_code == (0 if driver else 2)
    assert "no NVIDIA driver" in str(serve(str(file)))
    result = CliRunner().invoke(app, ["deploy", str(file), "--output", str(tmp_path / "manifests")])
    assert "NVIDIA" not in f"{result.output} {result.exception}", "it is served elsewhere"


def test_a_start_that_fails_leaves_no_folder_behind(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execvpe", stopped)
    serve(*pair)
    monkeypatch.setattr(launch.EmbeddedLaunch, "prepare", stopped)
    serve(*pair)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_servers_that_have_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; from dflash_serve.common.files import temporary_folder as f; print(f(), flush=True)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    become = "; os.execlp('sh', 'sh', '-c', 'read end')"
    (tmp_path / "dflash-serve-verify-1").mkdir()  # of another verb: its logs stay
    with Popen([sys.executable, "-c", code + become], env=env, stdin=PIPE, stdout=PIPE, text=True) as running:
        assert running.stdout is not None
        in_use = running.stdout.readline().strip()
        ended = check_output([sys.executable, "-c", code], env=env, text=True).strip()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        third = temporary_folder()
        assert {str(one) for one in tmp_path.iterdir()} - {str(tmp_path / "dflash-serve-verify-1")} == {
            in_use,
            str(third),
        }, f"{ended} is gone"
        running.kill()
    temporary_folder()
    assert (Path(in_use).exists(), third.exists()) == (False, True)


def test_serving_without_a_drafter_is_said(pair: tuple[str, ...], tmp_path: Path, became: dict[str, Any]) -> None:
    own = ("--backend", "sglang", "--dry-run", "--", "--speculative-algorithm", "NEXTN")  # the engine drafts by itself
    for more, said in ((), True), (("--width", "off"), False), (pair[2:], False), (("--quiet",), False), (own, False):
        words = ["serve", *pair[:2], "--folder", str(tmp_path), *more]
        assert ("serves without speculation" in CliRunner().invoke(app, words).stderr) is said


def test_what_does_not_come_from_the_file_is_listed_with_its_source(
    pair: tuple[str, ...], tmp_path: Path, became: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"target: {{model: {pair[1]}}}\ndrafter: {{model: {pair[3]}}}\nspeculation: {{width: 4}}\n")
    words = [str(file), "--max-batch-size", "2", "--folder", str(tmp_path / "prepared")]
    header = "given on the command line or by environment variables\n"
    assert header + "  limits.max_batch_size = 2 (command line)\n" in dry_run(*words)
    monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", "off")
    monkeypatch.setenv("DFLASH_SERVE_LIMITS", '{"max_batch_size": 7, "max_model_len": 64}')
    monkeypatch.setenv("DFLASH_SERVE_HTTP_LOG_FORMAT", "json")
    found = {
        ("limits.max_batch_size", 2, "command line"),
        ("limits.max_model_len", 64, "DFLASH_SERVE_LIMITS"),
        ("speculation.width", "off", "DFLASH_SERVE_SPECULATION__WIDTH"),
    }
    assert {tuple(each.values()) for each in json.loads(dry_run(*words, "--json"))["given"]} == found
    assert "speculation.width = off (DFLASH_SERVE_SPECULATION__WIDTH)" in dry_run(*words)
    unused = "speculation.width is off: it serves without speculation, and does not use the drafter"
    told = CliRunner().invoke(app, ["serve", *words]).stderr
    assert became
    assert unused in told
    assert "speculation.width = off (DFLASH_SERVE_SPECULATION__WIDTH)" in told
    assert "limits.max_batch_size" not in told, "a flag is this command's own"
    assert "the environment variable DFLASH_SERVE_HTTP_LOG_FORMAT = json" in told
    assert CliRunner().invoke(app, ["serve", *words, "--quiet"]).stderr == ""
