"""From an examination to a report: of a server, and of a pair alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_serve.errors import UserError
from dflash_serve.proving.doctor.corrections import corrections, fewest_prompts
from dflash_serve.proving.doctor.counts import total
from dflash_serve.proving.doctor.diagnosis import diagnose
from dflash_serve.proving.doctor.examination import Examination
from dflash_serve.proving.doctor.fit import Observation
from dflash_serve.proving.doctor.reference import F
from dflash_serve.proving.doctor.report import figures, pair_report, suspect_report


def conclude_suspect(examination: Examination[F], observation: Observation) -> dict[str, Any]:
    """Which explanation fits what was observed of a server."""
    diagnosis = diagnose(observation, examination.hypotheses())
    whole = observation.whole or (total(observation.each) if observation.each else None)
    return {
        "verdict": diagnosis.verdict.value,
        "sentences": [diagnosis.sentence],
        "evidence": observation.kind,
        "observed": {"acceptance_length": observation.length, "survival": whole.survival if whole else None},
        **suspect_report(diagnosis),
        "notes": [],
    }


def conclude_pair(examination: Examination[F], difference: Callable[[], object | None]) -> dict[str, Any]:
    """Whether another setting of the checkpoint is better, and whether our own engine computes what it should.

    Args:
        difference: finds the first tensor that is not as it should be; None where there is none.
    """
    sound, alternatives = examination.alternatives()
    found, needed = corrections(sound.counts, alternatives), fewest_prompts(len(alternatives))
    wrong, figured, prompts = difference(), figures(sound.counts), len(sound.counts)
    sentences = [f"the checkpoint: {correction}" for correction in found[:1]]
    sentences += [f"our own engine: {wrong}"] if wrong else []
    verdict = "fault" if sentences else "healthy" if prompts >= needed else "could not tell"
    length = f"τ = {figured['acceptance_length']:.2f}"
    otherwise = {
        "healthy": f"healthy: {length}, and none of {len(alternatives)} other settings raises it",
        "could not tell": f"cannot tell: {length}; {prompts} prompts cannot show that a setting helps, {needed} could",
    }
    return {
        "verdict": verdict,
        "sentences": sentences or [otherwise[verdict]],
        "reference": figured,
        "corrections": pair_report(found),
        "first_difference": str(wrong) if wrong else None,
        "notes": [f"or {correction}" for correction in found[1:4]],
    }


def write_report(report: dict[str, Any], output: Path) -> None:
    """The whole report or none.

    Raises:
        UserError: it cannot be written.
    """
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        scratch.rename(output)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(output), do="name another") from None
