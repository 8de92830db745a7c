"""`verify --warm`: prompts that are asked again after their K/V left the devices, of servers with a host tier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_serve.answers.engine import Conversation, template_variables
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify import subjects
from dflash_serve.verify.report import FaultKind, VerifyReport
from dflash_serve.verify.warm import BEYOND, acceptance_falls, long_prompts
from tests.support.command_line import call
from tests.support.fake_hicache import POOL, FakeHiCache, HiCacheFault

Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: Path) -> Verify:
    """Runs the command on a server; gives its exit code and all that it says."""
    monkeypatch.setattr(subjects, "BETWEEN_READINGS", 0)

    def run(server: FakeHiCache, *more: object) -> tuple[int, str]:
        with server.listening() as url:
            code = call(monkeypatch, "verify", "--url", url, "--warm", "--max-tokens", 24, *more, "--output", output)
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


def test_a_server_that_reloads_all_is_lossless_and_every_figure_is_told(verify: Verify, output: Path) -> None:
    server = FakeHiCache()
    code, said = verify(server)
    assert code == 0
    found = VerifyReport.model_validate_json(output.read_text()).findings
    reload = found.reload
    assert reload is not None
    assert reload.pool_tokens == POOL
    assert reload.filler_tokens >= BEYOND * POOL
    assert reload.reloaded_tokens is not None
    assert reload.reloaded_tokens > 0.9 * reload.prompt_tokens
    assert reload.first_length == reload.again_length
    assert found.headline in said
    assert found.headline.startswith("lossless: greedy; not tested: sampling, faults that requests without speculation")
    figures = f"{reload.filler_tokens} filler tokens for a pool of {POOL} (told by its metrics), then "
    assert figures + f"{reload.reloaded_tokens} of {reload.prompt_tokens} prompt tokens reloaded" in said
    assert [(one.case, one.prompts, one.identical) for one in (*found.greedy, *found.exact)] == [
        ("long prompts", 20, 20),
        ("long prompts, asked again", 20, 20),
    ]


def test_a_second_server_is_asked_without_speculation_where_one_is_given(verify: Verify, output: Path) -> None:
    speculating, other = FakeHiCache(HiCacheFault.tokens), FakeHiCache(drafts=False)
    with other.listening() as url:
        code, _ = verify(speculating, "--without-url", url)
    assert code == 1
    assert VerifyReport.model_validate_json(output.read_text()).findings.faults.keys() == {FaultKind.RELOAD}
    assert all("custom_params" not in body for body in (*speculating.asked, *other.asked))
    assert len([body for body in other.asked if body["max_tokens"] == 24]) == 20


def test_other_tokens_after_a_reload_are_named(verify: Verify, output: Path) -> None:
    code, said = verify(FakeHiCache(HiCacheFault.tokens))
    assert code == 1
    assert "not lossless: wrong after a reload (long prompts, asked again, prompt 1, position 3)" in said
    faults = VerifyReport.model_validate_json(output.read_text()).findings.faults
    assert faults.keys() == {FaultKind.RELOAD}


def test_acceptance_that_falls_after_a_reload_is_named(verify: Verify, output: Path) -> None:
    code, said = verify(FakeHiCache(HiCacheFault.drafter))
    assert code == 1
    assert "lossless, but slower; not tested: sampling, " in said
    assert "acceptance falls from 1.92 to 1.10 after a reload: the drafter's K/V did not come back (sglang#2112" in said
    assert VerifyReport.model_validate_json(output.read_text()).findings.verdict == "lossless, but slower"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (HiCacheFault.veto, "prompt tokens came back from a host tier: it is off, holds less than "),
        (HiCacheFault.small, "prompt tokens came back from a host tier: it is off, holds less than "),
        (HiCacheFault.large, f"were still on the devices: the pool is larger than {POOL} tokens (--pool-tokens)"),
    ],
)
def test_where_nothing_was_reloaded_nothing_is_shown(verify: Verify, fault: HiCacheFault, told: str) -> None:
    code, said = verify(FakeHiCache(fault))
    assert code == 3
    assert told in said
    assert "could not tell" in said


def test_with_few_prompts_a_fall_of_acceptance_could_not_be_told(verify: Verify) -> None:
    code, said = verify(FakeHiCache(HiCacheFault.drafter), "--num-prompts", 4)
    assert code == 3
    assert "acceptance is known of 4 prompts, too few to compare; give 10 or more (--num-prompts)" in said


def test_the_size_of_the_pool_is_given_where_no_metric_tells_it(verify: Verify) -> None:
    server = FakeHiCache(tells_pool=False)
    code, said = verify(server)
    assert (code, server.asked) == (2, [])
    assert "its metrics do not tell how many tokens its K/V pool holds; give --pool-tokens: SGLang logs max_" in said
    code, said = verify(server, "--pool-tokens", POOL)
    assert code == 0
    assert f"for a pool of {POOL} (told by --pool-tokens)" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--warm",), "--warm: only a running server keeps K/V in host memory; give --url, too"),
        (("--warm", "--samples", 64), "--samples: prompts are asked greedily, twice; leave it out"),
        (("--warm", "--resume"), "--resume: prompts are asked greedily, twice; leave it out"),
        (("--pool-tokens", 64), "--pool-tokens: no pool is filled; give --warm, too"),
    ],
)
def test_options_without_an_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], told: str
) -> None:
    assert call(monkeypatch, "verify", *words) == 2
    assert told in capsys.readouterr().err


def test_long_prompts_keep_their_form_and_begin_unlike() -> None:
    chats = [Conversation([{"role": "user", "content": text}], {"enable_thinking": False}) for text in ("one", "two")]
    for prompts in (["one", "two"], chats):
        made = long_prompts(prompts, 100, "abc")
        texts = [one if isinstance(one, str) else str(one[-1]["content"]) for one in made]  # type: ignore[index]
        assert [text[:6] for text in texts] == ["0 abc\n", "1 abc\n"]
        assert [text.rpartition("\n")[2] for text in texts] == ["one", "two"]
        assert all(100 <= len(text) < 120 for text in texts)
        assert [template_variables(one) for one in made] == [template_variables(one) for one in prompts]


def counted(lengths: list[float]) -> list[AcceptanceStatistics]:
    return [AcceptanceStatistics(100, 700, 100 * (length - 1)) for length in lengths]


@pytest.mark.parametrize(
    ("again", "falls"),
    [([2.0] * 10, True), ([2.0] * 9 + [4.5], False), ([2.95] * 10, False), ([3.0] * 10, False), ([2.0] * 12, True)],
)
def test_acceptance_falls_where_it_is_much_lower_for_nearly_every_prompt(again: list[float], falls: bool) -> None:
    assert acceptance_falls(counted([3.0] * len(again)), counted(again)) is falls


def test_fillers_are_told_by_the_server_and_begin_unlike(verify: Verify, output: Path) -> None:
    server = FakeHiCache()
    verify(server)
    fillers = [body["prompt"] for body in server.asked if str(body.get("prompt", "")).startswith("1000")]
    assert len({text.split()[0] for text in fillers}) == len(fillers)
    assert (
        sum(len(text.split()) for text in fillers)
        == json.loads(output.read_text())["findings"]["reload"]["filler_tokens"]
    )
