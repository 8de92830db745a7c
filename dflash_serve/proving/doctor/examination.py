"""The course of an examination: the reference, then probe after probe, each kept as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from dflash_serve.common.journal import Journal
from dflash_serve.proving.doctor.corrections import Alternative
from dflash_serve.proving.doctor.counts import Counts
from dflash_serve.proving.doctor.diagnosis import HEALTHY, Hypothesis
from dflash_serve.proving.doctor.reference import F, Prediction, Reference

AS_IT_IS = "as it is"


@dataclass
class Examination(Generic[F]):
    """Runs probes through a reference.

    Args:
        show: called with what is about to run, and how many probes there are in all.
    """

    reference: Reference[F]
    journal: Journal
    show: Callable[[str, int], None] = lambda name, count: None

    def hypotheses(self) -> list[Hypothesis]:
        """Healthy, and every fault, with what each predicts."""
        faults = list(self.reference.faults())
        sound = self._kept(AS_IT_IS, len(faults) + 1, lambda: self.reference.predict(None))
        found = [Hypothesis(HEALTHY, HEALTHY, "as in our own loop", sound.counts, answers=sound.answers)]
        for fault, prediction in self._predictions(faults):
            counts, answers = prediction.counts, prediction.answers
            found.append(Hypothesis(fault.cause, fault.name, fault.says, counts, fault.benign, answers))
        return found

    def alternatives(self) -> tuple[Prediction, list[Alternative]]:
        """As it is, and every other setting of the checkpoint."""
        faults = list(self.reference.settings())
        sound = self._kept(AS_IT_IS, len(faults) + 1, lambda: self.reference.predict(None))
        return sound, [
            Alternative(fault.cause, fault.name, fault.setting or fault.name, prediction.counts)
            for fault, prediction in self._predictions(faults)
        ]

    def _predictions(self, faults: Sequence[F]) -> list[tuple[F, Prediction]]:
        return [
            (fault, self._kept(fault.name, len(faults) + 1, lambda fault=fault: self.reference.predict(fault)))  # type: ignore[misc]
            for fault in faults
        ]

    def _kept(self, name: str, count: int, run: Callable[[], Prediction]) -> Prediction:
        self.show(name, count)
        kept = self.journal.get(name)
        if kept is None:
            prediction = run()
            kept = {"counts": [one.to_list() for one in prediction.counts], "answers": list(prediction.answers)}
            self.journal.put(name, kept)
        return Prediction(tuple(map(Counts.from_list, kept["counts"])), tuple(kept["answers"]))
