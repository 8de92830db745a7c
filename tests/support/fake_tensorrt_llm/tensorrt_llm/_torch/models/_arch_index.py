"""Which module provides which architecture and mode, importing nothing."""

MODEL_ARCH_TO_MODULE = {"Qwen3ForCausalLM": "modeling_zoo"}
SPEC_MODE_TO_MODULE = {"DFLASH": "modeling_dflash"}
