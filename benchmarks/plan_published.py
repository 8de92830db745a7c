"""Published DFlash tables predicted side by side, with errors; constants fitted on named rows only.

`python -m benchmarks.plan_published` writes results/plan-published.json; needs the extra [plan]; under a minute.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.common.files import write_whole
from dflash_serve.deployment import Model
from dflash_serve.planning import tables
from dflash_serve.planning.prediction import ALL, Load, MeasuredCell, Predictor, fit
from dflash_serve.planning.question import specification
from dflash_serve.planning.step_times import Constants, Pair, Roofline, Split, constants_of

HERE = Path(__file__).parent
RESULT = HERE / "results" / "plan-published.json"
DATA: dict[str, Any] = json.loads((HERE / "plan" / "published.json").read_text())
FITTED = "fitted"
TOLERANCE = 0.15


@cache
def pair_of(name: str) -> Pair:
    """A target and its drafter, by their published sizes."""
    row = DATA["targets"][name]
    depth, hidden, wide, heads, kv_heads, head_dim, features, vocabulary = row["drafter"]
    own = HERE / "plan" / row["model"]
    folder = own if own.is_dir() else tables.shipped_configuration(row["model"])
    assert folder is not None
    model = Model(model=row["model"])
    drafter = DrafterConfig(
        block_size=16, target_layer_ids=uniform_target_layer_ids(row["layers"], features), mask_token_id=0,
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, layers=(AttentionKind(),) * depth,
    )  # fmt: skip
    return Pair(model, folder, read_target_layout(folder, model), drafter)


@cache
def times_of(name: str, gpu: str, engine: str, tensor: int = 1, *, by_hand: bool = False) -> tables.Tables | Roofline:
    """Step times of a pair on one GPU, or on several."""
    pair, on = pair_of(name), specification(gpu)
    return Roofline(pair, on, Split(tensor)) if by_hand else tables.Tables(pair, on, Split(tensor), engine)


@dataclass(frozen=True)
class Case:
    """A published cell: tokens/s without and with DFlash, or their ratio; None = not published."""

    group: str
    held_out: bool
    target: str
    task: str
    concurrency: int
    tau: float
    block: int
    base: float | None
    dflash: float | None
    speedup: float
    plain: MeasuredCell
    wide: MeasuredCell

    def line(self, constants: Constants) -> dict[str, Any]:
        """Published beside predicted."""
        base, dflash = self.plain.predicted(constants), self.wide.predicted(constants)
        ratio = dflash / base
        keys = ("group", "held_out", "target", "task", "concurrency", "tau", "block", "base", "dflash")
        return {
            **{key: getattr(self, key) for key in keys},
            "predicted_base": round(base),
            "base_error": None if self.base is None else round(base / self.base - 1, 4),
            "predicted_dflash": round(dflash),
            "dflash_error": None if self.dflash is None else round(dflash / self.dflash - 1, 4),
            "speedup": round(self.speedup, 2),
            "predicted_speedup": round(ratio, 2),
            "speedup_error": round(ratio / self.speedup - 1, 4),
        }


def cases(group: Mapping[str, Any], start: Constants, *, by_hand: bool = False) -> Iterator[Case]:
    """All cells of a group of published rows."""
    for row in group["rows"]:
        times = times_of(row["target"], group["gpu"], group["engine"], group.get("tensor", 1), by_hand=by_hand)
        load = Load(*DATA["tasks"][row["task"]])
        predictor = Predictor(times, start, load, row["block"], Split(group.get("tensor", 1)))
        for place, batch in enumerate(row["concurrency"]):
            yield _case(group, row, place, batch, predictor)


def _case(group: Mapping[str, Any], row: Mapping[str, Any], place: int, batch: int, predictor: Predictor) -> Case:
    def given(key: str) -> float | None:
        return row[key][place] if key in row else None

    base, dflash, ratio = given("base"), given("dflash"), given("speedup")
    if base and dflash:
        ratio = dflash / base
    base = base or (dflash / ratio if dflash and ratio else None)
    dflash = dflash or (base * ratio if base and ratio else None)
    assert ratio is not None
    label = f"{row['target']} {row['task']} {batch}"
    plain = MeasuredCell(label, predictor, batch, 1, 1.0, base or 1.0)
    wide = MeasuredCell(label, predictor, batch, row["block"], row["tau"], dflash or 1.0)
    held_out = group["role"] != "in sample"
    return Case(
        group["name"], held_out, row["target"], row["task"], batch, row["tau"], row["block"], base, dflash, ratio,
        plain, wide,
    )  # fmt: skip


def both(found: Sequence[Case]) -> list[MeasuredCell]:
    """The cells that constants are fitted to."""
    return [cell for case in found for cell in (case.plain, case.wide)]


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean relative errors, and how many lie within 15 %."""
    out: dict[str, Any] = {}
    for key in ("base_error", "dflash_error", "speedup_error"):
        known = [line[key] for line in lines if line[key] is not None]
        if known:
            out[key.removesuffix("_error")] = {
                "mean_error": round(mean(map(abs, known)), 4),
                "bias": round(mean(known), 4),
                "worst": max(known, key=abs),
                "within_15": sum(abs(error) <= TOLERANCE for error in known),
                "cells": len(known),
            }
    return out


def measured_curve(constants: Constants) -> dict[str, Any]:
    """gpt-oss-120b without speculation on B200s: step times by SGLang's tables against the points measured with
    TensorRT-LLM (prompts of 1,024 tokens, TP 1 to 8) that the library ships; raw, and with scale and step fitted.
    """
    path = Path(tables.library().__file__).parent / "systems" / "silicon_sample.csv"
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
            cells.append(MeasuredCell(f"TP {tensor}, {osl} tokens, batch {batch}", predictor, batch, 1, 1.0, rate))
    raw = constants.model_copy(update={"scale": 1.0, "plain_step": 0.0, "plain_request": 0.0})
    fitted = fit(cells, raw, ("scale", "plain_step"))
    return {
        "points": len(cells),
        **{f"{name}_mean_error": round(mean(abs(cell.error(each)) for cell in cells), 4)
           for name, each in (("raw", raw), ("fitted", fitted))},
        "fitted_within_15": sum(abs(cell.error(fitted)) <= TOLERANCE for cell in cells),
        "scale": fitted.scale, "plain_step": fitted.plain_step,
        "cells": [{"cell": cell.label, "measured": round(cell.rate), "raw": round(cell.predicted(raw)),
                   "fitted": round(cell.predicted(fitted))} for cell in cells],
    }  # fmt: skip


def main() -> None:
    """Fits, predicts, writes."""
    start = constants_of("sglang", "sglang-spec-v1")
    groups = {group["name"]: list(cases(group, start)) for group in DATA["groups"]}
    constants = fit(both(groups[FITTED]), start)
    lines = {name: [case.line(constants) for case in found] for name, found in groups.items()}
    held = [line for found in lines.values() for line in found if line["held_out"]]
    by_hand = list(cases(DATA["groups"][0], start, by_hand=True))
    hand = fit(both(by_hand), start)
    names = ALL
    result = {
        "command": "python -m benchmarks.plan_published",
        "basis": times_of("qwen3-8b", "b200", "sglang").basis,
        "constants": {name: getattr(constants, name) for name in names},
        "groups": {name: {"source": group["source"], "role": group["role"], **summary(lines[name])}
                   for group in DATA["groups"] for name in (group["name"],)},
        "held_out": summary(held),
        "roofline": {"constants": {name: getattr(hand, name) for name in names},
                     "refitted": summary([case.line(hand) for case in by_hand]),
                     "constants_of_the_tables": summary([case.line(constants) for case in by_hand])},
        "plain_curve": measured_curve(constants_of("tensorrt-llm", None)),
        "lines": [line for found in lines.values() for line in found],
    }  # fmt: skip
    write_whole(RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
