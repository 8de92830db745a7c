"""For a model that was not found, a similar name is suggested, unless the given name may be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from dflash_engines.recipe import load_recipe
from dflash_serve.checkpoint.catalogue import catalogue
from dflash_serve.checkpoint.source import BUNDLED_CONFIGURATION, drafter_folder, probably_meant, target_folder
from dflash_serve.errors import UserError

RECIPES = sorted((Path(__file__).parents[3] / "engines" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("Qwen/Qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8", "Qwen/Qwen3-8B"),
        ("z-lab/Qwen3-8B-DFlash-b61", "z-lab/Qwen3-8B-DFlash-b16"),
        ("openai/gpt-oss-120", "openai/gpt-oss-120b"),
    ],
)
def test_the_nearest_known_model_is_suggested(name: str, meant: str) -> None:
    assert probably_meant(name, absent=True) == f"did you mean {meant}?"


def test_nothing_is_suggested_where_nothing_is_near_or_the_name_is_known() -> None:
    assert probably_meant("someone/else", absent=True) == ""
    assert probably_meant("Qwen/Qwen3-8B", absent=True) == ""


def test_a_name_that_may_be_right_is_not_corrected_where_the_hub_could_not_be_asked() -> None:
    assert probably_meant("Qwen/Qwen3-14B", absent=False) == ""
    assert probably_meant("qwen/qwen3-8b", absent=False) == "did you mean Qwen/Qwen3-8B?"


@pytest.mark.parametrize("written", ["{}/draftr", "./draftr", "models/draftr"])
def test_a_folder_beside_it_is_suggested_as_it_was_written(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = written.format(tmp_path)
    beside = Path(name).parent / "drafter"
    beside.mkdir(parents=True)
    assert probably_meant(name, absent=False) == "", "a folder without a model in it is none"
    (beside / "config.json").write_text("{}")
    assert probably_meant(name, absent=False) == f"did you mean {name.replace('draftr', 'drafter')}?"


def answers(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The hub raises this."""

    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


def http_error(kind: type[Any], status: int) -> Exception:
    found: Exception = kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))
    return found


def test_what_the_hub_does_not_have_what_is_gated_and_what_cannot_be_asked_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, http_error(RepositoryNotFoundError, 404))
    with pytest.raises(UserError, match=r"Qwen/Qwen3-8: not a folder, .* did you mean Qwen/Qwen3-8B\?"):
        target_folder("Qwen/Qwen3-8")
    answers(monkeypatch, http_error(GatedRepoError, 403))
    with pytest.raises(UserError, match="accept its terms on the hub, and set HF_TOKEN"):
        target_folder("meta-llama/Llama-3.1-8B-Instruct")
    answers(monkeypatch, OSError("no route to host\nand more"))
    with pytest.raises(UserError, match=r"\(no route to host\); check the name, the revision and the network$"):
        drafter_folder("Qwen/Qwen3-8")


def test_a_folder_has_no_revision_but_the_commit_that_it_is_named_by(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder has no revision main; leave the revision out, or give a hub id"):
        drafter_folder(tmp_path, "main")
    assert drafter_folder(tmp_path, tmp_path.name) == tmp_path


def test_a_bare_name_is_no_hub_id_and_is_told_the_alias() -> None:
    with pytest.raises(UserError, match=r"smollm: no such folder; did you mean smollm2\?"):
        drafter_folder("smollm")


def test_every_drafter_of_the_recipes_is_known() -> None:
    known = {drafter.repository for drafter in catalogue().drafters}
    assert {
        str(recipe.deployment.drafter and recipe.deployment.drafter.model) for recipe in map(load_recipe, RECIPES)
    } <= known


@pytest.mark.model
def test_the_configuration_of_the_bundled_target_is_that_of_its_conversion() -> None:
    """A dry run describes the target by it, without the package or PyTorch."""
    shipped, converted = (
        json.loads((folder / "config.json").read_text()) for folder in (BUNDLED_CONFIGURATION, target_folder("smollm2"))
    )
    assert shipped == {
        name: converted[name] for name in converted.keys() - {"_model_name_or_path", "transformers_version"}
    }
