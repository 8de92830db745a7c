"""One half of a disaggregated pair: the drafter of the other half, and the host memory that SGLang takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from dflash_serve.common.processes import free_port
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB
from dflash_sglang import SGLangBackend
from dflash_sglang.engine_arguments import _parser
from dflash_sglang.settings import HOST_RESERVE
from tests.support.paper_models import write_paper_drafter, write_paper_target

KEY = "secret"
ROOM = 7


@contextmanager
def prefill_half(settings: Any, port: int) -> Iterator[None]:
    """Its page of settings, behind a key; None: it has no such page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {KEY}"
            found = settings is not None and self.path == "/server_info"
            self.send_response(401 if not allowed else 200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(settings).encode() if allowed and found else b"")

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def bootstrap() -> tuple[str, int]:
    """SGLang's own bootstrap server of a prefill half: its address, and the port of the half's HTTP server."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    port, http_port = free_port(), free_port()
    CommonKVBootstrapServer("127.0.0.1", port)
    one = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")
    sizes = {**{f"{name}_size": 1 for name in one}, **{f"{name}_rank": 0 for name in one}}
    row = {**sizes, "rank_ip": "127.0.0.1", "rank_port": 1, "page_size": 1, "kv_cache_dtype": "auto"}
    for attempt in range(100):
        try:
            body: dict[str, Any] = {**row, "prefill_http_port": http_port}
            requests.put(f"http://127.0.0.1:{port}/route", json=body, timeout=5).raise_for_status()
            break
        except requests.ConnectionError:
            assert attempt < 99
            threading.Event().wait(0.1)
    return f"127.0.0.1:{port}", http_port


class DecodeHalf:
    """As much of SGLang's decode half as waits for a prefill half: its own functions, without K/V and without ranks."""

    def __init__(self, algorithm: str) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVManager
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.kv_manager: Any = SimpleNamespace(
            **{"prefill_info_table": {}, "failure_records": {}, "failure_lock": threading.Lock(), "dcp_size": 1},
            **{"kv_args": SimpleNamespace(page_size=1), "kv_cache_dtype_str": "auto", "kv_layout": None},
            **{"dsv41_spec_layout": None, "attn_tp_size": 1, "is_mla_backend": False, "is_hybrid_mla_backend": False},
            _resolve_rank_mapping=lambda info: None,
            update_status=lambda room, status: None,
        )
        for name in ("try_ensure_parallel_info", "record_failure"):
            setattr(self.kv_manager, name, getattr(CommonKVManager, name).__get__(self.kv_manager))
        self.scheduler = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string(algorithm))
        self._ensure_last_attempt_time: dict[str, float] = {}
        self._ensure_retry_count: dict[str, int] = {}
        self._ensure_retry_interval, self._max_ensure_retries = 0.0, 15

    def request(self) -> Any:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        receiver: Any = SimpleNamespace(_owns_bootstrap_room=True, conclude_state=None, bootstrap_room=ROOM)
        receiver.kv_mgr, receiver.ensure_abort_notified = self.kv_manager, lambda: None
        receiver.abort = CommonKVReceiver.abort.__get__(receiver)
        return SimpleNamespace(req=SimpleNamespace(bootstrap_room=ROOM), kv_receiver=receiver)

    def ready(self, address: str) -> bool:
        """A request by way of this prefill half goes on."""
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        from dflash_sglang.plugin.pair import beside_its_drafter

        ensure, request = DecodePreallocQueue._ensure_prefill_info, self.request()
        ready, remaining = beside_its_drafter(getattr(ensure, "__wrapped__", ensure), self, {address: [request]})
        assert remaining == []
        assert (request.kv_receiver.conclude_state is None) is bool(ready)
        return ready == {address: [request]}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: SimpleNamespace(api_key=KEY))


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_a_prefill_half_without_the_drafter_gets_no_request_and_is_named(
    bootstrap: tuple[str, int], algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    address, port = bootstrap
    half = DecodeHalf(algorithm)
    for theirs, said in ((None, "no drafter"), ("EAGLE3", "EAGLE3")):
        with prefill_half({"speculative_algorithm": theirs}, port):
            assert not half.ready(address)
        reason = half.kv_manager.failure_records[ROOM]
        assert f"the prefill half at {address} runs {said}, this decode half {algorithm}" in reason
        assert reason in caplog.text
    with prefill_half({"speculative_algorithm": algorithm}, port):  # started anew, with the drafter
        assert half.ready(address)
    assert half.ready(address), "it is asked once"


@pytest.mark.parametrize("settings", [None, {}, []])
def test_a_prefill_half_that_does_not_tell_is_served_with_a_warning(
    bootstrap: tuple[str, int], settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of Dynamo's has no such page."""
    address, port = bootstrap
    half = DecodeHalf("DFLASH")
    with prefill_half(settings, port):
        assert half.ready(address)
    assert f"the prefill half at {address} does not tell whether it runs the drafter" in caplog.text
    caplog.clear()
    assert half.ready(address)
    assert caplog.text == ""


def test_a_decode_half_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With either algorithm; the hook is named by its path, which tests/contract/test_sglang_names.py holds."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dflash_sglang import plugin

    applied: dict[str, Any] = {}
    monkeypatch.setattr(plugin, "_apply", applied.update)
    monkeypatch.setattr(plugin, "asked_width", lambda: None)
    for algorithm in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DSPARK):
        applied.clear()
        plugin.before_worker(lambda *_: int, algorithm, None)
        assert applied["sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info"].__name__ == (
            "beside_its_drafter"
        )


@pytest.mark.parametrize("room", [ROOM, [ROOM, ROOM + 1]])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_for_several_choices_is_refused_on_a_half(room: Any, n: int) -> None:
    """SGLang's own expansion gives all choices, and the request before them that fills the cache, one room."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from dflash_sglang.plugin.pair import one_choice

    handle = GenerateReqInput._handle_parallel_sampling
    handle = getattr(handle, "__wrapped__", handle)

    def request(room: Any) -> GenerateReqInput:
        made = GenerateReqInput(text="x", sampling_params={"n": n}, bootstrap_host="127.0.0.1", bootstrap_room=room)
        made.is_single, made.batch_size = True, 1
        return made

    one_choice(handle, request(None))
    if n == 1:
        one_choice(handle, request(room))
        return
    with pytest.raises(ValueError, match="n is 2, and the halves of a pair answer one choice a request"):
        one_choice(handle, request(room))


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", None])
def test_a_server_that_drafts_refuses_them(monkeypatch: pytest.MonkeyPatch, algorithm: str | None) -> None:
    from dflash_sglang import plugin

    applied: dict[str, Any] = {}
    monkeypatch.setattr(plugin, "_apply", applied.update)
    monkeypatch.setattr(plugin, "draft_problems", lambda _: [])
    monkeypatch.setattr(plugin, "width_problems", lambda _: [])
    monkeypatch.setattr("sglang.srt.arg_groups.overrides.resolving_view", lambda args: args)
    plugin.before_resolution(lambda _: None, SimpleNamespace(speculative_algorithm=algorithm))
    assert (plugin.CHOICES in applied) is (algorithm is not None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, dict[str, Any]] = {
        "plain": {},
        "latent": {"kv_lora_rank": 64},
        "recurrent": {"layer_types": ["linear_attention"] * 4},
    }
    found = {name: str(write_paper_target(folder / name, **config)) for name, config in made.items()}
    return {**found, "drafter": str(write_paper_drafter(folder / "drafter"))}


def planned(models: dict[str, str], target: str = "plain", *, drafter: bool = True, **more: Any) -> Any:
    """A decode half on one H200."""
    fields = {"target": {"model": models[target]}, "hardware": {"gpu": "h200"}, "role": "decode", **more}
    if drafter:
        fields["drafter"] = {"model": models["drafter"]}
    return SGLangBackend().launch(Deployment.model_validate(fields))


def reserved(monkeypatch: pytest.MonkeyPatch, plan: Any, free: float = 1e12) -> float:
    """Share of the device's K/V for which SGLang reserves memory on a host with so many free bytes; 0: it does not."""
    from sglang.srt.mem_cache import hicache_auto_size, kv_cache_builder
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import base

    settings = _parser().parse_args(plan.command(Path("/prepared")).argv[3:])
    settings.dcp_enabled = False
    context = SimpleNamespace(override=lambda _, **fields: vars(settings).update(fields))
    for module in (kv_cache_builder, hicache_auto_size):
        for name in ("get_disagg", "get_memory", "get_parallel", "get_schedule"):
            monkeypatch.setattr(module, name, lambda: settings, raising=False)
        monkeypatch.setattr(module, "get_context", lambda: context)
    monkeypatch.setattr(kv_cache_builder, "uses_ssm_state", lambda _: plan.target.recurrent)
    monkeypatch.setattr(hicache_auto_size, "_estimate_hicache_bytes", lambda *_: plan.memory.pool)
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: free)
    pool = SimpleNamespace() if plan.target.latent else object.__new__(MHATokenToKVPool)
    pool.size, pool.page_size = plan.memory.tokens, 1
    rows = SimpleNamespace(max_context_len=1 + (settings.context_length or plan.target.shape.max_position_embeddings))
    runner = SimpleNamespace(mtp_draft_device_pools=(), model_config=None)
    worker: Any = SimpleNamespace(model_runner=runner, is_hybrid_swa=False)
    worker.get_memory_pool = lambda: (rows, SimpleNamespace(get_kvcache=lambda: pool))
    if kv_cache_builder.resolve_decode_retraction_backup(tp_worker=worker) != "host_pool":
        return 0.0
    with hicache_auto_size.auto_size_hicache(None, None, enabled=True):
        return float(settings.hicache_ratio)


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("plain", {}),
        ("latent", {}),
        ("recurrent", {}),
        ("plain", {"disaggregation-decode-enable-radix-cache": True}),
        ("plain", {"disaggregation-decode-enable-offload-kvcache": True}),
        ("plain", {"enable-priority-scheduling": True}),
        ("plain", {"enable-priority-scheduling": True, "disable-priority-preemption": True}),
        ("plain", {"disaggregation-decode-retraction-backup": "cpu_tensor"}),
        ("recurrent", {"disaggregation-decode-retraction-backup": "host_pool"}),
    ],
)
def test_the_dry_run_knows_when_sglang_reserves_host_memory(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, target: str, given: dict[str, Any]
) -> None:
    plan = planned(models, target, drafter=False, engine_args={"sglang": given})
    told = [note for note in plan.notes if "host memory" in note]
    assert bool(told) is plan.has_host_copy is (reserved(monkeypatch, plan) > 0)


@pytest.mark.parametrize("longest", [256, 10**7])
def test_the_host_memory_that_the_dry_run_tells_is_what_sglang_takes(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, longest: int
) -> None:
    model = write_paper_target(tmp_path / "target", max_position_embeddings=10**7)
    plan = planned({"plain": str(model)}, drafter=False, limits={"max_model_len": longest})
    assert plan.host_copy is not None
    whole = max(0.2, longest / plan.memory.tokens)
    assert (whole > 0.2) is (longest > 256)
    enough = HOST_RESERVE + plan.host_copy
    assert reserved(monkeypatch, plan, enough + 1000) == pytest.approx(whole)
    assert reserved(monkeypatch, plan, enough - plan.host_copy / 2) == pytest.approx(whole / 2)
    with pytest.raises(ValueError, match="No host memory is left for HiCache after the 10 GiB reserve"):
        reserved(monkeypatch, plan, HOST_RESERVE)
    (told,) = [note for note in plan.notes if "host memory" in note]
    assert f"{plan.host_copy / GIB:.0f} GiB for each GPU where there is room, and ends at start unless 10 GiB" in told
