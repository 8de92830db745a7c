"""Options that several verbs share: declared once, read alike everywhere. A verb adds its own default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BUNDLED = "smollm2"
"""The target and drafter that need no download."""

DeploymentFile = Annotated[
    Path | None,
    typer.Argument(metavar="[DEPLOYMENT]", help="YAML file that describes target, drafter and how to serve them."),
]
Target = Annotated[str | None, typer.Option(help="Target: hub id, folder, or the bundled smollm2.")]
Drafter = Annotated[str | None, typer.Option(help="Drafter: hub id, folder, or the bundled smollm2.")]
Backend = Annotated[str, typer.Option("--backend", help="Installed backend: torch (embedded), sglang, tensorrt-llm.")]
BlockSize = Annotated[
    int | None, typer.Option(help="B: slots of a block, the anchor counted. [default: the drafter's own]")
]
Width = Annotated[str | None, typer.Option(help="Slots verified in a step: a number, auto or off.")]
Dtype = Annotated[str | None, typer.Option(help="What is computed in: auto, float32 or bfloat16.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
ServedModel = Annotated[str | None, typer.Option(help="Name of the served model. [default: the first one listed]")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the server's API key. [default: the environment's DFLASH_SERVE_API_KEY]"),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", help="JSONL file of {'prompt': text}. [default: the bundled prompts]")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
