"""Properties of the container files, read from the files; test_images.py builds them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from dflash_serve.adapter.registry import backend
from dflash_serve.deploying.chart import KNOWN as BACKENDS
from tests.support.chart import render, server, server_pod, values

USER = 10001
WRITABLE = {"/models", "/prepared", "/cache", "/tmp"}
ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
EACH = pytest.mark.parametrize("name", BACKENDS)
EVERY = pytest.mark.parametrize("name", [*BACKENDS, "engines"])
BASE = {"torch": "PYTHON", "engines": "PYTHON", "sglang": "BASE", "tensorrt-llm": "BASE", "vllm": "BASE"}
"""The build argument that names the image below."""


def path_of(name: str) -> Path:
    return DOCKER / f"{name}.Dockerfile"


def parsed(name: str) -> list[tuple[str, str]]:
    """(instruction, value) of every line, in order."""
    parser = DockerfileParser(fileobj=path_of(name).open("rb+"))
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def last_stage(name: str) -> dict[str, list[str]]:
    """Instruction -> values, of what is shipped."""
    steps = parsed(name)
    begin = max(i for i, (instruction, _) in enumerate(steps) if instruction == "FROM")
    found: dict[str, list[str]] = {}
    for instruction, value in steps[begin:]:
        found.setdefault(instruction, []).append(value)
    return found


@EVERY
def test_hadolint_has_nothing_to_say(name: str) -> None:
    argv = [str(Path(sys.executable).with_name("hadolint")), str(path_of(name))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@EVERY
def test_nothing_is_built_on_what_is_not_pinned(name: str) -> None:
    """The base has no default, and a build stage that all others need refuses one without a digest."""
    argument = BASE[name]
    steps = parsed(name)
    assert ("ARG", argument) in steps
    bases = [value for instruction, value in steps if instruction == "FROM"]
    assert bases == [f"${{{argument}}} AS build", f"${{{argument}}}"]
    check = next(value for instruction, value in steps if instruction == "RUN")
    for image, code in (("python:3.13-slim", 2), ("", 2), (f"python@sha256:{64 * 'a'}", 0)):
        run = subprocess.run(["sh", "-c", check], env={argument: image}, capture_output=True, text=True, check=False)
        assert run.returncode == code
        assert code == 0 or f"{argument} must be pinned by digest" in run.stderr
    assert any("from=build" in value for values in last_stage(name).values() for value in values)


@EVERY
def test_it_runs_without_rights_and_owns_only_what_it_writes(name: str) -> None:
    stage = last_stage(name)
    assert stage["USER"][-1] == f"{USER}:{USER}"
    pod = server_pod(render(values("torch", {"target": {"model": "x"}})))["spec"]
    assert pod["securityContext"]["runAsUser"] == USER
    mounts = pod["containers"][0]["volumeMounts"]
    assert {m["mountPath"] for m in mounts if not m.get("readOnly")} - {"/dev/shm"} == WRITABLE
    owned = next(value for value in stage["RUN"] if f"install -d -o {USER} -g {USER}" in value).split(f"-g {USER} ")[1]
    assert set(owned.split()) == WRITABLE - {"/tmp"}
    assert stage["WORKDIR"] == ["/cache"]


@EACH
def test_it_runs_sets_and_asks_what_the_pod_does(name: str) -> None:
    """And has what the chart's `helm test` imports, for its scripts run in the server's image."""
    stage = last_stage(name)
    container = server(render(values(name, {"target": {"model": "x"}})))
    assert json.loads(stage["ENTRYPOINT"][0]) == ["dflash-serve"]
    command = " ".join(json.loads(stage["CMD"][0])).replace("=", " ")
    assert set(command.split()) <= set(" ".join([*container["command"], *container["args"]]).replace("=", " ").split())
    assert "SHELL" not in stage
    set_here = dict(re.findall(r"(\w+)=(\S+)", " ".join(stage["ENV"])))
    assert {variable["name"]: variable["value"] for variable in container["env"]}.items() <= set_here.items()
    argv = json.loads(stage["HEALTHCHECK"][0].split("CMD", 1)[1])
    assert argv[:2] == ["python3", "-c"]
    assert f"http://127.0.0.1:8000{backend(name).facts.probes.ready}'" in argv[2]
    compile(argv[2], "healthcheck", "exec")
    installs = [value for instruction, value in parsed(name) if instruction == "RUN" and "install" in value]
    assert any("prove]" in value for value in installs)
    assert ("ARG", "AIPERF=") in parsed(name)  # with which an image has what the chart's `certify` needs


def test_dynamo_joins_sglangs_image_without_an_engine_of_its_own(tmp_path: Path) -> None:
    """ai-dynamo asks for another SGLang than ours; what it is installed beside stays as it is."""
    assert ("ARG", "DYNAMO=") in parsed("sglang")
    (step,) = [value for value in last_stage("sglang")["RUN"] if "DYNAMO" in value]
    pip = tmp_path / "python3"
    pip.write_text(f'#!/bin/sh\necho "$@" | tee -a {tmp_path}/calls\n')
    pip.chmod(0o755)
    for release, calls in (("", 0), ("1.6.1", 3)):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DYNAMO": release}
        subprocess.run(["sh", "-c", step], env=env, check=True, capture_output=True)
        called = (tmp_path / "calls").read_text().splitlines() if calls else []
        assert len(called) == calls
    assert called[1] == "-m pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1"
    assert called[2].startswith("-m pip install --constraint /tmp/there.txt kubernetes>=32.0.1,<33 ")


@pytest.mark.parametrize(
    ("name", "variable"), [("vllm", "VLLM_NO_USAGE_STATS"), ("tensorrt-llm", "TRTLLM_NO_USAGE_STATS")]
)
def test_engines_that_report_what_they_serve_are_told_not_to(name: str, variable: str) -> None:
    """TensorRT-LLM's telemetry is on by default, too (tensorrt_llm/usage of its sources)."""
    assert {f"{variable}=1", "DO_NOT_TRACK=1"} <= set(" ".join(last_stage(name)["ENV"]).split())


def copied(name: str) -> set[str]:
    """Paths of this repository that the builder copies."""
    steps = [value for instruction, value in parsed(name) if instruction == "COPY" and not value.startswith("--from")]
    return {word for value in steps for word in value.split()[:-1]}


@EVERY
def test_the_builder_is_sent_what_is_copied_and_nothing_else(name: str) -> None:
    ignore = path_of(name).with_name(f"{name}.Dockerfile.dockerignore").read_text().split()
    assert "*" in ignore
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == copied(name)


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm", "vllm"])
def test_flashinfers_kernels_are_linked_as_root_and_the_link_is_proven_as_the_user(name: str) -> None:
    steps = parsed(name)
    user = max(i for i, (instruction, _) in enumerate(steps) if instruction == "USER")
    (link,) = [i for i, (_, value) in enumerate(steps) if "link_cubins.sh &&" in value]
    (probe,) = [i for i, (_, value) in enumerate(steps) if "link_cubins.sh probe" in value]
    assert link < user < probe


def test_the_constraints_are_within_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        Requirement(line) for line in (*project["dependencies"], *extras["torch"], *extras["serve"], *extras["prove"])
    ]
    pins = dict(line.split("==") for line in (DOCKER / "constraints.txt").read_text().splitlines() if "==" in line)
    for requirement in asked:
        if requirement.name not in ("dflash-serve", "torch"):
            pin = pins[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(pin), f"{requirement}: {pin}"


def test_what_is_copied_is_enough_for_the_wheel(tmp_path: Path) -> None:
    """tests/wheel looks into the wheel."""
    apart = {"deploy/docker/constraints.txt", "deploy/docker/link_cubins.sh"}
    assert len({frozenset(copied(name) - apart) for name in (*BACKENDS, "engines")}) == 1
    for word in copied("engines"):
        source, target = ROOT / word, tmp_path / "src" / word
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(tmp_path / "src")], check=True)
    assert list(tmp_path.glob("*.whl"))
