"""What a form has no words for is refused in one line, before anything is written; what it can say is all there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from dflash_serve.cli.main import app
from dflash_serve.deploying.dynamo import worker_arguments
from dflash_serve.deploying.workload import Workload
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from tests.support.paper_models import write_paper_drafter, write_paper_target

Fields = dict[str, Any]
WIDE: Fields = {"parallel": {"tensor": 16, "nodes": 2}, "hardware": {"gpu": "b200", "count": 16}}


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


def run(verb: str, path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [verb, str(path), *words])


def refusal(path: Path, *words: str) -> str:
    """The one line of it."""
    error = run("deploy", path, *words).exception
    assert isinstance(error, UserError)
    assert "\n" not in str(error)
    return str(error)


def test_a_problem_of_the_deployment_comes_first_and_nothing_is_written(write: Any, tmp_path: Path) -> None:
    bad = write(speculation={"block_size": 99})
    for form in ("helm", "manifests", "dynamo", "kserve", "compose"):
        line = refusal(bad, "--render", form, "--backend", "sglang", "--output", str(tmp_path / "out.yaml"))
        assert "block_size 99 is larger than the drafter's" in line
    assert [path.name for path in tmp_path.iterdir()] == ["deployment.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "one of --render and --prepare"),
        (["--render", "helm", "--prepare", "/x"], "one of --render and --prepare"),
        (["--render", "nomad"], "there are: helm, manifests, dynamo, kserve, compose"),
        (
            ["--render", "helm", "--backend", "nope"],
            "no backend 'nope'; installed are: sglang, tensorrt-llm, torch, vllm",
        ),
        (["--render", "helm"], "--backend: which engine?; name one: sglang, tensorrt-llm, torch"),
        (["--render", "heml", "--backend", "torch"], "no form 'heml'; did you mean helm?"),
        (["--render", "helm", "--backend", "torch", "--name", "Bad_Name"], "'Bad_Name' is no name for Kubernetes"),
        (
            ["--render", "dynamo", "--backend", "torch"],
            "Dynamo has no such engine; use --backend sglang or tensorrt-llm",
        ),
        (["--render", "helm", "--backend", "torch", "--image", "x/y:latest"], "x/y:latest is not pinned"),
        (["--render", "compose", "--backend", "torch", "--output", f"{__file__}/x.yaml"], "x.yaml: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_one_line(write: Any, words: list[str], said: str) -> None:
    assert said in refusal(write(), *words)


@pytest.mark.parametrize("form", ["compose", "kserve"])
def test_several_nodes_do_not_fit_one_pod(write: Any, form: str) -> None:
    line = refusal(write(**WIDE), "--render", form, "--backend", "sglang")
    assert "parallel.nodes: 2 nodes" in line


def test_half_of_a_pair_is_no_graph(write: Any) -> None:
    line = refusal(write(role="decode"), "--render", "dynamo", "--backend", "sglang")
    assert "role: one half (decode) is not a graph" in line


def test_dynamo_is_given_the_engines_own_flags_but_where_to_listen(write: Any) -> None:
    path = write()
    dry = run("serve", path, "--backend", "sglang", "--dry-run", "--quiet", "--folder", "/prepared").stdout
    words = shlex.split(dry)
    wanted = words[words.index("sglang.launch_server") + 1 :]
    for flag in ("--host", "--port"):
        del wanted[wanted.index(flag) : wanted.index(flag) + 2]
    deployment = Deployment.model_validate(yaml.safe_load(path.read_text()))
    module, arguments, environment = worker_arguments(Workload("x", "sglang", deployment))
    assert module == "dynamo.sglang"
    assert arguments == [*wanted, "--served-model-name", deployment.target.model]
    assert environment == {"DFLASH_SERVE_SPECULATION__WIDTH": "auto"}


def test_dynamo_places_the_nodes_itself(write: Any) -> None:
    path = write(**WIDE)
    text = run("deploy", path, "--render", "dynamo", "--backend", "sglang").stdout
    worker = list(yaml.safe_load_all(text))[1]["spec"]["components"][1]
    assert worker["multinode"] == {"nodeCount": 2}
    container = worker["podTemplate"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "16" in container["args"]
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(container["args"])


def test_a_drafter_that_needs_our_plug_in_is_not_given_to_dynamos_tensorrt_llm(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dynamo.trtllm has no --custom_module_dirs: it would draft with what upstream gets wrong in silence."""
    monkeypatch.setattr("dflash_tensorrt_llm.launch_plan.beyond_built_in", lambda *_: ["a mask embedding of its own"])
    line = refusal(write(hardware={"gpu": "b200"}), "--render", "dynamo", "--backend", "tensorrt-llm")
    assert "needs trtllm-serve's --custom_module_dirs, which dynamo.trtllm does not have" in line


def test_an_init_container_writes_what_the_worker_reads(write: Any, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    path = write()
    assert run("deploy", path, "--backend", "sglang", "--prepare", str(folder)).exception is None
    deployment = Deployment.model_validate(yaml.safe_load(path.read_text()))
    _, arguments, _ = worker_arguments(Workload("x", "sglang", deployment))
    read = arguments[arguments.index("--speculative-draft-model-path") + 1]
    assert (folder / Path(read).relative_to("/prepared") / "config.json").is_file()


def test_a_deployment_with_dollars_survives_compose(write: Any) -> None:
    path = write(target={"model": "smollm2", "revision": "a$HOME"}, drafter=None)
    text = run("deploy", path, "--render", "compose", "--backend", "torch").stdout
    content = yaml.safe_load(text)["configs"]["deployment"]["content"]
    assert yaml.safe_load(content.replace("$$", "$"))["target"]["revision"] == "a$HOME"
    assert "a$$HOME" in content


def test_a_folder_of_this_machine_is_not_in_a_container(
    pair: Fields, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--render", "helm", "--backend", "sglang")
    noted = run("deploy", write(), *words)
    assert noted.exception is None
    assert f"note: target.model: mount {pair['target']['model']} at the same path" in noted.stderr
    target = Path(pair["target"]["model"])
    monkeypatch.chdir(target.parent)
    assert "target.model: target is a folder below this one" in refusal(write(target={"model": "target"}), *words)


def test_a_file_of_keys_of_this_machine_is_refused(write: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    line = refusal(write(serving={"api_key_file": str(tmp_path / "keys")}), "--render", "helm", "--backend", "sglang")
    assert line.startswith("serving.api_key_file: a file of this machine is not in the container")
    assert "secrets.apiKeys.name" in line


@pytest.mark.parametrize("form", ["helm", "compose", "kserve", "dynamo"])
def test_engine_arguments_and_what_clients_see_are_in_every_rendering(write: Any, form: str) -> None:
    more = {"engine_args": {"sglang": {"mem-fraction-static": 0.9}}, "serving": {"served_model_name": "mine"}}
    words = ("--render", form, "--backend", "sglang")
    text = run("deploy", write(**more), *words, "--", "--schedule-conservativeness", "0.3").stdout
    assert "mem-fraction-static: 0.9" in text, "in the deployment's file"
    assert "schedule-conservativeness: '0.3'" in text, "words after -- too"
    assert "served_model_name: mine" in text
    if form == "dynamo":
        arguments = list(yaml.safe_load_all(text))[1]["spec"]["components"][1]
        (container,) = arguments["podTemplate"]["spec"]["containers"]
        said = " ".join(container["args"])
        assert "--mem-fraction-static 0.9 --schedule-conservativeness 0.3" in said
        assert said.endswith("--served-model-name mine")
        assert said.count("--served-model-name") == 1


def test_dynamo_parses_answers_itself(write: Any) -> None:
    line = refusal(write(serving={"reasoning_parser": "qwen3"}), "--render", "dynamo", "--backend", "sglang")
    assert line.startswith("serving.reasoning_parser: Dynamo's frontend parses answers itself")


EIGHT: Fields = {"parallel": {"data": 8}, "hardware": {"gpu": "b200", "count": 8}}


def test_copies_are_sglangs_own_and_replicas_of_the_others(write: Any) -> None:
    path = write(**EIGHT)
    own = yaml.safe_load(run("deploy", path, "--render", "helm", "--backend", "sglang").stdout)
    assert "replicas" not in own
    assert (own["deployment"]["parallel"]["data"], own["deployment"]["hardware"]["count"]) == (8, 8)
    replicas = yaml.safe_load(run("deploy", path, "--render", "helm", "--backend", "tensorrt-llm").stdout)
    assert replicas["replicas"] == 8
    assert "parallel" not in replicas["deployment"]
    assert "count" not in replicas["deployment"]["hardware"], "one GPU each"
    served = list(yaml.safe_load_all(run("deploy", path, "--render", "kserve", "--backend", "tensorrt-llm").stdout))[1]
    assert served["spec"]["predictor"]["minReplicas"] == 8
    graph = list(yaml.safe_load_all(run("deploy", path, "--render", "dynamo", "--backend", "tensorrt-llm").stdout))[1]
    assert [component["replicas"] for component in graph["spec"]["components"]] == [1, 8]


def test_copies_that_are_replicas_have_no_place_in_a_compose_file(write: Any) -> None:
    line = refusal(write(**EIGHT), "--render", "compose", "--backend", "tensorrt-llm")
    assert "parallel.data: 8 copies of the model" in line
    uneven = {"parallel": {"data": 3}, "hardware": {"gpu": "b200", "count": 8}}
    line = refusal(write(**uneven), "--render", "helm", "--backend", "tensorrt-llm")
    assert "8 GPUs (hardware.count) cannot be shared evenly by 3 copies" in line


def test_a_rendering_is_json_too_and_quiet(write: Any) -> None:
    told = run("deploy", write(), "--render", "helm", "--backend", "sglang", "--json", "--quiet")
    assert json.loads(told.stdout)[0]["backend"] == "sglang"
    assert "limits.max_batch_size" not in told.stderr
    assert "limits.max_batch_size = 48" in run("deploy", write(), "--render", "helm", "--backend", "sglang").stderr
