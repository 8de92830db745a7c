"""Downloads a deployment's target and drafter into the hub's cache, and the encoding that gpt-oss reads."""

from __future__ import annotations

import argparse
import hashlib
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.source import DRAFTER_FILES, TARGET_FILES, drafter_source, local_folder, target_source
from dflash_serve.common.documents import read_yaml
from dflash_serve.errors import UserError

ENCODING = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def main() -> None:
    """Prints the folder of each; exit code 1 and one line if a download fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("deployment", type=Path)
    parser.add_argument("--encodings", type=Path)
    given = parser.parse_args()
    try:
        deployment: Any = read_yaml(given.deployment)
        target_files = [*TARGET_FILES, *(["*.py"] if runs_code(deployment) else [])]
        for name, source, files in (
            ("target", target_source, target_files),
            ("drafter", drafter_source, DRAFTER_FILES),
        ):
            model = deployment.get(name)
            if model and not model["model"].startswith("/"):
                print(local_folder(source(model["model"]), model.get("revision"), files=files), flush=True)
        if given.encodings:
            print(encoding(given.encodings), flush=True)
    except (UserError, OSError, ValueError) as error:
        sys.exit(str(error))


def runs_code(deployment: Mapping[str, Any]) -> bool:
    """True if an engine is told to run the code in the target's repository, such as that of Kimi's tokenizer."""
    given = (deployment.get("engine_args") or {}).values()
    return any(each.get(name) for each in given if each for name in ("trust-remote-code", "trust_remote_code"))


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
