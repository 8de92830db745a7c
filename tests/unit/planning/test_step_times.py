"""Both providers of step times: what more work costs, what fits, and where each figure comes from."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dflash_serve.checkpoint.config import context_bytes
from dflash_serve.checkpoint.storage import Format
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.deployment.gpus import GPUS, Gpu
from dflash_serve.planning.memory import MEMORY_SHARE, kv_tokens
from dflash_serve.planning.methods import chain_of_target
from dflash_serve.planning.pair import read_pair
from dflash_serve.planning.step_times import (
    LIBRARY,
    OF_BANDWIDTH,
    Milliseconds,
    Roofline,
    Split,
    Tables,
    library,
    priced,
    quantization,
    tables_installed,
)
from tests.support.planned import hybrid_target, planned_pair, shipped_pair
from tests.support.tiny import edit_json

B200 = GPUS["b200"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    return Tables(planned_pair(tmp_path_factory.mktemp("dense")), B200, Split(), "sglang")


def test_provenance_adds_up() -> None:
    step = Milliseconds(measured=3, roofline=1).times(0.5) + Milliseconds(constants=2)
    assert step.total == 4
    assert step.shares() == {"measured": 0.375, "interpolated": 0, "roofline": 0.125, "constants": 0.5}


def test_the_roofline_charges_for_more_of_everything(tmp_path: Path) -> None:
    times = Roofline(planned_pair(tmp_path), B200, Split())
    base = times.verify(8, 8, 1000).total
    assert times.verify(1, 1, 1).total == pytest.approx(2.7, rel=0.1), "16.4 GB at 80 % of 7.7 TB/s"
    assert base < times.verify(16, 8, 1000).total
    assert base < times.verify(8, 16, 1000).total
    assert base < times.verify(8, 8, 9000).total
    assert times.verify(8, 8, 1000).shares()["roofline"] == 1
    assert Roofline(times.pair, B200, Split(2)).verify(64, 16, 1000).total < times.verify(64, 16, 1000).total
    assert Roofline(times.pair, GPUS["h100"], Split()).verify(8, 8, 1000).total > base


def test_long_prompts_cost_the_square_of_their_length(tmp_path: Path) -> None:
    times = Roofline(planned_pair(tmp_path), B200, Split())
    linear, attention = 2 * 8.2e9 * 40_000, 4 * 36 * 32 * 128 * 40_000**2 / 2
    assert times.prefill(1, 40_000).total == pytest.approx(1e3 * (linear + attention) / (0.7 * 2.25e15), rel=0.05)


def test_more_rows_go_through_more_experts(tmp_path: Path) -> None:
    times = Roofline(planned_pair(tmp_path, "openai/gpt-oss-120b"), B200, Split())
    assert times.verify(1, 10, 1).total > 3 * times.verify(1, 1, 1).total
    assert times.verify(256, 2, 1).total < 1.2 * times.verify(256, 1, 1).total, "by then all of them are read"


def test_int4_weights_are_read_faster_and_multiplied_as_often(tmp_path: Path) -> None:
    plain = planned_pair(tmp_path)
    edit_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "awq"}})
    awq = replace(plain, layout=read_target_layout(tmp_path, plain.model))
    few, many = (
        [Roofline(pair, B200, Split()).verify(batch, 16, 1).total for pair in (plain, awq)] for batch in (1, 512)
    )
    assert few[1] < 0.6 * few[0]
    assert many[1] == pytest.approx(many[0], rel=0.1)


def test_the_drafter_takes_its_share_of_the_memory(tmp_path: Path) -> None:
    pair = planned_pair(tmp_path)
    shallow = replace(pair, drafter=pair.drafter.model_copy(update={"layers": pair.drafter.layers[:1]}))
    assert kv_tokens(pair, B200, Split()) < kv_tokens(shallow, B200, Split())
    tight = planned_pair(tmp_path, "openai/gpt-oss-120b")
    assert kv_tokens(tight, GPUS["h100"], Split()) < kv_tokens(tight, GPUS["b300"], Split())


def test_a_share_of_the_memory_that_is_given_is_kept(tmp_path: Path) -> None:
    pair = planned_pair(tmp_path)
    usual, less, more = (kv_tokens(replace(pair, memory_fraction=share), B200, Split()) for share in (None, 0.4, 0.8))
    assert less == pytest.approx(more / 2, rel=1e-4)
    assert usual == pytest.approx(more * MEMORY_SHARE / 0.8, rel=1e-4), "one rule, whether a share is given or not"


@pytest.mark.parametrize(("batch", "plain", "wide", "draft"), [(1, 3.64, 3.81, 0.79), (32, 3.91, 7.64, 1.59)])
def test_the_tables_give_what_was_written_down_of_them(
    dense: Tables, batch: int, plain: float, wide: float, draft: float
) -> None:
    """Qwen3-8B, one B200, SGLang's kernels, 600 tokens before a step; milliseconds."""
    assert dense.verify(batch, 1, 600).total == pytest.approx(plain, abs=0.01)
    assert dense.verify(batch, 16, 600).total == pytest.approx(wide, abs=0.01)
    assert dense.draft(batch, 16, 600).total == pytest.approx(draft, abs=0.01)
    assert dense.verify(batch, 16, 600).shares()["measured"] > 0.8


def test_a_block_reads_its_prefix_once(dense: Tables) -> None:
    """The library's own speculation would read it once a token: 16 times."""
    longer = dense.verify(32, 16, 8000).total - dense.verify(32, 16, 1000).total
    assert longer == pytest.approx(dense.verify(32, 1, 8000).total - dense.verify(32, 1, 1000).total, rel=1e-6)


def test_a_block_reads_a_latent_prefix_once_and_its_weights_for_all_rows() -> None:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    times = Tables(shipped_pair("moonshotai/Kimi-K2.5"), B200, Split(8), "sglang")
    longer = times.verify(8, 16, 60_000).total - times.verify(8, 16, 1000).total
    assert longer == pytest.approx(times.verify(8, 1, 60_000).total - times.verify(8, 1, 1000).total, rel=1e-6)
    assert times.verify(8, 16, 1).total == pytest.approx(times.verify(128, 1, 1).total)
    by_hand = Roofline(times.pair, B200, Split(8))
    split = by_hand.verify(8, 1, 60_000).total - by_hand.verify(8, 1, 1).total
    assert split > 1e3 * 8 * 60_000 * 61 * 576 * 2 / 7.7e12, "every device reads the whole latent vector"


def test_memory_by_the_tables_has_room_for_the_drafter(dense: Tables) -> None:
    alone = 965_111  # tokens of Qwen3-8B without a drafter, as the library counts
    assert 0.8 * alone < kv_tokens(dense.pair, B200, Split()) < 0.9 * alone


def test_memory_beside_weights_in_four_bits_counts_their_scales() -> None:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    pair, on = shipped_pair("openai/gpt-oss-120b"), GPUS["h200"]
    held = kv_tokens(pair, on, Split(), 8192, drafts=False) * pair.layout.kv_bytes(2, 8192) / 8192
    published, runtime = 65.2e9, 4.5e9  # the checkpoint; the CUDA context and workspaces, as the library has them
    assert held / MEMORY_SHARE + published + runtime < on.memory


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.system], ids=lambda gpu: gpu.name)
def test_the_table_of_gpus_is_the_one_of_the_operator_tables(gpu: Gpu) -> None:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    systems = Path(library().__file__).parent / "systems"
    told = yaml.safe_load((systems / f"{gpu.system}.yaml").read_text())["gpu"]
    assert gpu.compute == told["sm_version"]
    assert 0.94 * told["mem_capacity"] < gpu.memory < told["mem_capacity"], "less than all of it is free"
    figures = {"mem_bw": gpu.bandwidth, "bfloat16_tc_flops": gpu.flops}
    figures |= {"fp8_tc_flops": gpu.speed("fp8")} if gpu.has_fp8 else {}
    figures |= {"fp4_tc_flops": gpu.speed("nvfp4")} if gpu.has_fp4 else {}
    assert figures == pytest.approx({name: told[name] for name in figures}, rel=0.07)
    assert gpu.has_fp8 == ("fp8_tc_flops" in told)
    assert gpu.has_fp4 == ("fp4_tc_flops" in told)


@pytest.mark.skipif(not tables_installed(), reason="needs the extra [plan]")
@pytest.mark.parametrize("target", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3.8-27B"])
def test_tables_price_targets_whose_layers_have_their_kind_by_an_interval(target: str) -> None:
    """The catalogue's configurations, as the hub's files of other releases, do not list each layer."""
    pair = read_pair(Deployment(target=Model(model=target)))
    times, why = priced(pair, B200, Split(), "sglang", 8, 1000)
    assert isinstance(times, Tables), why


def test_a_gpu_without_operator_tables_gets_the_roofline_that_says_so() -> None:
    times, why = priced(shipped_pair("Qwen/Qwen3-8B"), GPUS["gb10"], Split(), "sglang", 16, 1000)
    assert isinstance(times, Roofline)
    assert why is not None
    assert "gb10" in why or not tables_installed()


def test_hopper_multiplies_fp8_twice_as_fast_as_bf16(tmp_path: Path) -> None:
    plain = planned_pair(tmp_path)
    fp8 = replace(plain, model=plain.model.model_copy(update={"quantization": "fp8"}))
    once, twice = (Roofline(each, GPUS["h200"], Split()).prefill(8, 8192).total for each in (plain, fp8))
    assert once == pytest.approx(2 * twice, rel=0.05)


def test_a_quantised_drafter_takes_the_bytes_that_it_stores(tmp_path: Path) -> None:
    plain = planned_pair(tmp_path)
    half = replace(plain, drafter_bytes=plain.draft_bytes // 2)
    bf16, small = (Roofline(each, B200, Split()) for each in (plain, half))
    fits, more = (kv_tokens(each, B200, Split()) for each in (plain, half))
    free, token = plain.draft_bytes // 2, plain.layout.kv_bytes(2) + context_bytes(plain.drafter)
    assert (more - fits) * token == pytest.approx(MEMORY_SHARE * free, rel=0.001)
    assert len({kv_tokens(each, B200, Split(), drafts=False) for each in (plain, half)}) == 1
    saved = bf16.draft(1, 16, 1000).total - small.draft(1, 16, 1000).total
    assert saved == pytest.approx(1e3 * free / (OF_BANDWIDTH * B200.bandwidth), rel=0.001), "less is read"


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_tables_price_a_drafter_s_quantised_products(dense: Tables, format: Format) -> None:
    products = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    pair = replace(dense.pair, drafter_formats=dict.fromkeys(products, format))
    small = Tables(pair, B200, Split(), "sglang")
    assert small.draft(1, 16, 1000).total < 0.95 * dense.draft(1, 16, 1000).total
    mixed = Tables(replace(pair, drafter_formats={"q_proj": format}), B200, Split(), "sglang")
    assert mixed.draft(1, 16, 1000) == dense.draft(1, 16, 1000), "q, k and v are one product"
    integers = Tables(replace(pair, drafter_formats=dict.fromkeys(products, "w4a16")), B200, Split(), "sglang")
    assert integers.draft(1, 16, 1000) == dense.draft(1, 16, 1000), "no table has it: priced, in bf16"


def test_a_chain_costs_a_pass_for_each_token(tmp_path: Path, dense: Tables) -> None:
    for times in (dense, Roofline(planned_pair(tmp_path), B200, Split())):
        for mtp in (False, True):
            head = chain_of_target(times.pair, mtp=mtp)
            two, three, four = (times.chain(head, 4, width, 1000).total for width in (2, 3, 4))
            assert 0 < two < three < four
            assert four - three == pytest.approx(three - two, rel=0.35), "only the first pass has more rows"
        with_head, mean = (times.chain(chain_of_target(times.pair, mtp=mtp), 1, 4, 1000).total for mtp in (False, True))
        assert with_head < mean, "the target's whole vocabulary, not 32,000 tokens"


def test_one_request_has_a_recurrent_state_for_every_slot_and_k_v_of_the_attention_layers(tmp_path: Path) -> None:
    folder = hybrid_target(tmp_path / "hybrid")
    dense = planned_pair(tmp_path / "dense")
    pair = replace(dense, layout=read_target_layout(folder, dense.model))
    state, token = 48 * 48 * 128 * 128 * 4, 16 * 2 * 8 * 128 * 2 + 5 * 2 * 8 * 128 * 2
    one, longer = (1 / kv_tokens(pair, B200, Split(), context) * context for context in (1000, 3000))
    free = 2000 * token / (longer - one)
    assert free * one == pytest.approx(17 * state + 1000 * token, rel=0.001)


def test_a_shipped_configuration_is_whole_and_leaves_no_folder_behind(tmp_path: Path) -> None:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    told = (
        "from dflash_serve.planning.step_times import shipped_configuration as found; "
        "print(*sorted(each.name for each in found('nvidia/Qwen3-235B-A22B-NVFP4').iterdir()))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", told], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["config.json", "hf_quant_config.json"]
    assert not list(tmp_path.iterdir())


def test_four_gpus_and_experts_have_prices(tmp_path: Path) -> None:
    pytest.importorskip(LIBRARY, reason="pip install 'dflash-serve[plan]'")
    pair = planned_pair(tmp_path, "openai/gpt-oss-120b")
    one, four = (Tables(pair, B200, split, "sglang") for split in (Split(), Split(4)))
    assert four.verify(16, 10, 1000).total < one.verify(16, 10, 1000).total
    assert four.draft(16, 10, 1000).total > 0
    assert quantization(pair, B200) == {"moe_quant_mode": "w4a8_mxfp4_mxfp8"}
    assert quantization(pair, GPUS["h200"]) == {"moe_quant_mode": "w4a16_mxfp4"}
