"""A package that is not installed is reported with its extra, before any work is done."""

from __future__ import annotations

import json

import pytest

from dflash_serve.common.extras import absent, import_extra, need
from dflash_serve.errors import UserError


def test_what_is_there_is_no_matter() -> None:
    need("prove", "json", "pathlib")
    assert import_extra("prove", "json") is json


def test_what_is_not_there_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(UserError, match=r"not installed: nosuchmodule.*pip install 'dflash-serve\[prove\]'"):
        need("prove", "json", "nosuchmodule")


@pytest.mark.parametrize("module", ["nosuchmodule", "nosuchmodule.inner", "json.nosuchmodule"])
def test_what_cannot_be_imported_is_named_with_the_extra_that_brings_it(module: str) -> None:
    with pytest.raises(UserError, match=rf"{module} cannot be imported.*pip install 'dflash-serve\[engines\]'"):
        import_extra("engines", module)


@pytest.mark.parametrize(
    ("module", "extra", "chosen"), [("torch.nn", None, "torch"), ("scipy", "plan", "plan"), ("uvicorn", None, "serve")]
)
def test_an_import_that_failed_is_told_as_the_extra(module: str, extra: str | None, chosen: str) -> None:
    told = absent(ModuleNotFoundError("no", name=module), extra)
    assert told is not None
    named = module.partition(".")[0]
    assert str(told) == f"extra [{chosen}]: not installed: {named}; pip install 'dflash-serve[{chosen}]'"


def test_an_import_that_no_extra_brings_is_a_bug_and_stays_one() -> None:
    assert absent(ModuleNotFoundError("no", name="dflash_serve.nothing")) is None
    assert absent(ModuleNotFoundError("no")) is None
