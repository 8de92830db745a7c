"""For SM100 and SM103 the same ONNX, and the commands that build it there. Written down, labelled: not built here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.deployment import Deployment

from .onnx_export import GRAPHS
from .pipeline import Measured, Work

LABEL = "not built here: TensorRT for SM100 and SM103 needs one of these GPUs and NVIDIA's own package index"


def write_commands(work: Work, deployment: Deployment, kinds: Sequence[str], precisions: Sequence[str]) -> Measured:
    """Step `commands`: writes commands.json and commands.sh."""
    commands: dict[str, list[str]] = {}
    for precision in precisions if "tensorrt" in kinds else ():
        made = _trtexec(deployment, precision, _drafter(work, precision))
        commands |= {f"tensorrt {graph} {precision}": argv for graph, argv in made.items()}
    if "edge-llm" in kinds:
        commands |= _edge_llm(work.inputs)
    fields = {"label": LABEL, "commands": commands}
    (work.folder / "commands.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    lines = [f"# {name}\n{shlex.join(argv)}\n" for name, argv in commands.items()]
    (work.folder / "commands.sh").write_text("\n".join([f"# {LABEL}\n", *lines]), encoding="utf-8")
    return {"label": LABEL, "commands": len(commands)}


def _drafter(work: Work, precision: str) -> DrafterConfig:
    described = json.loads((work.inputs[f"onnx-{precision}"] / "drafter.json").read_text(encoding="utf-8"))
    return DrafterConfig.model_validate(described["drafter"])


def _trtexec(deployment: Deployment, precision: str, drafter: DrafterConfig) -> Mapping[str, list[str]]:
    """trtexec of TensorRT 10.13 or later (opset 23, FP4), strongly typed: the graph says every precision."""
    most, length = deployment.limits.max_batch_size, deployment.limits.max_model_len or 8192
    sizes = ((1, 1), (min(8, most), min(1024, length)), (most, length))
    commands = {}
    for graph in GRAPHS:
        argv = ["trtexec", "--stronglyTyped", "--skipInference", f"--onnx=onnx-{precision}/{graph}.onnx"]
        argv.append(f"--saveEngine={graph}.{precision}.engine")
        for flag, (batch, tokens) in zip(("min", "opt", "max"), sizes, strict=True):
            argv.append(f"--{flag}Shapes={_shapes(graph, batch, tokens, drafter)}")
        commands[graph] = argv
    return commands


def _shapes(graph: str, batch: int, tokens: int, drafter: DrafterConfig) -> str:
    """Shapes of a graph's inputs (`graph.py`), as trtexec writes them."""
    block, dim = drafter.block_size, drafter.head_dim
    if graph == "context":
        shapes = {"features": (tokens, drafter.feature_size), "cos": (tokens, 1, dim), "sin": (tokens, 1, dim)}
        return _join(shapes)
    past = (drafter.num_layers, batch, drafter.num_key_value_heads, tokens, dim)
    turn = (batch, 1, block, dim)
    noise, mask = (batch, block, drafter.hidden_size), (batch, 1, block, tokens + block)
    return _join({"noise": noise, "context_k": past, "context_v": past, "cos": turn, "sin": turn, "mask": mask})


def _join(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _edge_llm(inputs: Mapping[str, object]) -> dict[str, list[str]]:
    """TensorRT Edge-LLM 0.11: export and build of target and drafter together; it refuses tensor parallelism."""
    drafters = sorted(name for name in inputs if name.startswith("drafter-") and name != "drafter-ranges") or [
        "drafter"
    ]
    commands = {}
    for name in drafters:
        export = ["tensorrt-edgellm-export", "--dflash-base", "--dflash-draft", "--dflash-draft-dir", name]
        commands[f"edge-llm export {name}"] = [*export, "TARGET", f"edge-{name}"]
        build = ["tensorrt-edgellm-build", "--spec-type", "dflash", "--draft-model-dir", f"edge-{name}/draft"]
        commands[f"edge-llm build {name}"] = [*build, f"edge-{name}/base"]
    return commands
