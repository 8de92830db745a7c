"""These run in the environment that `make test-sglang` builds; elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

HAVE_SERVER = find_spec("sglang") is not None and find_spec("sglang_cpu_platform") is not None
collect_ignore_glob = [] if HAVE_SERVER else ["test_*.py"]
