"""The whole loop samples from the target's distribution: a two-sample G-test, with and without speculation.

The unit tests compare the rule with exact probabilities; here real rows of a (tiny) target go through drafting,
verification, acceptance and commit. The two sides use different seeds: with the same ones they would be equal token by
token, which would leave nothing to test. False-alarm rate 1e-4 a case; seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from tests.support.broken_loops import LikelySpeculator, Prefix, greedy_verification
from tests.support.embedded import answers, tiny_engine
from tests.support.tiny_target import write_tiny_pair

pytestmark = pytest.mark.usefixtures("one_thread")
ALARM = 1e-4
SAMPLES = 2400
TOKENS = 3
PROMPT = "over"  # two tokens: `LikelySpeculator` spoils the draft of every fifth position
CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 20": {"top_k": 20},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "top_k": 20},
}
Samples = list[tuple[int, ...]]


def sample(engine: EmbeddedEngine, first_seed: int, settings: dict[str, Any]) -> tuple[Samples, float]:
    """Answers of `TOKENS` tokens to one prompt, one seed each, and the share of drafted tokens accepted."""
    params = [
        SamplingParams(seed=first_seed + n, max_tokens=TOKENS, ignore_eos=True, **settings) for n in range(SAMPLES)
    ]
    outputs = answers(engine, [PROMPT] * SAMPLES, params)
    counts = total(output.statistics for output in outputs)
    return [tuple(output.token_ids) for output in outputs], (counts.accepted or 0) / (counts.drafted or 1)


def p_value(first: Samples, second: Samples) -> float:
    """Of equal distribution: the least over token 2, token 3, both and the whole answer, times four (Bonferroni).

    Token 1 comes from the prompt's own pass, the others from verified blocks.
    """
    views = (slice(1, 2), slice(2, 3), slice(1, 3), slice(0, 3))
    return min(1.0, 4 * min(g_test([a[v] for a in first], [a[v] for a in second]) for v in views))


def g_test(first: Samples, second: Samples) -> float:
    """Two-sample G-test; values seen fewer than 10 times in all are pooled."""
    counts = Counter(first) + Counter(second)
    common = {value: n for n, (value, count) in enumerate(counts.items()) if count >= 10}
    table = [Counter(common.get(value, -1) for value in side) for side in (first, second)]
    cells = sorted({*table[0], *table[1]})
    result = chi2_contingency([[side[cell] for cell in cells] for side in table], lambda_="log-likelihood")
    return float(result.pvalue)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plainly(folders: tuple[Path, Path]) -> Callable[..., Samples]:
    """What plain sampling gives in a case, drawn once."""

    @cache
    def drawn(case: str, dtype: torch.dtype = torch.float32) -> Samples:
        return sample(tiny_engine(folders, width=1, max_batch_size=32, dtype=dtype), 0, CASES[case])[0]

    return drawn


def speculating(folders: tuple[Path, Path], expected: Samples, dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    """An engine that drafts what came most often after the same tokens: right often enough to test acceptance."""
    engine = tiny_engine(folders, width=4, max_batch_size=32, dtype=dtype)
    prompt, following = tuple(engine.tokenize(PROMPT)), defaultdict[Prefix, Counter[int]](Counter)
    for answer in expected:
        for n in range(1, len(answer)):
            following[*prompt, *answer[:n]][answer[n]] += 1
    speculator = engine.scheduler.speculator
    assert speculator is not None
    likely = {prefix: counts.most_common(1)[0][0] for prefix, counts in following.items()}
    speculator.__class__, speculator.likely = LikelySpeculator, likely  # type: ignore[attr-defined]
    return engine


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("top-k 20", torch.float32),
        *(pytest.param(case, torch.float32, marks=pytest.mark.thorough) for case in CASES if case != "top-k 20"),
        pytest.param("temperature 1", torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_speculation_samples_what_plain_sampling_samples(
    folders: tuple[Path, Path], plainly: Callable[..., Samples], case: str, dtype: torch.dtype
) -> None:
    expected = plainly(case, dtype)
    observed, accepted = sample(speculating(folders, expected, dtype), 10**6, CASES[case])
    assert accepted > 0.03, "too little was accepted for the test to mean anything"
    assert p_value(expected, observed) > ALARM


def test_greedy_verification_would_be_noticed(
    folders: tuple[Path, Path], plainly: Callable[..., Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plainly("top-k 20")
    engine = speculating(folders, expected)
    greedy_verification(engine, monkeypatch)
    observed, _ = sample(engine, 10**6, CASES["top-k 20"])
    assert p_value(expected, observed) < ALARM
