"""Projections are reproducible bits with the moments that the estimate's theory asks for."""

import hashlib
import itertools

import pytest
import torch
from torch import Tensor, nn

from src.randomness import generator, python_random, uniform
from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.projection import hash_key, hash_uniform, hash_words, rademacher, stable_name

_MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output function of splitmix64 in unsigned Python integers (public-domain C code of S. Vigna)."""
    z = state & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def unsigned(words: Tensor) -> list[int]:
    return [word & _MASK for word in words.tolist()]


def test_hash_words_are_splitmix64_published_outputs():
    """The n-th output for seed 1234567 is the hash at counter n; values from Rosetta Code, "Pseudo-random numbers"."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert unsigned(hash_words(1234567, torch.arange(1, 6))) == expected


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_hash_words_equal_a_pure_python_reference(key):
    counters = [0, 1, 2, 63, 64, 1000, 2**31, 2**40 + 7]
    expected = [splitmix64(key + 0x9E3779B97F4A7C15 * counter) for counter in counters]
    assert unsigned(hash_words(key, torch.tensor(counters))) == expected


def test_hash_words_broadcast_a_key_per_row():
    keys = torch.tensor([3, -4, 5])
    words = hash_words(keys, torch.full_like(keys, 9))
    assert words.tolist() == [int(hash_words(key, torch.tensor([9]))[0]) for key in (3, -4, 5)]


def test_hash_uniform_is_the_upper_53_bits_in_0_1():
    numbers = hash_uniform(42, torch.arange(1000))
    expected = [(splitmix64(42 + 0x9E3779B97F4A7C15 * i) >> 11) / 2**53 for i in range(1000)]
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == expected
    assert numbers.min() >= 0.0 and numbers.max() < 1.0


def test_uniform_numbers_are_flat_and_uncorrelated_over_positions_and_keys():
    keys = torch.tensor([hash_key("rollout", 0, 1, row) for row in range(2000)])
    table = torch.stack([uniform(keys, position) for position in range(10)])  # (10, 2000)
    counts = torch.histc(table.flatten().float(), 20, 0.0, 1.0).double()
    chi2 = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert chi2 < 45.0  # 19 degrees of freedom: exceeded with probability 7e-4 by chance
    correlations = torch.corrcoef(table) - torch.eye(10)
    assert correlations.abs().max() < 5 / 2000**0.5
    assert abs(float(torch.corrcoef(torch.stack([table[0, 1:], table[0, :-1]]))[0, 1])) < 5 / 2000**0.5


def test_hash_key_is_blake2b_of_typed_parts():
    text = b"str:projection\x1fint:7\x1fint:0\x1fstr:a.b"
    expected = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    assert hash_key("projection", 7, 0, "a.b") == expected
    different = {hash_key(*parts) for parts in [("a", 1), ("a", "1"), ("a1",), ("a", 11), ("a", 1, 1), (1, "a")]}
    assert len(different) == 6
    assert -(2**63) <= expected < 2**63


def test_generators_of_a_place_repeat_and_differ_between_places():
    first, again, other = (torch.rand(4, generator=generator("x", seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert python_random("x", 0).random() == python_random("x", 0).random() != python_random("x", 1).random()


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (3, 64), (5, 100), (4, 129)])
def test_rademacher_signs_equal_a_pure_python_reference(rank, width):
    """Bit j of word w of a row is the sign at 64 w + j; rows start at whole words."""
    key, words_per_row = -12345, -(-width // 64)
    expected = torch.empty(rank, width, dtype=torch.float64)
    for row, column in itertools.product(range(rank), range(width)):
        word = splitmix64(key + 0x9E3779B97F4A7C15 * (row * words_per_row + column // 64))
        expected[row, column] = (1.0 if word >> (column % 64) & 1 else -1.0) / rank**0.5
    torch.testing.assert_close(rademacher(rank, width, key, torch.float64), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rademacher_has_the_same_signs_in_every_dtype(dtype):
    projection = rademacher(4, 70, 9, dtype)
    assert projection.dtype == dtype
    assert torch.equal(projection.abs(), torch.full((4, 70), 0.5, dtype=dtype))
    assert torch.equal(projection.double(), rademacher(4, 70, 9, torch.float64))


def test_the_first_rows_of_a_larger_rank_are_the_smaller_ranks_draw():
    large, small = rademacher(16, 100, 3, torch.float64), rademacher(4, 100, 3, torch.float64)
    assert torch.equal(large[:4].sign(), small.sign())


def test_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        draws = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draws.append(rademacher(64, 4096, 11))  # large enough for torch to split the work
    finally:
        torch.set_num_threads(before)
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(70, 6)
        self.k_proj = nn.Linear(70, 6)


def projections(model: nn.Module, seed: int = 5, draw: int = 0) -> list[Tensor]:
    """The model's projections in the order of its targets."""
    layers = SketchedLayers(model, select_targets(model, ["q_proj", "k_proj"]), 4, seed)
    layers.draw = draw
    return [layers.projection(name) for name in layers.modules]


class Wrapper(nn.Module):
    """A wrapper that puts a segment of its choice into the path."""

    def __init__(self, segment: str, model: nn.Module):
        super().__init__()
        self.add_module(segment, model)


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compile":
        return torch.compile(model, backend="eager")  # nothing is compiled: the model is never called
    if kind == "parallel":
        return nn.DataParallel(model)
    return Wrapper(kind, model)


@pytest.mark.parametrize("kind", ["compile", "parallel", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_wrapped_model_keeps_its_projections(kind):
    """M08, F62: the draw belongs to the layer, not to how the model is wrapped."""
    plain = nn.Sequential(Block(), Block())
    outer = projections(wrapped(kind, nn.Sequential(Block(), Block())))
    inner = projections(nn.Sequential(wrapped(kind, Block()), wrapped(kind, Block())))
    for a, b, c in zip(projections(plain), outer, inner, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_stable_name_strips_whole_segments_only():
    assert stable_name("_orig_mod.module.layers.0._fsdp_wrapped_module.q_proj") == "layers.0.q_proj"
    assert stable_name("my_module.modules.q_proj") == "my_module.modules.q_proj"


def test_layers_draws_and_seeds_are_uncorrelated():
    """Any two of 4 layers x 3 draws x 3 seeds: the correlation of R N = 280 signs stays below 4.5 sigma."""
    drawn = [
        projection.flatten()
        for seed, draw in itertools.product((0, 1, 2), (0, 1, 2))
        for projection in projections(nn.Sequential(Block(), Block()), seed, draw)
    ]
    signs = torch.stack(drawn).sign()  # (36, 280)
    correlations = signs @ signs.T / signs.shape[1] - torch.eye(len(drawn))
    assert correlations.abs().max() < 4.5 / signs.shape[1] ** 0.5  # 630 pairs, 7e-6 each
    # Unrelated pairs have the mean square 1 / 280; over 630 pairs it spreads by sqrt(2 / 630) of that.
    mean_square = float(correlations.square().sum() / (36 * 35)) * signs.shape[1]
    assert abs(mean_square - 1.0) < 5 * (2 / 630) ** 0.5


def test_bits_are_balanced_at_every_position_and_between_neighbours():
    words = hash_words(hash_key("balance"), torch.arange(20000))
    bits = ((words[:, None] >> torch.arange(64)) & 1).double() * 2 - 1  # (20000, 64)
    bound = 5 / 20000**0.5
    assert bits.mean(0).abs().max() < bound
    assert (bits[1:] * bits[:-1]).mean(0).abs().max() < bound
    pairs = bits.T @ bits / 20000 - torch.eye(64)
    assert pairs.abs().max() < bound


def test_the_second_moment_of_projections_is_the_identity():
    """E[A^T A] = I: ones on the diagonal, off it a mean of D R products of signs, standard deviation 1 / sqrt(D R)."""
    draws, rank, width = 400, 5, 40
    mean = torch.zeros(width, width, dtype=torch.float64)
    for draw in range(draws):
        projection = rademacher(rank, width, hash_key("moment", draw), torch.float64)
        mean += projection.T @ projection / draws
    torch.testing.assert_close(mean.diagonal(), torch.ones(width, dtype=torch.float64), rtol=1e-12, atol=0)
    off = mean - torch.eye(width)
    assert off.abs().max() < 5 / (draws * rank) ** 0.5
    # 780 squares of mean 1: their mean has the standard deviation sqrt(2 / 780).
    assert abs(float(off.square().sum() / (width * (width - 1))) * draws * rank - 1.0) < 5 * (2 / 780) ** 0.5


@pytest.mark.parametrize("rank", [2, 8, 40])
def test_the_relative_mean_squared_error_is_n_minus_1_over_r(rank):
    """And the estimate G A^T A is unbiased; both within 4.5 standard errors over 400 draws, estimated from them."""
    draws, width = 400, 40
    gradient = torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors, along = [], []
    for draw in range(draws):
        projection = rademacher(rank, width, hash_key("error", rank, draw), torch.float64)
        estimate = gradient @ projection.T @ projection
        errors.append((estimate - gradient).square().sum() / gradient.square().sum())
        along.append((estimate * gradient).sum() / gradient.square().sum())
    for values, expected in ((torch.stack(errors), (width - 1) / rank), (torch.stack(along), 1.0)):
        assert abs(float(values.mean()) - expected) < 4.5 * float(values.std()) / draws**0.5
        assert float(values.std()) / draws**0.5 < 0.05 * expected  # tight enough to mean something
