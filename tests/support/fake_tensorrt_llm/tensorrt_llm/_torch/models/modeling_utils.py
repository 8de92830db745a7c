"""Registries of models, drafters and vision encoders (modeling_utils.py @000a01d).

External entries win, a built-in one fills empty slots only; workers are told of external *models* by module name, and
declaring them rebuilds the registries. As upstream, `_apply` asks nobody what was declared: a built-in module that is
imported between declaration and lookup takes the slot, and the declared package is never imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tensorrt_llm._torch.models._arch_index import MODEL_ARCH_TO_MODULE, SPEC_MODE_TO_MODULE

MODEL_CLASS_MAPPING: dict[str, type] = {}
MODEL_CLASS_VISION_ENCODER_MAPPING: dict[str, tuple[type, type | None]] = {}
DRAFT_MODEL_BUILDER_MAPPING: dict[Any, Callable[..., Any]] = {}
REGISTRIES: dict[str, dict[str, Any]] = {"model": MODEL_CLASS_MAPPING, "vision": MODEL_CLASS_VISION_ENCODER_MAPPING}
REGISTRATIONS: dict[str, list[tuple[str, str, Any]]] = {}
"""Module -> what its decorators registered: they run once a process."""
DECLARED: dict[str, str] = {}


def _builtin(module: str) -> bool:
    return module.startswith("tensorrt_llm._torch.models")


def _apply(registry: str, name: str, value: Any, module: str) -> None:
    if not (_builtin(module) and name in REGISTRIES[registry]):
        REGISTRIES[registry][name] = value


def _record(registry: str, name: str, value: Any, module: str) -> None:
    REGISTRATIONS.setdefault(module, []).append((registry, name, value))
    _apply(registry, name, value, module)


def register_auto_model(name: str) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        if "_registered_architectures" not in cls.__dict__:
            cls._registered_architectures = set()  # type: ignore[attr-defined]
        cls._registered_architectures.add(name)  # type: ignore[attr-defined]
        _record("model", name, cls, cls.__module__)
        return cls

    return decorate


def register_vision_encoder(encoder: type, base: type | None = None) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        for name in cls.__dict__["_registered_architectures"]:
            _record("vision", name, (encoder, base), cls.__module__)
        return cls

    return decorate


def register_draft_model(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(builder: Callable[..., Any]) -> Callable[..., Any]:
        if not (_builtin(builder.__module__) and mode in DRAFT_MODEL_BUILDER_MAPPING):
            DRAFT_MODEL_BUILDER_MAPPING[mode] = builder
        return builder

    return decorate


def export_external_model_modules() -> dict[str, str]:
    return {name: cls.__module__ for name, cls in MODEL_CLASS_MAPPING.items() if not _builtin(cls.__module__)}


def register_external_model_modules(declared: dict[str, str]) -> None:
    DECLARED.clear()
    DECLARED.update(declared)
    for registry in REGISTRIES.values():
        registry.clear()
    # Built-in modules first, but for architectures that are declared elsewhere; then the declared packages.
    order = [m for m in REGISTRATIONS if _builtin(m)] + list(dict.fromkeys(declared.values()))
    for module in order:
        for registry_name, name, value in REGISTRATIONS.get(module, ()):
            if declared.get(name, module) == module:
                _apply(registry_name, name, value, module)


def get_registered_model_class(name: str) -> type | None:
    if name not in MODEL_CLASS_MAPPING:
        module = DECLARED.get(name) or (
            f"tensorrt_llm._torch.models.{MODEL_ARCH_TO_MODULE[name]}" if name in MODEL_ARCH_TO_MODULE else None
        )
        if module:
            importlib.import_module(module)
    return MODEL_CLASS_MAPPING.get(name)


def get_model_architecture(config: Any) -> tuple[type, str]:
    found = get_registered_model_class(config.architectures[0])
    if found is None:
        raise RuntimeError(f"Unknown model architecture: {config.architectures[0]}")
    return found, config.architectures[0]


def get_registered_draft_model_builder(mode: Any) -> Callable[..., Any]:
    if mode not in DRAFT_MODEL_BUILDER_MAPPING:
        importlib.import_module(f"tensorrt_llm._torch.models.{SPEC_MODE_TO_MODULE[mode.name]}")
    return DRAFT_MODEL_BUILDER_MAPPING[mode]
