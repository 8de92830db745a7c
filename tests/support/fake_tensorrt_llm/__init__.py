"""As much of TensorRT-LLM as a drafter from outside meets, on CPU.

What it mirrors (github.com/NVIDIA/TensorRT-LLM, main of autumn 2026, between 1.3.0rc29 and 1.4):
registries      tensorrt_llm/_torch/models/modeling_utils.py, `register_draft_model` and the hand-over to workers
                (tests/unittest/_torch/speculative/hw_agnostic/test_draft_model_registry.py @e27249f, PR #18284)
worker          tensorrt_llm/_torch/speculative/dflash.py @00679c6 (`DFlashWorker`), contiguous arena
draft model     tensorrt_llm/_torch/models/modeling_dflash.py @009d8fa
attention       flash-attn's `flash_attn_with_kvcache`, through speculative/dflash_attention.py @0352547
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""To be put on sys.path: `import tensorrt_llm` then finds the fake."""
