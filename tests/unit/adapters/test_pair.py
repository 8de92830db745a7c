"""A pair is one deployment: each half is launched from it, and is checked against the other one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter.facts import Releases
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.deployment.pair import HALVES, both_halves, half_of
from dflash_serve.errors import UserError
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.unit.adapters.test_promises import adapter, problems

every_pair = pytest.mark.parametrize("engine", ["sglang", "vllm"])
both = pytest.mark.parametrize("role", HALVES)
TWO: dict[str, Any] = {"hardware": {"gpu": "h200", "count": 2}, "parallel": {"tensor": 2}}


def argv(engine: str, fields: dict[str, Any], **more: Any) -> tuple[str, ...]:
    assert problems(engine, fields, **more) == ""
    return adapter(engine).launch(Deployment.model_validate({**fields, **more})).command(Path("/prepared")).argv


def own(engine: str, half: str, **arguments: Any) -> dict[str, Any]:
    return {half: {"engine_args": {engine: arguments}}}


@every_pair
def test_each_half_has_its_own_gpus_and_arguments(engine: str, fields: dict[str, Any]) -> None:
    length = {"sglang": "stream-interval", "vllm": "seed"}[engine]
    size = {"sglang": "--tp-size", "vllm": "--tensor-parallel-size"}[engine]
    pair = {"decode": {"gpus": 4, "engine_args": {engine: {length.replace("-", "_"): 7}}}}
    more = {**TWO, "engine_args": {engine: {length: 3}}, "pair": pair}
    for role, gpus, value in (("prefill", "2", "3"), ("decode", "4", "7")):
        words = argv(engine, fields, role=role, **more)
        assert words[words.index(size) + 1] == gpus
        assert [words[at + 1] for at, word in enumerate(words) if word == f"--{length}"] == [value]


def test_sglangs_halves_are_told_the_way_of_the_kv(fields: dict[str, Any]) -> None:
    for role in HALVES:
        words = " ".join(argv("sglang", fields, role=role, pair={"transfer": "nixl"}))
        assert f" --disaggregation-mode {role} --disaggregation-transfer-backend nixl " in words
    given = {"sglang": {"disaggregation-transfer-backend": "nixl"}}
    said = problems("sglang", fields, role="decode", pair={"transfer": "nixl"}, engine_args=given)
    assert said.endswith("is what dflash-serve sets itself; set pair.transfer")


def test_vllms_halves_produce_and_consume_by_nixl(fields: dict[str, Any]) -> None:
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        words = argv("vllm", fields, role=role, pair={})
        told = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert told == {"kv_connector": "NixlConnector", "kv_role": kv_role}
        assert "--scheduler-cls" not in words, "a half verifies whole blocks"
    assert "exchange K/V by NIXL, not by mooncake" in problems(
        "vllm", fields, role="decode", pair={"transfer": "mooncake"}
    )


@every_pair
@both
def test_a_half_is_checked_against_the_other(engine: str, role: str, fields: dict[str, Any]) -> None:
    other = HALVES[1 - HALVES.index(role)]
    page = {"sglang": "page-size", "vllm": "block-size"}[engine]
    unlike = problems(engine, fields, role=role, pair=own(engine, other, **{page: 64}))
    assert unlike == (
        f"pair.{role}.engine_args.{engine}.{page}: not given on the {role} half, 64 on the {other} half; "
        "give both halves the same: the K/V of one is read by the other"
    )
    assert problems(engine, fields, role=role, pair={}, engine_args={engine: {page: 64}}) == ""
    broken = problems(engine, fields, role=role, pair=own(engine, other, nonsense=1))
    assert broken.startswith(f"engine_args.{engine}.nonsense: the {other} half: ")
    odd = problems(engine, fields, role=role, pair={other: {"gpus": 3}})
    assert f"the {other} half: " in odd
    assert "cannot be split over 3 devices" in odd
    notes = adapter(engine).launch(Deployment.model_validate({**fields, "role": role, "pair": {}})).notes
    assert any(note.startswith(f"checked against the {other} half") for note in notes)


@every_pair
def test_the_same_problem_of_both_halves_is_told_once(engine: str, fields: dict[str, Any]) -> None:
    said = problems(engine, fields, role="prefill", pair={}, speculation={"width": 9})
    assert said.count("width 9 is larger than the block of 8 slots") == 1


@every_pair
@pytest.mark.parametrize(
    ("kv_heads", "gpus", "said"),
    [
        (None, 4, ""),
        (4, 4, "the target has 8 K/V heads and the drafter 4"),
        (None, 16, "target and drafter have 8 K/V heads"),
    ],
)
def test_halves_of_other_sizes_need_kv_heads_that_both_can_share(
    engine: str, kv_heads: int | None, gpus: int, said: str, tmp_path: Path
) -> None:
    drafter = write_paper_drafter(
        tmp_path / "drafter", **({} if kv_heads is None else {"num_key_value_heads": kv_heads})
    )
    models = {"target": {"model": str(write_paper_target(tmp_path / "target"))}, "drafter": {"model": str(drafter)}}
    nodes = {"nodes": 2} if gpus > 8 else {}
    found = problems(engine, models, **TWO, role="prefill", pair={"decode": {"gpus": gpus, **nodes}})
    assert said in found
    assert bool(found) == bool(said)


@every_pair
def test_a_pair_is_started_half_by_half(engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert problems(engine, fields, pair={}) == (
        "pair: a pair of servers, and this command starts one of its halves; "
        "add --role prefill or --role decode, or leave pair out"
    )
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump({**fields, "pair": own(engine, "decode", seed=1) if engine == "vllm" else {}}))
    words = ["serve", str(file), "--backend", engine, "--dry-run", "--json", "--role", "decode"]
    flag = {"sglang": "--stream-interval", "vllm": "--seed"}[engine]
    told = json.loads(CliRunner().invoke(app, [*words, "--", flag, "5"]).stdout)
    assert told["problems"] == []
    assert told["command"][told["command"].index(flag) + 1] == "5", "the command line beats the half's own arguments"
    refused = CliRunner().invoke(app, [*words[:-1], "encode"])
    assert str(refused.exception) == (
        "command line: role: Input should be 'whole', 'prefill' or 'decode' (given: 'encode')"
    )


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
@pytest.mark.parametrize("drafter", [True, False])
def test_other_engines_refuse_a_pair(engine: str, drafter: bool, fields: dict[str, Any]) -> None:
    fields = {**fields, **({} if drafter else {"drafter": None})}
    for role in ("whole", "decode"):
        said = problems(engine, fields, role=role, pair={"decode": {"replicas": 2}})
        assert sum(line.startswith("pair: ") for line in said.splitlines()) == 1


def test_a_half_of_impossible_gpus_is_refused(fields: dict[str, Any]) -> None:
    deployment = Deployment.model_validate(
        {**fields, "hardware": {"count": 4}, "parallel": {"tensor": 2, "data": 2}, "pair": {"decode": {"gpus": 3}}}
    )
    with pytest.raises(UserError, match=r"pair.decode.gpus: 3 GPUs, where 4 \(hardware.count\) are 2"):
        half_of(deployment, "decode")
    half = deployment.model_copy(update={"role": "prefill"})
    assert both_halves(half) == (half,)


def test_whole_experts_stay_whole_on_another_number_of_gpus(fields: dict[str, Any]) -> None:
    deployment = Deployment.model_validate(
        {**fields, "hardware": {"count": 4}, "parallel": {"tensor": 4, "expert": 4}, "pair": {"decode": {"gpus": 8}}}
    )
    prefill, decode = (half_of(deployment, role) for role in HALVES)
    assert (prefill.parallel.expert, decode.parallel.expert, decode.parallel.tensor) == (4, 8, 8)


def test_variables_and_secrets_reach_into_the_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("target: {model: x}\npair: {prefill: {replicas: 2}, decode: null}")
    monkeypatch.setenv("DFLASH_SERVE_PAIR__DECODE__GPUS", "4")
    pair = load_deployment(file).pair
    assert pair is not None
    assert (pair.prefill.replicas, pair.decode.gpus) == (2, 4)
    monkeypatch.setenv("DFLASH_SERVE_PAIR__DECODE__GPU", "4")
    with pytest.raises(UserError, match="DFLASH_SERVE_PAIR__DECODE__GPU"):
        load_deployment(file)
    monkeypatch.undo()
    file.write_text("target: {model: x}\npair: {prefill: {engine_args: {sglang: {api-key: s3cret}}}}")
    with pytest.raises(UserError, match=r"pair.prefill.engine_args.sglang.api-key: a secret here") as caught:
        load_deployment(file)
    assert "s3cret" not in str(caught.value)


def test_a_decode_half_without_free_host_memory_is_refused_where_it_would_start(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_sglang import checks

    class Free:
        available = 9 << 30

    class Psutil:
        virtual_memory = Free

    monkeypatch.setattr(Releases, "installed", lambda self: "0.5.23")
    monkeypatch.setattr(Releases, "import_problem", lambda self: None)
    monkeypatch.setattr(checks, "import_module", lambda name: Psutil)
    for role, more, count in (
        ("decode", {}, 1),
        ("prefill", {}, 0),
        ("decode", own("sglang", "decode", **{"disaggregation-decode-retraction-backup": "cpu_tensor"}), 0),
    ):
        launch = adapter("sglang").launch(Deployment.model_validate({**fields, "role": role, "pair": more}))
        said = [str(problem) for problem in launch.problems_here]
        assert len(said) == count
        assert all("9.0 GiB of host memory are free" in line for line in said)
