from __future__ import annotations

import pytest

from dflash_serve.common.extras import need
from dflash_serve.errors import UserError


def test_what_is_there_is_no_matter() -> None:
    need("prove", "json", "pathlib")


def test_what_is_not_there_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(UserError, match=r"not installed: nosuchmodule.*pip install 'dflash-serve\[prove\]'"):
        need("prove", "json", "nosuchmodule")
