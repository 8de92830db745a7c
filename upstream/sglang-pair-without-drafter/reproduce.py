"""A DFLASH decode worker accepts a prefill worker without the drafter. Exit code 1: it does; 0: it refuses.

Needs the sglang wheel, no GPU, no network: the two workers' own messages are handed over in memory.
"""

import ast
import asyncio
import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch


def take(file: str, *wanted: str, **given: object) -> dict:
    """Functions, classes and methods (`Class.method`) of a file of the wheel, with what they use of that file.

    The file's imports are left out, since they take a minute and a GPU's libraries; `given` has what is needed of them.
    """
    (root,) = find_spec("sglang").submodule_search_locations
    known = {}
    for node in ast.parse((Path(root) / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            known |= {f"{node.name}.{one.name}": one for one in node.body if hasattr(one, "decorator_list")}
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            known[getattr(target, "id", getattr(target, "name", None))] = node
    chosen, left = {}, list(wanted)
    while left:
        name = left.pop()
        node = known[name]
        if "." in name:
            node.decorator_list = []
        if name not in chosen:
            chosen[name] = node
            parts = [(one, getattr(one, "annotation", None), getattr(one, "returns", None)) for one in ast.walk(node)]
            hints = {id(name) for _, *hints in parts for hint in hints if hint for name in ast.walk(hint)}
            used = {one.id for one, *_ in parts if isinstance(one, ast.Name) and id(one) not in hints}
            left += sorted(used & known.keys() - given.keys() - chosen.keys())
    future = ast.parse("from __future__ import annotations").body
    body = future + sorted(chosen.values(), key=lambda node: node.lineno)
    names = {"torch": torch, **given}
    exec(compile(ast.Module(body, []), file, "exec"), names)
    return names


requests = SimpleNamespace()
web = SimpleNamespace(
    Response=lambda text="", status=200, **_: SimpleNamespace(status=status, text=text),
    json_response=lambda payload, status: SimpleNamespace(status=status, text=json.dumps(payload)),
)
conn = take(
    "srt/disaggregation/common/conn.py",
    "CommonKVManager.register_to_bootstrap",
    "CommonKVManager.try_ensure_parallel_info",
    "CommonKVManager._register_topology_row",
    "CommonKVBootstrapServer._handle_route_put",
    "CommonKVBootstrapServer._handle_route_get",
    "PrefillServerInfo",
    "PrefillRankInfo",
    dataclasses=dataclasses,
    dataclass=dataclasses.dataclass,
    requests=requests,
    web=web,
    logger=MagicMock(),
    NetworkAddress=MagicMock(),
    StateType=MagicMock(),
    time=MagicMock(),
    envs=MagicMock(),
)


def half(**more: object) -> MagicMock:
    """A K/V manager as it is after its start; what is irrelevant here is a mock."""
    manager = MagicMock(
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        pp_size=1,
        pp_rank=0,
        system_dp_size=1,
        system_dp_rank=0,
        local_ip="127.0.0.1",
        rank_port=1,
        kv_cache_dtype_str="bfloat16",
        kv_layout=None,
        dsv41_spec_layout=None,
        dist_init_addr=None,
        bootstrap_host="127.0.0.1",
        bootstrap_port=2,
        kv_args=SimpleNamespace(page_size=1, state_types=()),
        prefill_info_table={},
        is_mla_backend=False,
        dcp_size=1,
        **more,
    )
    manager._register_topology_row = lambda url, row: conn["_register_topology_row"](manager, url, row)
    return manager


def runs(algorithm: str | None) -> None:
    """The process's settings: `--speculative-algorithm`, and defaults."""
    conn["get_spec"] = lambda: SimpleNamespace(speculative_algorithm=algorithm)
    conn["get_serving"] = lambda: SimpleNamespace(port=30000)
    conn["get_disagg"] = lambda: SimpleNamespace(disaggregation_decode_allocation_policy="early")
    conn["get_parallel"] = lambda: SimpleNamespace(
        enable_cp_tp_group_sharing=False,
        load_balance_method="round_robin",
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
        attn_tp_size=1,
        attn_cp_size=1,
    )


def meet(prefill: str | None, decode: str | None) -> str:
    """The answer of a decode worker to the prefill worker that its first request names."""
    told: list[dict] = []
    runs(prefill)
    requests.put = lambda _, json, **__: told.append(json) or SimpleNamespace(status_code=200, text="")
    conn["register_to_bootstrap"](half())
    names = [
        "pp_size",
        "attn_tp_size",
        "attn_cp_size",
        "dp_size",
        "page_size",
        "kv_cache_dtype",
        "kv_layout",
        "dsv41_spec_layout",
    ]
    names += ["follow_bootstrap_room", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "prefill_http_port"]
    server = MagicMock(
        **dict.fromkeys(names),
        prefill_port_table={},
        decode_allocation_policy="early",
        _registered_count=0,
        lock=asyncio.Lock(),
        speculative_algorithm=None,
    )

    async def route() -> str:
        put = await conn["_handle_route_put"](server, MagicMock(json=lambda: asyncio.sleep(0, told[0])))
        query = {"prefill_dp_rank": "-1", "prefill_cp_rank": "-1", "target_tp_rank": "-1", "target_pp_rank": "-1"}
        got = await conn["_handle_route_get"](server, MagicMock(query=query))
        assert (put.status, got.status) == (200, 200), (put.text, got.text)
        return got.text

    text = asyncio.run(route())
    runs(decode)
    requests.get = lambda *_, **__: SimpleNamespace(status_code=200, json=lambda: json.loads(text), text=text)
    try:
        assert conn["try_ensure_parallel_info"](half(), "127.0.0.1:2")
    except RuntimeError as error:
        return str(error)
    return "accepted"


assert meet("DFLASH", "DFLASH") == meet(None, None) == meet(None, "EAGLE") == "accepted"
answer = meet(None, "DFLASH")
print("prefill: no speculation, decode: DFLASH:", answer)
if answer != "accepted":
    print("mended: the pair is refused")
    sys.exit(0)
print("fault: the decode worker drafts without the drafter's K/V of the prompt, and says nothing")
sys.exit(1)
