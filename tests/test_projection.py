"""Projections are reproducible bits with the moments that the estimate's theory asks for."""

import hashlib
import itertools

import pytest
import torch
from torch import Tensor, nn

from src.randomness import generator, python_random, uniform
from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.projection import (
    FAMILIES,
    Group,
    Projections,
    coordinate,
    countsketch,
    gaussian,
    hash_key,
    hash_uniform,
    hash_words,
    rademacher,
    signs,
    srht,
    stable_name,
    stiefel,
)

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


def test_groups_draws_and_seeds_are_uncorrelated():
    """Any two of 4 groups x 3 draws x 3 seeds: the correlation of N = 70 signs in a row stays below 4.5 sigma."""
    drawn = [
        projection[0]
        for seed, draw in itertools.product((0, 1, 2), (0, 1, 2))
        for projection in projections(nn.Sequential(*(Block() for _ in range(4))), seed, draw)[::2]
    ]
    signs = torch.stack(drawn).sign()  # (36, 70)
    correlations = signs @ signs.T / signs.shape[1] - torch.eye(len(drawn))
    assert correlations.abs().max() < 4.5 / signs.shape[1] ** 0.5  # 630 pairs, 7e-6 each
    # Unrelated pairs have the mean square 1 / 70; over 630 pairs it spreads by sqrt(2 / 630) of that.
    mean_square = float(correlations.square().sum() / (36 * 35)) * signs.shape[1]
    assert abs(mean_square - 1.0) < 5 * (2 / 630) ** 0.5


def test_errors_of_two_groups_of_one_base_are_uncorrelated():
    """E[(A_1^T A_1 - I) o (A_2^T A_2 - I)] = 0 entry by entry, over 2000 draws, though both have one base."""
    products, squares = [], []
    places = [Group(label, 70, torch.float32, torch.device("cpu")) for label in ("one", "other")]
    for draw in range(2000):
        drawn = Projections(rademacher, 4, 5, draw, "projection", places)
        error_1, error_2 = (drawn.of(place).T @ drawn.of(place) - torch.eye(70) for place in places)
        products.append((error_1 * error_2).sum())
        squares.append(error_1.square().sum())
    correlation = torch.stack(products) / torch.stack(squares).mean()
    assert abs(float(correlation.mean())) < 4.5 * float(correlation.std()) / 2000**0.5
    assert float(correlation.std()) / 2000**0.5 < 0.01  # tight enough to mean something


def test_bits_are_balanced_at_every_position_and_between_neighbours():
    words = hash_words(hash_key("balance"), torch.arange(20000))
    bits = ((words[:, None] >> torch.arange(64)) & 1).double() * 2 - 1  # (20000, 64)
    bound = 5 / 20000**0.5
    assert bits.mean(0).abs().max() < bound
    assert (bits[1:] * bits[:-1]).mean(0).abs().max() < bound
    pairs = bits.T @ bits / 20000 - torch.eye(64)
    assert pairs.abs().max() < bound


# --- families ---

DISCRETE = {"rademacher": rademacher, "srht": srht, "coordinate": coordinate, "countsketch": countsketch}


def relative_error(family: str, rank: int, width: int) -> float:
    """E||G A^T A - G||^2 / ||G||^2, as the module's docstring has it."""
    padded = 1 << (width - 1).bit_length()
    return {
        "rademacher": (width - 1) / rank,
        "countsketch": (width - 1) / rank,
        "gaussian": (width + 1) / rank,
        "stiefel": width / rank - 1,
        "coordinate": width / rank - 1,
        "srht": width / rank - 1 + (rank - 1) * (padded - width) / (rank * (padded - 1)),
    }[family]


@pytest.mark.parametrize(("rank", "width"), [(2, 40), (8, 40), (8, 64), (40, 40)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_relative_mean_squared_error_of_each_family(family, rank, width):
    """And the estimate G A^T A is unbiased; both within 4.5 standard errors over 600 draws, estimated from them.

    G has an outlier column, as activations have: the error is the same for every G, its spread is not.
    """
    draws = 600
    gradient = torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient[:, 3] *= 5.0
    errors, along = [], []
    for draw in range(draws):
        projection = FAMILIES[family](rank, width, hash_key("error", family, rank, draw), torch.float64)
        assert projection.shape == (rank, width) and projection.dtype == torch.float64
        estimate = gradient @ projection.T @ projection
        errors.append((estimate - gradient).square().sum() / gradient.square().sum())
        along.append((estimate * gradient).sum() / gradient.square().sum())
    for values, expected in ((torch.stack(errors), relative_error(family, rank, width)), (torch.stack(along), 1.0)):
        if expected > 0:
            assert abs(float(values.mean()) - expected) < 4.5 * float(values.std()) / draws**0.5 + 1e-9
            assert float(values.std()) / draws**0.5 < 0.1 * expected  # tight enough to mean something
        else:  # full rank: the estimate is the gradient
            assert float(values.abs().max()) < 1e-20


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_moment_of_each_family_is_the_identity(family):
    """E[A^T A] = I, entry by entry: 400 draws, 5 standard errors of each, estimated from them."""
    draws, rank, width = 400, 5, 24
    squares = torch.stack(
        [
            projection.T @ projection
            for draw in range(draws)
            for projection in [FAMILIES[family](rank, width, hash_key("moment", draw), torch.float64)]
        ]
    )
    off = (squares.mean(0) - torch.eye(width)).abs()
    assert bool((off <= 5 * squares.std(0) / draws**0.5 + 1e-9).all())


@pytest.mark.parametrize("family", DISCRETE)
def test_discrete_families_have_the_same_bits_in_every_dtype_and_thread_count(family):
    """M08: what rounds is one factor, the same for all entries; where there is one and its sign are integers."""
    reference = DISCRETE[family](16, 100, 9, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(DISCRETE[family](16, 100, 9, dtype).double().sign(), reference.sign())
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(DISCRETE[family](16, 100, 9, torch.float64), reference)
            large = DISCRETE[family](64, 4096, 11)
            torch.set_num_threads(1)
            assert torch.equal(DISCRETE[family](64, 4096, 11), large)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.parametrize("family", DISCRETE)
def test_discrete_families_have_the_same_bits_on_cuda(family):
    device = torch.device("cuda")
    assert torch.equal(DISCRETE[family](64, 4096, 11, device=device).cpu(), DISCRETE[family](64, 4096, 11))


def test_the_hadamard_rows_are_scipys():
    """Up to the columns' signs, which all rows share: rows of the Hadamard matrix, each at most once."""
    from scipy.linalg import hadamard

    rank, width, key = 12, 23, 77
    columns = signs(width, [hash_key("signs", key)])[0].double()
    rows = (srht(rank, width, key, torch.float64) * columns * rank**0.5).round()
    matrix = torch.tensor(hadamard(32), dtype=torch.float64)[:, :width]
    found = [int((matrix == row).all(1).nonzero().item()) for row in rows]
    assert len(set(found)) == rank and found != sorted(found)
    assert 0.2 < float((columns > 0).double().mean()) < 0.8


def test_stiefel_has_orthogonal_rows_and_no_preferred_signs():
    """A A^T = (N / R) I; without the sign fix the first column of Q would point away from e_1 in every draw."""
    rank, width, draws = 5, 12, 200
    first = []
    for draw in range(draws):
        projection = stiefel(rank, width, hash_key("haar", draw), torch.float64)
        torch.testing.assert_close(
            projection @ projection.T, width / rank * torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12
        )
        first.append(float(projection[0, 0]) > 0)
    assert abs(sum(first) - draws / 2) < 5 * (draws / 4) ** 0.5


def test_stiefel_s_entries_have_the_haar_measure_s_marginal():
    """An entry of a uniform unit vector in N dimensions: its square is Beta(1/2, (N - 1)/2)."""
    from scipy.stats import beta, kstest

    rank, width = 3, 10
    entries = [
        float(stiefel(rank, width, hash_key("marginal", draw), torch.float64)[draw % rank, draw % width])
        for draw in range(800)
    ]
    squares = torch.tensor(entries).square() * rank / width
    assert kstest(squares.numpy(), beta(0.5, (width - 1) / 2).cdf).pvalue > 1e-3


def test_gaussian_numbers_are_normal_and_uncorrelated():
    from scipy.stats import kstest

    rank, width = 25, 401  # an odd number of them
    numbers = gaussian(rank, width, 5, torch.float64) * rank**0.5
    assert kstest(numbers.flatten().numpy(), "norm").pvalue > 1e-3
    correlations = torch.corrcoef(numbers) - torch.eye(rank)
    assert correlations.abs().max() < 5 / width**0.5
    half = numbers.flatten()[:5000], numbers.flatten()[5013:10013]  # the two of a pair of Box and Muller's
    assert abs(float((half[0] * half[1]).mean())) < 5 / 5000**0.5
    assert torch.equal(gaussian(rank, width, 5), gaussian(rank, width, 5)) and not torch.equal(
        gaussian(rank, width, 5), gaussian(rank, width, 6)
    )


def test_coordinates_are_a_part_of_the_gradient():
    rank, width = 4, 10
    projection = coordinate(rank, width, 3, torch.float64)
    assert int((projection != 0).sum()) == rank and int((projection.sum(0) != 0).sum()) == rank
    gradient = torch.randn(3, width, dtype=torch.float64)
    columns = projection.argmax(1)
    torch.testing.assert_close(gradient @ projection.T, gradient[:, columns] * (width / rank) ** 0.5)
    counts = sum((coordinate(rank, width, hash_key("subset", draw)) != 0).any(0).double() for draw in range(1000))
    assert float((counts - 400.0).abs().max()) < 5 * (1000 * 0.4 * 0.6) ** 0.5


def test_countsketch_has_one_sign_a_column_spread_over_the_rows():
    projection = countsketch(8, 4000, 3, torch.float64)
    assert torch.equal(projection.abs().sum(0), torch.ones(4000, dtype=torch.float64))
    counts = projection.abs().sum(1)
    assert float((counts - 500.0).abs().max()) < 5 * (4000 / 8 * 7 / 8) ** 0.5
    assert abs(float(projection.sum())) < 5 * 4000**0.5
