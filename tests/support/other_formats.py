"""Tiny drafters in GPTQ, AWQ, MXFP8 and ModelOpt's mixtures: each number is computed from its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from tests.support.tiny import edit_json, random_tensors, write_tiny_drafter

GROUP = 32
Stored = tuple[dict[str, Tensor], Tensor]  # (tensors of a module, the weight [out, in] that they stand for)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def numbers(*shape: int, below: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).tolist()


def as_int32(words: list[list[int]]) -> Tensor:
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32)


def turned(
    rows: int, columns: int, *, bits: int, places: list[int] | None, less_one: bool, symmetric: bool, desc_act: bool
) -> Stored:
    """GPTQ's (`places` None: neighbouring inputs share a word) or AWQ's (number `places[i]` is i-th in a word)."""
    each, groups = 32 // bits, columns // GROUP
    values = numbers(columns, rows, below=2**bits)
    zeros = [[2 ** (bits - 1)] * rows] * groups if symmetric else numbers(groups, rows, below=2**bits - 1, seed=1)
    zeros = [[zero + less_one for zero in row] for row in zeros] if not symmetric else zeros
    scales = torch.rand(groups, rows, generator=torch.Generator().manual_seed(2)).half() / 8 + 0.01
    group_of = [index // GROUP for index in range(columns)]
    group_of = group_of[::-1] if desc_act else group_of
    order = places or list(range(each))

    def packed_by_rows(table: list[list[int]], shift: int) -> list[list[int]]:
        words = [[0] * (rows // each) for _ in table]
        for line, row in enumerate(table):
            for word in range(rows // each):
                for place in range(each):
                    words[line][word] |= (row[word * each + order[place]] - shift) << (bits * place)
        return words

    if places is None:
        words = [[0] * rows for _ in range(columns // each)]
        for index in range(columns):
            for row in range(rows):
                words[index // each][row] |= values[index][row] << (bits * (index % each))
    else:
        words = packed_by_rows(values, 0)
    stored = {"qweight": as_int32(words), "qzeros": as_int32(packed_by_rows(zeros, int(less_one))), "scales": scales}
    if places is None:
        stored["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    step = scales.double().tolist()
    weight = [
        [(values[index][row] - zeros[group_of[index]][row]) * step[group_of[index]][row] for index in range(columns)]
        for row in range(rows)
    ]
    return stored, torch.tensor(weight)


def gptq(rows: int, columns: int, **more: Any) -> Stored:
    given: dict[str, Any] = {"bits": 4, "less_one": True, "symmetric": True, "desc_act": False}
    return turned(rows, columns, places=None, **{**given, **more})


def awq(rows: int, columns: int) -> Stored:
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    return turned(rows, columns, bits=4, places=places, less_one=False, symmetric=False, desc_act=False)


def mxfp8(rows: int, columns: int) -> Stored:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    exponents = numbers(rows, columns // 32, below=9, seed=4)
    scale = torch.tensor(exponents, dtype=torch.uint8) + 120
    plain = values.double().tolist()
    weight = [[plain[r][c] * 2.0 ** (exponents[r][c // 32] + 120 - 127) for c in range(columns)] for r in range(rows)]
    return {"weight": values, "weight_scale": scale}, torch.tensor(weight)


def fp8(rows: int, columns: int) -> Stored:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn)
    return {
        "weight": values,
        "weight_scale": torch.tensor(0.03),
        "input_scale": torch.tensor(0.5),
    }, values.float() * 0.03


def nvfp4(rows: int, columns: int) -> Stored:
    codes = numbers(rows, columns, below=16, seed=6)
    packed = [[row[c] | row[c + 1] << 4 for c in range(0, columns, 2)] for row in codes]
    scale = (torch.rand(rows, columns // 16, generator=torch.Generator().manual_seed(7)) + 0.5).to(torch.float8_e4m3fn)
    steps = scale.double().tolist()
    weight = [
        [
            (-1 if row[c] > 7 else 1) * E2M1[row[c] % 8] * steps[r][c // 16] * float(torch.tensor(0.02))
            for c in range(columns)
        ]
        for r, row in enumerate(codes)
    ]
    tensors = {"weight": torch.tensor(packed, dtype=torch.uint8), "weight_scale": scale}
    return {**tensors, "weight_scale_2": torch.tensor(0.02), "input_scale": torch.tensor(0.1)}, torch.tensor(weight)


GPTQ: Mapping[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
MXFP8: Mapping[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp8-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                **{"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
                **{"dynamic": False, "scale_dtype": "torch.uint8"},
            },
            "input_activations": None,
        }
    },
    "ignore": ["fc"],
}
MIXED: Mapping[str, object] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": None,
    "ignore": ["fc"],
    "quantized_layers": {
        f"model.layers.{layer}.{module}": {"quant_algo": algorithm}
        for layer in range(2)
        for module, algorithm in (
            *((f"self_attn.{part}_proj", "FP8") for part in "qkvo"),
            *((f"mlp.{part}_proj", "NVFP4") for part in ("gate", "up", "down")),
        )
    },
}
FORMATS: Mapping[str, tuple[Mapping[str, object], Callable[[str, int, int], Stored], str, str]] = {
    "GPTQ": (GPTQ, lambda _, rows, columns: gptq(rows, columns), "w4a16", "gptq"),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8}, lambda _, rows, columns: gptq(rows, columns, bits=8), "w8a16", "gptq"),
    "GPTQ by activations": (
        {**GPTQ, "desc_act": True},
        lambda _, rows, columns: gptq(rows, columns, desc_act=True),
        *("w4a16", "gptq"),
    ),
    "GPTQ by activations, with zero points": (
        {**GPTQ, "sym": False, "desc_act": True},
        lambda _, rows, columns: gptq(rows, columns, symmetric=False, desc_act=True),
        *("w4a16", "gptq"),
    ),
    "GPTQ's second form": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda _, rows, columns: gptq(rows, columns, symmetric=False, less_one=False),
        *("w4a16", "gptq"),
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        lambda _, rows, columns: awq(rows, columns),
        *("w4a16", "awq"),
    ),
    "MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["fc"]},
        lambda _, rows, columns: mxfp8(rows, columns),
        *("mxfp8", "modelopt"),
    ),
    "MXFP8 of compressed-tensors": (
        MXFP8,
        lambda _, rows, columns: mxfp8(rows, columns),
        *("mxfp8", "compressed-tensors"),
    ),
    "a mixture": (
        MIXED,
        lambda name, rows, columns: (fp8 if ".self_attn." in name else nvfp4)(rows, columns),
        *("mixed", "modelopt"),
    ),
}


def write(name: str, folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Writes a drafter in a format; returns the numbers of every tensor."""
    recipe, store, _, _ = FORMATS[name]
    write_tiny_drafter(folder, config)
    kept, plain = dict[str, Tensor](), random_tensors(config)
    for key, tensor in random_tensors(config).items():
        module = key.removesuffix(".weight")
        if not (key.startswith("layers.") and key.endswith("_proj.weight")):
            kept[key] = tensor
            continue
        tensors, plain[key] = store(module, *tensor.shape)
        kept |= {f"{module}.{leaf}": one.clone() for leaf, one in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": dict(recipe)})
    return plain
