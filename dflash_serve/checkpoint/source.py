"""Where a target or drafter comes from: the bundled `smollm2`, a local folder (never touches the network), a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_serve.checkpoint.smollm2 import ALIAS, smollm2_folder
from dflash_serve.errors import UserError

DRAFTER_FILES = ["*.json", "*.safetensors"]
TARGET_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is fetched from the hub: never code, never pickle."""
BUNDLED_DRAFTER = Path(__file__).parents[1] / "assets" / "smollm2-135m-instruct-dflash"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def drafter_source(name: str | Path) -> str | Path:
    """The folder of a drafter that comes with this package, for its alias; anything else as it is."""
    return BUNDLED_DRAFTER if str(name) == ALIAS else name


def target_source(name: str) -> str | Path:
    """The folder of the bundled target, converted first where need be; any other name as it is."""
    return smollm2_folder() if name == ALIAS else name


def drafter_folder(name: str | Path, revision: str | None = None) -> Path:
    """The local folder of a drafter, fetched where need be.

    Raises:
        UserError: neither an alias, a folder nor an id that can be fetched.
    """
    return local_folder(drafter_source(name), revision)


def target_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a target, fetched or converted first where need be.

    Raises:
        UserError: neither an alias, a folder nor an id that can be fetched.
    """
    return local_folder(target_source(name), revision, files=TARGET_FILES)


def local_folder(folder_or_id: str | Path, revision: str | None = None, *, files: list[str] | None = None) -> Path:
    """The folder itself, or the snapshot of a hub repository.

    Args:
        folder_or_id: a folder, or `owner/name` on the Hugging Face hub.
        revision: commit, branch or tag of the hub repository; hub checkpoints are replaced in place, so pin a commit.
        files: patterns of what to fetch, instead of all configuration and weights.

    Raises:
        UserError: neither a folder nor an id that can be fetched.
    """
    name, path = str(folder_or_id), Path(folder_or_id)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError("not a folder", where=name, do="give the folder that holds config.json and model.safetensors")
    if isinstance(folder_or_id, Path) or not HUB_ID.fullmatch(name) or name.startswith((".", "~")):
        raise UserError("no such folder", where=name, do="give a folder, or a hub id such as z-lab/Qwen3-8B-DFlash-b16")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            "no such folder, and huggingface_hub is not installed",
            where=name,
            do="pip install 'dflash-serve[torch]', or give a folder",
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files or DRAFTER_FILES))
    except Exception as error:  # the hub's own, httpx's and the system's errors all mean: not to be had
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"neither a folder nor to be fetched from the hub ({reason})",
            where=name,
            do="check the name, the revision and the network",
        ) from None
