"""These run in the environment that `make test-vllm` builds; elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

HAVE_SERVER = find_spec("vllm") is not None and find_spec("vllm_cpu_repair") is not None
collect_ignore_glob = [] if HAVE_SERVER else ["test_*.py"]
