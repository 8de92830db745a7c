"""Which module provides which architecture, importing nothing."""

MODEL_ARCH_TO_MODULE = {"Qwen3ForCausalLM": "modeling_zoo"}
