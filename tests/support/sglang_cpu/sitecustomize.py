"""Runs before anything else in the test environment."""

from sglang_cpu_platform.imports import prepare_imports

prepare_imports()
