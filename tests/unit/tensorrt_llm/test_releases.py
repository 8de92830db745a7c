"""The table of what each release has: every entry with its evidence, and nothing claimed that was not seen."""

from __future__ import annotations

import re

import pytest

from dflash_tensorrt_llm import releases
from dflash_tensorrt_llm.releases import NEWEST, Feature, Release

TABLE = {name: value for name, value in vars(releases).items() if isinstance(value, Feature)}


@pytest.mark.parametrize("name", TABLE)
def test_every_entry_names_a_pull_request_a_page_or_a_source(name: str) -> None:
    assert re.search(r"#\d{5}|reference page|@[0-9a-f]{7}|main's", TABLE[name].source)


def test_what_no_release_has_is_in_none() -> None:
    missing = [name for name, feature in TABLE.items() if feature.since is None]
    assert missing == ["OWN_MASK_ROW", "QUANTISED_CONTEXT"]
    assert not any(NEWEST.has(TABLE[name]) for name in missing)
    assert all(NEWEST.has(feature) for feature in TABLE.values() if feature.since)


def test_attention_came_in_steps() -> None:
    """#16914 was in review until 4 August, when trunk was rc24: the key is in no release before."""
    found = {text: Release.parse(text).attention_backends for text in ("1.3.0rc24", "1.3.0rc25", "1.3.0rc27", "1.4")}
    assert found == {
        "1.3.0rc24": ("VANILLA",),
        "1.3.0rc25": ("VANILLA", "TRTLLM"),
        "1.3.0rc27": ("VANILLA", "TRTLLM", "FA4"),
        "1.4": ("VANILLA", "TRTLLM", "FA4"),
    }
