"""Requirements of a node: checked before an engine starts, or by the scheduler."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.chart import CHART, ROOT, Manifest, case, of_kind, only, pods, render, server, server_pod, values

CHECK = CHART / "files" / "check.py"
ANOTHER_USER = 10001
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
"""One that any user can run: this one may lie in somebody's home."""


def checked(*arguments: str, before: Callable[[], None] | None = None, another_user: bool = False) -> tuple[int, str]:
    python, user = (str(SYSTEM_PYTHON), ANOTHER_USER) if another_user else (sys.executable, None)
    source = CHECK.read_text()
    argv = [python, "-c", source, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=before, user=user)
    return done.returncode, done.stderr


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))


def test_a_limit_on_locked_memory_ends_the_pod_with_what_to_do() -> None:
    code, said = checked("--memlock", before=limited)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(
        "ulimit -l: 8192 KiB of memory may be locked, and RDMA would fall back to TCP; set LimitMEMLOCK"
    )
    assert checked(before=limited) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0 or SYSTEM_PYTHON is None, reason="becomes another user")
def test_a_folder_that_the_user_cannot_write_ends_the_pod_with_what_to_do(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    locked, missing = tmp_path / "claim", tmp_path / "o200k_base.tiktoken"
    locked.mkdir(mode=0o755)
    code, said = checked(f"--writable={locked}", f"--file={missing}", another_user=True)
    assert code == 1
    first, second = said.splitlines()
    assert first.startswith(
        f"{locked}: user {ANOTHER_USER} cannot write it (Permission denied); chown it to {ANOTHER_USER}"
    )
    assert second == f"{missing}: not there; put it there, or let models.download fetch it"
    missing.touch()
    assert checked(f"--writable={tmp_path}", f"--file={missing}") == (0, "")


def checks_of(name: str) -> list[str]:
    containers = server_pod(render(case(name)))["spec"].get("initContainers", [])
    return next((c["args"] for c in containers if c["name"] == "check-node"), [])


def test_each_installation_is_checked_for_what_it_needs() -> None:
    encodings = "--file=/models/encodings/o200k_base.tiktoken"
    assert checks_of("sglang") == []
    assert checks_of("sglang-on-two-nodes") == ["--memlock", "--writable=/models", "--writable=/cache", encodings]
    assert checks_of("sglang-in-one-nvlink-domain") == ["--memlock", "--writable=/cache", encodings]
    assert checks_of("tensorrt-llm-with-a-built-drafter") == ["--writable=/models"]


@pytest.fixture
def cubins(tmp_path: Path) -> dict[str, str]:
    """An environment with a package like flashinfer-cubin, and a python3 that finds it."""
    package = tmp_path / "site" / "flashinfer_cubin"
    (package / "cubins").mkdir(parents=True)
    (package / "__init__.py").write_text(f"def get_cubin_dir(): return {str(package / 'cubins')!r}\n")
    (tmp_path / "python3").symlink_to(sys.executable)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(tmp_path / "site"),
        "CUBINS": str(package / "cubins"),
    }


def linked(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "deploy/docker/link_cubins.sh")
    return subprocess.run(["sh", script, *words], env=environment, capture_output=True, text=True, check=False)


def test_kernels_that_flashinfer_links_into_its_own_package_go_where_a_container_may_write(
    cubins: dict[str, str],
) -> None:
    assert linked(cubins, "probe").returncode == 1  # without the link it would write into the package
    folder = Path(cubins["CUBINS"], "flashinfer")
    assert linked(cubins).returncode == 1
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() else path.rmdir()
    folder.rmdir()
    assert [linked(cubins).returncode, linked(cubins, "probe").returncode] == [0, 0]
    assert (folder.is_symlink(), os.readlink(folder)) == (True, "/tmp")
    assert not Path("/tmp/trtllm").exists()
    assert "nothing to link" in linked({**cubins, "PYTHONPATH": ""}).stdout


def expressions(manifests: list[Manifest]) -> dict[str, tuple[str, list[str]]]:
    affinity = server_pod(manifests)["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return {e["key"]: (e["operator"], e.get("values", [])) for e in term["matchExpressions"]}


def test_a_gpu_is_whole_and_its_node_runs_the_image() -> None:
    for name, architecture in (("sglang", "amd64"), ("sglang-in-one-nvlink-domain", "arm64")):
        found = expressions(render(case(name)))
        assert found["kubernetes.io/arch"] == ("In", [architecture])
        assert found["nvidia.com/gpu.slices.gi"] == ("DoesNotExist", [])


def test_a_pod_asks_for_its_share_of_the_node() -> None:
    resources = server(render(case("tensorrt-llm-on-a-dgx")))["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["memory"]) == ("64", "512Gi")
    assert "cpu" not in resources["limits"]
    assert int(resources["requests"]["ephemeral-storage"]) == 3 * 50 * 2**30
    alone = server(render(case("sglang")))["resources"]["requests"]
    assert (alone["cpu"], int(alone["ephemeral-storage"])) == ("8", (500 + 3 * 50) * 2**30)


def test_trays_of_a_rack_are_one_nvlink_domain() -> None:
    manifests = render(case("sglang-in-one-nvlink-domain"))
    domain = only(manifests, "ComputeDomain")["spec"]
    assert domain["numNodes"] == 2
    for label, pod in pods(manifests):
        if "LeaderWorkerSet" in label:
            (claim,) = pod["spec"]["resourceClaims"]
            assert claim["resourceClaimTemplateName"] == domain["channel"]["resourceClaimTemplate"]["name"]
            assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
            assert "runAsUser" not in pod["spec"]["securityContext"]  # user: null, as OpenShift wants it


def test_an_eviction_of_any_node_counts_and_caches_outlive_a_pod() -> None:
    manifests = render(case("sglang-on-two-nodes"))
    (expression,) = only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchExpressions"]
    assert expression["values"] == ["server", "worker"]
    (cache,) = [m for m in server(manifests)["volumeMounts"] if m["mountPath"] == "/cache"]
    assert (cache["name"], cache["subPath"]) == ("models", "cache/0123456789ab")
    assert only(manifests, "LeaderWorkerSet")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "serving"


@pytest.mark.parametrize("name", ["qwen3-8b-one-b200", "gpt-oss-120b-one-b300"])
def test_the_examples_are_the_smallest_values_and_render(name: str) -> None:
    text = (ROOT / "examples" / "helm" / f"{name}.yaml").read_text()
    assert server(render(yaml.safe_load(text)))["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert len(text.splitlines()) < 20


def test_argo_cd_and_flux_install_what_the_smallest_example_does() -> None:
    """Flux waits longer than the Jobs that come first."""
    folder = ROOT / "examples" / "helm"
    wanted = yaml.safe_load((folder / "qwen3-8b-one-b200.yaml").read_text())
    argo = yaml.safe_load((folder / "argo-cd.yaml").read_text())["spec"]["source"]
    repository, flux = yaml.safe_load_all((folder / "flux.yaml").read_text())
    assert argo["helm"]["valuesObject"] == flux["spec"]["values"] == wanted
    assert f"oci://{argo['repoURL']}/{argo['chart']}" == repository["spec"]["url"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    seconds = defaults["models"]["download"]["deadlineSeconds"] + defaults["build"]["deadlineSeconds"]
    assert int(flux["spec"]["timeout"].removesuffix("h")) * 3600 > seconds


def test_weights_that_do_not_fit_the_default_volume_are_given_a_larger_one() -> None:
    given = values("sglang", {"target": {"model": "x"}, "hardware": {"gpu": "b300"}}, startup={"gigabytes": 150.5})
    assert of_kind(render({**given, "models": {"size": "151G"}}), "Deployment")
