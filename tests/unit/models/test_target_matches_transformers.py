"""The embedded target computes what transformers computes, for every family it runs: logits and features."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_serve.models.kv_cache import Span
from dflash_serve.models.loader import load_target
from dflash_torch.model_runner import TargetRunner

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral, sliding": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2, sliding from layer 2": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3 with yarn": transformers.Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN),
}


@pytest.mark.parametrize("way", ["compiled", "ragged", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(family: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    for parameter in reference.parameters():  # HF starts biases at 0 and norms at 1, which would hide a lost one
        torch.nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    target.pack(compiled=way == "compiled")
    tokens, layer_ids = torch.randint(0, 97, (23,)), (0, 3, 1)
    with torch.inference_mode():
        expected = reference(tokens[None], output_hidden_states=True)
        forward = TargetRunner(target, target.new_cache(entries=2, capacity=40), widest=16, static=way == "padded")
        ids = tokens.tolist()
        # in three pieces and in slot 1, with another sequence sharing the first batch
        first = forward([ids[:5], ids[:9]], [Span(0, 0, 5), Span(1, 0, 9)], layer_ids)
        pieces = [first.hidden[5:], forward([ids[9:10]], [Span(1, 9, 1)], ()).hidden]
        last = forward([ids[10:]], [Span(1, 10, 13)], layer_ids)
        logits = target.logits(torch.cat([*pieces, last.hidden]))
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4)
    # hidden_states[0] is the embedding, so layer id's output is hidden_states[id + 1]; the last one there is normed
    features = torch.cat([expected.hidden_states[i + 1][0] for i in layer_ids[::2]], dim=-1)
    ours = last.features
    assert ours is not None
    torch.testing.assert_close(ours[:, [*range(48), *range(96, 144)]], features[10:], rtol=1e-4, atol=1e-4)
