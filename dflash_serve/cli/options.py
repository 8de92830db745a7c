"""Options that several verbs share: declared once, read alike everywhere. A verb adds its own default.

Where a verb has bounds of its own, it shares the wording alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

BUNDLED = "smollm2"
"""The target and drafter that need no download."""

LIMITS = ("max_batch_size", "max_model_len", "max_queued_requests")

DEPLOYMENT = "YAML file that describes target, drafter and how to serve them."
WIDTH = "Slots verified in a step: a number, auto or off."
MAX_TOKENS = "Longest answer, in tokens."
NUM_PROMPTS = "How many prompts to use, the first ones."
REPORT = "File for the report, JSON."

DeploymentFile = Annotated[Path | None, typer.Argument(metavar="[DEPLOYMENT]", help=DEPLOYMENT)]
Target = Annotated[str | None, typer.Option(help="Target: hub id, folder, or the bundled smollm2.")]
Drafter = Annotated[str | None, typer.Option(help="Drafter: hub id, folder, or the bundled smollm2.")]
Revision = Annotated[str | None, typer.Option(help="Commit of the drafter's hub repository.")]
Backend = Annotated[str, typer.Option("--backend", help="Installed backend: torch (embedded), sglang, tensorrt-llm.")]
BlockSize = Annotated[
    int | None, typer.Option(help="B: slots of a block, the anchor counted. [default: the drafter's own]")
]
Width = Annotated[str | None, typer.Option(help=WIDTH)]
Dtype = Annotated[str | None, typer.Option(help="What is computed in: auto, float32 or bfloat16.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Requests that run at once.")]
MaxTokens = Annotated[int, typer.Option(help=MAX_TOKENS, min=1)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
ServedModel = Annotated[str | None, typer.Option(help="Name of the served model. [default: the first one listed]")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the server's API key. [default: the environment's DFLASH_SERVE_API_KEY]"),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", help="JSONL file of {'prompt': text}. [default: the bundled prompts]")
]
Raw = Annotated[bool, typer.Option("--raw", help="Send prompts as they are, without the chat template.")]
Report = Annotated[Path, typer.Option(help=REPORT)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def deployment_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's options, by their parameters' names, as keys of a Deployment, which beat its file.

    None counts as not given, and so does a name that is not there.
    """
    return {
        "target": {"model": given.get("target")},
        "drafter": {"model": given.get("drafter")},
        "speculation": {name: given.get(name) for name in ("block_size", "width")},
        "hardware": {"dtype": given.get("dtype")},
        "limits": {name: given.get(name) for name in LIMITS},
    }
