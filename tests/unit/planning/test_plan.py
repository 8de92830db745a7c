"""`dflash-serve plan`, from question to files: by the roofline, which every machine has; one plan by the tables."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.common.terminal import say
from dflash_serve.deployment.gpus import GPUS, Gpu
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from dflash_serve.planning import question, step_times
from dflash_serve.planning.step_times import Pair, Roofline, Split, StepTimes
from dflash_serve.speculation.costs import CostModel
from tests.support.golden_deployments import hub
from tests.support.planned import hybrid_target
from tests.unit.tensorrt_llm.published_targets import TARGETS

__all__ = ["hub"]
pytestmark = pytest.mark.usefixtures("hub")
PAIR = ("--target", "Qwen/Qwen3-8B", "--drafter", "z-lab/Qwen3-8B-DFlash-b16")
LENGTH = ("--acceptance-length", "6.5")
LIBRARY = step_times.tables_installed()


@pytest.fixture(autouse=True)
def by_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "tables_installed", lambda: False)


def plan(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words, "--output", str(folder), "--overwrite"])


def answer(folder: Path, *words: str) -> dict[str, Any]:
    done = plan(folder, *words, "--json")
    assert done.exception is None, done.exception
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, hub: None) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "tables_installed", lambda: False)
        made = tmp_path_factory.mktemp("plan")
        done = plan(made, *PAIR, *LENGTH, "--gpu", "h200", "--count", "2", "--slo-interactivity", "60")
        assert done.exception is None, done.exception
        (made / "said.txt").write_text(done.stdout)
    return made


def test_three_lines_say_what_to_run_what_it_gives_and_where_that_comes_from(folder: Path) -> None:
    told = json.loads((folder / "plan.json").read_text())
    (run, gives, trust), batch = told["verdict"], told["chosen"]["batch"]
    assert re.match(r"Run Qwen/Qwen3-8B on H200 with TP 1, 2 copies on 2 GPUs, width auto \(about \d+ at", run)
    assert run.endswith(f"at most {batch} requests at once on each copy, {2 * batch} on all 2.")
    assert "tokens/s/GPU (" in gives
    assert "With the same split and batch plain decoding gives" in gives
    best = r"The best setting of plain decoding that meets the limits gives [\d,]+ \(TP \d, batch \d+\)"
    assert re.search(best, gives)
    assert "In plain decoding, the fastest point is" in gives
    assert (
        "Nothing was run: τ 6.50 tokens a step, given by --acceptance-length; step times from roofline of the" in trust
    )
    assert "At equal batch, speculation with a fixed width of 16 is faster than plain decoding at every" in trust
    said = (folder / "said.txt").read_text()
    assert "the operator tables are not installed (pip install 'dflash-serve[plan]')" in said


def test_the_deployment_is_one_that_serve_takes(folder: Path) -> None:
    path = folder / "deployment.yaml"
    chosen = json.loads((folder / "plan.json").read_text())["chosen"]
    deployment = load_deployment(path)
    assert deployment.limits.max_batch_size == 2 * chosen["batch"], "the whole deployment's, over both copies"
    assert "# limits.max_batch_size is the number of requests at once on all copies together." in path.read_text()
    assert (deployment.parallel.data, deployment.hardware.gpu, deployment.hardware.count) == (2, "h200", 2)
    done = CliRunner().invoke(app, ["serve", str(path), "--backend", "sglang", "--dry-run", "--quiet"])
    assert done.exit_code == 0, done.stdout
    assert "--max-running-requests" in done.stdout


def test_the_cost_table_and_the_points_are_whole(folder: Path) -> None:
    cost = CostModel.model_validate_json((folder / "costs.json").read_text())
    assert cost.of_step(8, 8) > cost.of_step(8, 0)
    told = json.loads((folder / "plan.json").read_text())
    for row in told["points"]:
        shares = sum(row[f"share_{name}"] for name in ("measured", "interpolated", "roofline", "constants"))
        assert shares == pytest.approx(1, abs=0.001)
        assert row["lowest"] < row["tokens_per_s_per_gpu"] < row["highest"]
        if row["variant"] == "off":
            assert (row["width"], row["acceptance_length"]) == (1, 1.0)


def test_auto_is_nowhere_slower_than_off_or_fixed(folder: Path) -> None:
    points = json.loads((folder / "plan.json").read_text())["points"]
    rate = {(p["variant"], p["tensor"], p["batch"]): p["tokens_per_s_per_gpu"] for p in points}
    for (variant, tensor, batch), value in rate.items():
        if variant == "auto":
            assert value >= 0.97 * max(rate["off", tensor, batch], rate["fixed 16", tensor, batch])


def test_what_to_do_next_can_be_typed(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    commands = re.findall(r"^next: (?:\w+=\S+ )?dflash-serve (.*)$", said, re.MULTILINE)
    assert [shlex.split(command)[0] for command in commands] == ["serve", "bench", "plan"]
    for command in commands:
        verb, *words = shlex.split(command)
        parsed = CliRunner().invoke(app, [verb, *words, "--help"])
        assert parsed.exit_code == 0
        known = parsed.stdout
        assert all(word in known for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("backend", "gpu", "named"),
    [
        ("sglang", "b200", True),
        ("vllm", "b200", False),
        ("vllm", "rtx-pro-6000", True),
        ("tensorrt-llm", "b200", False),
    ],
)
def test_the_cost_table_is_named_where_a_width_follows_it(tmp_path: Path, backend: str, gpu: str, named: bool) -> None:
    """On a B200 vLLM measures its own costs; TensorRT-LLM's width is the whole block."""
    said = plan(tmp_path, *PAIR, *LENGTH, "--gpu", gpu, "--backend", backend).stdout
    assert (f"next: DFLASH_SERVE_COST_TABLE={tmp_path}/costs.json dflash-serve serve" in said) is named
    assert re.search("^next: .*dflash-serve serve", said, re.MULTILINE)


def test_without_acceptance_it_is_a_band(tmp_path: Path) -> None:
    told = answer(tmp_path, *PAIR, "--gpu", "b200")
    assert [each["name"] for each in told["acceptances"]] == ["τ 3.00", "τ 4.50", "τ 6.00"]
    low, high = told["chosen"]["lowest"], told["chosen"]["highest"]
    assert low < 0.6 * high
    assert "τ 3.00 to 6.00 tokens a step, no --task was given: a band, not a prediction" in told["verdict"][2]
    assert "published for this drafter are gsm8k 6.54, math500 7.87," in told["verdict"][2]


def test_where_plain_decoding_ends_there_is_no_ratio(tmp_path: Path) -> None:
    told = answer(tmp_path, *PAIR, *LENGTH, "--gpu", "b200", "--slo-interactivity", "500")
    assert told["equal_interactivity_ratio"] is None
    assert "No setting of plain decoding meets the limits: the fastest point is" in told["verdict"][1]
    assert told["plain_fastest"]["tokens_per_s_per_user"] < 500


def test_a_drafter_that_was_not_named_is_assumed_and_no_deployment_written(tmp_path: Path) -> None:
    done = plan(tmp_path, "--target", "Qwen/Qwen3-8B", "--task", "mt-bench", "--gpu", "h100")
    assert "note: No drafter was named: one of 5 layers" in done.stdout
    assert "τ 4.24 tokens a step, published for z-lab/Qwen3-8B-DFlash-b16 with Qwen/Qwen3-8B at MT-Bench" in done.stdout
    assert "the drafter of this plan is another, assumed one" in done.stdout
    assert "next: name --drafter" in done.stdout
    assert not (tmp_path / "deployment.yaml").exists()


def test_vllm_s_copies_are_replicas_and_tensorrt_llm_has_no_auto(tmp_path: Path) -> None:
    words = (*PAIR, *LENGTH, "--gpu", "b200", "--count", "4", "--slo-interactivity", "60")
    assert plan(tmp_path / "v", *words, "--backend", "vllm").exception is None
    assert yaml.safe_load((tmp_path / "v" / "deployment.yaml").read_text())["hardware"] == {"gpu": "b200"}
    batch = json.loads((tmp_path / "v" / "plan.json").read_text())["chosen"]["batch"]
    text = (tmp_path / "v" / "deployment.yaml").read_text()
    assert yaml.safe_load(text)["limits"] == {"max_batch_size": batch}
    assert f"# This is one of 4 servers alike, each with at most {batch} requests at once." in text
    assert "Set `replicas: 4` in the values that `dflash-serve deploy` writes." in text
    told = answer(tmp_path / "t", *words, "--backend", "tensorrt-llm")
    assert {point["variant"] for point in told["points"]} == {"off", "fixed 16"}
    assert any(
        "`width: auto` was not compared: tensorrt-llm verifies whole blocks; give" in caution
        for caution in told["cautions"]
    )


def test_a_pair_would_have_the_more_prefill_servers_the_longer_the_prompts(tmp_path: Path) -> None:
    """There are 8 copies, at least one of each kind; engines without pairs are told nothing."""
    words, found = (*PAIR, *LENGTH, "--gpu", "b200", "--count", "8", "--tensor", "1"), []
    for isl, osl in ((8000, 100), (1000, 1000), (100, 8000)):
        told = answer(tmp_path, *words, "--isl", str(isl), "--osl", str(osl))["cautions"]
        (line,) = (caution for caution in told if caution.startswith("As a pair, about "))
        assert line.endswith("No GPU has checked this estimate.")
        prefill, decode = (int(line.split(word)[0].split()[-1]) for word in (" of the 8 copies", " decode:"))
        assert prefill + decode == 8
        found.append(prefill)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] >= 1
    told = answer(tmp_path, *words, "--backend", "tensorrt-llm")["cautions"]
    assert not [caution for caution in told if caution.startswith("As a pair")]


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_pair_that_is_asked_for_is_written_and_its_halves_can_be_served(tmp_path: Path, backend: str) -> None:
    words = (*PAIR, *LENGTH, "--gpu", "b200", "--count", "8", "--tensor", "1", "--isl", "8000", "--osl", "100")
    done = plan(tmp_path, *words, "--pair", "--backend", backend)
    assert done.exception is None, done.exception
    deployment = load_deployment(tmp_path / "deployment.yaml")
    told = json.loads((tmp_path / "plan.json").read_text())
    (line,) = (caution for caution in told["cautions"] if caution.startswith("As a pair, about "))
    assert "a pair's is not predicted" in line
    assert "tokens/s of prompts on one" in line
    assert deployment.pair is not None
    halves = deployment.pair.prefill.replicas, deployment.pair.decode.replicas
    assert line.startswith(f"As a pair, about {halves[0]} of the 8 copies would prefill and {halves[1]} decode")
    assert sum(halves) == 8
    batch = told["chosen"]["batch"]
    assert halves[1] == 1
    assert told["verdict"][0].endswith(f"at most {batch} requests at once on the one copy that decodes.")
    assert (deployment.hardware.count, deployment.parallel.data) == (1, 1)
    assert {point["variant"] for point in told["points"]} == {"off", "fixed 16"}
    for role in ("prefill", "decode"):
        assert f"next: dflash-serve serve {tmp_path}/deployment.yaml --backend {backend} --role {role}" in done.stdout
    assert not [caution for caution in told["cautions"] if "`serve` would refuse" in caution]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--count", "1"), "a pair needs two copies of the model that fit"),
        (("--count", "2", "--backend", "tensorrt-llm"), "tensorrt-llm serves no pair"),
    ],
)
def test_a_pair_that_cannot_be_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = plan(tmp_path, *PAIR, *LENGTH, "--gpu", "b200", *words, "--pair")
    assert said in str(done.exception)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(("gpu", "count", "copies"), [("b200", 16, 8), ("gb200", 12, 4), ("b200", 12, 6)])
def test_the_copies_of_one_sglang_server_stay_within_a_node(tmp_path: Path, gpu: str, count: int, copies: int) -> None:
    told = answer(tmp_path, *PAIR, *LENGTH, "--gpu", gpu, "--count", str(count), "--tensor", "1")
    assert not any("`serve` would refuse" in caution for caution in told["cautions"])
    made = load_deployment(tmp_path / "deployment.yaml")
    assert (made.parallel.data, made.hardware.count) == (copies, copies)
    text = (tmp_path / "deployment.yaml").read_text()
    assert f"servers alike, each with at most {made.limits.max_batch_size} requests at once." in text
    assert f"Set `replicas: {count // copies}` in the values" in text


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_limit_of_requests_that_is_given_bounds_the_whole_plan(tmp_path: Path, backend: str) -> None:
    given = tmp_path / "given.yaml"
    told = {"target": {"model": PAIR[1]}, "drafter": {"model": PAIR[3]}, "hardware": {"gpu": "h200", "count": 8}}
    given.write_text(yaml.safe_dump({**told, "limits": {"max_batch_size": 20}}))
    answered = answer(tmp_path / "out", str(given), *LENGTH, "--backend", backend)
    assert {point["batch"] * 8 // point["tensor"] > 20 for point in answered["points"]} == {False}
    chosen = answered["chosen"]
    assert chosen["batch"] * 8 // chosen["tensor"] <= 20
    made = load_deployment(tmp_path / "out" / "deployment.yaml")
    assert made.limits.max_batch_size == chosen["batch"] * made.parallel.data
    given.write_text(yaml.safe_dump({**told, "limits": {"max_batch_size": 4}}))
    answered = answer(tmp_path / "out", str(given), *LENGTH, "--backend", backend)
    assert {point["tensor"] for point in answered["points"]} == {2, 4, 8}
    assert "limits.max_batch_size leaves less than one request to a copy: TP 1." in answered["cautions"]
    error = plan(tmp_path / "none", str(given), *LENGTH, "--tensor", "1").exception
    assert "limits.max_batch_size: not one request for each copy of the model; give at least 8" in str(error)


def test_without_its_states_for_every_slot_a_hybrid_target_answers_more_requests(tmp_path: Path) -> None:
    low = ("--acceptance-length", "2.5")
    told = answer(tmp_path, "--target", str(hybrid_target(tmp_path / "hybrid")), *low, "--gpu", "h200")
    room = told["requests_that_fit"]["TP 1"]
    assert told["chosen"]["batch"] > room["speculative"]
    assert room["plain"] > 5 * room["speculative"]
    most = {variant: max(p["batch"] for p in told["points"] if p["variant"] == variant) for variant in ("off", "auto")}
    assert (most["off"], most["auto"]) == (min(512, room["plain"]), room["speculative"])
    assert re.search(r"Speculation does not pay here: its best gives [\d,]+ \(TP 1, batch", told["verdict"][1])
    said = f"TP 1 has room for {room['speculative']} requests at once, {room['plain']} without a drafter."
    assert any(caution.endswith(said) for caution in told["cautions"])


def test_what_holds_of_several_splits_is_said_once(tmp_path: Path) -> None:
    told = answer(tmp_path, "--target", "moonshotai/Kimi-K2.5", *LENGTH, "--gpu", "b300", "--count", "4")
    assert "Weights leave no room for one request's K/V: TP 1; TP 2; TP 2, EP 2." in told["cautions"]
    roofline = [each for each in told["cautions"] if each.startswith("Roofline: ")]
    assert [each.rpartition(": ")[2] for each in roofline] == ["TP 4; TP 4, EP 4."]


def test_splits_that_cut_the_blocks_of_fp8_experts_are_no_choice(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    recipe = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # six blocks: 768 rows
    config = {**TARGETS["Qwen/Qwen3-Coder-30B-A3B-Instruct"], "quantization_config": recipe}
    (target / "config.json").write_text(json.dumps(config))
    told = answer(tmp_path / "out", "--target", str(target), *LENGTH, "--gpu", "b200", "--count", "8")
    assert [*told["requests_that_fit"]] == ["TP 1", "TP 2", "TP 2, EP 2", "TP 4, EP 4", "TP 8, EP 8"]


def test_splits_without_prices_of_their_own_are_left_out_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roofline promises more than measured tables do."""

    def priced(pair: Pair, on: Gpu, split: Split, *_: object) -> tuple[StepTimes, str | None]:
        return Roofline(pair, on, split), "no row" if split.tensor == 2 else None

    monkeypatch.setattr(question, "priced", priced)
    told = answer(tmp_path, *PAIR, *LENGTH, "--gpu", "b200", "--count", "4")
    assert [*told["requests_that_fit"]] == ["TP 1", "TP 4"]
    assert "Left out beside splits that the tables price: no row: TP 2." in told["cautions"]


def test_parallelism_that_no_plan_has_is_refused(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    told = {"target": {"model": PAIR[1]}, "hardware": {"gpu": "b200", "count": 4}}
    for name, value in {"pipeline": 2, "attention_data": True, "nodes": 2}.items():
        given.write_text(yaml.safe_dump({**told, "parallel": {"tensor": 2, name: value}}))
        error = plan(tmp_path / "out", str(given), *LENGTH).exception
        assert str(error).startswith(f"parallel.{name}: this is not planned for; leave it out")


def test_copies_that_are_given_leave_the_splits_that_make_them(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    told = {"target": {"model": PAIR[1]}, "hardware": {"gpu": "b200", "count": 8}}
    given.write_text(yaml.safe_dump({**told, "parallel": {"data": 4}}))
    assert {point["tensor"] for point in answer(tmp_path / "a", str(given), *LENGTH)["points"]} == {2}
    given.write_text(yaml.safe_dump({**told, "parallel": {"data": 3}}))
    error = plan(tmp_path / "b", str(given), *LENGTH).exception
    assert "TP 1 makes 8 copies on 8 GPUs, and parallel.data is 3" in str(error)


def test_the_kind_of_gpu_may_be_written_in_capitals(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text(yaml.safe_dump({"target": {"model": PAIR[1]}, "hardware": {"gpu": "H200"}}))
    assert answer(tmp_path / "a", str(given), *LENGTH)["question"]["gpu"] == "h200"
    assert answer(tmp_path / "b", *PAIR, *LENGTH, "--gpu", "B200")["question"]["gpu"] == "b200"


def test_requests_are_as_long_as_target_and_limits_allow(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    limited = {"target": {"model": PAIR[1]}, "limits": {"max_model_len": 4096}}
    given.write_text(yaml.safe_dump(limited))
    words = (str(given), *LENGTH, "--gpu", "b200", "--isl")
    assert plan(tmp_path / "a", *words, "3072").exception is None
    assert "exceed limits.max_model_len, 4096; give 4096 together" in str(
        plan(tmp_path / "b", *words, "3073").exception
    )
    coder = ("--target", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "--drafter", "z-lab/Qwen3-Coder-30B-A3B-DFlash")
    error = plan(tmp_path / "b", *coder, *LENGTH, "--gpu", "b200", "--isl", "50000").exception
    assert "exceed the positions of the drafter, 40960" in str(error), "the target has 262144"
    given.write_text(yaml.safe_dump({**limited, "limits": {"max_model_len": 50000}}))
    assert "50000 is more than the target's 40960 positions" in str(plan(tmp_path / "b", *words, "8").exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), r"which GPU\?"),
        (("--gpu", "b20"), "nothing is known of a GPU 'b20'; there are: a100, l40s, h100, h200, b200,"),
        (("--gpu", "none"), "a CPU is not planned for"),
        (("--gpu", "B20"), "nothing is known of a GPU 'b20'; there are: a100, l40s, h100, h200, b200,"),
        (("--gpu", "b200", "--tensor", "3"), r"TP 3 does not divide 1 GPU; use 1; more GPUs \(--count\) allow more$"),
        (("--gpu", "b200", "--tensor", "3", "--count", "8"), "TP 3 does not divide 8 GPUs; use 1 or 2 or 4 or 8$"),
        (("--gpu", "gb200", "--tensor", "3", "--count", "8"), "TP 3 does not divide 8 GPUs; use 1 or 2 or 4$"),
        (("--gpu", "b200", "--tensor", "3", "--count", "3"), "32 attention heads cannot be split over 3 devices"),
        (
            ("--gpu", "b200", "--isl", "100000", "--osl", "100000"),
            "prompts of 100000 and answers of 100000 tokens exceed the positions of .*, 40960; give 40960 together",
        ),
        (("--gpu", "b200", "--tensor", "16", "--count", "16"), "TP 16 is more than the 8 GPUs of a node; use 1 or 2"),
        (("--gpu", "b200", "--expert", "8", "--count", "8"), "has no experts to share out over 8 GPUs; leave it"),
        (("--gpu", "b200", "--acceptance-length", "17"), "17 is no acceptance length of a block of 16"),
        (("--gpu", "b200", "--acceptance-length", "4", "--task", "gsm8k"), "acceptance is given twice"),
        (("--gpu", "a6000"), f"'a6000'; there are: {', '.join(GPUS)}$"),
        (("--gpu", "b200", "--methods", " ,"), "--methods: no method is named; use some of off,dflash,"),
        (("--gpu", "b200", "--task", "gsm9"), "no acceptance was published for .* at this task; there are: aime25"),
        (("--gpu", "b200", "--backend", "torch"), "nothing is known of how long torch takes"),
        (("--gpu", "b200", "--slo-interactivity", "9000"), r"gives 9000 tokens/s/user; the nearest that is met"),
        (("--gpu", "b200", "--slo-ttft", "1"), r"first token after 1 ms; the nearest that is met is --slo-ttft \d+"),
    ],
)  # fmt: skip
def test_a_bad_question_gets_one_line_and_writes_nothing(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    error = plan(tmp_path / "out", *PAIR, *words).exception
    assert isinstance(error, UserError)
    assert re.search(said, str(error)), str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"num_attention_heads": None}, {"intermediate_size": -5}])
def test_sizes_that_no_drafter_can_have_are_one_line(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TARGETS["Qwen/Qwen3-8B"], **wrong}))
    error = plan(tmp_path / "out", "--target", str(tmp_path), *LENGTH, "--gpu", "b200").exception
    assert isinstance(error, UserError)
    assert "no drafter has the sizes of this target" in str(error)


def test_experts_of_which_a_token_uses_an_unknown_number_are_one_line(tmp_path: Path) -> None:
    """Otherwise no expert would be read: a 30B-A3B target on an H100 took less time than its memory can give."""
    sizes = {**TARGETS["Qwen/Qwen3-Coder-30B-A3B-Instruct"], "num_experts_per_tok": None}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    error = plan(tmp_path / "out", "--target", str(tmp_path), *LENGTH, "--gpu", "h100").exception
    assert "names 128 experts, and not how many of them a token uses; add num_experts_per_tok" in str(error)


def test_a_target_whose_sizes_of_state_are_unknown_is_planned_for(tmp_path: Path) -> None:
    sizes = {**TARGETS["Qwen/Qwen3-8B"], "layer_types": 36 * ["linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert plan(tmp_path / "out", "--target", str(tmp_path), *LENGTH, "--gpu", "b200").exception is None


@pytest.mark.parametrize("backend", ["sglang", "vllm", "tensorrt-llm"])
def test_the_deployment_has_no_more_positions_than_the_drafter(tmp_path: Path, backend: str) -> None:
    """The target has 262144; every engine refuses as many beside this drafter."""
    pair = ("--target", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "--drafter", "z-lab/Qwen3-Coder-30B-A3B-DFlash")
    told = answer(tmp_path, *pair, *LENGTH, "--gpu", "b200", "--backend", backend)
    assert not any("`serve` would refuse" in caution for caution in told["cautions"])
    assert any(caution.startswith("limits.max_model_len is set to 40960") for caution in told["cautions"])
    assert load_deployment(tmp_path / "deployment.yaml").limits.max_model_len == 40960


def test_a_plan_is_not_written_over_unless_that_is_asked_for(folder: Path) -> None:
    before = (folder / "plan.json").read_text()
    words = ["plan", *PAIR, *LENGTH, "--gpu", "b300", "--output", str(folder)]
    error = CliRunner().invoke(app, words).exception
    assert str(error) == f"--output {folder}: it has a plan; give another folder, or --overwrite"
    assert (folder / "plan.json").read_text() == before


def test_a_plan_that_replaces_another_leaves_none_of_its_files(tmp_path: Path) -> None:
    assert plan(tmp_path, *PAIR, *LENGTH, "--gpu", "b200").exception is None
    assert (tmp_path / "deployment.yaml").exists()
    assert plan(tmp_path, *PAIR[:2], *LENGTH, "--gpu", "b200").exception is None
    assert not (tmp_path / "deployment.yaml").exists(), "it describes the first plan"


def test_the_table_fits_sixty_columns_and_is_whole_where_it_is_piped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from dflash_serve.cli import plan as verb

    printed: list[Any] = []
    monkeypatch.setattr(Console, "print", lambda self, table: printed.append(table))
    done = plan(folder.parent / "table", *PAIR, *LENGTH, "--gpu", "h200", "--count", "8")
    monkeypatch.undo()
    assert done.exception is None
    Console(width=60).print(*printed)
    narrow = capsys.readouterr().out
    Console(width=verb.UNCUT).print(*printed)
    assert narrow.split() == capsys.readouterr().out.split()
    assert "…" not in (folder / "said.txt").read_text() + narrow


def test_a_terminal_gets_lines_that_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "note: " + "a-word-of-twenty-four-ch " * 6
    monkeypatch.setenv("COLUMNS", "60")
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda seen=is_terminal: seen)
        say(line.strip())
        lines = capsys.readouterr().out.splitlines()
        assert (max(map(len, lines)) <= 60, len(lines) > 1) == (is_terminal, is_terminal)
        assert " ".join(lines).split() == line.split()


def test_the_chosen_point_stands_in_the_table(folder: Path) -> None:
    chosen = json.loads((folder / "plan.json").read_text())["chosen"]
    row = rf"TP {chosen['tensor']} +{chosen['batch']} +{chosen['width']} +{chosen['tokens_per_s_per_gpu']:,.0f} "
    assert re.search(row, (folder / "said.txt").read_text())


@pytest.mark.parametrize("limit", [("--slo-interactivity", "9000"), ("--slo-ttft", "1")])
def test_the_nearest_that_is_met_is_met(limit: tuple[str, str], tmp_path: Path) -> None:
    words = (*PAIR, *LENGTH, "--gpu", "b200")
    error = str(plan(tmp_path / "a", *words, *limit).exception)
    found = re.search(rf"({limit[0]}) (\d+)", error)
    assert found is not None
    assert plan(tmp_path / "b", *words, *found.groups()).exception is None


@pytest.mark.skipif(not LIBRARY, reason="pip install 'dflash-serve[plan]'")
def test_a_plan_by_the_tables_says_how_much_of_a_step_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "tables_installed", lambda: LIBRARY)
    told = answer(tmp_path, *PAIR, *LENGTH, "--gpu", "b200", "--slo-interactivity", "50")
    assert told["basis"].startswith("operator tables of aiconfigurator-core 0.12.0")
    assert told["chosen"]["share_measured"] > 0.7
    assert 15_000 < told["chosen"]["tokens_per_s_per_gpu"] < 25_000
