"""`dflash-serve deploy`: values and manifests hold the whole deployment; a refusal is one line, and writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from dflash_serve.adapter.registry import backend
from dflash_serve.cli.main import app
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from tests.support.chart import BACKENDS, DIGEST
from tests.support.helm import HELM_4, helm
from tests.support.offline_hub import offline_hub
from tests.support.paper_models import write_paper_drafter, write_paper_target

Fields = dict[str, Any]
IMAGE = ("--image", f"registry.example/x@{DIGEST}")
HELM = ("--render", "helm", "--backend", "sglang")
EIGHT: Fields = {"parallel": {"data": 8}, "hardware": {"gpu": "b200", "count": 8}}


@pytest.fixture(autouse=True)
def with_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{helm(HELM_4).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = write_paper_target(folder / "target"), write_paper_drafter(folder / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


@pytest.fixture
def write(pair: Fields, tmp_path: Path) -> Any:
    def written(**more: Any) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_text(yaml.safe_dump({**pair, **more}))
        return path

    return written


def run(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["deploy", str(path), *words])


def values(path: Path, *words: str) -> Fields:
    result = run(path, *words)
    assert result.exception is None, result.exception
    found: Fields = yaml.safe_load(result.stdout)
    return found


def refusal(path: Path, *words: str) -> str:
    """The one line of it."""
    error = run(path, *words).exception
    assert isinstance(error, UserError)
    assert "\n" not in str(error)
    return str(error)


def test_a_problem_of_the_deployment_comes_first_and_nothing_is_written(write: Any, tmp_path: Path) -> None:
    bad = write(speculation={"block_size": 99})
    for form in ("helm", "manifests"):
        line = refusal(bad, "--render", form, "--backend", "sglang", "--output", str(tmp_path / "out.yaml"))
        assert "block_size 99 is larger than the drafter's" in line
    assert [path.name for path in tmp_path.iterdir()] == ["deployment.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one of --render and --prepare"),
        (["--render", "helm", "--prepare", "/x"], "give one of --render and --prepare"),
        (["--render", "nomad"], "no form 'nomad'; there are: helm, manifests"),
        (["--render", "heml", "--backend", "torch"], "no form 'heml'; did you mean helm?"),
        (["--render", "kserve"], "no form 'kserve'; start from examples/deploy/kserve.yaml"),
        (["--render", "helm", "--backend", "nope"], "no backend 'nope'; installed are: sglang, tensorrt-llm, torch"),
        (["--render", "helm"], "--backend: no engine is named; name one: sglang, tensorrt-llm, torch"),
        (["--render", "helm", "--backend", "sglang", "--name", "Bad_Name"], "'Bad_Name' is no name for Kubernetes"),
        (["--render", "helm", "--backend", "sglang", "--image", "x/y:latest"], "x/y:latest is not pinned"),
        (["--render", "helm", "--backend", "sglang", "--output", f"{__file__}/x.yaml"], "x.yaml: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_one_line(write: Any, words: list[str], said: str) -> None:
    assert said in refusal(write(), *words)


def test_the_values_hold_the_deployment_itself(write: Any, tmp_path: Path) -> None:
    more = {"engine_args": {"sglang": {"mem-fraction-static": 0.9}}, "serving": {"served_model_name": "mine"}}
    path = write(**more, hardware={"gpu": "b200"})
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(values(path, *HELM)["deployment"]))
    assert load_deployment(again) == load_deployment(path)
    text = run(path, *HELM, "--", "--schedule-conservativeness", "0.3").stdout
    assert "schedule-conservativeness: '0.3'" in text, "words after -- too"


def test_copies_are_sglangs_own_and_replicas_of_the_others(write: Any) -> None:
    path = write(**EIGHT)
    own = values(path, *HELM)
    assert "replicas" not in own
    assert (own["deployment"]["parallel"]["data"], own["deployment"]["hardware"]["count"]) == (8, 8)
    replicas = values(path, "--render", "helm", "--backend", "tensorrt-llm")
    assert replicas["replicas"] == 8
    assert "parallel" not in replicas["deployment"]
    assert "count" not in replicas["deployment"]["hardware"], "one GPU each"
    uneven = write(parallel={"data": 3}, hardware={"gpu": "b200", "count": 8})
    line = refusal(uneven, "--render", "helm", "--backend", "tensorrt-llm")
    assert "8 GPUs (hardware.count) cannot be shared evenly by 3 copies" in line


def test_replicas_share_the_requests_of_the_deployment(write: Any) -> None:
    limits = {"max_batch_size": 1536}
    assert values(write(**EIGHT, limits=limits), *HELM)["deployment"]["limits"] == limits, "one server has all copies"
    replicas = values(write(**EIGHT, limits=limits), "--render", "helm", "--backend", "tensorrt-llm")
    assert (replicas["replicas"], replicas["deployment"]["limits"]["max_batch_size"]) == (8, 192)
    line = refusal(write(**EIGHT, limits={"max_batch_size": 9}), "--render", "helm", "--backend", "tensorrt-llm")
    assert "limits.max_batch_size: 9 requests cannot be shared evenly by 8 copies; use a multiple of 8" in line


def test_weights_that_do_not_fit_the_default_volume_get_a_larger_one(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "models" not in values(write(), *HELM)
    monkeypatch.setattr("dflash_serve.deploying.chart.stored_bytes", lambda *_: 600e9)
    given = values(write(), *HELM)
    assert int(given["models"]["size"].removesuffix("G")) > given["startup"]["gigabytes"] >= 600


def test_weights_that_are_converted_while_loading_are_read_whole(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_hub(tmp_path / "hub", monkeypatch)
    for quantization in ("none", "fp8"):
        target = {"model": "Qwen/Qwen3-8B", "quantization": quantization}
        assert values(write(target=target, drafter=None), *HELM)["startup"] == {"gigabytes": 17}


def test_prepare_writes_the_files_that_the_engine_reads(write: Any, tmp_path: Path) -> None:
    """The init container of examples/deploy/dynamo.yaml."""
    assert run(write(), "--backend", "sglang", "--prepare", str(tmp_path / "prepared")).exception is None
    assert (tmp_path / "prepared" / "draft" / "config.json").is_file()


def test_files_of_this_machine_are_refused_or_noted(
    pair: Fields, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = run(write(), *HELM)
    assert noted.exception is None
    assert f"note: target.model: mount {pair['target']['model']} at the same path" in noted.stderr
    (tmp_path / "keys").write_text("one\n")
    line = refusal(write(serving={"api_key_file": str(tmp_path / "keys")}), *HELM)
    assert line.startswith("serving.api_key_file: ")
    assert "secrets.apiKeys.name" in line
    target = Path(pair["target"]["model"])
    (tmp_path / "models").symlink_to(target.parent)
    noted = run(write(target={"model": "models/target"}), *HELM)
    assert f"note: target.model: mount {tmp_path}/models/target at the same path" in noted.stderr
    rendered = yaml.safe_load(noted.stdout)["deployment"]
    assert (rendered["target"]["model"], rendered["serving"]["served_model_name"]) == (
        f"{tmp_path}/models/target",
        "models/target",
    )


def test_a_rendering_is_json_too_and_quiet(write: Any) -> None:
    told = run(write(), *HELM, "--json", "--quiet")
    assert json.loads(told.stdout)[0]["backend"] == "sglang"
    assert "limits.max_batch_size" not in told.stderr
    assert "limits.max_batch_size = 48" in run(write(), *HELM).stderr


@pytest.mark.parametrize("name", BACKENDS)
def test_values_become_manifests(write: Any, name: str, tmp_path: Path) -> None:
    """With the labels by which routers find the pods."""
    path = write(target={"model": "smollm2"}, drafter=None) if name == "torch" else write()
    output = tmp_path / "all.yaml"
    words = ("--render", "manifests", "--backend", name, "--name", "mine", "--output", str(output), *IMAGE)
    assert run(path, *words).exception is None
    documents = list(yaml.safe_load_all(output.read_text()))
    (server,) = [d for d in documents if d["kind"] == "Deployment"]
    assert "Pod" not in {d["kind"] for d in documents}  # `kubectl apply` would start `helm test` beside loading servers
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == backend(name).facts.engine_type
    assert labels["app.kubernetes.io/instance"] == "mine"
    assert not [*tmp_path.glob(".*")]


def test_a_first_look_needs_no_image(write: Any) -> None:
    result = run(write(), "--render", "manifests", "--backend", "sglang")
    (server,) = [d for d in yaml.safe_load_all(result.stdout) if d and d["kind"] == "Deployment"]
    image = server["spec"]["template"]["spec"]["containers"][0]["image"]
    assert f"note: --image is not given: {image} stands in its place" in result.stderr


def test_without_helm_and_where_helm_refuses_it_is_one_line(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--render", "manifests", "--backend", "sglang")
    assert "deployment.role: prefill is one half of a pair" in refusal(write(role="prefill"), *words)
    monkeypatch.setenv("PATH", "/nowhere")
    line = refusal(write(), *words)
    assert line.startswith("helm: not installed")
    assert "--render helm" in line
