"""Downloads a deployment's target and drafter into the hub's cache, and the encoding that gpt-oss reads."""

from __future__ import annotations

import argparse
import hashlib
import sys
import urllib.request
from pathlib import Path

import yaml

from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.errors import UserError

ENCODING = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def main() -> None:
    """Prints the folder of each; exit code 1 and one line if a download fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("deployment", type=Path)
    parser.add_argument("--encodings", type=Path)
    given = parser.parse_args()
    deployment = yaml.safe_load(given.deployment.read_text(encoding="utf-8"))
    try:
        for name, folder_of in (("target", target_folder), ("drafter", drafter_folder)):
            model = deployment.get(name)
            if model and not model["model"].startswith("/"):
                print(folder_of(model["model"], model.get("revision")), flush=True)
        if given.encodings:
            print(encoding(given.encodings), flush=True)
    except (UserError, OSError, ValueError) as error:
        sys.exit(str(error))


def encoding(folder: Path) -> Path:
    """The path of o200k_base.tiktoken in a folder, downloaded unless its digest is the published one.

    Raises:
        ValueError: the downloaded file is not the published one.
        OSError: it cannot be fetched or written.
    """
    path = folder / "o200k_base.tiktoken"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    with urllib.request.urlopen(ENCODING, timeout=60) as response:
        content = response.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{ENCODING}: not the file that was published; put it into {folder} yourself")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_bytes(content)
    return scratch.replace(path)


if __name__ == "__main__":
    main()
