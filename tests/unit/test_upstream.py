"""The reports in `upstream/`: each is whole, says nothing of us, and has its row."""

from __future__ import annotations

import re

import pytest

from tests.support.upstream import FAULTS, UPSTREAM, Fault

SECTIONS = {
    "sglang": ["### Checklist", "### Describe the bug", "### Reproduction", "### Environment"],
    "vllm": ["### Your current environment", "### 🐛 Describe the bug", "### Before submitting a new issue..."],
}
TITLES = {"sglang": "sglang", "vllm": "vllm", "router": "sglang"}  # the router's template is SGLang's
LIMIT_BYTES = 150_000  # the whole tree has 30 MB


def test_each_folder_has_its_row_with_what_is_in_it() -> None:
    rows = re.findall(
        r"^\| .+ \| \[(\S+)\]\((\S+)/ISSUE.md\) \| .+ \| (.+) \| (\S+) \| .+ \|$",
        (UPSTREAM / "README.md").read_text(),
        re.M,
    )
    assert sorted(name for name, *_ in rows) == [str(fault) for fault in FAULTS]
    faults = {str(fault): fault for fault in FAULTS}
    for name, link, after, lines in rows:
        fault = faults[name]
        assert link == name
        assert lines == str(fault.patched_lines)
        assert (after == "mended") is (fault.patch is not None)
        for number in re.findall(r"#\d+", after):
            assert f"{number} (open)" in fault.issue


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_report_is_in_its_projects_template_and_says_nothing_of_us(fault: Fault) -> None:
    assert re.findall(r"^### .+$", fault.issue, re.M) == SECTIONS[TITLES[fault.engine]]
    has_patch = fault.patch is not None
    assert ("**Proposed change**" in fault.issue, "**Public fix.**" in fault.issue) in (
        (has_patch, not has_patch),
        (False, False),  # the router
    )
    for part in ("**Cause.**", "**What it costs.**", "`python reproduce.py`"):
        assert part in fault.issue
    texts = [file.read_text(encoding="utf-8") for file in fault.folder.iterdir() if file.is_file()]
    assert not re.search("dflash[-_]serve|our plug-in", "".join(texts), re.I)


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in UPSTREAM.rglob("*") if file.is_file()) < LIMIT_BYTES
