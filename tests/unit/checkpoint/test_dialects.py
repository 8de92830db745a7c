"""The meaning of each dialect's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.reader import DIALECTS, read_config
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, edit_json, tiny_drafter_config

TWO = tiny_drafter_config()


def raw(dialect: str, config: DrafterConfig = TWO) -> dict[str, object]:
    return DIALECTS[dialect].write(config, None)


def read(tmp_path: Path, start: dict[str, object], change: dict[str, object], *remove: str) -> DrafterConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(start))
    edit_json(path, change, remove=remove)
    return read_config(tmp_path)[0]


def test_layer_ids_are_shifted_by_one_in_speculators_and_nowhere_else() -> None:
    assert raw("speculators")["aux_hidden_state_layer_ids"] == [2, 4, 6]
    for dialect in ("zlab", "modelopt"):
        dflash = raw(dialect)["dflash_config"]
        assert isinstance(dflash, dict)
        assert dflash["target_layer_ids"] == [1, 3, 5]


def test_speculative_tokens_leave_the_anchor_out() -> None:
    config = raw("speculators")["speculators_config"]
    assert isinstance(config, dict)
    assert config["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]


def test_the_writer_keeps_block_size_where_every_engine_reads_it() -> None:
    for dialect in ("zlab", "speculators", "modelopt", "deepspec"):
        assert raw(dialect)["block_size"] == 4


def test_zlab_of_august_is_read_from_dflash_config_first(tmp_path: Path) -> None:
    change: dict[str, object] = {
        "dflash_config.block_size": 8,
        "dflash_config.input_embedding_scale": 2.5,
        "dflash_config.output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    config = read(tmp_path, raw("zlab"), change, "block_size")
    assert (config.block_size, config.embedding_scale, config.output_multiplier) == (8, 2.5, 0.5)
    assert config.final_logit_softcap == 30.0


def test_a_soft_cap_of_zero_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, raw("zlab"), {"final_logit_softcapping": 0.0}).final_logit_softcap is None


def test_deepspec_puts_everything_at_top_level(tmp_path: Path) -> None:
    change: dict[str, object] = {"target_layer_ids": [0, 7], "mask_token_id": 5}
    config = read(tmp_path, raw("zlab"), change, "dflash_config", "architectures")
    assert (config.target_layer_ids, config.mask_token_id) == ((0, 7), 5)


def test_specforge_gives_no_layer_ids_which_means_the_uniform_ones(tmp_path: Path) -> None:
    start = {**raw("zlab"), "dflash_config": None}
    assert read(tmp_path, start, {"num_target_layers": 36, "mask_token_id": 5}).target_layer_ids == (1, 33)


@pytest.mark.parametrize(
    ("is_causal", "kinds"),
    [
        (None, (AttentionKind(window=6, causal=True), AttentionKind())),
        (False, (AttentionKind(window=6), AttentionKind())),
        (True, (AttentionKind(window=6, causal=True), AttentionKind(causal=True))),
    ],
)
def test_a_sliding_layer_is_causal_unless_told_otherwise(
    is_causal: bool | None, kinds: tuple[AttentionKind, ...], tmp_path: Path
) -> None:
    start = raw("zlab", tiny_drafter_config(layers=(SLIDING, FULL)))
    assert read(tmp_path, start, {"is_causal": is_causal}).layers == kinds


@pytest.mark.parametrize(
    ("non_causal", "kind"), [(False, AttentionKind(window=6, causal=True)), (True, AttentionKind(window=6))]
)
def test_speculators_full_layers_are_always_bidirectional(
    non_causal: bool, kind: AttentionKind, tmp_path: Path
) -> None:
    start = raw("speculators", tiny_drafter_config(layers=(SLIDING, FULL)))
    assert read(tmp_path, start, {"sliding_window_non_causal": non_causal}).layers == (kind, FULL)


@pytest.mark.parametrize("causal", [True, False])
def test_modelopt_windows_hold_although_layer_types_say_full(causal: bool, tmp_path: Path) -> None:
    change: dict[str, object] = {
        "dflash_config.use_swa": True,
        "dflash_config.swa_window_size": 9,
        "dflash_config.causal": causal,
    }
    config = read(tmp_path, raw("zlab"), change, "is_causal")
    assert config.layers == (AttentionKind(window=9, causal=causal),) * 2
    assert read_config(tmp_path)[1] == "modelopt"


def test_modelopt_windows_hold_in_the_sliding_layers_where_layer_types_tells_them(tmp_path: Path) -> None:
    change: dict[str, object] = {
        "dflash_config.use_swa": True,
        "dflash_config.swa_window_size": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = read(tmp_path, raw("zlab"), change, "use_sliding_window", "is_causal")
    assert config.layers == (AttentionKind(window=9, causal=True), FULL)


def test_modelopt_writes_what_modelopt_exports() -> None:
    fields = raw("modelopt", tiny_drafter_config(layers=(SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)))
    dflash = fields["dflash_config"]
    assert isinstance(dflash, dict)
    assert (dflash["causal"], dflash["use_swa"], dflash["swa_window_size"]) == (False, True, 6)
    assert (fields["layer_types"], fields["sliding_window"]) == (["sliding_attention"] * 2, 6)  # ModelOpt leaves them
    assert fields["is_causal"] is False


def test_qwen_windows_without_layer_types_begin_at_max_window_layers(tmp_path: Path) -> None:
    change: dict[str, object] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}
    config = read(tmp_path, raw("zlab"), change, "layer_types")
    assert [kind.window for kind in config.layers] == [None, 5]


def test_rope_is_read_in_both_forms_of_transformers(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    old = read(tmp_path, raw("zlab"), {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}})
    new_form = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    new = read(tmp_path, raw("zlab"), dict[str, object](new_form), "rope_theta", "rope_scaling")
    assert old.rope == new.rope
    assert (new.rope.scaling, new.rope.theta, new.rope.factor) == ("yarn", 5e5, 4.0)


def test_a_qwen3_config_without_head_dim_has_128_as_everywhere(tmp_path: Path) -> None:
    assert read(tmp_path, raw("zlab"), {}, "head_dim").head_dim == 128


def test_keys_transformers_writes_are_harmless(tmp_path: Path) -> None:
    assert read(tmp_path, raw("zlab"), {"_name_or_path": "x", "some_new_key": 1}) == TWO
