"""The report says what was done, and prompts of every form are read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash_serve.answers.prompts import read_prompt_set
from dflash_serve.common.reports import write_json
from dflash_serve.errors import UserError
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import VerifyPlan
from dflash_serve.verify.report import FaultKind, Findings, VerifyReport, report_of, show
from dflash_serve.verify.tokens import Difference, TokenComparison

SUBJECTS = {"with": {"url": "http://a"}, "without": {"url": "http://b"}}
DIFFERENCE = Difference(
    prompt=3, position=17, with_speculation="' [x]' (5)", without_speculation=None, gap=1.5, kind="fault"
)


def report() -> VerifyReport:
    plan = VerifyPlan(prompts=4, prompts_sha256="0" * 64, max_tokens=8, samples=64)
    greedy = TokenComparison(case="greedy", prompts=4, identical=3, tokens=32, compared=25, differences=(DIFFERENCE,))
    drawn = DistributionComparison(case="temperature 1", prompt=1, samples=64, p_value=0.4, smallest_deviation=0.2)
    findings = Findings(
        verdict="not lossless",
        faults={FaultKind.STALE_STATE: "greedy, prompt 3, position 17"},
        reasons=(),
        unit="token ids",
        greedy=(greedy,),
        sampled=(drawn,),
        seeded=None,
        accepted=None,
        acceptance_length=None,
    )
    return report_of(plan, SUBJECTS, findings)


def shown(made: VerifyReport, width: int = 160) -> str:
    out = io.StringIO()
    show(made, Console(file=out, width=width))
    return out.getvalue().strip()


def test_a_report_is_written_whole_with_versions_and_comes_back(tmp_path: Path) -> None:
    written = report()
    write_json(tmp_path / "r.json", written)
    assert VerifyReport.model_validate_json((tmp_path / "r.json").read_text()) == written
    assert written.versions["dflash-serve"]
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_a_reader_sees_the_first_differing_position_both_tokens_and_the_verdict() -> None:
    text = shown(report())
    assert "prompt 3, position 17: ' [x]' (5) with, the end without speculation; gap 1.5: fault" in text
    assert "0.200" in text
    assert text.endswith("not lossless: stale state (greedy, prompt 3, position 17)")


def test_a_case_keeps_its_name_and_a_head_its_words_in_a_narrow_terminal() -> None:
    named = report().findings.greedy[0].model_copy(update={"case": "log-probabilities"})
    findings = report().findings.model_copy(update={"greedy": (named,)})
    text = shown(report_of(report().plan, SUBJECTS, findings), 60)
    assert "\nlog-probabilities " in text
    assert {"prompts", "same", "compared", "near-", "ties", "faults"} <= set(text.split())
    assert "…" not in text


def test_a_verdict_says_what_was_not_tested() -> None:
    plan = VerifyPlan(prompts=4, prompts_sha256="0" * 64, max_tokens=8, samples=0, penalties=False)
    findings = report().findings.model_copy(update={"verdict": "lossless", "faults": {}, "scope": plan.left_out})
    assert shown(report_of(plan, SUBJECTS, findings)).endswith(
        "lossless: greedy and sampled; not tested: sampling, short answers under load, penalties"
    )


def test_the_bundled_prompts_are_read_and_so_are_a_users(tmp_path: Path) -> None:
    assert len(read_prompt_set()) == 20
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a\\u2028b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n{"token_ids": [1, 2]}\n'
    )
    user = [{"role": "user", "content": "c"}]
    assert read_prompt_set(path) == [[{"role": "user", "content": "a\u2028b"}], user, [1, 2]]
    assert read_prompt_set(path, raw=True)[0] == "a\u2028b"


@pytest.mark.parametrize("content", [None, 5, [{"type": "text", "text": "c"}]])
def test_a_message_whose_content_is_no_text_is_refused_by_its_line(tmp_path: Path, content: object) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    with pytest.raises(UserError, match=r"p.jsonl:1: 'content' of a message is no text"):
        read_prompt_set(tmp_path / "p.jsonl")


@pytest.mark.parametrize("line", ["", "nonsense", '{"text": "a"}', '{"prompt": ""}', '{"token_ids": ["a"]}', "[1]"])
def test_what_is_no_prompt_is_one_clear_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"no prompt(s in it)?; give one JSON object a line"):
        read_prompt_set(tmp_path / "p.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_prompt_set(tmp_path / "missing")
