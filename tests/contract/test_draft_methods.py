"""The targets that we let an engine draft for by MTP are those that its own source makes a drafter of."""

from __future__ import annotations

import inspect

import pytest

from dflash_sglang import methods as sglang_methods
from dflash_vllm import methods as vllm_methods


def test_sglang_makes_a_drafter_of_each() -> None:
    configs = pytest.importorskip("sglang.srt.configs.model_config")
    source = inspect.getsource(configs.ModelConfig._config_draft_model)
    assert [name for name in sglang_methods.WITH_MTP if name not in source] == []


def test_sglang_has_the_eagle3_models_that_we_name() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.models import kimi_k25_eagle3, llama_eagle3

    known = {entry.__name__ for module in (llama_eagle3, kimi_k25_eagle3) for entry in module.EntryClass}
    assert set(sglang_methods.HEADS) == known


def test_vllm_makes_a_drafter_of_each() -> None:
    speculative = pytest.importorskip("vllm.config.speculative")
    source = inspect.getsource(speculative.SpeculativeConfig.hf_config_override)
    assert [name for name in vllm_methods.WITH_MTP if name not in source] == []
