"""How updates below the stored precision are kept; and the two-sided estimate."""

import io
import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from src.sketch.direction import reconstruct
from src.sketch.merge import Moved, merge, merge_stochastically, round_stochastically, sampled
from src.sketch.optimizer import SketchOptimizer
from src.sketch.projection import FAMILIES, hash_key, hash_words, rademacher
from tests.test_sketch import (
    assert_all_close,
    build,
    dense_gradients,
    loss_of,
    orthogonal,
    sketched,
    sketches,
    square_llama,
    weights,
)
from tests.tinymodels import tokens

BFLOAT16 = torch.bfloat16


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def optimizer_for(dtype: torch.dtype, lr: float = 1e-3, **options: Any) -> tuple[nn.Module, SketchOptimizer]:
    """An optimizer on an Mlp whose start can be stored in bfloat16, in whatever dtype."""
    model, patterns, _ = build("mlp", BFLOAT16)
    return model, SketchOptimizer(sketched(model.to(dtype), patterns), lr, **({"clip_norm": "none"} | options))


def fill(optimizer: SketchOptimizer, seed: int, scale: float = 1.0) -> None:
    """Sketches from a generator: two optimizers get the same ones."""
    source = generator(seed)
    for parameter in optimizer.layers.sketch_parameters():
        noise = torch.randn(parameter.shape, generator=source)
        parameter.grad = noise.mul(scale).to(parameter.dtype)


def masters(optimizer: SketchOptimizer) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["master"] for name, p in optimizer.layers.parameters.items()}


# --- master weights ---


@pytest.mark.parametrize("direction", ["sgd", "row_adam", "adam"])
def test_masters_are_a_float32_runs_weights(direction):
    """Six updates from the same sketches: the masters' bits are the float32 weights', the stored ones are theirs."""
    options = {"direction": direction, "weight_decay": 0.1, "refresh_every": 2}
    _, narrow = optimizer_for(BFLOAT16, **options)
    _, wide = optimizer_for(torch.float32, **options)
    assert not any("master" in state for state in wide.state.values())
    for step in range(6):
        for optimizer in (narrow, wide):
            fill(optimizer, step)
            optimizer.step()
        for name, weight in weights(wide.layers).items():
            assert torch.equal(masters(narrow)[name], weight)
            assert torch.equal(narrow.layers.modules[name].weight, weight.to(BFLOAT16))
    start = weights(optimizer_for(torch.float32)[1].layers)
    assert all(not torch.equal(weight, start[name]) for name, weight in weights(wide.layers).items())


def test_small_updates_add_up_in_masters_and_are_lost_without():
    """Changes of about 1/20 of a weight's spacing, all in one direction: plain rounds each of them away."""
    found = {}
    for storage in ("master", "stochastic", "plain"):
        _, optimizer = optimizer_for(BFLOAT16, 5e-5, direction="sgd", storage=storage, refresh_every="never")
        start, shares = weights(optimizer.layers), []
        for _ in range(40):
            fill(optimizer, 0)
            optimizer.propose()
            shares.append(optimizer.apply(1.0)["moved_share"])
        fill(optimizer, 0)
        exact = {n: -40 * 5e-5 * s @ optimizer.layers.projection(n) for n, s in sketches(optimizer.layers).items()}
        change = {name: (weight - start[name]).float() for name, weight in weights(optimizer.layers).items()}
        errors = [float((change[name] - exact[name]).norm() / exact[name].norm()) for name in start]
        found[storage] = max(errors), sum(shares) / 40
    assert found["master"][0] < 0.35 and found["stochastic"][0] < 1.0 < 1.5 * found["plain"][0]
    assert found["master"][0] < 0.5 * found["plain"][0]
    assert found["plain"][1] < 0.05 < found["stochastic"][1]
    assert found["master"][1] > 1.2 * found["plain"][1]


def test_weights_changed_behind_their_masters_are_refused():
    """Loading a checkpoint of the model alone: the masters would undo it at the next step."""
    model, optimizer = optimizer_for(BFLOAT16)
    with torch.no_grad():
        model.up.weight.add_(1.0)
    before, kept = weights(optimizer.layers), {name: master.clone() for name, master in masters(optimizer).items()}
    fill(optimizer, 0)
    with pytest.raises(RuntimeError, match="up were changed, and their float32 master copy was not"):
        optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(optimizer.layers).items())
    assert all(torch.equal(master, kept[name]) for name, master in masters(optimizer).items())


@pytest.mark.parametrize("storage", ["master", "stochastic"])
def test_a_state_with_masters_loads_safely_and_goes_on_to_the_bit(storage):
    """weights_only=True; the masters hold what the stored weights do not."""

    def run(model: nn.Module, optimizer: SketchOptimizer, steps: range) -> None:
        for step in steps:
            fill(optimizer, step)
            optimizer.step()

    options = {"weight_decay": 0.1, "refresh_every": 2, "storage": storage}
    model, optimizer = optimizer_for(BFLOAT16, **options)
    run(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    run(model, optimizer, range(3, 6))

    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again, other = optimizer_for(BFLOAT16, **options)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    if storage == "master":
        assert {master.dtype for master in masters(other).values()} == {torch.float32}
        assert any(not torch.equal(m, m.to(BFLOAT16).float()) for m in masters(other).values())
    run(again, other, range(3, 6))
    assert all(torch.equal(weight, weights(other.layers)[name]) for name, weight in weights(optimizer.layers).items())
    if storage == "master":
        assert all(torch.equal(master, masters(other)[name]) for name, master in masters(optimizer).items())


def test_a_state_without_masters_begins_them_anew():
    """From a run with storage=plain to one with masters: they are there, and equal to the stored weights."""
    _, plain = optimizer_for(BFLOAT16, storage="plain")
    fill(plain, 0)
    plain.step()
    model, optimizer = optimizer_for(BFLOAT16)
    for name, module in optimizer.layers.modules.items():
        module.weight.data.copy_(plain.layers.modules[name].weight)
    optimizer.load_state_dict(plain.state_dict())
    assert masters(optimizer).keys() == optimizer.layers.modules.keys()
    for name, weight in weights(optimizer.layers).items():
        assert torch.equal(masters(optimizer)[name], weight.float())
    fill(optimizer, 1)
    optimizer.step()


# --- stochastic rounding ---


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers towards zero and away from it, from bit patterns in numpy; inf after the largest."""
    bits = values.numpy().view(np.uint32)
    inward = bits & np.uint32(0xFFFF0000)
    exact = bits == inward
    outward = np.where(exact, inward, inward + np.uint32(0x10000))
    return torch.from_numpy(inward.view(np.float32)), torch.from_numpy(outward.view(np.float32))


def test_a_rounded_value_is_one_of_its_two_neighbours():
    """Random bit patterns: every exponent, both signs, denormals; the value's own sign; words of any bits."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator(0)).to(torch.int32)
    edges = [0, -(2**31), 1, 0xFFFF, 0x10000, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0x00800000, 0x007FFFFF]
    values = torch.cat([bits, torch.tensor(edges, dtype=torch.int64).to(torch.int32)]).view(torch.float32)
    values = torch.cat([values, -values])
    values = values[values.isfinite()]
    inward, outward = neighbours(values)
    ways = set()
    for seed in range(4):
        words = hash_words(seed, torch.arange(values.numel()))
        rounded = round_stochastically(values, words).float()
        up, down = rounded == outward, rounded == inward
        assert bool((up | down).all())
        assert torch.equal(rounded.signbit(), values.signbit())
        exact = inward == outward
        assert torch.equal(rounded[exact], values[exact])
        ways |= {bool((up & ~down).any()), bool((down & ~up).any())}
        subnormal = (values != 0) & (values.abs() < 2.0**-126)
        assert bool((up & ~down)[subnormal].any()) and bool((down & ~up)[subnormal].any())
    assert ways == {True}


@pytest.mark.parametrize("words", [0, 0xFFFF, -1, -(2**63), 2**63 - 1])
def test_exact_and_non_finite_values_stay(words):
    stored = torch.randint(-(2**15), 2**15, (5000,), generator=generator(1)).to(torch.int16).view(BFLOAT16)
    stored = stored[~stored.isnan()]
    values = torch.cat([stored.float(), torch.tensor([math.inf, -math.inf, 0.0, -0.0])])
    rounded = round_stochastically(values, torch.full(values.shape, words, dtype=torch.int64))
    assert torch.equal(rounded.view(torch.int16), values.to(BFLOAT16).view(torch.int16))
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    payloads = torch.cat([payloads, -payloads])
    words_of = torch.full(payloads.shape, words, dtype=torch.int64)
    assert bool(round_stochastically(payloads, words_of).isnan().all())


def test_the_mean_over_seeds_is_the_exact_change():
    """4000 seeds: every element's mean within 4.5 standard errors, the whole's as well; the spread is a rounding's."""
    weight = torch.randn(6, 10, generator=generator(0)).to(BFLOAT16)
    left, right = 1e-3 * torch.randn(6, 3, generator=generator(1)), rademacher(3, 10, 1)
    exact = (0.999 * weight.double() + 0.5 * left.double() @ right.double()).float().double()
    total, count = torch.zeros(6, 10, dtype=torch.float64), 4000
    for seed in range(count):
        stored = weight.clone()
        merge_stochastically(stored, left, right, 0.999, 0.5, seed, 0, "layer")
        total += stored.double()
    inward, outward = neighbours(exact.float())
    share = ((exact - inward) / (outward - inward)).nan_to_num()
    error = (outward - inward).abs() * (share * (1 - share)).sqrt() / count**0.5
    z = (total / count - exact) / error.clamp(min=1e-9)
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) * 60**0.5 < 4.5
    assert 0.6 < float(z.std()) < 1.4
    nearest = (0.999 * weight.float() + 0.5 * left @ right).to(BFLOAT16).double()
    assert float(((nearest - exact) / error.clamp(min=1e-9)).abs().max()) > 20  # to nearest would be seen


def test_the_bits_are_a_function_of_seed_update_and_name():
    """The same again, by whatever blocks; another seed, update or name, other bits."""
    weight = torch.randn(300, 400, generator=generator(0)).to(BFLOAT16)  # two blocks of rows
    left, right = 1e-3 * torch.randn(300, 3, generator=generator(1)), rademacher(3, 400, 1)

    def merged(*key: int | str, rows: slice = slice(None)) -> Tensor:
        stored = weight.clone()
        merge_stochastically(stored[rows], left[rows], right, 0.999, 1.0, *key)
        return stored[rows]

    first = merged(0, 0, "a")
    assert torch.equal(first, merged(0, 0, "a"))
    assert torch.equal(first[:10], merged(0, 0, "a", rows=slice(10)))
    for key in ((1, 0, "a"), (0, 1, "a"), (0, 0, "b")):
        assert 0.1 < float((merged(*key) != first).double().mean()) < 0.9
    exact = torch.addmm(weight.float(), left, right, beta=0.999)
    words = hash_words(hash_key("rounding", 0, 0, "a"), torch.arange(weight.numel()).view_as(weight))
    expected = round_stochastically(exact, words)
    assert float((first != expected).double().mean()) < 1e-4  # a product by blocks may differ in its last bit


def test_two_updates_of_an_optimizer_round_with_other_bits():
    _, one = optimizer_for(BFLOAT16, direction="sgd", storage="stochastic", refresh_every="never")
    _, other = optimizer_for(BFLOAT16, direction="sgd", storage="stochastic", refresh_every="never")
    other.updates = 1
    for optimizer in (one, other):
        fill(optimizer, 0)
        optimizer.step()
    assert not torch.equal(one.layers.modules["up"].weight, other.layers.modules["up"].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_are_merged_in_place_whatever_is_said(dtype):
    results = []
    for storage in ("master", "stochastic", "plain"):
        _, optimizer = optimizer_for(dtype, storage=storage)
        fill(optimizer, 0)
        optimizer.step()
        assert not optimizer.memory()["master_weights"]
        results.append(weights(optimizer.layers))
    for result in results[1:]:
        assert all(torch.equal(weight, results[0][name]) for name, weight in result.items())


# --- the share of weights that moved ---


def test_the_share_that_moved_is_an_exact_count_for_small_matrices():
    """Weighted by size; a bias-like vector and a scalar are looked at as well."""
    moved = Moved()
    assert math.isnan(moved.share())
    for shape, changed in (((4, 5), 3), ((7,), 2), ((), 1), ((30, 11), 0)):
        weight = torch.zeros(shape)
        before = sampled(weight)
        weight.view(-1)[:changed] = 1.0
        moved.count(weight, before)
    assert moved.share() == pytest.approx(6 / (20 + 7 + 1 + 330), rel=1e-12)


def test_the_share_that_moved_in_an_update_of_bfloat16_weights():
    _, optimizer = optimizer_for(BFLOAT16, 1e-3, storage="plain")
    before = weights(optimizer.layers)
    fill(optimizer, 0)
    optimizer.propose()
    share = optimizer.apply(1.0)["moved_share"]
    after = weights(optimizer.layers)
    count = sum(int((after[name] != before[name]).sum()) for name in before)
    assert share == optimizer.metrics["moved_share"] == count / sum(weight.numel() for weight in before.values())
    assert 0.05 < share < 0.95


def test_the_share_that_moved_of_a_large_matrix_is_sampled_over_all_of_it():
    """1000 x 1000: every sixteenth row, so what is confined to a half of the rows is seen as a half."""
    moved = Moved()
    weight = torch.arange(1000.0)[:, None].repeat(1, 1000)
    before = sampled(weight)
    assert before.shape == (63, 1000)
    rows = before[:, 0].long()
    assert rows[0] == 0 and rows[-1] >= 980 and set(rows.diff().tolist()) == {16}
    weight[500:, ::2] += 1.0
    assert torch.equal(before[:, 0].long(), rows)  # a copy
    moved.count(weight, before)
    assert moved.share() == pytest.approx(0.25, abs=0.01)
    assert sampled(torch.zeros(4, 0)).numel() == 0
    assert sampled(torch.zeros(1, 200_000)).numel() == sampled(torch.zeros(2, 200_000)).numel() == 65536


def test_a_plain_merge_is_one_addmm():
    weight = torch.randn(6, 10, generator=generator(0), dtype=torch.float64)
    left, right = torch.randn(6, 3, generator=generator(1), dtype=torch.float64), rademacher(3, 10, 1, torch.float64)
    expected = 0.9 * weight + 0.5 * left @ right
    merge(weight, left, right, 0.9, 0.5)
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)


# --- the two-sided estimate ---


def spectrum(rows: int, width: int, power: float) -> Tensor:
    """A matrix with singular values i^-power and random singular vectors, float64."""
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator(5), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, width, generator=generator(6), dtype=torch.float64)).Q
    count = min(rows, width)
    values = torch.arange(1, count + 1, dtype=torch.float64) ** -power
    return (left[:, :count] * values) @ right[:, :count].T


def two_sided(gradient: Tensor, rank: int, co_rank: int, key: int, family: str = "gaussian") -> tuple[Tensor, ...]:
    """(Y, Z, B) of a gradient."""
    rows, width = gradient.shape
    a = FAMILIES[family](rank, width, hash_key("a", key), torch.float64)
    b = FAMILIES[family](co_rank, rows, hash_key("b", key), torch.float64)
    return gradient @ a.T, b @ gradient, b


@pytest.mark.parametrize("family", ["rademacher", "gaussian", "stiefel", "srht"])
@pytest.mark.parametrize(("rank", "co_rank"), [(1, 1), (1, 7), (5, 9), (5, 20)])
def test_the_estimate_is_the_papers_formula(family, rank, co_rank):
    """Q (B Q)^+ Z by numpy, with right right^T = (N / R) I, so that the left factor's norm is that of a sketch."""
    y, z, b = two_sided(spectrum(20, 12, 0.7), rank, co_rank, 1, family)
    left, right = reconstruct(y, z, b)
    q = np.linalg.qr(y.numpy())[0]
    expected = torch.from_numpy(q @ np.linalg.pinv(b.numpy() @ q) @ z.numpy())
    assert left.shape == (20, rank) and right.shape == (rank, 12)
    assert float((left @ right - expected).norm() / expected.norm()) < 1e-10
    torch.testing.assert_close(right @ right.T, 12 / rank * torch.eye(rank).double(), rtol=1e-10, atol=1e-10)
    assert float(left.norm()) * (12 / rank) ** 0.5 == pytest.approx(float(expected.norm()), rel=1e-10)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_a_matrix_of_low_rank_is_recovered(rank):
    """Also one of a smaller rank than R, where Y's last columns are of no consequence, and one with few rows."""
    noise = torch.randn(20, 12, generator=generator(0), dtype=torch.float64)
    low = torch.randn(20, rank, generator=generator(1), dtype=torch.float64) @ noise[:rank]
    left, right = reconstruct(*two_sided(low, 5, 9, 2))
    assert float((left @ right - low).norm() / low.norm()) < 1e-10
    few = torch.zeros_like(noise)
    few[:rank] = noise[:rank]
    left, right = reconstruct(*two_sided(few, 5, 9, 2))
    assert float((left @ right - few).norm() / few.norm()) < 1e-10


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("rank", "co_rank"), [(4, 4), (4, 8)])
def test_sketches_of_zeros_give_an_estimate_of_zeros(family, rank, co_rank):
    """Whatever B is: of a zero Y, Q is made of unit vectors, of which a block of signs may see too few."""
    for key in range(20):
        left, right = reconstruct(*two_sided(torch.zeros(20, 12, dtype=torch.float64), rank, co_rank, key, family))
        assert not left.any() and bool(right.isfinite().all())


@pytest.mark.parametrize(("power", "least", "largest"), [(1.0, 0.1, 0.25), (0.2, 1.3, 1.8)])
def test_the_error_is_that_of_the_tail(power, least, largest):
    """E error <= (1 + f(R, L)) (1 + f(r, R)) tail(r), f(s, t) = s / (t - s - 1), for every r below R - 1.

    Theorem 4.3 of arXiv 1609.00048 for Gaussian projections; and no estimate of rank R is better than the best one.
    A spectrum that falls quickly gives a small error; of a flat one the estimate is worse than zeros (error 1).
    """
    rank, co_rank = 10, 21
    matrix = spectrum(60, 50, power)
    values = torch.linalg.svdvals(matrix).square()
    bound = min(
        (1 + rank / (co_rank - rank - 1)) * (1 + r / (rank - r - 1)) * float(values[r:].sum()) for r in range(rank - 1)
    )
    errors = []
    for key in range(200):
        left, right = reconstruct(*two_sided(matrix, rank, co_rank, key))
        errors.append(float((left @ right - matrix).square().sum()))
    mean, spread = float(np.mean(errors)), float(np.std(errors)) / 200**0.5
    assert float(values[rank:].sum()) < min(errors)
    assert mean - 4.5 * spread < bound
    assert mean > 0.4 * bound  # the bound is near: a worse estimate would not pass
    assert least < mean / float(values.sum()) < largest


@pytest.mark.parametrize("kind", ["llama", "mlp"])
def test_the_co_sketch_is_a_projection_of_the_gradients_columns(kind):
    """Z = B G beside Y = G A^T, in float64, over two microbatches."""
    model, patterns, batch = build(kind)
    gradients = dense_gradients(model, patterns, batch)
    layers = sketched(model, patterns, co_rank=6)
    for microbatch in batch.chunk(2):
        loss_of(model, microbatch).backward()
    found = {name: parameter.grad for name, parameter in layers.co_parameters.items()}
    expected = {name: layers.co_projection(name) @ gradient for name, gradient in gradients.items()}
    assert_all_close(found, expected, 1e-12)
    assert_all_close(sketches(layers), {n: g @ layers.projection(n).T for n, g in gradients.items()}, 1e-12)
    assert {tuple(layers.co_projection(n).shape) for n in gradients} == {(6, g.shape[0]) for g in gradients.values()}


@pytest.mark.parametrize("case", ["rank 12 of an MLP", "orthogonal"])
def test_two_sided_sgd_at_full_rank_is_dense_sgd(case):
    """R is the rank of every G, so the estimate is G, whatever the projections; with decay, four updates."""
    if case == "orthogonal":
        (model, patterns), rank, vocabulary = square_llama(), 24, 29
        patterns = ["q_proj", "o_proj"]
        options: dict[str, Any] = {"projection": orthogonal}
    else:
        (model, patterns, _), rank, vocabulary = build("mlp"), 12, 17
        options = {"projection": "gaussian"}  # a square matrix of signs may be singular
    reference = deepcopy(model)
    layers = sketched(model, patterns, rank=rank, co_rank=rank, **options)
    optimizer = SketchOptimizer(layers, 0.02, "sgd", weight_decay=0.3, clip_norm="none")
    start = weights(layers)
    dense = dict(start)
    for update in range(4):
        batch = tokens(4, 7, vocabulary, seed=update)
        for name, gradient in dense_gradients(reference, patterns, batch).items():
            dense[name] = (1 - 0.02 * 0.3) * dense[name] - 0.02 * gradient
            reference.get_submodule(name).weight.data.copy_(dense[name])
        loss_of(model, batch).backward()
        optimizer.step()
    change = {name: weight - start[name] for name, weight in weights(layers).items()}
    assert_all_close(change, {name: weight - start[name] for name, weight in dense.items()}, 1e-8)


@pytest.mark.parametrize("clip_norm", ["sketch", "estimate"])
def test_a_two_sided_update_below_full_rank_is_the_clipped_formula(clip_norm):
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns, co_rank=7)
    optimizer = SketchOptimizer(layers, 0.1, "sgd", max_grad_norm=0.5, clip_norm=clip_norm)
    before = weights(layers)
    loss_of(model, batch).backward()
    estimates, squares = {}, 0.0
    for name, sketch in sketches(layers).items():
        q, b = np.linalg.qr(sketch.numpy())[0], layers.co_projection(name).numpy()
        co_sketch = layers.co_parameters[name].grad
        estimates[name] = torch.from_numpy(q @ np.linalg.pinv(b @ q) @ co_sketch.numpy())
        squares += float((sketch if clip_norm == "sketch" else estimates[name]).square().sum())
    metrics = optimizer.propose()
    assert metrics[f"{clip_norm}_norm"] == pytest.approx(math.sqrt(squares), rel=1e-6)
    optimizer.apply(1.0)
    expected = {name: -0.1 * 0.5 / math.sqrt(squares) * estimate for name, estimate in estimates.items()}
    assert_all_close({name: weight - before[name] for name, weight in weights(layers).items()}, expected, 1e-5)
