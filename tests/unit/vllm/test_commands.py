"""The command and the draft folder that the vLLM backend writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.reader import open_checkpoint
from dflash_serve.deployment import COST_TABLE, SURVIVAL, Deployment, given_survival
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_vllm import VLLMBackend
from dflash_vllm.schedule import every_width, static_schedule
from tests.support.paper_models import write_paper_drafter, write_paper_target


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def flags(fields: dict[str, Any], folder: Path, **more: Any) -> dict[str, str]:
    """Flag -> value; "" where it takes none."""
    argv = VLLMBackend().command(Deployment.model_validate({**fields, **more}), folder).argv[5:]
    after = [*argv[1:], "--"]
    return {
        word: "" if next_word.startswith("--") else next_word
        for word, next_word in zip(argv, after, strict=True)
        if word.startswith("--")
    }


def speculative(fields: dict[str, Any], folder: Path, **more: Any) -> Any:
    return json.loads(flags(fields, folder, **more)["--speculative-config"])


def test_vllm_counts_no_anchor(fields: dict[str, Any], tmp_path: Path) -> None:
    assert speculative(fields, tmp_path)["num_speculative_tokens"] == 7
    assert speculative(fields, tmp_path, speculation={"block_size": 4})["num_speculative_tokens"] == 3


def test_what_clients_see_is_translated(fields: dict[str, Any], tmp_path: Path) -> None:
    serving = {"served_model_name": "m", "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    found = flags(fields, tmp_path, serving=serving)
    assert found["--served-model-name"] == "m"
    assert found["--reasoning-parser"] == "qwen3"
    assert found["--tool-call-parser"] == "hermes"
    assert "--enable-auto-tool-choice" in found


@pytest.mark.parametrize(
    ("width", "schedule"),
    [(8, None), (3, [[1, 256, 2]]), ("auto", [[1, 1, 7], [2, 2, 3], [3, 3, 1], [4, 256, 0]])],
)
def test_a_whole_block_needs_no_schedule_and_auto_lists_every_width(
    fields: dict[str, Any], tmp_path: Path, width: object, schedule: object
) -> None:
    found = speculative(fields, tmp_path, speculation={"width": width})
    assert found.get("num_speculative_tokens_per_batch_size") == schedule
    assert ("--scheduler-cls" in flags(fields, tmp_path, speculation={"width": width})) is (width == "auto")


@pytest.mark.parametrize("batch", [1, 2, 3, 32])
def test_every_listed_width_gets_a_batch_size_because_graphs_are_captured_of_those(
    fields: dict[str, Any], tmp_path: Path, batch: int
) -> None:
    found = speculative(fields, tmp_path, limits={"max_batch_size": batch})
    rows = found.get("num_speculative_tokens_per_batch_size", [[1, batch, 7]])
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1][1] == batch
    assert rows[0][2] == 7
    assert batch == 1 or rows[-1][2] == 0


def test_a_schedule_falls_with_the_batch() -> None:
    assert every_width((1, 2, 8), 16) == [[1, 1, 7], [2, 2, 1], [3, 16, 0]]


def test_drafted_slots_have_rows_of_their_own(fields: dict[str, Any], tmp_path: Path) -> None:
    found = flags(fields, tmp_path, limits={"max_num_tokens": 512, "max_batch_size": 16})
    assert (found["--max-num-scheduled-tokens"], found["--max-num-batched-tokens"]) == ("512", str(512 + 16 * 7))


@pytest.mark.parametrize("gpu", ["h100", "b200", None])
def test_a_drafter_inherits_neither_the_targets_keys_and_values_nor_its_attention(
    fields: dict[str, Any], tmp_path: Path, gpu: str | None
) -> None:
    found = speculative(fields, tmp_path, hardware={"gpu": gpu}, kv_cache={"dtype": "fp8"})
    assert (found["kv_cache_dtype"], found["attention_backend"]) == ("bfloat16", "FLASH_ATTN")
    assert flags(fields, tmp_path, hardware={"gpu": gpu}, kv_cache={"dtype": "fp8"})["--kv-cache-dtype"] == "fp8"


def test_a_cpu_computes_in_float32_with_its_own_attention_and_in_turns(fields: dict[str, Any], tmp_path: Path) -> None:
    found = flags(fields, tmp_path, hardware={"gpu": "none"})
    assert found["--dtype"] == "float32"
    assert "--enforce-eager" in found
    assert found["--scheduler-cls"] == "dflash_vllm.plugin.scheduler.WidthScheduler"
    assert "attention_backend" not in json.loads(found["--speculative-config"])
    assert flags(fields, tmp_path)["--scheduler-cls"] == "dflash_vllm.plugin.scheduler.AsyncWidthScheduler"


def test_acceptance_is_the_exact_one(fields: dict[str, Any], tmp_path: Path) -> None:
    found = speculative(fields, tmp_path)
    assert (found["draft_sample_method"], found["rejection_sample_method"]) == ("greedy", "standard")


def test_a_cached_prompts_last_block_is_used(fields: dict[str, Any], tmp_path: Path) -> None:
    assert speculative(fields, tmp_path)["disable_eagle_block_drop"] is True


@pytest.mark.parametrize("dialect", ["speculators", "modelopt"])
def test_the_draft_folder_is_zlabs_form_with_every_key(fields: dict[str, Any], tmp_path: Path, dialect: str) -> None:
    from dflash_serve.checkpoint.reader import read_config
    from tests.support.tiny import write_tiny_drafter

    config, _ = read_config(fields["drafter"]["model"])
    other = write_tiny_drafter(tmp_path / dialect, config, dialect=dialect)
    deployment = Deployment.model_validate({**fields, "drafter": {"model": str(other)}})
    VLLMBackend().prepare(deployment, tmp_path / "folder")
    written = open_checkpoint(tmp_path / "folder" / "draft")
    assert (written.problems, written.config) == ([], config)
    raw = json.loads((tmp_path / "folder" / "draft" / "config.json").read_text())
    assert raw["is_causal"] is False
    assert "speculators_model_type" not in raw


MEASURED = (0.627, 0.347, 0.202, 0.119, 0.093, 0.073, 0.052)
"""The bundled drafter's survival."""
FLAT_THEN_STEEP = CostModel(target={1: 1.0, 8: 1.0, 256: 32.0}, draft={1: 0.05, 16: 0.05})


def test_a_static_schedule_covers_every_batch_and_is_what_pays_at_each() -> None:
    rows = static_schedule(FLAT_THEN_STEEP, MEASURED, (1, 2, 4, 8), 16)
    assert [row[0] for row in rows] == [1, *(row[1] + 1 for row in rows[:-1])]
    assert rows[-1][1] == 16
    assert (rows[0][2], rows[-1][2]) == (7, 0)
    for first, last, drafted in rows:
        for batch in range(first, last + 1):

            def rate(width: int, n: int = batch) -> float:
                return n * (1 + sum(MEASURED[: width - 1])) / FLAT_THEN_STEEP.step_seconds([width] * n)

            assert rate(drafted + 1) == max(map(rate, (1, 2, 4, 8)))


def test_costs_and_a_survival_give_a_static_schedule_without_a_scheduler_of_ours(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "cost.json"
    table.write_text(FLAT_THEN_STEEP.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(table))
    assert "--scheduler-cls" in flags(fields, tmp_path)
    monkeypatch.setenv(SURVIVAL, ",".join(map(str, MEASURED)))
    assert "--scheduler-cls" not in flags(fields, tmp_path)
    rows = static_schedule(FLAT_THEN_STEEP, MEASURED, (1, 2, 4, 8), 256)
    assert speculative(fields, tmp_path)["num_speculative_tokens_per_batch_size"] == rows
    assert speculative(fields, tmp_path, speculation={"width": 3})["num_speculative_tokens_per_batch_size"] == [
        [1, 256, 2]
    ]


@pytest.mark.parametrize("text", ["", "0.5,0.6", "1.2", "half", "0.5,-0.1"])
def test_a_survival_that_is_none_is_named(text: str) -> None:
    with pytest.raises(UserError, match="is no survival"):
        given_survival({SURVIVAL: text})
