"""The embedded engine as a backend, which also starts it in this process. Imports torch at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_serve.adapter.draft_layouts import EVERY_LAYOUT
from dflash_serve.adapter.protocol import LookingBackend
from dflash_serve.answers.engine import Engine, Prompt
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.checkpoint.target_config import is_embedded
from dflash_serve.deployment.description import Deployment
from dflash_serve.doctor.evidence import DiagnosableBackend, Steps
from dflash_serve.errors import Problem, raise_problems
from dflash_serve.speculation.params import SamplingParams

from .facts import FACTS, head_problems
from .launch import EmbeddedLaunch, choose_waiting, readable, waiting_here

if TYPE_CHECKING:
    from .engine import EmbeddedEngine
    from .faults.replay import EmbeddedReference
    from .faults.tensors import Difference


class EmbeddedBackend(LookingBackend, DiagnosableBackend):
    """PyTorch in this process: one device, Llama- and Qwen-family targets, unquantised.

    It runs every head of a drafter; a confidence head is read and not used.
    """

    name = "torch"
    facts = FACTS
    releases = "this release"
    untried = ()
    layouts = EVERY_LAYOUT

    def launch(self, deployment: Deployment) -> EmbeddedLaunch:
        return EmbeddedLaunch(deployment=deployment)

    def head_problems(self, heads: Heads) -> list[Problem]:
        return list(head_problems(heads))

    def storage_problems(self, checkpoint: Checkpoint) -> list[Problem]:
        return []

    def target_problems(self, family: str) -> list[Problem]:
        if is_embedded(family):
            return []
        what = f"the embedded engine runs no {family} targets"
        return [Problem(what, "target.model", "use another --backend")]

    def engine(self, deployment: Deployment) -> EmbeddedEngine:
        choose_waiting()  # before torch is there: the check imports it
        launch = self.launch(deployment)
        raise_problems(launch.problems)
        from .engine import start_engine

        try:
            return start_engine(launch.with_batch_size(), launch.checkpoint)
        except (MemoryError, RuntimeError) as error:
            raise readable(error) from None

    def reference(
        self,
        engine: Engine,
        deployment: Deployment,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        width: int,
        steps: Sequence[Steps] | None = None,
    ) -> EmbeddedReference:
        from dflash_serve.models.loader import load_drafter

        from .engine import EmbeddedEngine
        from .faults.replay import EmbeddedReference

        assert isinstance(engine, EmbeddedEngine)
        assert deployment.drafter is not None
        embedding, drafter = engine.scheduler.target.embedding, deployment.drafter
        kind = embedding.dtype, embedding.device
        sound = load_drafter(drafter.model, revision=drafter.revision, dtype=kind[0], device=kind[1], dequantise=True)
        return EmbeddedReference(engine, sound, prompts, params, width, steps)

    def first_difference(self, engine: Engine, deployment: Deployment, prompt: Prompt) -> Difference | None:
        from .engine import EmbeddedEngine
        from .faults.tensors import first_difference

        assert isinstance(engine, EmbeddedEngine)
        assert deployment.drafter is not None
        target, drafter = deployment.target, deployment.drafter
        folders = target_folder(target.model, target.revision), drafter_folder(drafter.model, drafter.revision)
        return first_difference(engine, *folders, prompt)

    def look(self) -> Mapping[str, str]:
        return waiting_here()


backend = EmbeddedBackend()
