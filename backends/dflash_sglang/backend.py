"""SGLang as a backend: a plan's command, choices and notes. SGLang's own server serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_serve.backend import Command
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.errors import Problem
from dflash_serve.server_adapter import Choice, DraftForm, PreparedFile, ServerAdapter

from .arguments import arguments, kernels_of, node_arguments
from .checks import problems
from .engine_arguments import own_arguments
from .facts import FACTS, RELEASES
from .heads import DSPARK, dialect_of, head_problems
from .launch_plan import WIDTH_VARIABLE, SGLangPlan
from .planner_table import FILE as PLANNER
from .planner_table import planner_costs, planner_table

SPECULATING_REQUESTS = 48
"""SGLang 0.5.23's --max-running-requests for speculation, where none is given (arg_groups/speculative_hook.py)."""


class SGLangBackend(ServerAdapter[SGLangPlan]):
    """Checks and command line for SGLang 0.5.23. Needs neither a GPU nor SGLang until the command is run."""

    name = "sglang"
    facts = FACTS
    releases = str(RELEASES)
    drafting_arguments = ("speculative_algorithm",)
    plan = SGLangPlan
    one_key = True
    loggers = ("sglang",)
    logging_variable = "SGLANG_LOGGING_CONFIG_PATH"

    def problems(self, plan: SGLangPlan) -> list[Problem]:
        """Problems of a plan, in the order in which a user would fix them."""
        return problems(plan)

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Reasons why the engine does not serve such a drafter."""
        return list(head_problems(heads))

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """Arguments that keys of the deployment stand for, with those keys."""
        return own_arguments(drafter=drafter)

    def draft_form(self, drafter: DrafterConfig, target: str) -> DraftForm:
        """z-lab's or DeepSpec's dialect, in bfloat16."""
        dialect = dialect_of(drafter)
        return DraftForm(dialect, f"{'z-lab' if dialect == 'zlab' else 'DeepSpec'}'s dialect", dtype="bfloat16")

    def own_files(self, plan: SGLangPlan, folder: Path) -> Iterator[PreparedFile]:
        """Costs for the planner of DSPARK."""
        costs = None if plan.drafter is None else planner_costs(plan.drafter)
        if costs is not None and plan.block_size is not None:
            batch = plan.deployment.limits.max_batch_size or SPECULATING_REQUESTS
            yield PreparedFile(PLANNER, "costs for DSPARK's planner", planner_table(costs, batch * plan.block_size))

    def launch(self, plan: SGLangPlan, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder; on several nodes, the command of the node that this runs on.

        Raises:
            UserError: several nodes, and the environment does not say which this is.
        """
        argv = [sys.executable, "-m", "sglang.launch_server", *arguments(plan, folder)]
        argv += node_arguments(plan.deployment.parallel.nodes, os.environ)
        width = plan.block_size if plan.width is None else plan.width
        env = {} if plan.algorithm is None else {WIDTH_VARIABLE: str(width)}
        return Command((*argv, "--host", host, "--port", str(port)), {**env, **self.shared_environment(plan, folder)})

    def choices(self, plan: SGLangPlan) -> Iterator[Choice]:
        """Settings that the deployment leaves open."""
        deployment = plan.deployment
        limits, speculation, gpu = deployment.limits, deployment.speculation, plan.gpu
        if limits.max_batch_size is None:
            yield _max_batch_size(plan)
        if limits.max_model_len is None and plan.target.shape.max_position_embeddings is not None:
            longest = plan.target.shape.max_position_embeddings
            yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
        if plan.drafter is not None and speculation.block_size is None:
            yield Choice("speculation.block_size", f"{plan.block_size}", "the drafter's own")
        if plan.drafter is not None:
            ours = plan.width is not None
            why = "our worker in SGLang serves it" if ours else f"SGLang's own {plan.family}: the width never changes"
            width = plan.block_size if plan.whole_blocks_with is not None else speculation.width
            yield Choice("speculation.width", str(width), why)
        if gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked, and SGLang chooses the attention kernels")
        elif not plan.target.latent and "attention-backend" not in plan.given:
            kernels = kernels_of(gpu)
            drafts = f", {kernels.drafter} for the drafter" if plan.drafter is not None else ""
            yield Choice("attention kernels", f"{kernels.target}{drafts}", f"what serves DFlash on a {gpu.name}")
        if deployment.hardware.dtype == "auto":
            yield Choice("hardware.dtype", "bfloat16", "what SGLang's DFlash computes in")

    def notes(self, plan: SGLangPlan) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        if plan.algorithm == DSPARK:
            yield "SGLang's own DSPARK serves it alone: our plug-in counts no slots there and refuses no request"
        elif plan.drafter is not None and plan.width is None:
            yield "requests with penalties are refused: SGLang's own DFlash would not apply them"
        if plan.whole_blocks_with is not None and plan.deployment.speculation.width == "auto":
            whole = f"whole blocks of {plan.block_size} slots with {plan.whole_blocks_with}"
            yield f"SGLang verifies {whole}: auto changes nothing"


def _max_batch_size(plan: SGLangPlan) -> Choice:
    each = " for each copy of the model" if plan.deployment.parallel.data > 1 else ""
    if plan.drafter is not None:
        why = f"SGLang's own number for speculation{each}; it lowers it where memory is short"
        return Choice("limits.max_batch_size", f"{SPECULATING_REQUESTS}", why)
    why = f"SGLang takes what its K/V memory holds{each}, and logs it"
    return Choice("limits.max_batch_size", "SGLang's choice", why)


backend = SGLangBackend()
