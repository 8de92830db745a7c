"""What vLLM loads into each of its processes (entry point `vllm.general_plugins`): drafters that are loaded strictly.

vLLM only logs what fails while a plug-in is loaded; that this one took effect is asked where it can stop the server: by
our schedulers and by our metrics (`proof`).
"""

from __future__ import annotations

import logging

from dflash_vllm.facts import TESTED, installed_version, is_supported

logger = logging.getLogger(__name__)
STRICT = {"DFlashDraftModel": "StrictDFlash", "DFlash2DraftModel": "StrictDFlash2"}
"""Architectures of drafters -> our classes of them."""


def register() -> None:
    """Puts our classes in the place of vLLM's; the entry point, called in every process, maybe more than once."""
    version = installed_version() or "unknown"
    if not is_supported(version):
        logger.error("dflash-serve: vLLM %s is not supported, tested %s", version, TESTED)
        return
    from vllm import ModelRegistry

    for architecture, name in STRICT.items():
        # By name: importing the class here would choose a platform too early.
        ModelRegistry.register_model(architecture, f"{__name__}.model:{name}")


def proof() -> None:
    """Does nothing where `register` took effect in this process.

    Raises:
        ValueError: it did not.
    """
    from vllm import ModelRegistry

    for architecture in STRICT:
        known = ModelRegistry.models.get(architecture)
        if getattr(known, "module_name", None) != f"{__name__}.model":
            raise ValueError(
                f"dflash-serve: {architecture} is not loaded by our class but by {known}: the plug-in dflash_serve was "
                f"not loaded (see VLLM_PLUGINS, and the log of this start; supported is vLLM {TESTED})"
            )
