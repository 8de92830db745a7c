"""The command line that serves a prepared folder."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_serve.backend import Command

from .plan import Plan

CONFIG, DRAFT, PLUG_IN = "config.yaml", "draft", "dflash_serve_drafter"


def command_of(plan: Plan, folder: Path, host: str, port: int) -> Command:
    """`trtllm-serve` on one node; under `srun` and `trtllm-llmapi-launch`, one task a device, on several."""
    serve = ["trtllm-serve", plan.deployment.target.model, "--host", host, "--port", str(port)]
    serve += ["--config", str(folder / CONFIG)]
    env = {}
    if plan.drafter is not None and plan.implementation == "plug-in":
        serve += ["--custom_module_dirs", str(folder / PLUG_IN)]
        # The option imports it in this process; the workers import it by name and need to find it.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return Command((*_launcher(plan), *serve), env)


def _launcher(plan: Plan) -> list[str]:
    """What starts one process a device on several nodes (Slurm with PMIx, upstream's deployment guides)."""
    nodes, count = plan.deployment.parallel.nodes, plan.deployment.hardware.count
    if nodes == 1:
        return []
    tasks = [f"--nodes={nodes}", f"--ntasks={count}", f"--ntasks-per-node={count // nodes}"]
    return ["srun", "--mpi=pmix", *tasks, "trtllm-llmapi-launch"]
