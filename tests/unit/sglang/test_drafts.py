"""What the plug-in refuses where SGLang would go on in silence: drafts it would read wrongly, and requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.checkpoint.config import expected_tensors
from dflash_sglang.plugin.drafts import StrictLoad, account, draft_problems
from dflash_sglang.plugin.requests import NEUTRAL, guarded, refusal
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter, write_tiny_drafter

TENSORS = list(expected_tensors(tiny_drafter_config()))
WHOLE = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
PARAMETERS = sorted(
    {".".join(WHOLE.get(part, part) for part in name.split(".")) for name in TENSORS if ".up_proj." not in name}
)
"""As SGLang's class has them: q, k and v are one parameter, gate and up another."""


def test_a_whole_checkpoint_is_accounted_for() -> None:
    assert account(TENSORS, PARAMETERS) == ([], [])
    assert account([f"model.{name}" for name in TENSORS], PARAMETERS) == ([], [])
    assert account([*TENSORS, "layers.0.self_attn.rotary_emb.inv_freq"], PARAMETERS) == ([], [])


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"])
def test_one_missing_tensor_is_named(name: str) -> None:
    assert account([t for t in TENSORS if t != name], PARAMETERS) == ([], [name])


def test_a_renamed_tensor_is_both_unknown_and_missing() -> None:
    names = ["fc.weight_packed" if name == "fc.weight" else name for name in TENSORS]
    assert account(names, PARAMETERS) == (["fc.weight_packed"], ["fc.weight"])


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.k_scale"])
def test_what_sglang_does_not_use_is_not_unknown(name: str) -> None:
    assert account([*TENSORS, name], PARAMETERS) == ([], [])


@pytest.mark.parametrize("name", ["candidate_selector.predecessor_codebook", "layers.0.attention_conv.base_kernel"])
def test_parameters_of_other_heads_are_waited_for_whatever_their_names_end_with(name: str) -> None:
    assert account(TENSORS, [*PARAMETERS, name]) == ([], [name])


def test_scales_that_a_quantisation_makes_itself_are_not_waited_for() -> None:
    assert account(TENSORS, [*PARAMETERS, "fc.weight_scale", "fc.input_scale"]) == ([], [])


def test_loading_a_broken_draft_raises_until_the_worker_is_built() -> None:
    model = SimpleNamespace(named_parameters=lambda: [(name, None) for name in PARAMETERS])
    weights: list[tuple[str, Any]] = [(name, None) for name in TENSORS if not name.startswith("layers.1.")]
    strict = StrictLoad()
    strict.active = True
    with pytest.raises(ValueError, match=r"missing: layers\.1\.input_layernorm\.weight, "):
        strict(lambda _, given: list(given), model, weights)
    strict.active = False  # from then on weights come in parts
    assert strict(lambda _, given: list(given), model, weights) == weights


def test_an_update_of_the_targets_weights_does_not_touch_the_draft() -> None:
    model = SimpleNamespace(named_parameters=lambda: [(name, None) for name in PARAMETERS])
    weights: list[tuple[str, Any]] = [(name, None) for name in TENSORS]
    strict = StrictLoad()
    strict.active = True
    strict(lambda _, given: list(given), model, weights)
    strict.active = False
    of_target: list[tuple[str, Any]] = [(f"model.{name}", None) for name, _ in weights if name.startswith("layers.")]
    assert of_target
    assert strict(lambda _, given: list(given), model, [*of_target, *weights[:3]]) == weights[:3]


def server_args(folder: Path, block_size: int | None = None) -> Any:
    return SimpleNamespace(
        speculative_draft_model_path=str(folder),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=block_size,
        speculative_dflash_block_size=None,
    )


def test_drafts_that_sglang_would_read_wrongly_are_found(tmp_path: Path) -> None:
    sliding = tiny_drafter_config(layers=[{"window": 6, "causal": True}] * 2)
    assert draft_problems(server_args(write_tiny_drafter(tmp_path / "zlab"))) == []
    speculators = write_tiny_drafter(tmp_path / "speculators", dialect="speculators")
    assert "speculators' dialect, SGLang reads z-lab's" in str(draft_problems(server_args(speculators))[0])
    modelopt = write_tiny_drafter(tmp_path / "modelopt", sliding, dialect="modelopt")
    assert "written as ModelOpt does" in str(draft_problems(server_args(modelopt))[0])
    quantised = write_quantized_drafter(tmp_path / "fp8", "fp8")
    assert "quantised to FP8, SGLang reads bf16" in str(draft_problems(server_args(quantised))[0])
    assert "block size 16 is larger" in str(draft_problems(server_args(tmp_path / "zlab", 16))[0])


def test_a_draft_that_only_sglang_can_find_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert draft_problems(server_args(tmp_path / "elsewhere")) == []
    assert "the draft was not checked" in caplog.text


GREEDY = SimpleNamespace(top_k=1, **NEUTRAL)
SAMPLED = SimpleNamespace(**{**vars(GREEDY), "top_k": 50})


def test_requests_that_dflash_would_answer_otherwise_are_refused() -> None:
    assert refusal(GREEDY, can_sample=False, counts_penalties=False) is None
    assert refusal(SAMPLED, can_sample=True, counts_penalties=False) is None
    assert "would answer greedily" in str(refusal(SAMPLED, can_sample=False, counts_penalties=True))
    for name in NEUTRAL:
        penalised = SimpleNamespace(**{**vars(GREEDY), name: 1.5})
        found = refusal(penalised, can_sample=True, counts_penalties=False)
        assert f"does not count the tokens of DFlash steps for {name}" in str(found)
        assert refusal(penalised, can_sample=True, counts_penalties=True) is None


def test_without_speculation_nothing_is_asked_of_a_request() -> None:
    taken: list[Any] = []
    guarded(lambda _, request, retracted: taken.append((request, retracted)), SimpleNamespace(draft_worker=None), 1)
    assert taken == [(1, False)]
