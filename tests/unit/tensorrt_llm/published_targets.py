"""config.json of the targets our recipes name, as far as a shape on devices follows from it (July to November 2026)."""

from __future__ import annotations

KIMI_SIZES: dict[str, object] = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_5_27B: dict[str, object] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "layer_types": 16 * (3 * ["linear_attention"] + ["full_attention"]), "max_position_embeddings": 262144,
    },
}  # fmt: skip
TARGETS: dict[str, dict[str, object]] = {
    "openai/gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    },
    "Qwen/Qwen3.5-27B": QWEN3_5_27B,
    "Qwen/Qwen3.8-27B": QWEN3_5_27B,  # of Qwen3.5's classes; its sizes are taken to be the same
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 5472, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 262144,
    },
    "moonshotai/Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": {
            **KIMI_SIZES,
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"], "input_activations": None,
                        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
                    },
                },
            },
        },
    },
    "nvidia/Kimi-K2.5-NVFP4": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": KIMI_SIZES,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip
