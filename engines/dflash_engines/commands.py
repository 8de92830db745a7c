"""Commands of TensorRT Edge-LLM, NVIDIA's runtime for one small device: written down here, run where its wheel is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from .pipeline import Measured, Work

LABEL = "not built here: Edge-LLM builds for the GPU that it finds"


def write_commands(work: Work) -> Measured:
    """Step `commands`: writes commands.json and commands.sh."""
    commands = _edge_llm(work.inputs)
    fields = {"label": LABEL, "commands": commands}
    (work.folder / "commands.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    lines = [f"# {name}\n{shlex.join(argv)}\n" for name, argv in commands.items()]
    (work.folder / "commands.sh").write_text("\n".join([f"# {LABEL}\n", *lines]), encoding="utf-8")
    return {"label": LABEL, "commands": len(commands)}


def _edge_llm(inputs: Mapping[str, object]) -> dict[str, list[str]]:
    """TensorRT Edge-LLM 0.11: export and build of target and drafter together; it refuses tensor parallelism."""
    drafters = sorted(name for name in inputs if name.startswith("drafter-") and name != "drafter-ranges")
    commands = {}
    for name in drafters or ["drafter"]:
        export = ["tensorrt-edgellm-export", "--dflash-base", "--dflash-draft", "--dflash-draft-dir", name]
        commands[f"edge-llm export {name}"] = [*export, "TARGET", f"edge-{name}"]
        build = ["tensorrt-edgellm-build", "--spec-type", "dflash", "--draft-model-dir", f"edge-{name}/draft"]
        commands[f"edge-llm build {name}"] = [*build, f"edge-{name}/base"]
    return commands
