"""The promise of the room: speculation changes neither the distribution of the output nor, with a seed, the output."""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dflash_serve.speculation import sampling
from dflash_serve.speculation.acceptance import count_accepted
from dflash_serve.speculation.noise import draw, uniforms
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.sampling import SamplingBatch, TokenCounts, probabilities

V, BLOCK_SIZE, LENGTH, REQUESTS = 5, 4, 3, 10_000
PROMPT = [0, 3]
FALSE_ALARM = 1e-4  # per G-test; all seeds are fixed, so a failure is a change of the code, not bad luck
CAUGHT = 1e-9

# A target with a memory of two tokens, and a drafter that sees the anchor and guesses each slot on its own.
TARGET = torch.randn(V, V, V, generator=torch.Generator().manual_seed(1)) * 1.5
DRAFTER = torch.randn(V, BLOCK_SIZE - 1, V, generator=torch.Generator().manual_seed(2)) + TARGET.mean(0)[:, None]

PARAMS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.15),
    "repetition penalty": SamplingParams(repetition_penalty=1.8),
    "presence and frequency penalties": SamplingParams(presence_penalty=1.2, frequency_penalty=0.9),
    "logit bias": SamplingParams(logit_bias={1: 2.0, 4: -100.0}),
    "everything": SamplingParams(
        temperature=1.3, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.5,
        presence_penalty=-0.4, logit_bias={2: 1.0},
    ),
}  # fmt: skip


def accept(draft: Tensor, choice: Tensor, widths: Tensor) -> Tensor:
    """The tokens gained, [N, W]; -1 behind the bonus token."""
    return choice.masked_fill(torch.arange(choice.shape[1]) > count_accepted(draft, choice, widths - 1)[:, None], -1)


def speculate(params: Sequence[SamplingParams], seeds: Tensor, *, max_width: int = BLOCK_SIZE) -> Tensor:
    """[N, LENGTH] tokens by speculation with ragged widths."""
    n, start = len(params), len(PROMPT)
    batch, prompts = SamplingBatch.of(params, V), torch.tensor([PROMPT] * n)
    tokens = torch.full((n, start + 3 * (LENGTH + BLOCK_SIZE)), -1)
    tokens[:, :start] = prompts
    done, rows = torch.zeros(n, dtype=torch.int64), max_width
    while (done < LENGTH).any():
        ends = start - 1 + done[:, None]
        anchor, before = tokens.gather(1, ends), tokens.gather(1, ends - 1)
        draft = DRAFTER[anchor[:, 0], : rows - 1].argmax(-1)
        block, counts = torch.cat([before, anchor, draft], dim=1), TokenCounts.of(prompts, tokens[:, start:], V)
        p = probabilities(TARGET[block[:, :-1], block[:, 1:]], batch, counts, draft)
        widths = (seeds + done) % rows + 1
        gained = accept(draft, draw(p, uniforms(seeds, done, rows)), widths)
        tokens.scatter_(1, ends + 1 + torch.arange(rows), gained)
        done = done + (gained >= 0).sum(1)
    return tokens[:, start : start + LENGTH]


def plain_distribution(params: SamplingParams, output: Sequence[int]) -> list[float]:
    """The target's distribution of one more token, written down a second time, one float at a time."""
    context = PROMPT + list(output)
    logits = [float(x) + params.logit_bias.get(i, 0.0) for i, x in enumerate(TARGET[context[-2], context[-1]])]
    for token in range(V):
        if token in context:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    weights = [math.exp(x / params.temperature) for x in logits]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    ranked = sorted(range(V), key=lambda i: -weights[i])
    for token in ranked[params.top_k or V :]:
        weights[token] = 0.0
    total, mass = sum(weights), 0.0
    for token in ranked:
        mass, keep = mass + weights[token], mass < params.top_p * total
        weights[token] *= keep
    return [w / sum(weights) for w in weights]


def p_value(observed: Tensor, params: SamplingParams) -> float:
    """G-test of the joint distribution of the first LENGTH tokens; cells that expect fewer than five are merged."""
    counts = Counter(tuple(row) for row in observed.tolist())
    cells, rare_observed, rare_expected = [], 0, 0.0
    for output in itertools.product(range(V), repeat=LENGTH):
        steps = (plain_distribution(params, output[:i])[token] for i, token in enumerate(output))
        expected = len(observed) * math.prod(steps)
        if expected == 0 and counts[output]:
            return 0.0
        if expected >= 5:
            cells.append((counts[output], expected))
        else:
            rare_observed, rare_expected = rare_observed + counts[output], rare_expected + expected
    if rare_expected > 1e-6:
        cells.append((rare_observed, rare_expected))
    g = 2 * sum(o * math.log(o / e) for o, e in cells if o)
    return float(chi2.sf(g, len(cells) - 1))


def run(params: SamplingParams, *, max_width: int = BLOCK_SIZE) -> float:
    return p_value(speculate([params] * REQUESTS, torch.arange(REQUESTS), max_width=max_width), params)


@pytest.mark.parametrize("max_width", [1, BLOCK_SIZE], ids=["plain sampling", "blocks"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_output_is_distributed_as_the_targets_own(name: str, max_width: int) -> None:
    assert run(PARAMS[name], max_width=max_width) > FALSE_ALARM


def test_the_test_catches_a_rejected_token_drawn_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept with probability p(d), then draw from all of p: the rule without its residual."""

    def forgetful(draft: Tensor, choice: Tensor, widths: Tensor) -> Tensor:
        gained = right(draft, choice, widths)
        count = (gained >= 0).sum(1)
        again = torch.where(count == widths, gained.gather(1, count[:, None] - 1)[:, 0], choice.roll(1, 0)[:, 0])
        return gained.scatter(1, count[:, None] - 1, again[:, None])

    right = accept
    monkeypatch.setattr(sys.modules[__name__], "accept", forgetful)
    assert run(SamplingParams()) < CAUGHT


def test_the_test_catches_penalties_frozen_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampling, "_occurrences", lambda tokens, rows: tokens.new_zeros(len(tokens), rows, tokens.shape[1])
    )
    assert run(PARAMS["presence and frequency penalties"]) < CAUGHT


def mixed(n: int) -> list[SamplingParams]:
    greedy = SamplingParams(temperature=0)
    return list(itertools.islice(itertools.cycle([*PARAMS.values(), greedy]), n))


@pytest.mark.parametrize("max_width", [2, 3, 4])
def test_a_seeded_output_is_the_same_token_by_token_at_any_width(max_width: int) -> None:
    params, seeds = mixed(2000), torch.arange(2000) * 7919
    assert torch.equal(speculate(params, seeds, max_width=max_width), speculate(params, seeds, max_width=1))


def test_a_request_never_feels_its_batch_neighbours() -> None:
    params, seeds = mixed(60), torch.arange(60) * 104729
    alone = [speculate([params[i]], seeds[i : i + 1])[0] for i in range(60)]
    assert torch.equal(speculate(params, seeds), torch.stack(alone))


def test_a_greedy_request_in_a_sampled_batch_gets_the_greedy_output() -> None:
    output, prefix = speculate(mixed(9), torch.arange(9))[8].tolist(), list(PROMPT)
    for token in output:
        assert token == int(TARGET[prefix[-2], prefix[-1]].argmax())
        prefix.append(token)
