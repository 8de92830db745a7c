"""Settings of a plan, and the question that they ask about a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.planning.acceptance import band, from_length, from_report, of_task, published
from dflash_serve.planning.calibration import calibrated
from dflash_serve.planning.pair import read_pair
from dflash_serve.planning.prediction import ExpectedAcceptance, Load, constants_of
from dflash_serve.planning.question import Objective, PlanQuestion, specification


class PlanSettings(Frozen):
    """A field for each option of `dflash-serve plan` that is not of a deployment, with the same name."""

    backend: str
    gpu: str | None
    count: PositiveInt | None
    tensor: PositiveInt | None
    """None = the best."""
    expert: PositiveInt | None
    pair: bool
    isl: PositiveInt
    osl: PositiveInt
    slo_interactivity: float | None
    slo_ttft: float | None
    acceptance_length: float | None
    survival: Path | None
    task: str | None
    constants: str | None
    calibrate: Path | None

    def flags(self) -> Mapping[str, Mapping[str, Any]]:
        """The keys of a deployment among the options; None = not given.

        Raises:
            UserError: there is no such GPU.
        """
        if self.gpu is not None:
            specification(self.gpu)
        return {
            "hardware": {"gpu": self.gpu, "count": self.count},
            "parallel": {"tensor": self.tensor, "expert": self.expert},
            **({"pair": {"prefill": {}}} if self.pair else {}),
        }

    def question(self, deployment: Deployment) -> PlanQuestion:
        """Everything that the plan of a deployment depends on.

        Raises:
            UserError: the first mistake, in the options or in the deployment.
        """
        on = specification(deployment.hardware.gpu)
        constants = constants_of(self.backend, self.constants)
        pair = read_pair(deployment)
        block = deployment.speculation.block_size or pair.drafter.block_size
        question = PlanQuestion(
            deployment=deployment,
            backend=self.backend,
            on=on,
            pair=pair,
            block_size=block,
            load=Load(self.isl, self.osl),
            objective=Objective(self.slo_interactivity, self.slo_ttft),
            acceptances=tuple(self._acceptances(deployment, block)),
            constants=constants,
        )
        return question if self.calibrate is None else calibrated(question, self.calibrate)

    def _acceptances(self, deployment: Deployment, block_size: int) -> list[ExpectedAcceptance]:
        length, report, task = self.acceptance_length, self.survival, self.task
        if length is not None and (report is not None or task is not None):
            do = "leave out --survival and --task"
            raise UserError("acceptance is given twice", where="--acceptance-length", do=do)
        if length is not None:
            return [from_length(length, block_size, "given by --acceptance-length")]
        if report is not None:
            return [from_report(report, task, block_size, Load(self.isl, self.osl).context)]
        target, drafter = deployment.target.model, deployment.drafter.model if deployment.drafter else None
        if task is not None:
            return [of_task(task, target, drafter, block_size)]
        return band(block_size, "" if drafter is None else published(target, drafter))
