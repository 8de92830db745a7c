"""What a server tells of itself, prompt by prompt, and the command on a tiny pair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dflash_serve.answers.prompts import with_variables
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common import progress
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.doctor.evidence import BY_USAGE, Observation, Prediction, interview, widths_of
from dflash_serve.doctor.examination import Examination
from dflash_serve.doctor.examiner import examine, examine_apart
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.speculation.width import AutoWidth
from dflash_torch.faults.replay import EmbeddedReference
from tests.support.command_line import call
from tests.support.embedded import answers, tiny_engine
from tests.support.serving import Running, running
from tests.support.site import site, usage_only

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[{"role": "user", "content": text}] for text in ("the quick brown fox", "over", "lazy dog")]


@pytest.fixture(scope="module")
def served(pair: tuple[Path, Path]) -> Iterator[Running]:
    with running(tiny_engine(pair, width=4)) as server:
        yield server


def given(pair: tuple[Path, Path], tmp_path: Path) -> tuple[object, ...]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": prompt}) + "\n" for prompt in PROMPTS))
    report = tmp_path / "report.json"
    return "--target", pair[0], "--drafter", pair[1], "--prompts", prompts, "--max-tokens", 12, "--output", report


def test_a_server_is_read_prompt_by_prompt(served: Running, pair: tuple[Path, Path]) -> None:
    told = interview(Endpoint(served.url), PROMPTS, PARAMS, 4)
    outputs = answers(tiny_engine(pair, width=4).fixed(4), PROMPTS, PARAMS)
    expected = [output.statistics for output in outputs]
    assert told.observation.each is not None
    assert [one.acceptance_lengths for one in told.observation.each] == [one.acceptance_lengths for one in expected]
    assert told.observation.whole.acceptance_lengths == total(expected).acceptance_lengths
    assert told.observation.whole.survival(4) == total(expected).survival(4)
    assert told.observation.answers == tuple(output.text for output in outputs)
    assert (told.width, told.steps, told.engine, told.notes) == (4, None, "dflash-serve", ())


def test_a_server_without_metrics_is_read_by_the_usage_of_its_answers(served: Running) -> None:
    """Behind a gateway, for example; accepted tokens are the same, steps are derived from the numbers of tokens."""
    expected = interview(Endpoint(served.url), PROMPTS, PARAMS, 4)
    with usage_only(served.url) as url:
        told = interview(Endpoint(url), PROMPTS, PARAMS, 4)
    assert (told.width, told.steps, told.engine, told.notes) == (4, None, None, (BY_USAGE,))
    assert told.observation.each is not None
    assert expected.observation.each is not None
    for one, counted in zip(told.observation.each, expected.observation.each, strict=True):
        assert (one.accepted, one.drafted) == (counted.accepted, counted.drafted)
        assert one.verifications == pytest.approx(counted.verifications, abs=1), "a last block is cut, or a step is 1"


def test_a_server_with_neither_metrics_nor_usage_is_asked_for_the_metrics_of_its_workers() -> None:
    def answer(path: str, body: object, _key: str | None) -> tuple[int, object]:
        if body is None:
            return (200, {"data": [{"id": "m"}]}) if path == "/v1/models" else (404, "")
        return 200, {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}}

    with site(answer) as url, pytest.raises(UserError, match="shows no metrics") as error:
        interview(Endpoint(url), PROMPTS, PARAMS, 4)
    assert "--metrics-url" in str(error.value)


def test_a_server_that_does_not_speculate_says_nothing(pair: tuple[Path, Path]) -> None:
    with running(tiny_engine(pair, width=1)) as server, pytest.raises(UserError, match="reports no acceptance"):
        interview(Endpoint(server.url), PROMPTS, PARAMS, 4)


def counted(steps: float, drafted: float) -> AcceptanceStatistics:
    return AcceptanceStatistics(steps, drafted, None, None, None, None)


def chosen(**steps: int) -> AcceptanceStatistics:
    """Steps by width, given as w8=90; nothing was accepted."""
    counts = AcceptanceStatistics()
    for name, count in steps.items():
        counts.record(int(name[1:]), 0, count)
    return counts


@pytest.mark.parametrize(
    ("each", "width"),
    [
        ([chosen(w1=2, w8=90, w3=5), chosen(w8=7)], 8),
        ([counted(100, 700)], 8),
        ([counted(100, 680)], 8),
        ([counted(100, 300)], 4),
        ([AcceptanceStatistics.unknown(reported_length=2.0)], 8),
        ([chosen(w8=15, w5=3, w2=4), chosen(w8=15, w5=4, w2=3)], 8),  # the ends of short answers
    ],
)
def test_a_constant_width_is_found(each: list[AcceptanceStatistics], width: int) -> None:
    assert widths_of(each, 8, "x") == (width, None)


@pytest.mark.parametrize("widths", [{"w2": 50, "w8": 50}, {"w8": 60, "w4": 30}, {"w1": 40, "w8": 90}])
def test_widths_that_change_are_kept_prompt_by_prompt(widths: dict[str, int]) -> None:
    each = [chosen(**widths), chosen(w8=3)]
    assert widths_of(each, 8, "x") == (8, tuple(one.widths for one in each))


def test_blocks_that_are_trimmed_are_refused_and_not_taken_for_whole_ones() -> None:
    trimmed = AcceptanceStatistics(100, None, 60, None, [40, 20], None, "vLLM with dflash-serve", trimmed=True)
    with pytest.raises(UserError, match=r"it trims drafted blocks.*start it with a fixed width"):
        widths_of([trimmed, trimmed], 8, "x")


def test_the_deployments_own_width_is_what_a_server_without_widths_is_held_against() -> None:
    assert widths_of([AcceptanceStatistics.unknown(reported_length=2.0)], 4, "x") == (4, None)
    with pytest.raises(UserError, match="it verifies 8 slots a step, more than the deployment's 4"):
        widths_of([chosen(w8=30)], 4, "x")


def test_widths_that_change_unseen_or_are_not_the_drafters_are_refused() -> None:
    with pytest.raises(UserError, match="its width changes from step to step, and it does not report its widths"):
        widths_of([counted(100, 350)], 8, "x")
    with pytest.raises(UserError, match="it verifies 16 slots a step, more than the deployment's 8"):
        widths_of([chosen(w16=30)], 8, "x")


class Alternating(FixedWidth):
    """Every width in turn, as no sane policy would choose."""

    turn = 0

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        type(self).turn += 1
        return [1 + type(self).turn % self.width] * len(request_ids)


def auto_width() -> AutoWidth:
    """Our own default, with the policy that it serves with: it chooses a width at every step, off among them."""
    cheap = CostModel(target={1: 1.0, 64: 1.0}, draft={1: 1e-3, 4: 1e-3})
    return AutoWidth(cheap, 4, known_survival=[0.9, 0.8, 0.7])


@pytest.mark.parametrize("policy", [lambda: 4, lambda: Alternating(4), auto_width], ids=["fixed", "changing", "auto"])
def test_a_server_of_the_pair_is_examined_whatever_chooses_its_widths(
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    tmp_path: Path,
    policy: Callable[[], int | WidthPolicy],
) -> None:
    with running(tiny_engine(pair, width=policy())) as server:
        code = call(monkeypatch, "doctor", *given(pair, tmp_path), "--url", server.url)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["evidence"] == "paired"
    # a random drafter accepts nothing: this is what healthy looks like here
    assert {"healthy": 0, "could not tell": 3}[report["verdict"]] == code
    assert report["observed"]["acceptance_length"] == report["explanations"][0]["predicted"]["acceptance_length"]
    assert not list(tmp_path.glob("*.partial.jsonl"))
    steps = report["pair"].get("steps", [{report["pair"]["width"]: 1}])  # one width is told as that width
    assert any(int(width) > 1 for one in steps for width in one)
    if policy is not auto_width:
        changes = isinstance(policy(), Alternating)
        assert any("chose its widths step by step" in note for note in report["notes"]) is changes
        widths = [[1, 2, 3, 4]] * len(PROMPTS) if changes else [[4]]
        assert [sorted(map(int, one)) for one in steps] == widths


def test_an_interrupted_examination_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    predict = EmbeddedReference.predict

    def interrupted(self: EmbeddedReference, fault: str | None) -> Prediction:
        asked.append(fault or "as it is")
        if len(asked) == 6:
            raise KeyboardInterrupt
        return predict(self, fault)

    monkeypatch.setattr(EmbeddedReference, "predict", interrupted)
    arguments = (*given(pair, tmp_path), "--observed", 1.5)
    assert call(monkeypatch, "doctor", *arguments) == 130
    said = capsys.readouterr().err
    assert "5 finished probes are kept" in said
    assert "--resume" in said
    assert not (tmp_path / "report.json").exists()
    first = asked[:5]
    assert call(monkeypatch, "doctor", *arguments, "--resume") == 3
    assert not set(first) & set(asked[6:])
    assert (tmp_path / "report.json").exists()


def test_a_process_of_its_own_examines_the_deployment_with_its_templates_variables(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    fields = {"target": {"model": str(pair[0])}, "drafter": {"model": str(pair[1])}, "hardware": {"gpu": "none"}}
    whole = Deployment.model_validate({**fields, "speculation": {"width": 3}, "serving": {"log_format": "json"}})
    prompts = [with_variables(prompt, {"enable_thinking": False}) for prompt in PROMPTS[:2]]
    examine_apart(whole, prompts, tmp_path / "report.json", observed=1.5, max_tokens=8, seconds=600)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["pair"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (report["pair"]["width"], report["pair"]["deployment"]["hardware"]["gpu"]) == (3, "none")
    assert report["notes"] == ["the reference does without settings of the server alone: serving.log_format"]
    refused = whole.model_copy(update={"kv_cache": whole.kv_cache.model_copy(update={"dtype": "fp8"})})
    with pytest.raises(UserError, match=r"kv_cache\.dtype: the embedded backend has no such thing"):
        examine(refused, prompts, tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_a_pair_alone_is_examined(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", *given(pair, tmp_path)) == 3  # three prompts cannot show anything
    assert "3 prompts cannot show that a setting helps, 9 could" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "report.json").read_text())["first_difference"] is None


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "doctor", "--url", "http://127.0.0.1:9", "--observed", 2) == 2
    assert "--observed" in capsys.readouterr().err
    assert call(monkeypatch, "doctor", "--url", "http://127.0.0.1:9", "--target", "smollm2") == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [("--url", "http://127.0.0.1:9"), ("--observed", 3)])
def test_a_server_is_not_taken_for_one_of_the_bundled_pair(
    asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", *asked) == 2
    assert "which pair the server has; give a deployment.yaml, or --target" in capsys.readouterr().err


def test_prompts_for_which_nothing_is_drafted_are_one_line() -> None:
    nothing = Prediction((AcceptanceStatistics(),) * 3, ("",) * 3)
    silent = Mock(faults=list, settings=list, predict=lambda fault: nothing)  # answers that end at once
    examination = Examination(silent, Store(None, {}))
    with pytest.raises(UserError, match="nothing is drafted"):
        examination.examine_suspect(Observation.of_length(2.0))
    with pytest.raises(UserError, match="nothing is drafted"):
        examination.examine_pair(lambda: None)


def test_a_backend_that_cannot_be_given_faults_is_one_line(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_serve.doctor.examiner.embedded_backend", lambda: SimpleNamespace(name="torch"))
    assert call(monkeypatch, "doctor", *given(pair, tmp_path)) == 2
    assert "backend torch: it cannot be given faults on purpose" in capsys.readouterr().err


def test_progress_is_told_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in ("FIRST_SECONDS", "LINE_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(progress, name, 0.001)
    lines = {}
    for quiet in ((), ("--quiet",)):
        call(monkeypatch, "doctor", *given(pair, tmp_path), *quiet)
        lines[quiet] = capsys.readouterr().err
    assert "loading the target, " in lines[()]
    assert re.search(r"predicting acceptance \(\d+ of \d+ done\): .* so far, about .* left", lines[()])
    assert "predicting" not in lines[("--quiet",)]
