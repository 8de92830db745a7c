"""What a misspelt target or drafter was meant to be: the bundled alias, a folder beside it, a published model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_serve.errors import did_you_mean

ALIAS = "smollm2"
"""The bundled target, and its drafter."""
PUBLISHED = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "Qwen/Qwen3-Coder-Next": "z-lab/Qwen3-Coder-Next-DFlash",
    "Qwen/Qwen3.5-4B": "z-lab/Qwen3.5-4B-DFlash",
    "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen/Qwen3.5-27B": "z-lab/Qwen3.5-27B-DFlash",
    "Qwen/Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "Qwen/Qwen3.5-122B-A10B": "z-lab/Qwen3.5-122B-A10B-DFlash",
    "Qwen/Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
    "Qwen/Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "google/gemma-4-26B-A4B-it": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "google/gemma-4-31B-it": "z-lab/gemma-4-31B-it-DFlash",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "moonshotai/Kimi-K2.5": "z-lab/Kimi-K2.5-DFlash",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
}
"""Target -> its published drafter. For suggestions alone: any other id is asked for on the hub."""


def probably_meant(name: str, *, absent: bool) -> str:
    """ "did you mean X?" for a model that was not found; "" where nothing is near.

    Args:
        absent: the hub said that it has no such repository, or the name is no hub id at all. Where the hub could not be
            asked, the name may be right, and only what differs in case, or a folder, is suggested.
    """
    known = [ALIAS, *PUBLISHED, *PUBLISHED.values()]
    if name in known:
        return ""
    same = next((one for one in known if one.lower() == name.lower()), None)
    if same is not None:
        return f"did you mean {same}?"
    return _folder_meant(name) or (did_you_mean(name, known) if absent else "")


def _folder_meant(name: str) -> str:
    path = Path(name).expanduser()
    return did_you_mean(path.name, _folders(path.parent), prefix=name.removesuffix(path.name)) if path.name else ""


def _folders(parent: Path) -> Iterator[str]:
    """Those with a config.json."""
    try:
        yield from sorted(path.parent.name for path in parent.glob("*/config.json"))
    except OSError:
        return
