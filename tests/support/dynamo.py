"""Dynamo's own Python, of which the parsers of its SGLang worker and of its frontend are asked.

A wheel of Dynamo asks for engines and for packages that are not on PyPI, so it is unpacked and not installed: 79 MB are
fetched once. Run as a script beside SGLang, it parses a worker's command line and the frontend's environment, and
prints what both became as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.support.pinned_wheels import PinnedWheel, unpacked

ROOT = Path(__file__).parents[2]
DYNAMO = PinnedWheel("ai-dynamo", "1.6.1", "83f768730104cbbc84029bf436025706632735173933adbb650b99c746517b70")
RUNTIME = PinnedWheel(
    "ai-dynamo-runtime",
    DYNAMO.version,
    "3683cafe88ededdff29c9ae6f651367eac33153487ff84e205082483cd6b3095",
    platform="manylinux_2_28_x86_64",
)
# Imported by a worker, which uses them for pictures alone.
MODULES = (
    PinnedWheel("redis", "8.1.0", "a4fe1aac3d3b3cc791d4b3d5931c5a956045dc951ee74d1c913ee3ac4d2ee9fb"),
    PinnedWheel(
        "blake3",
        "1.0.11",
        "fe624bb87ee53d9770bec087631d7fd8f01eab0128693b8fe6b884d8c2cf0989",
        platform="manylinux2014_x86_64",
    ),
)


def dynamo_folders() -> tuple[Path, Path]:
    """The two folders that are one package, fetched if they are not there yet."""
    first, second = map(unpacked, (DYNAMO, RUNTIME))
    return first, second


def worker_folders() -> tuple[Path, ...]:
    """`dynamo_folders`, and those of the modules that a worker imports besides."""
    return (*dynamo_folders(), *map(unpacked, MODULES))


def _parsed(words: list[str]) -> dict[str, object]:
    from argparse import ArgumentParser

    from dynamo.frontend.frontend_args import FrontendArgGroup, FrontendConfig
    from dynamo.sglang.args import parse_args

    config = asyncio.run(parse_args(words))
    server, worker = config.server_args, config.dynamo_args
    parser = ArgumentParser()
    FrontendArgGroup().add_arguments(parser)
    frontend = FrontendConfig.from_cli_args(parser.parse_args([]))
    frontend.validate()
    taken = {name: getattr(server, name, None) for name in json.loads(os.environ["ASKED"])}
    return {
        "server": taken,
        "worker": {"use_kv_events": worker.use_kv_events, "mode": config.serving_mode.value},
        "frontend": {"router_mode": str(frontend.router_mode), "migration_limit": frontend.migration_limit},
    }


if __name__ == "__main__":
    print(json.dumps(_parsed(sys.argv[1:])))
