"""The Python API: generate, stream, chat and z-lab's spec_generate, with and without speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_serve import LLM, Deployment, SamplingParams, UserError
from tests.support.tiny_target import EOS, write_tiny_pair

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, drafter = write_tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(drafter)


@pytest.fixture(scope="module")
def llm(folders: tuple[str, str]) -> LLM:
    return LLM(*folders, width=4, max_batch_size=4)


@pytest.fixture(scope="module")
def plain(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], max_batch_size=4)


def test_many_prompts_come_back_in_order_and_unchanged_by_speculation(llm: LLM, plain: LLM) -> None:
    prompts = ["the quick", "brown fox jumps", "lazy", "dog", "over the", "name"]  # more than there are slots
    with_speculation, without = llm.generate(prompts, GREEDY), plain.generate(prompts, GREEDY)
    assert [o.text for o in with_speculation] == [o.text for o in without]
    assert [llm.tokenizer.decode(o.prompt_token_ids) for o in without] == prompts
    assert all(o.statistics.acceptance_length is None for o in without)


def test_the_stream_adds_up_to_the_answer(llm: LLM) -> None:
    stream = llm.stream("the lazy dog", GREEDY)
    pieces = list(stream)
    output = stream.outputs()[0]
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == output.finish_reason


def test_an_answer_without_max_tokens_has_a_default_length(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_serve.answers.llm.MAX_TOKENS", 5)
    unsaid = SamplingParams(temperature=0, ignore_eos=True)
    assert len(llm.generate("the quick", unsaid)[0].token_ids) == 5
    assert (
        len(llm.generate("the quick", SamplingParams(temperature=0, ignore_eos=True, min_tokens=9))[0].token_ids) == 9
    )
    everything = llm.generate("the quick", SamplingParams(temperature=0, ignore_eos=True, max_tokens=None))[0]
    assert len(everything.token_ids) > 100


def test_chat_goes_through_the_targets_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.tokenizer.decode(output.prompt_token_ids).endswith("<|im_start|>assistant\n")


def test_spec_generate_takes_and_gives_what_z_labs_users_know(llm: LLM, plain: LLM) -> None:
    ids = torch.tensor([llm.tokenizer("the quick brown")["input_ids"]])
    out = llm.spec_generate(input_ids=ids, max_new_tokens=20, stop_token_ids=[EOS], temperature=0.0)
    assert out.dtype == ids.dtype
    assert out[0, : ids.shape[1]].tolist() == ids[0].tolist()
    assert out.tolist() == plain.spec_generate(ids, max_new_tokens=20, stop_token_ids=[EOS]).tolist()


def test_a_deployment_says_the_same_as_arguments(folders: tuple[str, str], llm: LLM) -> None:
    deployment = Deployment.model_validate(
        {"target": {"model": folders[0]}, "drafter": {"model": folders[1]}, "speculation": {"width": 4}}
    )
    assert LLM(deployment).generate("fox", GREEDY)[0].text == llm.generate("fox", GREEDY)[0].text


@pytest.mark.parametrize("prompt", ["", [], [10**6], list(range(3)) * 100])
def test_a_prompt_that_cannot_run_is_refused_before_anything_runs(llm: LLM, prompt: str | list[int]) -> None:
    with pytest.raises(UserError, match="prompt"):
        llm.generate([[1, 2, 3], prompt], GREEDY)


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"abc",
        {"role": "user"},
        [None],
        [1.5],
        [1, "a"],
        ["a", 1.5],
        [["a"]],
        [[[1]]],
        {"a"},
        "\ud800",
        ["\ud800"],
    ],
)
def test_what_is_no_prompt_is_one_line(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UserError, match="prompt") as refused:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, [], {"max_tokens": 3}, 5, [None, None]])
def test_params_that_do_not_fit_the_prompts_are_one_line(llm: LLM, params: Any) -> None:
    with pytest.raises(UserError, match="params"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize("messages", ["hi", None, 5])
def test_a_chat_of_something_else_is_not_answered_without_its_template(llm: LLM, messages: Any) -> None:
    with pytest.raises(UserError, match="messages"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], [1, 2], [[1.5]], [[]]])
def test_spec_generate_answers_one_prompt_and_drops_none(llm: LLM, ids: Any) -> None:
    with pytest.raises(UserError):
        llm.spec_generate(torch.tensor(ids))
