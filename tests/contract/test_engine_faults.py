"""Faults of SGLang and vLLM that an adapter refuses or works around, asked of the installed release.

The tables in docs/ that begin with `fault | upstream` say what each release does. A probe asks the installed one again:
where it has mended a fault, the refusal and its row go. TensorRT-LLM's rows were read.
"""

from __future__ import annotations

import inspect
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any

import pytest
import torch

from dflash_serve.adapter.facts import Releases
from dflash_sglang import facts as sglang
from dflash_sglang.checks import CAPTURING, CAPTURING_FOR_DSPARK
from dflash_sglang.plugin.refusals import with_min_p
from dflash_vllm import facts as vllm
from dflash_vllm.checks import CAPTURING as VLLM_CAPTURING
from dflash_vllm.drafter_rules import CACHE_ONLY, RAISES_TABLES
from dflash_vllm.facts import REAL_OFF
from dflash_vllm.kv_groups import Layer, group_layers
from tests.support.upstream import UPSTREAM, Fault

ROOT = Path(__file__).parents[2]
HIDDEN, VOCABULARY, PADDED, TOP_K = 64, 320, 384, 4
Patch = pytest.MonkeyPatch


def rows() -> Iterator[dict[str, str]]:
    """Every row of the tables, by the heads of its columns."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for table in re.findall(r"^\| fault \| upstream \|.*(?:\n\|.*)+", page.read_text(encoding="utf-8"), re.M):
            head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
            yield from (dict(zip(head, line, strict=True)) for line in lines)


def told(releases: Releases, fault: str) -> str:
    """The answer in the installed release's column; the column's head names title and release."""
    found = releases.numbers(version(releases.package))
    column = f"{releases.title} {'.'.join(map(str, found or ()))}"
    (answer,) = [row[column] for row in rows() if row["fault"] == fault and column in row]
    return answer


def reported(name: str) -> Callable[[Patch], bool]:
    """The probe of a fault that `upstream/` reports: its reproduction."""
    return lambda _: Fault(UPSTREAM / name).is_there(sys.executable)


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    """True if the call ends with such an error; any other error is one of the probe."""
    try:
        call()
    except error:
        return True
    return False


def source(*modules: str) -> str:
    return "".join(inspect.getsource(import_module(name)) for name in modules)


# --- SGLang -----------------------------------------------------------------------------------------------------------

DFLASH, DSPARK = "sglang.srt.models.dflash", "sglang.srt.models.dspark"
WORKER = "sglang.srt.speculative.dflash_worker_v2"
DRAFTERS = (DFLASH, DSPARK, WORKER, "sglang.srt.speculative.dflash_utils")
NVFP4_STATE = ("weight_scale_interleaved", "alpha", "input_size_per_partition", "output_size_per_partition")


class ModelOptFp4LinearMethod:
    """Stand-in of the class, which SGLang recognises by its name; computes without FP4 kernels."""

    quant_mode = "w4a4"

    def apply(self, _: object, rows: torch.Tensor, bias: None) -> torch.Tensor:
        return rows @ torch.ones(HIDDEN, PADDED)


def nvfp4_head() -> Any:
    packed = torch.zeros(PADDED, HIDDEN // 2, dtype=torch.uint8)
    state = dict.fromkeys((*NVFP4_STATE, "input_scale_inv"), 1)
    return Stub(weight=packed, quant_method=ModelOptFp4LinearMethod(), org_vocab_size=VOCABULARY, **state)


def draft_through(head: Any, devices: int, patch: Patch) -> list[Callable[[], object]]:
    """Calls that draft a few rows through a head: plain, DFlash2's and DSpark's."""
    dflash, dspark, worker = map(import_module, (DFLASH, DSPARK, WORKER))
    hidden = torch.randn(4, HIDDEN)
    patch.setattr(dflash, "get_parallel", lambda: Stub(tp_size=devices))
    patch.setattr(worker, "get_parallel", lambda: Stub(tp_group=Stub(world_size=devices)))
    plain = object.__new__(worker.DFlashWorkerV2)
    return [
        lambda: plain._greedy_sample_from_vocab_parallel_head(hidden_states=hidden, lm_head=head),
        lambda: dflash.candidate_topk(hidden, head, TOP_K),
        lambda: dspark.project_through_lm_head(hidden, head),
    ]


def tied_gemma(patch: Patch) -> bool:
    embedding = import_module("sglang.srt.models.gemma4_causal").Gemma4TextScaledWordEmbedding
    _, *others = draft_through(embedding(VOCABULARY, HIDDEN, 0, embed_scale=8.0), 1, patch)
    return all(raises(AttributeError, other) for other in others)


def nvfp4_on_one_device(patch: Patch) -> bool:
    return any(raises(RuntimeError, call) for call in draft_through(nvfp4_head(), 1, patch))


def nvfp4_on_two_devices(patch: Patch) -> bool:
    return raises(RuntimeError, draft_through(nvfp4_head(), 2, patch)[0])


def short_rows(patch: Patch) -> bool:
    sizing = import_module("sglang.srt.mem_cache.allocation_sizing")
    spec = Stub(speculative_algorithm="DFLASH", speculative_num_steps=1, speculative_eagle_topk=1)
    for name, value in {"get_spec": spec, "get_alloc_page_size": 1, "max_speculative_num_draft_tokens": 8}.items():
        patch.setattr(sizing, name, lambda value=value: value)
    return bool(sizing.get_req_to_token_extra_context_len() < sizing.get_alloc_reserve_per_decode())


def shared_pool(patch: Patch) -> bool:
    sizes = import_module("sglang.srt.model_executor.pool_configurator")
    patch.setattr(sizes, "get_parallel", lambda: Stub(attn_dcp_size=1))
    family = Stub(is_dflash_family=lambda: True)
    target = Stub(is_draft_worker=False, spec_algorithm=family, dflash_draft_cell_size_per_token=100)
    return bool(sizes._dflash_draft_cell_size(target) == 100)


def careless_load(_: Patch) -> bool:
    model = Stub(named_parameters=lambda: [("fc.weight", torch.nn.Parameter(torch.ones(1)))], projector_type=None)
    load = import_module(DFLASH).DFlashDraftModel.load_weights
    return not raises(Exception, lambda: load(model, [("fc.weight_packed", torch.ones(1))]))


def uncounted_penalties(patch: Patch) -> bool:
    patch.setattr("sglang.srt.speculative.spec_utils.spec_prepare_for_decode", lambda _: None)
    counted: list[object] = []
    sampling = Stub(penalizer_orchestrator=Stub(is_required=True))
    speculating = Stub(is_none=lambda: False)
    batch = Stub(spec_algorithm=speculating, sampling_info=sampling, cumulate_penalty_output_tokens=counted.append)
    import_module("sglang.srt.managers.schedule_batch").ScheduleBatch.prepare_for_decode(batch)
    return not counted and "cumulate_penalty" not in source(WORKER)


def min_p_left_out(_: Patch) -> bool:
    build = import_module("sglang.srt.speculative.dflash_utils").build_speculative_verify_target_probs
    off = {"need_top_k_sampling": False, "need_top_p_sampling": False}
    asked = Stub(temperatures=torch.ones(2, 1), need_min_p_sampling=True, min_ps=torch.tensor([0.5, 0.1]), **off)
    given = {"next_token_logits": torch.tensor([[0.0, 1.0]]).repeat(4, 1), "draft_token_num": 2, "bs": 2}
    ours = with_min_p(build, sampling_info=asked, **given)
    assert torch.equal(ours[0], torch.tensor([[0.0, 1.0]]).repeat(2, 1))
    theirs = build(sampling_info=asked, **given)
    assert torch.allclose(ours[1], theirs[1])
    return bool((theirs > 0).all())


def one_causality(_: Patch) -> bool:
    config = Stub(layer_types=["full_attention", "sliding_attention"], is_causal=True, sliding_window=8)
    config.get_text_config = lambda: config
    kind_of = import_module(DFLASH)._get_dflash_layer_attention_params
    return len({kind_of(config, index)[1] for index in (0, 1)}) == 1


def markov_required(_: Patch) -> bool:
    resolve = import_module("sglang.srt.speculative.dspark_components.dspark_config").resolve_runtime_config

    def starts(rank: int) -> bool:
        fields = {"markov_rank": rank, "markov_head_type": "vanilla", "target_layer_ids": [1], "mask_token_id": 7}
        config = Stub(block_size=7, num_hidden_layers=1, vocab_size=VOCABULARY, **fields)
        asks = {"speculative_num_draft_tokens": None, "target_vocab_size": VOCABULARY}
        return not raises(ValueError, lambda: resolve(draft_hf_config=config, **asks))

    assert starts(6)
    return not starts(0)


def layers_in_order(_: Patch) -> bool:
    found = set()
    for name, kind in (
        ("sglang.srt.models.llama", "LlamaForCausalLM"),
        ("sglang.srt.models.qwen3", "Qwen3ForCausalLM"),
    ):
        model = Stub(pp_group=Stub(is_last_rank=True), model=Stub())
        getattr(import_module(name), kind).set_dflash_layers_to_capture(model, [2, 0, 2])
        assert set(model.model.layers_to_capture) == {1, 3}
        found.add("if i in self.layers_to_capture" in source(name))
    return found == {True}


def one_room_for_all(_: Patch) -> bool:
    request = import_module("sglang.srt.managers.io_struct").GenerateReqInput
    expand = getattr(request._handle_parallel_sampling, "__wrapped__", request._handle_parallel_sampling)
    asked = request(text="x", sampling_params={"n": 2}, bootstrap_host="127.0.0.1", bootstrap_room=7)
    asked._determine_batch_size()
    expand(asked)
    asked._normalize_batch_inputs()
    assert asked.bootstrap_room == [7, 8]
    send = import_module("sglang.srt.managers.tokenizer_manager").TokenizerManager._handle_batch_request
    return asked.batch_size == 1 and "bootstrap_room" not in inspect.getsource(send)


def drafts_without_the_prompt(_: Patch) -> bool:
    found = find_spec("sglang.srt.disaggregation.nixl")  # its module wants NIXL
    assert found is not None
    assert found.origin is not None
    return "decode_only_spec_dec" in Path(found.origin).with_name("conn.py").read_text(encoding="utf-8")


def kept_drafts(patch: Patch, **kept: bool) -> bool:
    """The drafter's K/V pool is among those that SGLang gives to its cache outside the GPUs."""
    workers = import_module("sglang.srt.speculative.base_spec_worker")
    off = {"enable_hierarchical_cache": False, "enable_lmcache": False, "enable_unified_cache_external_linker": False}
    patch.setattr(workers, "get_memory", lambda: Stub(**{**off, **kept}))
    patch.setattr(workers, "get_disagg", lambda: Stub(disaggregation_decode_retraction_backup=None))
    dflash = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string("DFLASH")
    pool = object()
    worker = Stub(
        target_worker=Stub(model_runner=Stub(spec_algorithm=dflash)),
        draft_worker=Stub(model_runner=Stub(token_to_kv_pool=pool)),
    )
    worker._draft_model_runners = partial(workers.BaseSpecWorker._draft_model_runners, worker)
    return pool in workers.BaseSpecWorker._build_hicache_draft_plan(worker).device_pools


def no_drafts_in_lmcache(patch: Patch) -> bool:
    found = find_spec("sglang.srt.mem_cache.storage")
    assert found is not None
    assert found.origin is not None
    files = list((Path(found.origin).parent / "lmcache").glob("*.py"))
    alone = not kept_drafts(patch, enable_lmcache=True)
    return bool(files) and alone and not any("draft" in file.read_text(encoding="utf-8") for file in files)


OF_SGLANG: dict[str, Callable[[Patch], bool]] = {
    "DFlash2 and DSpark fail with Gemma 4, whose head is its embedding": tied_gemma,
    "a plain drafter fails with an NVFP4 head on several devices": nvfp4_on_two_devices,
    "a drafter fails with an NVFP4 head on one device": nvfp4_on_one_device,
    "a request at the end of its context writes into the row of another one": short_rows,
    "a drafter's K/V pool has an entry for every token of the target": shared_pool,
    "tensors of a drafter that are unknown or missing are no error": careless_load,
    "penalties do not count the tokens of DFlash steps": uncounted_penalties,
    "tokens of DFlash steps are sampled without `min_p`": min_p_left_out,
    "one `is_causal` governs all layers of a drafter": one_causality,
    "`input_embedding_scale` is not read": lambda _: "input_embedding_scale" not in source(*DRAFTERS),
    "`d2t` is not read": lambda _: "d2t" not in source(*DRAFTERS),
    "a decode half with DFLASH takes a prefill half without the drafter": reported("sglang-pair-without-drafter"),
    "a weight update of the target overwrites the drafter": reported("sglang-target-weights-in-draft"),
    "a step narrower than the block gives requests the Mamba2 states of others": reported("sglang-mamba2-narrow-steps"),
    "no metric tells which slots are accepted": reported("sglang-slot-counters"),
    "DSPARK fails without a Markov head": markov_required,
    "features come in the order of the target's layers, each once, whatever `target_layer_ids` says": layers_in_order,
    "the halves of a pair answer no request with `n` above 1": one_room_for_all,
    "a decode half drafts without the prompt beside a prefill half without the drafter": drafts_without_the_prompt,
    "HiCache brings back the target's K/V without the drafter's": (
        lambda patch: not kept_drafts(patch, enable_hierarchical_cache=True)
    ),
    "LMCache is given the target's K/V without the drafter's": no_drafts_in_lmcache,
}


# --- vLLM -------------------------------------------------------------------------------------------------------------

PLAIN = "vllm.model_executor.models.qwen3_dflash"
SCHEDULER = "vllm.v1.core.sched.scheduler"
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
MARKOV = "vllm.model_executor.models.qwen3_dspark"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"


def unscaled_rows(_: Patch) -> bool:
    looked_up = torch.ones(2, HIDDEN)
    model = Stub(embed_tokens=lambda _: looked_up, has_separate_mask_embedding=False, mask_token_id=None)
    ids = torch.tensor([1, 2])
    classes = import_module(PLAIN).DFlashQwen3Model, import_module(MARKOV).Qwen3DSparkModel
    return all(torch.equal(one.embed_input_ids(model, ids), torch.ones(2, HIDDEN)) for one in classes)


def short_table(_: Patch) -> bool:
    raised = getattr(import_module("vllm.config.speculative").SpeculativeConfig, "draft_shares_target_positions", None)

    def is_raised(kind: str | None) -> bool:
        rope = {"rope_type": kind or "default", "rope_theta": 1e4}
        config = Stub(method="dflash", draft_model_config=Stub(hf_config=Stub(rope_parameters=rope)))
        return raised is not None and bool(raised(config))

    found = {is_raised(kind) for kind in CACHE_ONLY}
    assert len(found) == 1
    assert not is_raised("yarn")
    return found == {False}


def drafts_at_width_one(_: Patch) -> bool:
    drafting = import_module(SPECULATOR).DFlashSpeculator.propose
    return "num_speculative_tokens == 0" not in inspect.getsource(drafting)


def unchecked_load(_: Patch) -> bool:
    loads = [import_module(PLAIN).DFlashQwen3ForCausalLM, import_module(MARKOV).Qwen3DSparkForCausalLM]
    return not any(re.search(r"\n {8}return \S", inspect.getsource(one.load_weights)) for one in loads)


def sorted_layers(_: Patch) -> bool:
    holder = Stub(_cache_aux_pp_layout=lambda: None)
    mixin = import_module("vllm.model_executor.models.interfaces").EagleModelMixin
    mixin._set_aux_hidden_state_layers(holder, (3, 1, 3))
    return bool(holder.aux_hidden_state_layers == (1, 3))


def one_key_for_causality(_: Patch) -> bool:
    config = Stub(is_causal=True, layer_types=["full_attention", "sliding_attention"])
    return {import_module(PLAIN)._dflash_layer_causal(config, index) for index in (0, 1)} == {True}


def causal_by_speculators(_: Patch) -> bool:
    read: dict[str, Any] = {}
    update = import_module("vllm.transformers_utils.configs.speculators.algos").update_dflash
    update({"aux_hidden_state_layer_ids": [2], "mask_token_id": 7, "sliding_window_non_causal": False}, read)
    config = Stub(layer_types=["full_attention"], **read)
    return bool(import_module(PLAIN)._dflash_layer_causal(config, 0))


def first_runner(_: Patch) -> bool:
    config = import_module("vllm.config").VllmConfig
    lacks = inspect.getsource(config._get_v1_model_runner_unsupported_features)
    return all(words in lacks for words in ("dspark speculative", "mixed sliding/full dflash", "DFlash candidate-head"))


def drops_last_block(_: Patch) -> bool:
    config = import_module("vllm.config.speculative").SpeculativeConfig
    drafter = Stub(method="dflash", disable_eagle_block_drop=False)
    for name in ("use_eagle", "use_dflash", "use_dspark", "needs_eagle_block_drop"):
        if hasattr(config, name):
            setattr(drafter, name, partial(getattr(config, name), drafter))
    return bool(config.use_eagle_block_drop(drafter))


def refused_parameters(_: Patch) -> bool:
    parameters = import_module("vllm.sampling_params").SamplingParams
    given = parameters(min_p=0.1), parameters(logit_bias={1: 1.0})
    error = import_module("vllm.exceptions").VLLMValidationError
    return all(raises(error, partial(one._validate_spec_decode, Stub())) for one in given)


def adaptive_for_dspark_alone(_: Patch) -> bool:
    every = inspect.getsource(import_module("vllm.v1.worker.gpu.spec_decode.speculator").DraftModelSpeculator)
    return "self.acceptance_estimator = OnlineAcceptanceEstimator(" not in every


def offloads_on_gpus_alone(_: Patch) -> bool:
    spec = import_module("vllm.v1.kv_offload.cpu.spec").CPUOffloadingSpec
    try:
        spec.get_worker(Stub(_worker=None, create_worker=lambda _: None), Stub())
    except Exception as error:  # the class that vLLM raises
        return "only supported on CUDA" in str(error)
    return False


def hangs_where_its_port_is_taken(_: Patch) -> bool:
    """Its listener ends before it sets the event for which the start waits without an end."""
    scheduler = import_module(f"{NIXL}.base_scheduler").NixlBaseConnectorScheduler
    ready, taken = threading.Event(), import_module("zmq").ZMQError
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = "127.0.0.1", other.getsockname()[1]
        refused = raises(taken, lambda: scheduler._nixl_handshake_listener({}, ready, threading.Event(), *place))
    waits = "ready_event.wait()" in inspect.getsource(scheduler.set_xfer_handshake_metadata)
    return refused and waits and not ready.is_set()


QWEN35_27B = [Layer(4, 256)] * 16 + [Layer(0, 0, state=48 * 128 * 128 * 4)] * 48


def counted(layers: list[Layer]) -> int:
    return group_layers(layers, tokens=32768, step_tokens=8192, drafted=15, reuse=True).groups


def groups_of_one_layer(_: Patch) -> bool:
    drafter = [Layer(8, 128, window=2048)] * 5 + [Layer(8, 128)]
    return counted(QWEN35_27B + drafter) == 70 and counted(QWEN35_27B) == 4


def flash_attention_on_sm121(patch: Patch) -> bool:
    """Asked without such a GPU: which kernels come first there, not whether they fail."""
    for built_for_gpus in ("vllm._C", "vllm._C_stable_libtorch"):
        patch.setitem(sys.modules, built_for_gpus, Stub())
    cuda, platform = import_module("vllm.platforms.cuda"), import_module("vllm.platforms.interface")
    first, *_others = cuda._get_backend_priorities(False, platform.DeviceCapability(12, 1), use_non_causal=True)
    return str(first.name) == "FLASH_ATTN"


OF_VLLM: dict[str, Callable[[Patch], bool]] = {
    "a Gemma target's rows reach plain and DSpark drafters unscaled": unscaled_rows,
    "a drafter's RoPE table stays shorter than the context": short_table,
    "the drafter's pass runs where the width is 1": drafts_at_width_one,
    "tensors of a drafter that are missing are no error": unchecked_load,
    "`target_layer_ids` are sorted, and one named twice counts once": sorted_layers,
    "one `is_causal` governs all layers of a drafter": one_key_for_causality,
    "the V1 model runner has no DFlash2, no DSpark and no mixed windows": first_runner,
    "`sliding_window_non_causal: false` in a speculators file makes every layer causal": causal_by_speculators,
    "method `dflash` fails with anchor-first slots": lambda _: "sample_from_anchor=True is not" in source(SPECULATOR),
    "every Markov head is read as vanilla": lambda _: "markov_head_type" not in source(MARKOV),
    "a soft-cap of the logits is left out with a Markov head": lambda _: "softcap" not in source(MARKOV),
    "an API key leaves `/invocations`, `/tokenize` and others open": reported("vllm-open-routes"),
    "fused layers of a quantised drafter get no scheme": reported("vllm-packed-modules"),
    "every K/V group drops the last block of a reused prefix": drops_last_block,
    "a miss of the drafter's K/V vetoes an external hit": reported("vllm-external-hits"),
    "the offloading connector runs on no CPU": offloads_on_gpus_alone,
    "FlashAttention 2 is chosen for drafters on SM121 (GB10), where it ends at the start": flash_attention_on_sm121,
    "a half whose `VLLM_NIXL_SIDE_CHANNEL_PORT` is taken hangs at its start": hangs_where_its_port_is_taken,
    "a decode half counts a block a request that was never drafted": lambda _: "pad_spec_decode" in source(SCHEDULER),
    "a drafter with one layer of a kind makes K/V groups of one layer": groups_of_one_layer,
    "drafted tokens that vLLM trims count as drafted": reported("vllm-trimmed-slots"),
    "`min_p` and `logit_bias` are refused with speculation": refused_parameters,
    "adaptive verification takes DSpark alone": adaptive_for_dspark_alone,
}

# --- both -------------------------------------------------------------------------------------------------------------

ENGINES = ((sglang.RELEASES, OF_SGLANG), (vllm.RELEASES, OF_VLLM))
ALL = [(releases, fault) for releases, probes in ENGINES for fault in probes]


@pytest.mark.parametrize(("releases", "fault"), ALL, ids=[f"{one.package}: {fault}" for one, fault in ALL])
def test_the_installed_release_does_what_the_table_says(
    releases: Releases, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(releases.package)
    found = dict(next(probes for one, probes in ENGINES if one is releases))[fault](monkeypatch)
    assert told(releases, fault) == ("yes" if found else "no")


@pytest.mark.parametrize(("releases", "probes"), ENGINES, ids=["sglang", "vllm"])
def test_every_row_has_a_probe_and_every_issue_that_the_adapter_cites_has_a_row(
    releases: Releases, probes: dict[str, object]
) -> None:
    ours = [row for row in rows() if any(head.startswith(f"{releases.title} ") for head in row)]
    assert sorted(row["fault"] for row in ours) == sorted(probes)
    code = "".join(file.read_text() for file in (ROOT / "backends" / f"dflash_{releases.package}").rglob("*.py"))
    cited = set(re.findall(rf"{releases.package}#\d+", code))
    assert cited <= {issue for row in ours for issue in row["upstream"].split(", ")}


def test_every_issue_that_the_tensorrt_llm_adapter_cites_has_a_row() -> None:
    """These rows have no probe: TensorRT-LLM is not installed where the tests run."""
    code = "".join(file.read_text() for file in (ROOT / "backends" / "dflash_tensorrt_llm").rglob("*.py"))
    known = {issue for row in rows() if "read in TensorRT-LLM's" in row for issue in row["upstream"].split(", ")}
    assert set() < set(re.findall(r"TensorRT-LLM#\d+", code)) <= known


@pytest.mark.parametrize(("probe", "since"), [(short_table, RAISES_TABLES), (drafts_at_width_one, REAL_OFF)])
def test_a_fault_was_mended_in_the_release_that_the_adapter_names(
    probe: Callable[[Patch], bool], since: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    installed = vllm.RELEASES.numbers(version("vllm"))
    assert installed is not None
    assert probe(monkeypatch) is (installed < since)


GPT_OSS_20B = [Layer(8, 64, window=128), Layer(8, 64)] * 12
QWEN35_35B_A3B = [Layer(2, 256)] * 10 + [Layer(0, 0, state=32 * 128 * 128 * 4)] * 30
QWEN3_8B = [Layer(8, 128)] * 36
MIXED = [Layer(4, 128, window=4096)] * 5 + [Layer(4, 128)]


@pytest.mark.parametrize(
    ("target", "drafter", "groups", "with_drafter"),
    [
        (QWEN35_35B_A3B, MIXED, 4, 46),  # vllm#51742
        (GPT_OSS_20B, [Layer(4, 128)] * 8, 2, 5),  # groups of 8: two of each of the target's kinds, which are padded
        (GPT_OSS_20B, [Layer(8, 64)], 2, 2),  # 12 and 13 layers: vLLM pads groups of 13
        (QWEN3_8B, [Layer(8, 128)] * 5, 1, 1),
        (QWEN3_8B, [Layer(4, 128)] * 5, 1, 1),
    ],
)
def test_vllms_own_code_counts_the_kv_groups(
    target: list[Layer], drafter: list[Layer], groups: int, with_drafter: int
) -> None:
    pytest.importorskip("vllm")
    assert (counted(target), counted(target + drafter)) == (groups, with_drafter)


NO_TARGET = re.compile("NextN|MTP|Eagle|Assistant|Bidirectional")  # drafters and embedding models


def models(package: str, folder: str) -> tuple[str, dict[str, list[str]], dict[str, str]]:
    """Text of an engine's files, its classes' bases and their bodies; read, as some cannot be imported on a CPU."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / folder).rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = re.findall(r"^class (\w+)(?:\(([^)]*)\))?:(.*?)(?=^\S|\Z)", text, re.M | re.S)
    bases = {name: re.findall(r"\w+", below) for name, below, _ in found}
    return text, bases, {name: body for name, _, body in found}


def descends(name: str, roots: set[str], bases: dict[str, list[str]]) -> bool:
    return name in roots or any(descends(base, roots, bases) for base in bases.get(name, ()) if base != name)


def sglangs_models_with(method: str) -> set[str]:
    """Architectures of the installed SGLang whose class, or the one inside a multimodal one, has a method."""
    text, bases, bodies = models("sglang", "srt/models")
    having = {name for name, body in bodies.items() if f"def {method}" in body}
    given = re.findall(r"^EntryClass = (\[[^]]*\]|\w+)", text, re.M)
    served = {name for entry in given for name in re.findall(r"\w+", entry) if not NO_TARGET.search(name)}
    inside = {name: name.removesuffix("ForConditionalGeneration") for name in served}
    return {name for name in served if descends(name, having, bases) or descends(inside[name], having, bases)}


def test_sglangs_models_that_hand_out_hidden_states_are_those_that_we_know() -> None:
    pytest.importorskip("sglang")
    found = sglangs_models_with("set_dflash_layers_to_capture")
    assert found == CAPTURING
    assert sglangs_models_with("set_dspark_layers_to_capture") - found == CAPTURING_FOR_DSPARK


def test_vllms_models_that_we_know_hand_out_hidden_states() -> None:
    pytest.importorskip("vllm")
    text, bases, _ = models("vllm", "")
    registered = dict(re.findall(r'"(\w+)": \(\s*"[\w.]+",\s*"(\w+)"', text))
    assert {name for name in VLLM_CAPTURING if not descends(registered[name], {"SupportsEagle3"}, bases)} == set()
