"""Drafters for targets that the embedded engine does not run: features by transformers, answers by a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

from dflash_serve.answers.engine import Conversation
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter, load_tokenizer
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.training.answers import AnswerRequest, AnswerServer, ask
from dflash_serve.training.other_target import load_other_target, read_sizes
from dflash_serve.training.recipe import TrainingRecipe
from dflash_serve.training.run import run
from tests.support.embedded import tiny_engine
from tests.support.recipes import tiny_recipe, write_prompts
from tests.support.serving import running
from tests.support.tiny import edit_json
from tests.support.tiny_target import write_tiny_target

CPU = torch.device("cpu")
SEQUENCES = [torch.arange(5, 40), torch.arange(60, 67), torch.tensor([9, 9, 30, 2, 41])]
LAYERS = (2, 0, 3)
FRESH = {"init": "random", "intermediate_size": 64}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "qwen3_5_text"])
def test_features_are_the_layers_outputs_that_transformers_gives(family: str, tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", family=family)
    target = load_other_target(folder, CPU)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for tokens, features in zip(SEQUENCES, target.features(SEQUENCES, LAYERS), strict=True):
        with torch.no_grad():
            states = model(tokens[None], output_hidden_states=True).hidden_states
        wanted = [states[index + 1][0] for index in LAYERS[:2]]  # the last one comes after the final norm
        found = torch.cat([features[:, :64], target.norm(features[:, 64:])], dim=-1).float()
        expected = torch.cat([*wanted, states[4][0]], dim=-1).float()
        assert (found - expected).norm() < 0.02 * expected.norm()  # a batch is rounded otherwise than a row
    torch.testing.assert_close(target.norm_weight(), target.norm(torch.ones(1, 32, dtype=torch.bfloat16))[0])


def test_mxfp4_experts_are_computed_in_bfloat16(tmp_path: Path) -> None:
    plain, packed = (write_tiny_target(tmp_path / name, family="gpt_oss") for name in ("plain", "packed"))
    tensors, stored = load((plain / "model.safetensors").read_bytes()), dict[str, torch.Tensor]()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        codes = torch.randint(0, 16, tensor.transpose(1, 2).shape, dtype=torch.uint8)  # [experts, out, in]
        numbers = torch.where(codes < 8, 1.0, -1.0) * values[(codes % 8).long()] / 16
        tensors[name] = numbers.transpose(1, 2).contiguous().to(torch.bfloat16)
        blocks = codes.unflatten(-1, (-1, 16, 2))
        stored[f"{name}_blocks"] = blocks[..., 0] | blocks[..., 1] << 4
        stored[f"{name}_scales"] = torch.full(blocks.shape[:3], 127 - 4, dtype=torch.uint8)  # 2^-4
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    edit_json(packed / "config.json", {"quantization_config": {"quant_method": "mxfp4"}})
    wanted, found = (load_other_target(folder, CPU).features(SEQUENCES, LAYERS) for folder in (plain, packed))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_drafter_is_trained_for_gpt_oss_with_answers_of_a_server(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has another tiny target of the same vocabulary, and a line shows that it is another one."""
    folder = write_tiny_target(tmp_path / "target", family="gpt_oss")
    with running(tiny_engine((tiny_target_folder, tmp_path), width=1)) as server:
        recipe = _recipe(folder, tmp_path, FRESH, server=server.url, soft_labels=0.5, steps=3)
        assert run(recipe, tmp_path / "out")
        assert _likeliest(capsys) < 20
        own = _recipe(tiny_target_folder, tmp_path, {}, server=server.url, steps=1)
        assert run(own, tmp_path / "own")
        assert _likeliest(capsys) > 80
    config, _ = read_config(tmp_path / "out" / "drafter")
    assert (config.hidden_size, config.intermediate_size, config.num_target_layers) == (32, 64, 4)
    assert config.rope == read_sizes(folder).rope
    assert load_drafter(tmp_path / "out" / "drafter").config == config


def test_a_rope_that_is_no_object_is_one_line(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", family="gpt_oss")
    edit_json(folder / "config.json", {"rope_parameters": 3, "rope_theta": None})
    with pytest.raises(UserError, match="rope_theta"):
        read_sizes(folder)


def _likeliest(capsys: pytest.CaptureFixture[str]) -> int:
    said = re.search(r"(\d+)% of the server's tokens", capsys.readouterr().err)
    assert said is not None
    return int(said[1])


def test_a_servers_answers_are_those_of_its_engine(tiny_target_folder: Path) -> None:
    engine = tiny_engine((tiny_target_folder, tiny_target_folder), width=1)
    prompts = [(5, 6, 7), (9,), (30, 31, 32), (12, 13), (60, 61, 62, 63), (7,) * 9]
    params = [SamplingParams(temperature=n % 2, seed=n + 2**31, max_tokens=40) for n in range(len(prompts))]
    requests = [AnswerRequest(n, prompt, params[n]) for n, prompt in enumerate(prompts)]
    own = {one.request.index: one for one in ask(engine, iter(requests), 3)}
    with running(engine) as server:
        answering = AnswerServer(server.url, engine.tokenizer, 3)
        found = {one.request.index: one for one in ask(answering, iter(requests), 3)}
    assert len(own) == len(found) == len(prompts)
    for n in range(0, len(prompts), 2):  # seeds of the sampled ones are another server's in their own way
        assert (found[n].tokens, found[n].ended, found[n].looped) == (own[n].tokens, own[n].ended, own[n].looped)


def test_a_servers_answer_that_repeats_itself_is_cut(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (1, 2, 3, *(4, 5) * 40)
    monkeypatch.setattr(Endpoint, "complete", lambda *_: Reply("", tokens, finish_reason="stop"))
    answering = AnswerServer("http://127.0.0.1:1", load_tokenizer(str(tiny_target_folder)), 2)
    (found,) = ask(answering, iter([AnswerRequest(0, (7,), SamplingParams())]), 2)
    assert (found.looped, found.ended, found.tokens) == (True, False, [1, 2, 3, *(4, 5) * 13][:28])


def _recipe(target: Path, folder: Path, drafter: dict[str, Any], server: str | None, **training: Any) -> TrainingRecipe:
    recipe = tiny_recipe(str(target), write_prompts(folder / "prompts.jsonl"), drafter, **training)
    fields = recipe.model_dump(mode="json")
    fields["data"]["answers"]["server"] = server
    return TrainingRecipe.model_validate(fields)


@pytest.mark.parametrize(
    ("change", "drafter", "server", "why"),
    [
        ({}, FRESH, None, "does not run model_type 'gpt_oss', so it cannot answer; start it on vLLM or SGLang"),
        ({}, {}, "http://127.0.0.1:1", "layers of model_type 'gpt_oss' are no drafter's first weights"),
        ({"quantization_config": {"quant_method": "fp8"}}, FRESH, None, r"quantised \(fp8\)"),
        ({"hidden_size": None}, FRESH, None, "hidden_size is None"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, FRESH, None, "odd"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    change: dict[str, Any], drafter: dict[str, Any], server: str | None, why: str, tmp_path: Path
) -> None:
    folder = write_tiny_target(tmp_path / "target", family="gpt_oss")
    edit_json(folder / "config.json", change)
    with pytest.raises(UserError, match=why) as error:
        run(_recipe(folder, tmp_path, drafter, server), tmp_path / "out", quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_target_that_scales_its_embedding_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", family="gemma2")
    with pytest.raises(UserError, match="do not read the rows of its embedding as they are"):
        load_other_target(folder, CPU)


def test_a_server_without_token_ids_is_refused(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine((tiny_target_folder, tiny_target_folder), width=1)
    with running(engine) as server:
        answering = AnswerServer(server.url, engine.tokenizer, 1)
        answering.endpoint._ways["/v1/completions"] = {}
        with pytest.raises(UserError, match="returns no token ids"):
            list(ask(answering, iter([AnswerRequest(0, (5, 6), SamplingParams(max_tokens=4))]), 1))


def test_a_variable_that_the_chat_template_does_not_read_is_refused(tiny_target_folder: Path) -> None:
    answering = AnswerServer("http://127.0.0.1:1", load_tokenizer(str(tiny_target_folder)), 1)
    with pytest.raises(UserError, match="does not read 'reasoning_efort'"):
        answering.tokenize(Conversation([{"role": "user", "content": "x"}], {"reasoning_efort": "low"}))


def test_the_config_of_a_tiny_gpt_oss_is_as_nasty_as_the_published_one(tmp_path: Path) -> None:
    config = json.loads((write_tiny_target(tmp_path / "target", family="gpt_oss") / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert {*config["layer_types"]} == {"sliding_attention", "full_attention"}
