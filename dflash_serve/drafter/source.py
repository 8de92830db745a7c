"""Where a drafter comes from: a local folder, which never touches the network, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_serve.assets import bundled_drafter
from dflash_serve.errors import UserError

FILES = ["*.json", "*.safetensors"]
"""What is fetched from the hub: never code, never pickle."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def drafter_source(name: str | Path) -> str | Path:
    """The folder of a drafter that comes with this package, for its alias; anything else as it is."""
    return bundled_drafter(str(name)) or name


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
        return Path(snapshot_download(name, revision=revision, allow_patterns=files or FILES))
    except Exception as error:  # the hub's own, httpx's and the system's errors all mean: not to be had
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"neither a folder nor to be fetched from the hub ({reason})",
            where=name,
            do="check the name, the revision and the network",
        ) from None
