"""Every drafter that vLLM would serve badly without a word is refused before launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_vllm import VLLMBackend
from tests.support.paper_models import write_paper_target
from tests.support.vllm_faults import FAULTS, write_faulty

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_refused_before_launch(name: str, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target", **SMOLLM2)
    drafter = write_faulty(tmp_path / "drafter", FAULTS[name])
    fields = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    found = "\n".join(map(str, VLLMBackend().check(Deployment.model_validate(fields))))
    assert FAULTS[name].says in found
