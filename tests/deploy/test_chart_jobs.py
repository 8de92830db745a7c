"""Weights and builds are there before a server asks for its GPUs; the walk-through of deploy/README.md, played."""

from __future__ import annotations

import hashlib
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dflash_serve.cli.main import app
from tests.support.chart import (
    CHART,
    DIGEST,
    RECIPES,
    Manifest,
    case,
    changed,
    of_kind,
    only,
    render,
    server_pod,
    values,
    whole_chart,
)
from tests.support.offline_hub import offline_hub

README = (CHART.parents[1] / "README.md").read_text()
BUILT = "tensorrt-llm-with-a-built-drafter"


def block(file: str) -> Manifest:
    """A file of the walk-through."""
    (text,) = re.findall(rf"^```yaml file={file}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    parsed: Manifest = yaml.safe_load(text)
    return parsed


def walk_through() -> Manifest:
    """Values of the walk-through with a quantised drafter, merged as helm merges -f and --set-file."""
    cluster, deployment = {**block("cluster.yaml"), **block("quantised.yaml")}, block("deployment.yaml")
    deployment["drafter"] |= cluster.pop("deployment")["drafter"]
    given = {**values("tensorrt-llm", deployment), "startup": {"gigabytes": 70}, **cluster}
    given["build"]["recipe"] = (RECIPES / "gpt-oss-120b-b300.yaml").read_text()
    given["build"]["image"]["digest"] = DIGEST
    return given


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return [block("claim.yaml"), *render(walk_through())]


def test_a_build_takes_the_gpus_that_it_is_given_or_none(manifests: list[Manifest]) -> None:
    """Without one, an upgrade on a node whose GPUs all serve builds on its CPUs."""
    limits = server_pod(manifests)["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8"
    given = walk_through()
    for gpus, wanted in ((1, "1"), (0, None)):
        given["build"]["gpus"] = gpus
        (build,) = [m for m in of_kind(render(given), "Job") if m["metadata"]["name"].endswith("-build")]
        (container,) = build["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == wanted


def test_what_a_job_reads_is_there_before_it_and_it_is_there_before_servers(manifests: list[Manifest]) -> None:
    """helm waits for hooks, in the order of their weights, before it applies anything else."""

    def weight(manifest: Manifest) -> int:
        return int(manifest["metadata"]["annotations"]["helm.sh/hook-weight"])

    download, build = sorted(of_kind(manifests, "Job"), key=weight)
    assert (download["metadata"]["name"][-8:], build["metadata"]["name"][-5:]) == ("download", "build")
    for job in (download, build):
        assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        spec = job["spec"]["template"]["spec"]
        (config,) = [v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v]
        for kind, name in (("ConfigMap", config), ("ServiceAccount", spec["serviceAccountName"])):
            (read,) = [m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name]
            assert weight(read) < weight(job)
        assert job["spec"]["activeDeadlineSeconds"] == 14400
    assert "helm.sh/hook" not in only(manifests, "Deployment")["metadata"].get("annotations", {})
    policy = next(m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"].endswith("-jobs"))
    (expression,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert expression["values"] == ["download", "build", "certify"]


def build_of(**changes: Any) -> Manifest:
    given = {**case(BUILT), **changes}
    return only(render(given), "Job")


def output_of(job: Manifest) -> str:
    return str(job["spec"]["template"]["spec"]["containers"][0]["command"][-1])


def test_a_build_is_named_by_recipe_tools_and_gpu() -> None:
    given = case(BUILT)
    first = build_of()
    comment = {**given["build"], "recipe": "# said otherwise\n" + given["build"]["recipe"]}
    assert output_of(build_of(build=comment)) == output_of(first)
    for changes in (
        {"build": {**given["build"], "recipe": given["build"]["recipe"].replace("[fp8]", "[fp8, nvfp4]")}},
        {"build": {**given["build"], "image": {**given["build"]["image"], "digest": "sha256:" + "f" * 64}}},
        {"placement": {"products": ["NVIDIA-H200"]}},
    ):
        assert output_of(build_of(**changes)) != output_of(first)


def test_servers_hold_the_build_against_its_manifest_and_do_not_wait() -> None:
    rendered = render(case(BUILT))
    built = output_of(only(rendered, "Job"))
    spec = server_pod(rendered)["spec"]
    _, checks = spec["initContainers"]
    assert checks["command"][0] == "timeout"
    assert checks["command"][2:] == ["dflash-serve", "build"]
    assert checks["args"] == ["/etc/dflash-serve/recipe.yaml", "--output", built, "--verify"]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == "/build"]
    assert mount == {
        **{"name": "models", "mountPath": "/build", "readOnly": True},
        "subPath": built.removeprefix("/models/"),
    }


def certify_of(name: str, changes: Mapping[str, object]) -> tuple[Manifest, Manifest]:
    """The specification of the Job that certifies an installation, and that of its server's pod."""
    manifests = render(changed(name, {"certify.enabled": True, **changes}))
    (job,) = [m for m in of_kind(manifests, "Job") if m["metadata"]["name"].endswith("-certify")]
    assert int(job["metadata"]["annotations"]["helm.sh/hook-weight"]) == 0  # the last one
    return job["spec"], server_pod(manifests)["spec"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (BUILT, {}),
        (BUILT, {"models.download.enabled": True}),
        ("torch-on-a-cpu", {}),
        ("sglang-from-a-model-image", {}),
    ],
)
def test_a_deployment_is_certified_with_what_its_server_gets(name: str, changes: Mapping[str, object]) -> None:
    job, server = certify_of(name, changes)
    spec = job["template"]["spec"]
    mine, other = spec["containers"][0], server["containers"][0]
    for key in ("image", "env", "resources", "securityContext"):
        assert mine[key] == other[key], key
    apart = {"containers", "serviceAccountName", "restartPolicy", "volumes", "topologySpreadConstraints"}
    assert {key: spec[key] for key in spec.keys() - apart} == {key: server[key] for key in server.keys() - apart}
    assert [volume["name"] for volume in spec["volumes"]] == [volume["name"] for volume in server["volumes"]]
    assert {m["mountPath"] for m in mine["volumeMounts"]} == {m["mountPath"] for m in other["volumeMounts"]}
    (models,) = [m for m in mine["volumeMounts"] if m["mountPath"] == "/models"]
    written = name == BUILT  # to the claim; otherwise the log has the report
    assert (mine["command"][3].startswith("/models/certificates/"), "--json" not in mine["args"]) == (written, written)
    assert not (written and models.get("readOnly"))
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2, 3]
    flags = {word.partition("=")[0] for word in mine["args"] if word.startswith("--")}
    command: Any = typer.main.get_command(app)
    assert flags < {option for parameter in command.commands["certify"].params for option in parameter.opts}


def test_an_upgrade_of_a_certified_release_is_certified_only_if_what_it_serves_changes(tmp_path: Path) -> None:
    """Here a value stands for the ConfigMap that `lookup` finds in a cluster."""
    asked = 'lookup "v1" "ConfigMap" .Release.Namespace (include "dflash-serve.fullname" .)'
    chart = tmp_path / CHART.name
    shutil.copytree(whole_chart(), chart)
    template = chart / "templates" / "_jobs.tpl"
    assert asked in template.read_text()
    template.write_text(template.read_text().replace(asked, ".Values.global.running"))

    def kinds(running: Manifest, **changes: object) -> list[str]:
        given = changed("torch-on-a-cpu", {"certify.enabled": True, "global.running": running, **changes})
        return [manifest["kind"] for manifest in render(given, chart=chart)]

    (running,) = [m for m in of_kind(render(changed("torch-on-a-cpu", {"certify.enabled": True})), "ConfigMap")
                  if m["metadata"].get("annotations", {}).keys() == {"dflash-serve/certified"}]  # fmt: skip
    assert "Job" not in kinds(running, replicas=2)
    assert "Job" in kinds(running, **{"deployment.speculation": {"width": 2}})
    assert "Job" in kinds({"metadata": {}})


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({}, "certify --minutes=5 --output"),
        ({"certificate.json.partial.jsonl": ""}, "certify --minutes=5 --resume --output"),
        ({"certificate.json": '{\n "verdict": "refused"'}, "certify --minutes=5 --output"),
        ({"certificate.json": '{\n "verdict": "accepted"'}, "accepted before:"),
    ],
)
def test_an_accepted_deployment_is_not_certified_again_and_an_interrupted_run_goes_on(
    kept: Mapping[str, str], said: str, tmp_path: Path
) -> None:
    script = certify_of(BUILT, {})[0]["template"]["spec"]["containers"][0]["command"][2]
    program, folder = tmp_path / "dflash-serve", tmp_path / "out"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    folder.mkdir()
    for name, text in kept.items():
        (folder / name).write_text(text)
    argv, path = ["sh", "-c", script, str(folder), "--minutes=5"], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(argv, env=path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said} {folder}\n"


def test_a_job_reaches_the_hub_by_the_proxy_and_the_certificates_of_the_servers() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    volume, mount = {"name": "ca", "configMap": {"name": "ca"}}, {"name": "ca", "mountPath": "/ca"}
    given = changed(BUILT, {"models.download.enabled": True, "env": [proxy]})
    jobs = of_kind(render({**given, "extraVolumes": [volume], "extraVolumeMounts": [mount]}), "Job")
    assert len(jobs) == 2
    for job in jobs:
        spec = job["spec"]["template"]["spec"]
        assert (proxy in spec["containers"][0]["env"], volume in spec["volumes"]) == (True, True)
        assert mount in spec["containers"][0]["volumeMounts"]


def test_what_was_downloaded_is_all_that_servers_ask_for(manifests: list[Manifest]) -> None:
    (container,) = server_pod(manifests)["spec"]["containers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    assert {"name": "TIKTOKEN_ENCODINGS_BASE", "value": "/models/encodings"} in container["env"]
    # transformers copies a model's own code there before it runs it.
    assert {"name": "HF_MODULES_CACHE", "value": "/cache/modules"} in container["env"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/models"]
    assert mount["readOnly"]


def test_the_download_finds_both_models_and_says_in_a_line_what_is_not_to_be_had(tmp_path: Path) -> None:
    hub, file = tmp_path / "hub", tmp_path / "deployment.yaml"
    with pytest.MonkeyPatch.context() as patch:
        offline_hub(hub, patch)
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(CHART.parents[2])

    def fetched(**models: str) -> subprocess.CompletedProcess[str]:
        file.write_text(yaml.safe_dump({name: {"model": model} for name, model in models.items()}))
        argv = [sys.executable, str(CHART / "files" / "fetch.py"), str(file)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    done = fetched(target="Qwen/Qwen3-8B", drafter="z-lab/Qwen3-8B-DFlash-b16")
    assert (done.returncode, done.stdout.count("snapshots")) == (0, 2), done.stderr
    assert fetched(target="/models/here", drafter="/models/there").stdout == ""
    gone = fetched(target="no-owner/no-model")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    assert gone.stderr.startswith("no-owner/no-model: ")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, False),
        ({"sglang": {"trust-remote-code": False}}, False),
        ({"tensorrt-llm": {"trust_remote_code": True}}, True),
        ({"sglang": {"trust-remote-code": True}}, True),
    ],
)
def test_code_is_downloaded_only_where_an_engine_is_told_to_run_it(
    arguments: Manifest, code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi's tokenizer is code; a server is offline, and could not get it later."""
    patterns: list[bool] = []

    def fetched(_: str, *, revision: str | None, allow_patterns: list[str], **__: object) -> str:
        patterns.append("*.py" in allow_patterns)
        return str(revision)

    file = tmp_path / "deployment.yaml"
    models = {name: {"model": f"owner/{name}"} for name in ("target", "drafter")}
    file.write_text(yaml.safe_dump({**models, "engine_args": arguments}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    monkeypatch.setattr(sys, "argv", ["fetch.py", str(file)])
    runpy.run_path(str(CHART / "files" / "fetch.py"), run_name="__main__")
    assert patterns == [code, False]


def test_the_encoding_of_gpt_oss_is_taken_as_it_was_published_or_not_at_all(tmp_path: Path) -> None:
    """Another file in its place is fetched again; what comes and is another file is refused, and nothing is left."""
    namespace = runpy.run_path(str(CHART / "files" / "fetch.py"))
    encoding, published = namespace["encoding"], b"IQ== 0\n"
    source, folder = tmp_path / "source", tmp_path / "encodings"
    source.write_bytes(published)
    told = encoding.__globals__
    told |= {"ENCODING": source.as_uri(), "SHA256": hashlib.sha256(published).hexdigest()}
    folder.mkdir()
    (folder / "o200k_base.tiktoken").write_bytes(b"cut off")
    assert encoding(folder).read_bytes() == published
    source.unlink()
    assert encoding(folder) == folder / "o200k_base.tiktoken"  # it is there: nothing is downloaded
    source.write_bytes(b"another")
    with pytest.raises(ValueError, match="not the file that was published"):
        encoding(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
