"""The embedded image's entry point, run as the chart's container would be: same command, user, mounts, probes, end.

Everything comes from the rendered chart. This Python and this project stand in for the image, unless it is built
(`make test-images`), which takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.deploying.chart import template
from tests.support.container import Container, container, spec_of, why_not
from tests.support.helm import HELM_4, helm
from tests.support.images import Image
from tests.support.tiny_target import write_tiny_pair

REASON = why_not()
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
IMAGE = {"repository": "registry.example/dflash-serve-torch", "digest": f"sha256:{64 * '0'}"}
ONE_CORE = [{"name": "OMP_NUM_THREADS", "value": "1"}]


def rendered(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's pod in the chart, and its ConfigMaps by name."""
    monkeypatch.setenv("PATH", f"{helm(HELM_4).parent}{os.pathsep}{os.environ['PATH']}")
    text = template("release", {"backend": "torch", "image": IMAGE, "env": ONE_CORE, **values})
    documents = [document for document in yaml.safe_load_all(text) if document]
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    return deployment["spec"]["template"]["spec"], maps


@contextmanager
def started(
    values: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Path],
    image: Image | None,
) -> Iterator[tuple[Container, dict[str, Any]]]:
    """The container after its startup probe, and its pod."""
    pod, maps = rendered(values, monkeypatch)
    with container(spec_of(pod, maps, given, image), folder) as running:
        running.wait_for(pod["containers"][0]["startupProbe"])
        yield running, pod


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, torch_image: Image | None
) -> Iterator[tuple[Container, dict[str, Any]]]:
    """A random pair: its drafter accepts next to nothing, so readiness does not ask for that."""
    folder = tmp_path_factory.mktemp("container")
    for path in (folder, *write_tiny_pair(folder / "models")):
        path.chmod(0o755)
    for file in folder.glob("models/*/*"):
        file.chmod(0o644)  # as a claim's files are: fsGroup may read them
    deployment = {
        "target": {"model": "/models/tiny/target"},
        "drafter": {"model": "/models/tiny/drafter"},
        "speculation": {"width": 4},
        "limits": {"max_batch_size": 2},
    }
    values = {"deployment": deployment, "readiness": {"acceptance": False}}
    with (
        pytest.MonkeyPatch.context() as patch,
        started(values, folder, patch, {"/models/tiny": folder / "models"}, torch_image) as found,
    ):
        yield found


def status(running: Container, key: str) -> str:
    """A line of its process 1's /proc/status."""
    lines = Path(f"/proc/{running.pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{key}:"))


def test_it_has_no_rights(tiny: tuple[Container, dict[str, Any]]) -> None:
    running, pod = tiny
    user = str(pod["securityContext"]["runAsUser"])
    assert status(running, "Uid").split() == status(running, "Gid").split() == [user] * 4
    assert {status(running, key) for key in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}
    assert status(running, "NoNewPrivs") == "1"


def test_nothing_can_be_written_but_the_mounts(tiny: tuple[Container, dict[str, Any]]) -> None:
    running, _ = tiny
    ours = [sys.prefix, str(Path(__file__).parents[2])] if running.spec.image is None else ["/opt/dflash-serve"]
    for path in ("/", "/etc", "/usr", "/etc/dflash-serve", *ours):
        assert "Read-only file system" in running.run("touch", f"{path}/new").stderr
    assert all(running.run("touch", f"{writable}/new").returncode == 0 for writable in running.spec.writable)


def test_the_engine_is_process_1_and_its_folder_is_prepared(tiny: tuple[Container, dict[str, Any]]) -> None:
    running, _ = tiny
    words = running.run("cat", "/proc/1/cmdline").stdout.split("\0")
    assert words[1:4] == ["-m", "dflash_torch.server", "/prepared/deployment.json"]
    assert json.loads(running.run("cat", "/prepared/deployment.json").stdout)["limits"]["max_batch_size"] == 2


def test_it_is_alive_and_ready(tiny: tuple[Container, dict[str, Any]]) -> None:
    running, pod = tiny
    server = pod["containers"][0]
    running.wait_for(server["readinessProbe"])
    assert running.probe(server["livenessProbe"])


def drained(running: Container, pod: dict[str, Any], body: dict[str, object], streams: int, folder: Path) -> float:
    """SIGTERM under load: no answer is lost, nothing new is taken, and it ends by itself; the seconds it took."""
    server = pod["containers"][0]
    (folder / "body.json").write_text(json.dumps(body))
    client = running.outside(sys.executable, "-m", "tests.support.streams", str(folder / "body.json"), str(streams))
    assert client.stdout is not None
    assert client.stdout.readline() == "admitted\n"
    begun = time.monotonic()
    running.terminate()
    assert not running.probe(server["readinessProbe"])
    assert running.probe(server["livenessProbe"]), "a draining server must not be killed"
    assert client.poll() is None, "the load was over before the drain had begun"
    answers = json.loads(client.stdout.readline())
    assert client.wait(10) == 0
    assert [(a["status"], a["reason"], a["ended"]) for a in answers] == [(200, "length", True)] * streams
    grace = pod["terminationGracePeriodSeconds"] - server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert running.process.wait(grace) == 0
    return time.monotonic() - begun


LONG = {"model": "/models/tiny/target", "prompt": [9, 8], "max_tokens": 160, "temperature": 0, "ignore_eos": True}


def test_a_drain_under_load_loses_no_answer(tiny: tuple[Container, dict[str, Any]], tmp_path: Path) -> None:
    """Last: it ends the container. Two run at once, so most of the streams wait when SIGTERM comes."""
    running, pod = tiny
    seconds = drained(running, pod, LONG, 6, tmp_path)
    assert seconds < pod["terminationGracePeriodSeconds"]
    assert "shutting down" not in running.log.read_text()


@pytest.mark.model
def test_smollm2_is_served_and_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_image: Image | None
) -> None:
    """The whole way, with the bundled pair: nothing is ready before the drafter was seen to accept a token."""
    deployment = {
        "target": {"model": "smollm2"},
        "drafter": {"model": "smollm2"},
        "limits": {"max_batch_size": 2, "max_model_len": 512},
    }
    with started({"deployment": deployment}, tmp_path, monkeypatch, {}, torch_image) as (running, pod):
        running.wait_for(pod["containers"][0]["readinessProbe"])
        body = {
            "model": "smollm2",
            "prompt": "Once upon a time",
            "max_tokens": 48,
            "temperature": 0,
            "ignore_eos": True,
        }
        seconds = drained(running, pod, body, 4, tmp_path)
    print(f"drained in {seconds:.1f} s")
