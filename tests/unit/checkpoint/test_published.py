"""Every drafter of the catalogue is understood or refused; a golden table holds the engines' verdicts on each.

`UPDATE_GOLDEN=1` writes the table anew.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path

import pytest
import torch

from dflash_serve.adapter.protocol import Backend
from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import rule
from dflash_serve.catalogue_row import row
from dflash_serve.checkpoint.catalogue import CataloguedDrafter, catalogue, catalogued_target
from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, Heads, expected_tensors
from dflash_serve.checkpoint.reader import DIALECTS, parse
from dflash_serve.errors import Problem, UserError
from dflash_serve.models.drafter import Drafter
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import NEWEST, Release
from tests.support.offline_hub import write_hollow
from tests.unit.checkpoint.published import PUBLISHED, Published
from tests.unit.checkpoint.published_heads import (
    MUSE_GLIMMER,
    NEMOTRON_DFLASH,
    NEMOTRON_DSPARK,
    PUBLISHED_DRAFTERS,
    config_json,
)

TABLE = Path(__file__).with_name("golden") / "published.txt"
ENGINES: list[Backend] = [
    *map(backend, ("torch", "sglang", "vllm")),
    *[TensorRTLLMBackend(Release.parse(text)) for text in ("1.3.0rc27", "1.4.0rc4", "1.4")],
]
SOURCES = {
    ("sglang", "a reduced draft vocabulary"): "models/dflash.py load_weights",
    ("torch", "attention sinks, which"): "dflash_serve/models/drafter.py",
    ("torch", "latent attention (MLA), which"): "dflash_serve/models/drafter.py",
    ("sglang", "latent attention (MLA) in a drafter"): "models/dspark.py EntryClass",
    ("tensorrt-llm", "latent attention (MLA) in a drafter"): "modeling_dspark.py, which #19040 extended",
    ("tensorrt-llm", "attention sinks, which"): "modeling_dflash.py",
    ("sglang", "anchor-first slots"): "models/dflash.py, models/dspark.py",
    ("vllm", "anchor-first slots"): "model_executor/models/qwen3_dflash.py, qwen3_dspark.py",
    ("tensorrt-llm", "a reduced draft vocabulary"): "modeling_dflash.py load_weights_from_target_model",
    ("tensorrt-llm", "has no DSpark drafter"): "modeling_dspark.py, which #18043 extended",
    ("tensorrt-llm", "is not known to have DFlash2"): "modeling_dflash.py, which #18155 extended",
}
"""(engine, words of a refusal) -> the engine's file that it follows from."""


def parsed(drafter: CataloguedDrafter) -> tuple[DrafterConfig | None, list[Problem]]:
    """With the confidence head's tensors, as the checkpoints have them."""
    problems: list[Problem] = []
    stored = ["confidence_head.proj.weight"] if drafter.heads and drafter.heads.confidence else []
    config, _ = parse(config_json(drafter), Path("config.json"), problems, stored=stored, block_size=drafter.block_size)
    return config, problems


def shapes_of_model(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row.name)
def test_a_model_card_is_met(published: Published) -> None:
    config, dialect = parse(published.config_json(), Path("config.json"), [])
    assert config is not None
    assert dialect is DIALECTS["zlab"]
    assert (config.block_size, config.num_target_layers) == (published.block_size, published.num_target_layers)
    assert config.target_layer_ids == tuple(published.target_layer_ids)
    assert (config.mask_token_id, config.vocab_size) == published.vocabulary
    windows = [published.window] * (published.layers - 1) + [None]
    assert [(kind.window, kind.causal) for kind in config.layers] == [(each, each is not None) for each in windows]
    shapes = shapes_of_model(config)
    assert shapes == expected_tensors(config)
    assert len(shapes) == (15 if published.attention_bias else 11) * published.layers + 3
    assert 2 * sum(prod(shape) for shape in shapes.values()) / 2**30 == pytest.approx(published.gib, rel=0.02)


def test_what_muse_glimmers_files_leave_out_is_what_its_class_fixes() -> None:
    """meta-models/Muse-Glimmer-30B-assistant; its layers are bidirectional inside the block (transformers, vLLM)."""
    problems: list[Problem] = []
    config, dialect = parse(MUSE_GLIMMER, Path("config.json"), problems)
    assert (problems, dialect) == ([], DIALECTS["zlab"])
    assert config is not None
    assert config.layers == (AttentionKind(window=2048, causal=False),) * 5
    assert (config.vocab_size, config.block_size, config.slots) == (202048, 16, "fill-in")


def test_what_nemotrons_file_repeats_is_read_once() -> None:
    problems: list[Problem] = []
    config, dialect = parse(NEMOTRON_DSPARK, Path("config.json"), problems)
    assert (problems, dialect) == ([], DIALECTS["modelopt"])
    assert config is not None
    assert config.layers == (AttentionKind(window=1024, causal=True),) * 6
    assert (config.block_size, config.slots) == (8, "fill-in")
    assert config.words == "vanilla Markov head of rank 512, attention sinks"
    assert expected_tensors(config)["layers.5.self_attn.attention_sink_bias"] == (32,)
    parse({**NEMOTRON_DSPARK, "pard_token": 1}, Path("config.json"), problems)
    assert "pard_token is 1" in problems[0].what
    parse({**NEMOTRON_DSPARK, "train_embed_tokens": True}, Path("config.json"), problems := [])
    assert "an embedding of its own" in problems[0].what


def test_nemotrons_plain_drafter_lacks_its_block_size_alone() -> None:
    problems: list[Problem] = []
    assert parse(NEMOTRON_DFLASH, Path("config.json"), problems)[0] is None
    assert [problem.what for problem in problems] == ["no dflash_config.block_size"]
    assert problems[0].do.startswith("set speculation.block_size (--block-size)")
    config, _ = parse({**NEMOTRON_DFLASH, "block_size": 8}, Path("config.json"), problems := [])
    assert problems == []
    assert config is not None
    assert parse(NEMOTRON_DFLASH, Path("config.json"), problems, block_size=8)[0] == config
    assert parse({**NEMOTRON_DFLASH, "block_size": 8}, Path("config.json"), problems, block_size=4)[0] == config
    assert (config.words, config.layers, config.rope.factor) == ("", (AttentionKind(),) * 6, 128.0)


def test_sinks_reach_the_engines_that_have_them() -> None:
    config, _ = parse(NEMOTRON_DSPARK, Path("config.json"), [])
    assert config is not None
    for dialect in ("zlab", "deepspec", "specforge", "modelopt"):
        plain = config if dialect != "zlab" else config.model_copy(update={"markov": None})
        section = DIALECTS[dialect].write(plain, None)["dflash_config"]
        assert isinstance(section, dict)
        assert (section["attention_sink_bias"], section["target_layer_ids"]) == (True, [1, 5, 19, 29, 41, 51])
    with pytest.raises(UserError, match="attention sinks"):
        DIALECTS["speculators"].write(config, "target")
    with pytest.raises(UserError, match="attention sinks"):
        Drafter(config)


@pytest.mark.parametrize("drafter", PUBLISHED_DRAFTERS, ids=lambda one: one.repository)
def test_a_published_config_is_what_the_catalogue_says_and_survives_its_own_dialect(drafter: CataloguedDrafter) -> None:
    config, problems = parsed(drafter)
    if drafter.unread is not None:
        assert (config, len(problems)) == (None, 1)
        return
    assert problems == []
    assert config is not None
    assert config.block_size == drafter.block_size
    assert Heads.model_validate(config.parts) == drafter.heads
    if config.not_embedded is None:
        assert shapes_of_model(config) == expected_tensors(config)
    raw = config_json(drafter)
    config, dialect = parse(raw, Path("config.json"), problems, block_size=drafter.block_size)  # no tensors' names
    assert config is not None
    assert dialect is not None
    again, found = parse(DIALECTS[dialect.name].write(config, None), Path("config.json"), problems)
    assert (again, found, problems) == (config, dialect, [])


def source(engine: str, refusal: str) -> str:
    """The engine's file behind a refusal; every refusal must have one."""
    (file,) = (file for (name, words), file in SOURCES.items() if name == engine and words in refusal)
    return file


def golden_line(drafter: CataloguedDrafter) -> str:
    """One line of the table: kind, block size, tensors, and the engines that serve it or why not."""
    config, problems = parsed(drafter)
    if config is None:
        return f"{drafter.repository} | refused: {problems[0].what}"
    verdicts = []
    for one in ENGINES:
        release = getattr(one, "release", one.releases)
        found = [problem.what for problem in one.head_problems(config)][:1]
        verdicts.append(f"{one.name} {release}: " + (f"{found[0]} [{source(one.name, found[0])}]" if found else "yes"))
    heads = f" ({config.words})" if config.words else ""
    size = f"B {config.block_size}, {config.rows()} rows, {len(expected_tensors(config))} tensors"
    return " | ".join([drafter.repository, config.family + heads, size, *verdicts])


def test_what_each_engine_makes_of_each_is_as_it_was() -> None:
    text = "".join(golden_line(drafter) + "\n" for drafter in PUBLISHED_DRAFTERS)
    if os.environ.get("UPDATE_GOLDEN"):
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text)
    assert text == TABLE.read_text()


def test_every_figure_of_the_catalogue_has_its_source() -> None:
    raw = json.loads((Path(__file__).parents[3] / "dflash_serve/assets/drafters.json").read_text())
    assert len({drafter.repository for drafter in catalogue().drafters}) == len(raw["drafters"]) >= 90
    for entry in raw["drafters"]:
        assert entry["source"]
        for figure in entry["acceptance_length"]:
            assert 1 <= figure["value"] <= (entry["block_size"] or 16)
            assert figure["source"]


@pytest.mark.parametrize("drafter", PUBLISHED_DRAFTERS, ids=lambda one: one.repository)
def test_a_row_is_what_the_module_makes_of_the_checkpoint(drafter: CataloguedDrafter, tmp_path: Path) -> None:
    """A row is what its config.json gives, with the headers of its weights where it is read; a person's fields stay."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(drafter)))
    config, _ = parsed(drafter)
    if config is not None:
        write_hollow(tmp_path / "model.safetensors", expected_tensors(config), header_only=True)
    made, _ = row(tmp_path, drafter.repository, drafter.target)
    if drafter.unread is not None:
        assert made.unread is not None
        return
    assert (made.block_size, made.heads) == (drafter.block_size, drafter.heads)
    assert made.kind == drafter.kind
    if drafter.sizes is not None:
        assert made.sizes == drafter.sizes
    for name, verdict in made.engines.items():
        if drafter.weights in (None, "bf16") and name != "tensorrt-llm":  # its verdict is of the newest release
            assert drafter.engines[name] == verdict


@pytest.mark.parametrize("drafter", catalogue().drafters, ids=lambda one: one.repository)
def test_a_verdict_is_the_rules_unless_the_engine_serves_what_we_do_not_read(drafter: CataloguedDrafter) -> None:
    """Rows of quantised drafters leave their verdicts to the installed release, or refuse what no format shows."""
    engines = {one.name: one for one in (*map(backend, ("torch", "sglang", "vllm")), TensorRTLLMBackend(NEWEST))}
    known = catalogued_target(drafter.target)
    family = known.family if known else None
    quantised = drafter.weights not in (None, "bf16")
    assert drafter.engines.keys() == engines.keys() or quantised
    for name, stored in drafter.engines.items():
        found = rule(
            engines[name],
            heads=drafter.heads,
            weights=drafter.weights,
            layout=drafter.layout,
            unread=drafter.unread,
            family=family,
        )
        if stored.verdict == "engine alone":
            assert stored.why
            assert found.verdict == "refused", "dflash-serve could serve it"
        elif quantised and stored.verdict in ("refused", "after convert"):
            assert stored.why
        else:
            assert stored == found
