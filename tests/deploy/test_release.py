"""Workflows are well formed and pin their actions; a release builds every image, and its chart can be
pushed to a registry and installed from there."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_serve.deploying.chart import write_chart
from dflash_tensorrt_llm.upstream import NEWEST, OLDEST, Release
from tests.support.chart import HELMS, KUBERNETES, ROOT, recipe_deployment, values, whole_chart
from tests.support.helm import HELM_4, Layer, helm
from tests.support.registry import PASSWORD, USER, registry

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
WORKFLOW = WORKFLOWS["release"]
STYLE = (
    "{extends: default, rules: {line-length: {max: 130}, truthy: {check-keys: false}, document-start: disable, braces: "
)
STYLE += "{max-spaces-inside: 0}, comments: {min-spaces-from-content: 1}}}"


FORMS = {
    "vendor.dependabot": [ROOT / ".github" / "dependabot.yml"],
    "vendor.github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml")),
}


@pytest.mark.parametrize("schema", FORMS)
def test_what_github_reads_beside_workflows_is_well_formed(schema: str) -> None:
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, FORMS[schema])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize(
    "argv",
    [
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"],
        [str(Path(sys.executable).with_name("zizmor")), "--offline", "--no-progress", "--quiet"],
        [sys.executable, "-m", "yamllint", "--strict", "--config-data", STYLE],
    ],
    ids=["its schema", "zizmor: actions by commit, no right that is not named, no injection", "yamllint"],
)
def test_a_workflow_is_well_formed_and_safe(argv: list[str], file: Path) -> None:
    done = subprocess.run([*argv, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_released_before_the_suites_have_passed() -> None:
    jobs = WORKFLOW["jobs"]
    (suites,) = [name for name, job in jobs.items() if job.get("uses") == "$/.github/workflows/ci.yaml"]
    assert "workflow_call" in WORKFLOWS["ci"][True]  # YAML 1.1 reads the key `on` as true
    assert {name for name, job in jobs.items() if job.get("needs") != suites} == {suites}


def test_the_contract_job_tries_the_newest_release_that_was_read() -> None:
    releases = WORKFLOWS["tensorrt-llm"]["jobs"]["contract"]["strategy"]["matrix"]["release"]
    assert all(OLDEST <= Release.parse(release) <= NEWEST for release in releases)


def test_it_builds_signs_and_describes_every_image_for_both_architectures() -> None:
    job = WORKFLOW["jobs"]["images"]
    built = {entry["image"] for entry in job["strategy"]["matrix"]["include"]}
    assert built == {path.stem for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile")}
    (build,) = [step["with"] for step in job["steps"] if step.get("id") == "build"]
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    for name in ("images", "chart"):
        assert any("cosign sign" in step.get("run", "") for step in WORKFLOW["jobs"][name]["steps"])


@pytest.mark.parametrize("layer", HELMS, ids=lambda layer: layer.helm)
def test_the_charts_job_pushes_and_signs_a_chart_that_can_be_installed(layer: Layer, tmp_path: Path) -> None:
    """Runs the workflow's own lines against a closed registry with its docker login, then renders what was pushed; a
    stand-in for cosign writes its arguments down.
    """
    job = WORKFLOW["jobs"]["chart"]
    assert any(step.get("uses", "").startswith("docker/login-action@") for step in job["steps"])
    (step,) = [step for step in job["steps"] if "helm push" in step.get("run", "")]
    programs = {
        "helm": f'[ "$1" = push ] && set -- "$@" --plain-http\nexec {shlex.quote(str(helm(layer)))} "$@"',
        "cosign": f'echo "$@" > {shlex.quote(str(tmp_path / "signed"))}',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (packing,) = [step for step in job["steps"] if "deploying.chart" in step.get("run", "")]
    folder = packing["run"].split()[-1]
    write_chart(tmp_path / folder)
    with registry(tmp_path, closed=True) as address:
        login = {"auths": {address: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(login))
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        given = {"PATH": path, "HOME": str(tmp_path), "REGISTRY": f"{address}/us/it", "TAG": "v1.2.3"}

        def run(**more: str) -> subprocess.CompletedProcess[str]:
            argv, variables = ["bash", "-eo", "pipefail", "-c", step["run"]], {**given, **more}
            return subprocess.run(argv, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

        stranger, done = run(), run(DOCKER_CONFIG=str(tmp_path))
        (tmp_path / "values.yaml").write_text(json.dumps(values("sglang", recipe_deployment("qwen3-8b-b200"))))
        argv = [str(helm(layer)), "template", "x", f"oci://{address}/us/it-charts/dflash-serve", "--version", "1.2.3"]
        argv += ["--plain-http", "--values", str(tmp_path / "values.yaml"), "--kube-version", KUBERNETES]
        pulled = subprocess.run(
            argv, env={**given, "DOCKER_CONFIG": str(tmp_path)}, capture_output=True, text=True, check=False
        )
    assert stranger.returncode != 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert pulled.returncode == 0, pulled.stderr
    assert "helm.sh/chart: dflash-serve-1.2.3" in pulled.stdout
    assert "kind: Deployment" in pulled.stdout
    digest = rf"{re.escape(address)}/us/it-charts/dflash-serve@sha256:[0-9a-f]{{64}}"
    assert re.fullmatch(f"sign --yes {digest}\n", (tmp_path / "signed").read_text())


def test_a_tag_of_another_version_publishes_no_wheel(tmp_path: Path) -> None:
    (build,) = [step for step in WORKFLOW["jobs"]["wheel"]["steps"] if "-m build" in step.get("run", "")]
    check = build["run"].strip().splitlines()[-1]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "dflash_serve-1.2.3-py3-none-any.whl").touch()
    for tag, fits in (("v1.2.3", True), ("v1.2.4", False)):
        argv, environment = ["sh", "-ec", check], {"TAG": tag, "PATH": os.environ["PATH"]}
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert (done.returncode == 0) == fits


def test_the_chart_says_who_keeps_it_what_it_is_and_what_its_values_mean() -> None:
    said = yaml.safe_load(shown("chart"))
    assert all(said[name] for name in ("description", "maintainers", "sources", "icon", "keywords"))
    assert shown("readme").startswith("# dflash-serve\n")
    assert "size: 500Gi" in shown("values")


def shown(what: str) -> str:
    """`helm show`."""
    argv: list[str | Path] = [helm(HELM_4), "show", what, whole_chart()]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
