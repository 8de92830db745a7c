"""Registries of models and drafters: external entries win, and workers are told of external *models* by module name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

MODELS: dict[str, type] = {}
BUILDERS: dict[Any, Callable[..., Any]] = {}
DECLARED: dict[str, str] = {}


def _builtin(thing: Any) -> bool:
    return str(thing.__module__).startswith("tensorrt_llm._torch.models")


def register_auto_model(name: str) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        cls._registered_architectures = {name}  # type: ignore[attr-defined]
        if not (_builtin(cls) and name in MODELS):
            MODELS[name] = cls
        return cls

    return decorate


def register_draft_model(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(builder: Callable[..., Any]) -> Callable[..., Any]:
        if not (_builtin(builder) and mode in BUILDERS):
            BUILDERS[mode] = builder
        return builder

    return decorate


def export_external_model_modules() -> dict[str, str]:
    return {name: cls.__module__ for name, cls in MODELS.items() if not _builtin(cls)}


def register_external_model_modules(declared: dict[str, str]) -> None:
    DECLARED.update(declared)


def get_registered_model_class(name: str) -> type | None:
    if name in DECLARED:
        importlib.import_module(DECLARED[name])
    elif name not in MODELS:
        importlib.import_module("tensorrt_llm._torch.models.modeling_zoo")
    return MODELS.get(name)


def get_registered_draft_model_builder(mode: Any) -> Callable[..., Any]:
    if mode not in BUILDERS:
        importlib.import_module("tensorrt_llm._torch.models.modeling_zoo")
    return BUILDERS[mode]
