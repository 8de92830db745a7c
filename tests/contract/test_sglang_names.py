"""Every name of SGLang that the plug-in imports, hooks or calls, with the parameters that it passes, is there.

SGLang's plug-in interface is official, these names are not: a release that moves one of them is not supported until it
has been tested. They are read from the plug-in's source, but for methods of objects that SGLang hands out (`METHODS`).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_sglang.plugin

PLUGIN = Path(dflash_sglang.plugin.__file__).parent
TREES = {path.stem: ast.parse(path.read_text()) for path in PLUGIN.glob("*.py")}
WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
HOOKED = [value for value in vars(dflash_sglang.plugin).values() if str(value).startswith("sglang.")]
READ = (
    "sglang.srt.mem_cache.memory_pool.KVCache.post_capture_active",
    "sglang.srt.sampling.sampling_params.SamplingParams.custom_params",
)
"""Attributes of objects that SGLang hands out."""
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
PLAN = "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
METHODS: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort": ("error_msg",),
    "sglang.srt.managers.schedule_batch.Req.finished": (),
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
        *("batch", "forward_batch", "is_verify", "skip_attn_backend_init"),
    ),
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan": (
        *("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    f"{PLAN}.reads_from": ("source", "seq_lens", "seq_lens_cpu", "read_extent"),
    f"{PLAN}.bind": ("batch", "reader"),
    f"{PLAN}.write_ids": ("reader",),
    f"{LOGITS}.is_deferred_shard": ("logits",),
    f"{LOGITS}.finish_deferred_gather": ("logits",),
    f"{LOGITS}.deferred_argmax": ("logits",),
    f"{RUNNER}._get_attention_backend": ("init_new_workspace",),
    f"{RUNNER}._decode_cuda_graph_runner_cls": (),
    f"{RUNNER}.recapture_decode_cuda_graph": (),
    f"{RUNNER}.forward": ("forward_batch",),
    dflash_sglang.plugin.RESULT: ("batch", "result"),
    dflash_sglang.plugin.MAMBA: ("intermediate_states_buffer", "cache_steps"),
    GRAPHS: ("model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
    f"{WORKER}.forward_batch_generation": ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    f"{WORKER}._next_accept_bonus_buffers": ("bs",),
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": ("batch", "target_worker"),
}
TUPLES = {
    f"{WORKER}._accept_block": 5,
    f"{WORKER}._next_accept_bonus_buffers": 5,
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": 2,
}
OURS = {"_own", "counts_penalties", "widths", "states", "penalties", "ranks"}
"""Attributes of our worker that are not SGLang's; private ones are found in its class."""


def imported() -> dict[str, str]:
    """Names that the plug-in imports from SGLang, with their paths."""
    froms = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    froms = [node for node in froms if (node.module or "").startswith("sglang")]
    return {name.name: f"{node.module}.{name.name}" for node in froms for name in node.names}


def calls() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Calls of imported names and of the worker's methods: path, and the parameters that are passed by name."""
    names = {**imported(), "worker": WORKER}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                root, _, rest = ast.unparse(node.func).partition(".")
                passed = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
                if root in names and passed and rest.count(".") == 0:
                    yield f"{names[root]}.{rest}".rstrip("."), passed


def attributes() -> set[str]:
    """Attributes of the worker that the plug-in reads."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "worker"}
    own = [node for node in ast.walk(TREES["worker"]) if isinstance(node, ast.Attribute)]
    read |= {node.attr for node in own if isinstance(node.value, ast.Name) and node.value.id == "self"}
    functions = {node.name for node in ast.walk(TREES["worker"]) if isinstance(node, ast.FunctionDef)}
    return read - OURS - functions - {"_whole_graphs"}


@pytest.fixture(autouse=True)
def _sglang() -> None:
    pytest.importorskip("sglang")


@pytest.mark.parametrize("path", [*sorted(imported().values()), *HOOKED, *METHODS, *READ])
def test_the_installed_sglang_has_it(path: str) -> None:
    assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize(("path", "passed"), [*sorted(set(calls())), *METHODS.items()])
def test_it_takes_the_parameters_that_we_pass(path: str, passed: tuple[str, ...]) -> None:
    parameters = inspect.signature(pkgutil.resolve_name(path)).parameters
    assert set(passed) <= set(parameters)


@pytest.mark.parametrize("path", TUPLES)
def test_it_returns_as_many_values_as_we_unpack(path: str) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(pkgutil.resolve_name(path))))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert {len(value.elts) for value in returned if isinstance(value, ast.Tuple)} == {TUPLES[path]}


def test_its_worker_has_the_attributes_that_we_read() -> None:
    worker = pkgutil.resolve_name(WORKER)
    source = inspect.getsource(worker)
    assert [name for name in sorted(attributes()) if not hasattr(worker, name) and f"self.{name}" not in source] == []
    assert {"_draft_block_ids_buf", "_noise_embed_scale", "block_size"} <= attributes()


def test_a_request_is_equal_to_itself_only() -> None:
    """Penalties are counted by request."""
    request = pkgutil.resolve_name("sglang.srt.managers.schedule_batch.Req")
    assert (request.__eq__, request.__hash__) == (object.__eq__, object.__hash__)


def test_weights_from_a_folder_go_to_the_target_whatever_is_asked() -> None:
    """The reason why `swap` refuses SGLang: with a choice of model, as requests with tensors have, it could be used."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("needs SGLang")
    managers = Path(str(found.origin)).parent / "srt" / "managers"
    structs = ast.parse((managers / "io_struct.py").read_text())
    fields = {
        each.name: {
            str(one.target.id) for one in each.body if isinstance(one, ast.AnnAssign) and hasattr(one.target, "id")
        }
        for each in ast.walk(structs)
        if isinstance(each, ast.ClassDef)
    }
    assert "selector" in fields["UpdateWeightsFromTensorReqInput"]
    assert fields["UpdateWeightFromDiskReqInput"] >= {"model_path", "load_format"}
    assert "selector" not in fields["UpdateWeightFromDiskReqInput"]
    updater = (managers / "scheduler_components" / "weight_updater.py").read_text()
    assert "for role, runner in self._select_runners():" in updater
    assert 'def _select_runners(self, selector: str = "all")' in updater
