"""Tiny random targets with a real tokenizer: a step takes milliseconds, and everything a server does can be seen."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
EOS = SPECIALS.index("<|im_end|>")
CORPUS = ["the quick brown fox jumps over the lazy dog", '{"name": "value", "list": [1, 2, 3], "true": false}'] * 4
TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick {% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GATED_DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Three recurrent layers and one with attention, as Qwen3.5 has them."""


EXPERTS = {
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"intermediate_size": 64, "moe_intermediate_size": 64},
}
"""A mixture of experts, in the keys of gpt-oss and of Qwen3; MXFP4 has one scale for 32 values."""


def write_tiny_target(folder: Path, *, family: str = "llama", positions: int = 256, head_dim: int = 16) -> Path:
    """Writes config.json, safetensors and a byte-level tokenizer with a chat template; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab_size, more = _write_tokenizer(folder), EXPERTS if family in ("gpt_oss", "qwen3_moe") else {}
    if family.startswith("qwen3_5"):
        more = GATED_DELTA_NETS
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        initializer_range=0.25,  # large, so that the logits differ and greedy answers do not hang on rounding
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS,
        **{"intermediate_size": 48, **more},
    )
    if family.startswith("qwen3_5"):
        config.full_attention_interval = 4  # SGLang reads it, and transformers drops it as an argument
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_tiny_pair(folder: Path, *, positions: int = 256) -> tuple[Path, Path]:
    """A target and a random drafter that fits it: (target folder, drafter folder)."""
    target = write_tiny_target(folder / "target", positions=positions)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    config = tiny_drafter_config(
        num_target_layers=4,
        target_layer_ids=(0, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=vocab_size,
        max_position_embeddings=positions,
    )
    return target, write_tiny_drafter(folder / "drafter", config)


def _write_tokenizer(folder: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()
