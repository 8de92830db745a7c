"""The z-lab checkpoints of 2026, as their config.json describe them (the tables of the model cards and configs).

Where a value is not public knowledge it is plausible and marked: only shapes, windows and layer ids matter here.
"""

from __future__ import annotations

from dataclasses import dataclass

QWEN3, QWEN35 = (151669, 151936), (248070, 248320)  # (mask_token_id, vocab_size)
GPT_OSS, KIMI = (200000, 201088), (163838, 163840)
LLAMA31 = (128002, 128256)  # mask id not found: a reserved special token of Llama 3.1
GEMMA4 = (4, 262144)  # mask id not found: Gemma's own <mask>
FULL, SLIDING = "full_attention", "sliding_attention"
EIGHT_OF_40 = [1, 6, 11, 16, 22, 27, 32, 37]
EIGHT_OF_32 = [1, 5, 9, 13, 17, 21, 25, 29]
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class Published:
    """A row of the table; `gib` is the size of the weights it states."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: tuple[int, int]
    block_size: int
    target_layer_ids: list[int]
    num_target_layers: int
    gib: float
    vocabulary: tuple[int, int] = QWEN3
    window: int | None = None
    """All layers but the last slide."""
    head_dim: int = 128
    rope_theta: float = 1e7  # confirmed for Qwen3.6-27B and gpt-oss only
    rope_scaling: dict[str, object] | None = None
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6

    def config_json(self) -> dict[str, object]:
        """Its config.json, with what transformers writes besides."""
        mask_token_id, vocab_size = self.vocabulary
        kinds = [FULL] * self.layers if self.window is None else [SLIDING] * (self.layers - 1) + [FULL]
        return {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": self.target_layer_ids},
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": kinds,
            "max_position_embeddings": 40960,
            "max_window_layers": self.layers,
            "num_attention_heads": self.heads[0],
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads[1],
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": self.rope_scaling,
            "rope_theta": self.rope_theta,
            "sliding_window": self.window,
            "tie_word_embeddings": False,
            "transformers_version": "4.57.3",
            "use_cache": True,
            "use_sliding_window": self.window is not None,
            "vocab_size": vocab_size,
        }


def _gpt_oss(name: str, block_size: int, ids: list[int], depth: int) -> Published:
    return Published(
        name, 8, 2880, 7680, (64, 8), block_size, ids, depth, 1.46, GPT_OSS, head_dim=64, rope_theta=150000.0,
        rope_scaling={**YARN, "factor": 32.0, "truncate": False}, attention_bias=True, rms_norm_eps=1e-5,
    )  # fmt: skip


PUBLISHED = (
    Published("Qwen3-4B-DFlash-b16", 5, 2560, 9728, (32, 8), 16, [1, 9, 17, 25, 33], 36, 1.00, rope_theta=1e6),
    Published("Qwen3-8B-DFlash-b16", 5, 4096, 12288, (32, 8), 16, [1, 9, 17, 25, 33], 36, 1.95, rope_theta=1e6),
    Published(
        "LLaMA3.1-8B-Instruct-DFlash-UltraChat", 5, 4096, 12288, (32, 8), 10, [1, 8, 15, 22, 29], 32, 1.95, LLAMA31,
        rope_theta=500000.0,
    ),
    Published("Qwen3-Coder-30B-A3B-DFlash", 8, 2048, 6144, (32, 4), 16, [1, 12, 23, 34, 45], 48, 0.88),
    Published("Qwen3-Coder-Next-DFlash", 8, 2048, 6144, (32, 4), 16, [3, 11, 23, 35, 43], 48, 0.88),
    _gpt_oss("gpt-oss-20b-DFlash", 8, [1, 6, 11, 16, 21], 24),
    _gpt_oss("gpt-oss-120b-DFlash", 10, [1, 9, 17, 25, 33], 36),
    Published(
        "Kimi-K2.5-DFlash", 6, 7168, 18432, (64, 8), 8, [1, 12, 24, 35, 47, 58], 61, 6.48, KIMI, rope_theta=50000.0,
        rope_scaling={**YARN, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    Published("Qwen3.5-4B-DFlash", 6, 2560, 9216, (32, 8), 16, EIGHT_OF_32, 32, 1.18, QWEN35, 4096),
    Published("Qwen3.5-9B-DFlash", 6, 4096, 12288, (32, 8), 16, EIGHT_OF_32, 32, 2.41, QWEN35, 4096),
    Published(
        "Qwen3.5-27B-DFlash", 6, 5120, 17408, (32, 8), 16, [1, 10, 18, 27, 35, 44, 52, 61], 64, 3.96, QWEN35, 4096
    ),
    Published("Qwen3.5-35B-A3B-DFlash", 6, 2048, 6144, (32, 8), 16, EIGHT_OF_40, 40, 0.72, QWEN35, 4096),
    Published(
        "Qwen3.5-122B-A10B-DFlash", 6, 3072, 9216, (32, 8), 16, [1, 7, 14, 20, 26, 32, 39, 45], 48, 1.44, QWEN35, 4096
    ),
    Published("Qwen3.6-27B-DFlash", 5, 5120, 17408, (32, 8), 16, [1, 16, 31, 46, 61], 64, 3.22, QWEN35, 2048),
    Published("Qwen3.6-35B-A3B-DFlash", 6, 2048, 6144, (32, 8), 16, EIGHT_OF_40, 40, 0.72, QWEN35, 4096),
    Published("gemma-4-31B-it-DFlash", 5, 5376, 10752, (64, 8), 16, [1, 12, 23, 35, 46, 57], 60, 2.86, GEMMA4, 2048),
    Published("gemma-4-26B-A4B-it-DFlash", 5, 2816, 5632, (32, 8), 16, [1, 6, 11, 17, 22, 27], 30, 0.80, GEMMA4, 2048),
)  # fmt: skip
