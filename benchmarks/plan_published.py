"""Published DFlash tables predicted side by side, with errors; constants fitted on named rows only.

`python -m benchmarks.plan_published` writes results/plan-published.json; needs the extra [plan]; under a minute.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.common.reports import write_json
from dflash_serve.deployment.description import Model
from dflash_serve.planning.methods import chain_of_target
from dflash_serve.planning.prediction import FITTED, WHOLE, Constants, Load, MeasuredCell, Predictor, constants_of, fit
from dflash_serve.planning.question import specification
from dflash_serve.planning.step_times import Pair, Roofline, Split, Tables, library, priced, shipped_configuration

HERE = Path(__file__).parent
RESULT = HERE / "results" / "plan-published.json"
DATA: dict[str, Any] = json.loads((HERE / "plan" / "published.json").read_text())
TOLERANCE = 0.15


@cache
def pair_of(name: str) -> Pair:
    """A target and its drafter, by their published sizes."""
    row = DATA["targets"][name]
    depth, hidden, wide, heads, kv_heads, head_dim, features, vocabulary = row["drafter"]
    own = HERE / "plan" / row["model"]
    folder = own if own.is_dir() else shipped_configuration(row["model"])
    assert folder is not None
    model = Model(model=row["model"], quantization=row.get("quantization", "none"))
    drafter = DrafterConfig(
        block_size=16, target_layer_ids=uniform_target_layer_ids(row["layers"], features), mask_token_id=0,
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, layers=(AttentionKind(),) * depth,
    )  # fmt: skip
    return Pair(model, folder, read_target_layout(folder, model), drafter)


@cache
def times_of(name: str, gpu: str, engine: str, tensor: int = 1, *, by_hand: bool = False) -> Tables | Roofline:
    """Step times of a pair on one GPU, or on several."""
    pair, on = pair_of(name), specification(gpu)
    return Roofline(pair, on, Split(tensor)) if by_hand else Tables(pair, on, Split(tensor), engine)


class Case(NamedTuple):
    """A published cell: its row, tokens/s without and with DFlash (None = not published) and their ratio."""

    row: dict[str, Any]
    speedup: float
    plain: MeasuredCell
    wide: MeasuredCell

    def line(self, constants: Constants) -> dict[str, Any]:
        """Published beside predicted."""
        out = dict(self.row)
        for key, cell in (("base", self.plain), ("dflash", self.wide)):
            told, published = cell.predicted(constants), self.row[key]
            out |= {f"predicted_{key}": round(told), f"{key}_error": published and round(told / published - 1, 4)}
        ratio = self.wide.predicted(constants) / self.plain.predicted(constants)
        figures = {"speedup": round(self.speedup, 2) or None, "predicted_speedup": round(ratio, 2)}
        return {**out, **figures, "speedup_error": round(ratio / self.speedup - 1, 4) if self.speedup else None}


def cases(group: Mapping[str, Any], start: Constants, *, by_hand: bool = False) -> Iterator[Case]:
    """All cells of a group of published rows."""
    for row in group["rows"]:
        times = times_of(row["target"], group["gpu"], group["engine"], group.get("tensor", 1), by_hand=by_hand)
        load = Load(*DATA["tasks"][row["task"]])
        head = chain_of_target(times.pair, mtp=group["method"] == "MTP") if "method" in group else None
        predictor = Predictor(times, start, load, row["block"], Split(group.get("tensor", 1)), head)
        told = {"group": group["name"], "held_out": group["role"] != "in sample"}
        told |= {key: row[key] for key in ("target", "task", "tau", "block")}
        for place, batch in enumerate(row["concurrency"]):
            base, dflash, ratio = (row[key][place] if key in row else None for key in ("base", "dflash", "speedup"))
            ratio = dflash / base if base and dflash else ratio
            base = base or (dflash / ratio if dflash and ratio else None)
            dflash = dflash or (base * ratio if base else None)
            plain = MeasuredCell(predictor, batch, 1, 1.0, base or 1.0)
            wide = MeasuredCell(predictor, batch, row["block"], row["tau"], dflash or 1.0)
            yield Case({**told, "concurrency": batch, "base": base, "dflash": dflash}, ratio or 0.0, plain, wide)


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean relative errors, and how many lie within 15 %."""
    out: dict[str, Any] = {}
    for key in ("base_error", "dflash_error", "speedup_error"):
        known = [line[key] for line in lines if line[key] is not None]
        if known:
            out[key.removesuffix("_error")] = {
                "mean_error": round(mean(map(abs, known)), 4),
                "within_15": sum(abs(error) <= TOLERANCE for error in known),
                "cells": len(known),
            }
    return out


def measured_curve(constants: Constants) -> dict[str, Any]:
    """gpt-oss-120b without speculation on B200s: step times by SGLang's tables against the points measured with
    TensorRT-LLM (prompts of 1,024 tokens, TP 1 to 8) that the library ships; raw, and with scale and step fitted.
    """
    path = Path(library().__file__).parent / "systems" / "silicon_sample.csv"
    seen, cells = set(), []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            wanted = ("openai/gpt-oss-120b", "b200_sxm", "trtllm", "1024", "1")
            keys = ("model_path", "system", "backend", "isl", "attention_dp_size")
            tensor, osl, batch = (int(float(row[key] or 0)) for key in ("tp_size", "osl", "batch_size"))
            if tuple(row[key] for key in keys) != wanted or (tensor, osl, batch) in seen:
                continue
            seen.add((tensor, osl, batch))
            times = times_of("gpt-oss-120b", "b200", "sglang", tensor)
            predictor = Predictor(times, constants, Load(1024, osl), 10, Split(tensor))
            rate = 1e3 * batch / float(row["silicon_tpot_ms"])
            cells.append(MeasuredCell(predictor, batch, 1, 1.0, rate))
    raw = constants.model_copy(update={"scale": 1.0, "plain_step": 0.0, "plain_request": 0.0})
    fitted = fit(cells, raw, ("scale", "plain_step"))
    return {
        "points": len(cells),
        **{f"{name}_mean_error": round(mean(abs(cell.error(each)) for cell in cells), 4)
           for name, each in (("raw", raw), ("fitted", fitted))},
        "scale": fitted.scale, "plain_step": fitted.plain_step,
    }  # fmt: skip


def chains(constants: Constants) -> dict[str, Any]:
    """EAGLE-3 and MTP: one more constant, fitted to the group in sample; errors of it and of the groups held out."""
    groups = {group["name"]: list(cases(group, constants)) for group in DATA["chains"]}
    fitted = fit([case.wide for case in groups["EAGLE-3, fitted"]], constants, ["chain_pass"])
    lines = {name: [case.line(fitted) for case in found] for name, found in groups.items()}
    told = {group["name"]: {"source": group["source"], "role": group["role"], **summary(lines[group["name"]])}
            for group in DATA["chains"]}  # fmt: skip
    return {
        "chain_pass": fitted.chain_pass,
        "groups": told,
        "lines": [each for found in lines.values() for each in found],
    }


def other_gpus() -> list[dict[str, Any]]:
    """Figures of GPUs that no fit has seen, beside what `plan` foresees there by its tables, roofline and constants."""
    lines = []
    for group in DATA["gpus"]:
        constants, load = constants_of(group["engine"], None), Load(*group["load"])
        for row in group["rows"]:
            pair, block = pair_of(row["target"]), row.get("block", 16)
            times, _ = priced(pair, specification(group["gpu"]), WHOLE, group["engine"], block, load.context)
            head = chain_of_target(pair, mtp=True) if "method" in group else None
            predictor = Predictor(times, constants, load, block, WHOLE, head)
            told = {"gpu": group["gpu"], "engine": group["engine"], "target": row["target"], "basis": times.basis}
            for kind, width, tokens in (("plain", 1, 1.0), ("drafted", block, row.get("tau"))):
                for users, published in row.get(kind, {}).items():
                    foreseen = 1e3 * int(users) * tokens / predictor.step(int(users), width).total
                    what = {"tau": tokens, "width": width, "users": int(users), "published": published}
                    error = round(foreseen / published - 1, 4)
                    lines.append({**told, **what, "predicted": round(foreseen, 1), "error": error})
    return lines


def main() -> None:
    """Fits, predicts, writes."""
    start = constants_of("sglang", "sglang-spec-v1")
    groups = {group["name"]: list(cases(group, start)) for group in DATA["groups"]}
    constants = fit([cell for case in groups["fitted"] for cell in (case.plain, case.wide)], start)
    lines = {name: [case.line(constants) for case in found] for name, found in groups.items()}
    held = [line for found in lines.values() for line in found if line["held_out"]]
    by_hand = list(cases(DATA["groups"][0], start, by_hand=True))
    result = {
        "command": "python -m benchmarks.plan_published",
        "basis": times_of("qwen3-8b", "b200", "sglang").basis,
        "constants": {name: getattr(constants, name) for name in FITTED},
        "groups": {group["name"]: {"source": group["source"], "role": group["role"], **summary(lines[group["name"]])}
                   for group in DATA["groups"]},
        "held_out": summary(held),
        "roofline": {"constants_of_the_tables": summary([case.line(constants) for case in by_hand])},
        "chains": chains(constants),
        "gpus": other_gpus(),
        "plain_curve": measured_curve(constants_of("tensorrt-llm", None)),
        "lines": [line for found in lines.values() for line in found],
    }  # fmt: skip
    write_json(RESULT, result)


if __name__ == "__main__":
    main()
