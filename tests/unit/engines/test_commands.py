"""The commands for SM100 and SM103 are complete, and labelled as not built here."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_engines.pipeline import Work
from dflash_engines.rtx import LABEL, write_commands
from dflash_serve.deployment import Deployment
from tests.support.tiny import tiny_drafter_config


def test_every_moving_axis_has_its_range(tmp_path: Path) -> None:
    graphs = tmp_path / "onnx-fp16"
    graphs.mkdir()
    (graphs / "drafter.json").write_text(json.dumps({"drafter": tiny_drafter_config().model_dump(mode="json")}))
    out = tmp_path / "out"
    out.mkdir()
    limits = {"max_batch_size": 16, "max_model_len": 2048}
    deployment = Deployment.model_validate({"target": {"model": "t"}, "limits": limits})
    inputs = {"onnx-fp16": graphs, "drafter-fp8": tmp_path, "drafter-ranges": tmp_path}
    write_commands(Work(out, inputs, lambda line: None), deployment, ["tensorrt", "edge-llm"], ["fp16"])
    written = json.loads((out / "commands.json").read_text())
    assert written["label"] == LABEL
    assert "not built here" in LABEL
    assert written["commands"]["tensorrt block fp16"] == [
        "trtexec", "--stronglyTyped", "--skipInference", "--onnx=onnx-fp16/block.onnx",
        "--saveEngine=block.fp16.engine",
        "--minShapes=noise:1x4x32,context_k:2x1x2x1x16,context_v:2x1x2x1x16,cos:1x1x4x16,sin:1x1x4x16,mask:1x1x4x5",
        "--optShapes=noise:8x4x32,context_k:2x8x2x1024x16,context_v:2x8x2x1024x16,cos:8x1x4x16,sin:8x1x4x16,"
        "mask:8x1x4x1028",
        "--maxShapes=noise:16x4x32,context_k:2x16x2x2048x16,context_v:2x16x2x2048x16,cos:16x1x4x16,sin:16x1x4x16,"
        "mask:16x1x4x2052",
    ]  # fmt: skip
    edge = [name for name in written["commands"] if name.startswith("edge-llm")]
    assert edge == ["edge-llm export drafter-fp8", "edge-llm build drafter-fp8"]
