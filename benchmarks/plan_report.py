"""The result of `plan_published` as a page of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def as_markdown(result: Mapping[str, Any]) -> str:
    """Summary, seeds, every cell."""
    return "\n".join([*_head(result), *_groups(result), *_seeds(result), *_cells(result)]) + "\n"


def _head(result: Mapping[str, Any]) -> Iterator[str]:
    constants = result["constants"]
    yield "# Published DFlash tables, predicted"
    yield ""
    yield (
        f"`{result['command']}`; {result['basis']}. Constants in ms: "
        + ", ".join(f"{name} {value:g}" for name, value in constants.items())
        + ". They are fitted to the group `fitted` alone; all other groups are held out."
    )
    yield "Lengths of prompts and answers were not published and are assumed. No GPU was used, and no run was ours."
    yield (
        "The rule for attention (one of 3) and the form of the constants (one of 8) were chosen on the fitted cells, "
        "and the prefill share was changed once after the hold-outs had been seen: in-sample errors flatter, and the "
        "hold-outs were not blind."
    )


def _summary(one: Mapping[str, Any], key: str) -> str:
    if key not in one:
        return "| | "
    each = one[key]
    return f"| {each['mean_error']:.1%} | {each['within_15']}/{each['cells']} "


def _groups(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Mean relative errors", "")
    yield "| rows | role | plain | within 15 % | DFlash | within 15 % | speed-up | within 15 % |"
    yield "|---|---|---|---|---|---|---|---|"
    rows = [(f"{name} ({one['source']})", one["role"], one) for name, one in result["groups"].items()]
    rows.append(("all held out", "held out", result["held_out"]))
    rows.append(("all held out but the H100 cell", "held out", result["held_out_without_h100"]))
    rows += [(f"{name}, fitted to the other targets", "left out", one) for name, one in result["left_out"].items()]
    rows.append(("roofline instead of tables, its own constants", "in sample", result["roofline"]["refitted"]))
    rows.append(("roofline, constants of the tables", "in sample", result["roofline"]["constants_of_the_tables"]))
    for name, role, one in rows:
        yield f"| {name} | {role} " + "".join(_summary(one, key) for key in ("base", "dflash", "speedup")) + "|"
    curve = result["plain_curve"]
    yield ""
    yield (
        f"Plain gpt-oss-120b on B200 against the library's {curve['points']} points measured with TensorRT-LLM (TP "
        f"1 to 8, prompts of 1,024): mean error "
        f"{curve['raw_mean_error']:.1%} raw, {curve['fitted_mean_error']:.1%} with scale "
        f"{curve['scale']:.3f} and {curve['plain_step']:.2f} ms fitted ({curve['fitted_within_15']} within 15 %)."
    )
    yield ""
    yield "SGLang's second speculative engine (PR 23000), from which `sglang-spec-v2` is implied:"
    yield from (
        "",
        "| concurrency | published | predicted | ms left for the engine: v1 | v2 |",
        "|---|---|---|---|---|",
    )
    for row in result["next_engine"]:
        left = row["engine_ms_left"]
        yield f"| {row['concurrency']} | {row['published']:,} | {row['predicted']:,} | {left['v1']} | {left['v2']} |"


def _seeds(result: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        "",
        "## The numbers that made it known",
        "",
        "| claim | published | predicted | remark |",
        "|---|---|---|---|",
    )
    for row in result["seeds"]:
        yield f"| {row['claim']} | {_number(row['published'])} | {_number(row['predicted'])} | {row['remark']} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _cells(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Every cell", "")
    names = ["group", "target", "task", "concurrency", "τ", "B"]
    names += ["plain", "predicted", "DFlash", "predicted", "speed-up", "predicted", "error"]
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in result["lines"]:
        base, dflash = (_rate(row[key]) for key in ("base", "dflash"))
        yield (
            f"| {row['group']} | {row['target']} | {row['task']} | {row['concurrency']} | {row['tau']} "
            f"| {row['block']} | {base} | {row['predicted_base']:,} | {dflash} "
            f"| {row['predicted_dflash']:,} | {row['speedup']:.2f} "
            f"| {row['predicted_speedup']:.2f} | {row['speedup_error']:+.0%} |"
        )


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
