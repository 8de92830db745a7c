import pytest
import torch
from scipy.stats import kstest

from dflash_serve.speculation.noise import draw, fresh_seed, uniforms

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1, -(2**63)])
def test_numbers_follow_the_definition_bit_by_bit_on_every_device(seed: int) -> None:
    golden = 0x9E3779B97F4A7C15
    want = mix((mix((seed + golden) & MASK) + 8 * golden) & MASK) >> 11
    assert uniforms(torch.tensor([seed]), torch.tensor([7]), 1).item() == want / 2**53


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    over_seeds = uniforms(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), 1)
    over_positions = uniforms(torch.tensor([42]), torch.tensor([0]), 20_000)
    for numbers in (over_seeds, over_positions):
        assert kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4


def test_positions_and_seeds_are_uncorrelated() -> None:
    columns = uniforms(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), 2)
    columns = torch.cat([columns, columns.roll(1, 0)], dim=1)
    correlation = torch.corrcoef(columns.T) - torch.eye(columns.shape[1])
    assert correlation.abs().max() < 5 / 20_000**0.5


def test_a_position_has_its_numbers_whatever_block_it_is_seen_in() -> None:
    seeds = torch.tensor([3, 4])
    wide, late = uniforms(seeds, torch.tensor([10, 20]), 6), uniforms(seeds, torch.tensor([12, 22]), 3)
    assert torch.equal(wide[:, 2:5], late)


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(100)}) == 100


@pytest.mark.parametrize("vocab_size", [3, 128, 1000])
def test_draw_inverts_the_cumulative_distribution(vocab_size: int) -> None:
    weights = torch.rand(vocab_size, generator=torch.Generator().manual_seed(0))
    weights[::2] = 0
    edges = weights.double().cumsum(0)
    u = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    got = draw(weights.expand(4000, vocab_size), u)
    want = torch.searchsorted(edges, u * edges[-1], right=True)
    assert (got == want).float().mean() > 0.999  # float32 sums of chunks may shift an edge by a rounding
    assert (weights[got] > 0).all()


def test_draw_never_takes_a_token_without_weight() -> None:
    weights = torch.zeros(300)
    weights[[7, 131, 256]] = torch.tensor([1.0, 1e-30, 1.0])
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert set(draw(weights.expand(3, 300), u).tolist()) <= {7, 131, 256}
    assert draw(weights.expand(3, 300), u).tolist() == [7, 256, 256]


def test_draw_survives_rows_of_no_use() -> None:
    rows = torch.stack([torch.zeros(5), torch.full((5,), float("nan"))])
    got = draw(rows, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert ((got >= 0) & (got < 5)).all()
