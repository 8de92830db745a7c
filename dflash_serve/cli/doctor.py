"""`dflash-serve doctor`: why is acceptance low? Exit code 0: healthy; 1: a fault was found; 2: it could not be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.backend import EMBEDDED, Prompt, backend
from dflash_serve.cli.extras import need
from dflash_serve.cli.generate import BUNDLED
from dflash_serve.cli.resumable import resumable
from dflash_serve.deployment import load_deployment
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.proving.doctor.suspect import Interview
    from dflash_torch.faults.reference import EmbeddedReference

Show = Callable[[str, int], None]


def doctor(
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = BUNDLED,
    drafter: Annotated[str, typer.Option(help="Likewise.")] = BUNDLED,
    url: Annotated[str | None, typer.Option(help="A server of this pair that nobody else uses meanwhile.")] = None,
    observed: Annotated[float | None, typer.Option(help="Or only its acceptance length, as seen.", min=1.0)] = None,
    model: Annotated[str | None, typer.Option(help="Of the server. [default: the first that it lists]")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="With the server's key. [else DFLASH_SERVE_API_KEY]")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="B as served, the anchor counted.", min=2)] = None,
    dtype: Annotated[str, typer.Option(help="Of our own loop: auto, float32 or bfloat16.")] = "auto",
    prompts: Annotated[Path | None, typer.Option(help="JSONL of {'prompt': ...}. [default: bundled ones]")] = None,
    count: Annotated[int, typer.Option(help="Prompts to use.", min=2)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=8)] = 64,
    output: Annotated[Path, typer.Option(help="The report.")] = Path("doctor-report.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted examination.")] = False,
) -> None:
    """Say why acceptance is low: of a server, or of a pair whose checkpoint may be wrong about itself."""
    need("prove", "httpx", "numpy", "prometheus_client")
    from rich.console import Console

    from dflash_serve.prompts.prompt_set import read_prompt_set
    from dflash_serve.proving.doctor.conclusions import conclude_pair, conclude_suspect, write_report
    from dflash_serve.proving.doctor.examination import Examination
    from dflash_serve.proving.doctor.fit import Observation
    from dflash_serve.proving.doctor.report import show
    from dflash_serve.speculation.params import SamplingParams

    if url is not None and observed is not None:
        raise UserError("the server says it itself", where="--observed", do="leave it out, or --url")
    asked = read_prompt_set(prompts)[:count]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with _progress() as advance:
        told = _interview(url, model, api_key_file, asked, params, drafter, advance) if url else None
        if told is not None and block_size is None and told.engine != "dflash-serve":
            block_size = told.width  # others draft as many slots as they verify
        reference = _reference(target, drafter, block_size, dtype, asked, params, told, advance)
        belongs_to = _belongs_to(reference, target, drafter, asked, max_tokens)
        with resumable(output, belongs_to, "finished probes", resume=resume) as journal:
            examination = Examination(reference, journal, advance)
            if told is None and observed is None:
                report = conclude_pair(examination, lambda: _difference(reference, target, drafter, advance))
            else:
                seen = told.observation if told else Observation(observed or 1.0)
                report = conclude_suspect(examination, seen)
            report["notes"] += told.notes if told else ()
            write_report({"pair": belongs_to, **report}, output)
    console = Console(highlight=False)
    show(report, console)
    console.print(f"report: {output}", soft_wrap=True)
    raise typer.Exit({"healthy": 0, "fault": 1}.get(report["verdict"], 2))


def _interview(
    url: str, model: str | None, key: Path | None, asked: list[Prompt], params: Any, drafter: str, advance: Show
) -> Interview:
    from dflash_serve.checkpoint.reader import read_config
    from dflash_serve.client.endpoint import Endpoint
    from dflash_serve.common.http import read_api_key
    from dflash_serve.proving.doctor.suspect import interview

    config, _ = read_config(drafter)
    endpoint = Endpoint(url, model, read_api_key(key))
    return interview(endpoint, asked, params, config.block_size, lambda: advance("asking the server", len(asked)))


def _reference(
    target: str,
    drafter: str,
    block_size: int | None,
    dtype: str,
    asked: list[Prompt],
    params: Any,
    told: Interview | None,
    advance: Show,
) -> EmbeddedReference:
    """Our own loop, at the width that the server verifies."""
    import torch

    from dflash_serve.checkpoint.reader import read_config
    from dflash_serve.models.loader import load_drafter
    from dflash_torch.faults.reference import EmbeddedReference

    advance("loading target and drafter", 1)
    width = told.width if told else block_size or read_config(drafter)[0].block_size
    flags = {
        "target": {"model": target},
        "drafter": {"model": drafter},
        "speculation": {"block_size": block_size, "width": width},
        "hardware": {"dtype": dtype},
        "limits": {"max_batch_size": len(asked), "max_model_len": _room(target, asked, params.max_tokens)},
    }
    engine: Any = backend(EMBEDDED).engine(load_deployment(flags=flags))
    embedding: torch.Tensor = engine.scheduler.target.embedding
    sound = load_drafter(drafter, dtype=embedding.dtype, device=embedding.device)
    return EmbeddedReference(engine, sound, asked, params, width)


def _room(target: str, asked: list[Prompt], max_tokens: int) -> int:
    """Tokens that a slot must hold: a K/V cache for the target's whole context would fill a GPU."""
    from dflash_serve.checkpoint.source import target_folder
    from dflash_serve.models.target_config import read_target_config

    characters = max(len(str(prompt)) for prompt in asked)  # no fewer than tokens; the template's come on top
    return min(read_target_config(target_folder(target)).max_position_embeddings, characters + 512 + max_tokens)


def _difference(reference: EmbeddedReference, target: str, drafter: str, advance: Show) -> object | None:
    """The first tensor of our own engine that is not transformers' or the core's."""
    from dflash_serve.checkpoint.source import drafter_source, local_folder, target_folder
    from dflash_torch.faults.tensors import first_difference

    advance("comparing tensors with transformers", 1)
    folders = target_folder(target), local_folder(drafter_source(drafter))
    return first_difference(reference.engine, *folders, reference.asked[0])


def _belongs_to(
    reference: EmbeddedReference, target: str, drafter: str, asked: list[Prompt], max_tokens: int
) -> dict[str, Any]:
    """All that a probe's counts depend on."""
    from dflash_serve.checkpoint.manifest import file_entries
    from dflash_serve.checkpoint.source import drafter_source, local_folder
    from dflash_serve.prompts.prompt_set import prompts_digest

    speculator = reference.speculator
    return {
        "target": target,
        "drafter": {name: entry.sha256 for name, entry in file_entries(local_folder(drafter_source(drafter))).items()},
        "prompts": prompts_digest(asked),
        "max_tokens": max_tokens,
        "block_size": speculator.block_size,
        "width": reference.width,
        "dtype": str(speculator.target.embedding.dtype),
    }


@contextmanager
def _progress() -> Iterator[Show]:
    """A line that says what runs, and how much of it is done."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        done: list[str] = []

        def advance(name: str, count: int) -> None:
            done.append(name)
            status.update(f"{name} ({len(done)} of about {count + 2})" if count > 1 else name)

        yield advance
