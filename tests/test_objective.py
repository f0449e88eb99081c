"""Advantages, token weights and the clipped loss against numbers worked out by hand, torch and simulation."""

import math

import pytest
import torch
from torch import Tensor

from src.objective import dead_groups, group_advantages, policy_loss, token_weights


def mask(*lengths: int, width: int = 6) -> Tensor:
    """Response masks (B, width) of the given lengths."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


# --- advantages ---


def test_two_groups_by_hand():
    """F17: means 1/4 and 5/2; unbiased deviations 1/2 and sqrt(5/3); normalised within the group, not the batch."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    centred = [-0.25, -0.25, 0.75, -0.25, -1.5, -0.5, 0.5, 1.5]
    assert group_advantages(rewards, groups, "none").tolist() == pytest.approx(centred, rel=1e-12)
    deviations = [0.5] * 4 + [math.sqrt(5 / 3)] * 4
    expected = [value / (deviation + 1e-4) for value, deviation in zip(centred, deviations, strict=True)]
    assert group_advantages(rewards, groups, "std").tolist() == pytest.approx(expected, rel=1e-12)


def test_groups_are_formed_by_index_in_any_order_and_size():
    """F20: the same rewards with rows interleaved and groups of different size; equal prompts do not merge."""
    rewards = torch.tensor([1.0, 5.0, 0.0, 9.0, 7.0])
    groups = torch.tensor([0, 1, 0, 1, 1])
    expected = [0.5, -2.0, -0.5, 2.0, 0.0]
    assert group_advantages(rewards, groups, "none").tolist() == pytest.approx(expected)
    two = group_advantages(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 1]), "none")
    one = group_advantages(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([0, 0, 0, 0]), "none")
    assert two.tolist() == [0.5, -0.5, 0.5, -0.5] != one.tolist()


@pytest.mark.parametrize("reward", [0.1, 1.0, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("normalise", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_group_has_exactly_zero_advantage(reward, normalise, dtype):
    """Also in float64, where the mean of equal rewards rounds, so that centring alone would leave 1e-17."""
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([0] * 7 + [1, 1])
    advantages = group_advantages(rewards, groups, normalise)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] < 0 < advantages[8]
    assert dead_groups(rewards, groups).tolist() == [True, False]


def test_a_group_of_one():
    """F16: refused where its deviation is needed, and exactly 0 otherwise: never the raw reward."""
    rewards, groups = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="at least 2 responses"):
        group_advantages(rewards, groups, "std")
    assert group_advantages(rewards, groups, "none").tolist() == [0.0, 0.5, -0.5]
    assert dead_groups(rewards, groups).tolist() == [True, False]


def test_advantages_keep_shape_and_dtype():
    """F16: one number a response, no broadcast."""
    advantages = group_advantages(torch.rand(6), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert advantages.shape == (6,) and advantages.dtype == torch.float32


# --- weights ---


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("token", 1 / 6, 1 / 6),  # 2 + 4 tokens alike
        ("sequence", 1 / 4, 1 / 8),  # half of the loss to each response
        ("fixed", 1 / 20, 1 / 20),  # 2 responses x 10 tokens at most
    ],
)
def test_weights_of_two_responses_of_different_length(aggregation, short, long):
    """F07: what the length of a response does to the weight of its tokens, by hand."""
    responses = mask(2, 4)
    weights = token_weights(responses, torch.tensor([True, True]), aggregation, 10)
    expected = torch.where(responses, torch.tensor([[short], [long]]), 0.0)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    # With advantage 1 and ratio 1 the loss is minus the sum of the weights.
    zero = torch.zeros(2, 6)
    loss, _ = policy_loss(zero, zero, torch.ones(2), weights, 0.2, 0.2)
    assert float(loss) == pytest.approx(-(2 * short + 4 * long), rel=1e-6)


@pytest.mark.parametrize(("aggregation", "weight"), [("token", 1 / 3), ("sequence", 1 / 3), ("fixed", 1 / 10)])
def test_numerator_and_denominator_hold_the_same_rows(aggregation, weight):
    """F05: a truncated row that is left out of the loss is left out of its normaliser too."""
    weights = token_weights(mask(3, 6), torch.tensor([True, False]), aggregation, 10)
    assert weights[0].tolist() == pytest.approx([weight] * 3 + [0.0] * 3)
    assert weights[1].tolist() == [0.0] * 6


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
def test_a_batch_without_a_used_row_has_a_finite_zero_loss_and_gradient(aggregation):
    """F05, F14: all truncated; also with NaN log-probabilities and the reference KL on."""
    weights = token_weights(mask(6, 6), torch.tensor([False, False]), aggregation, 6)
    logprobs = torch.full((2, 6), math.nan, requires_grad=True)
    loss, metrics = policy_loss(
        logprobs, logprobs.detach(), torch.ones(2), weights, 0.2, 0.2, torch.zeros(2, 6), reference_kl=0.5
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logprobs.grad, torch.zeros(2, 6))
    assert metrics == {"clipped": 0.0, "tokens": 0.0, "reference_kl": 0.0}


# --- the loss ---


def one(log_ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> tuple[float, float, float]:
    """Return (loss, its derivative by the log-probability, clipped tokens) of a single token."""
    logprobs = torch.tensor([[-1.0 + log_ratio]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    loss, metrics = policy_loss(logprobs, old, torch.tensor([advantage]).double(), torch.ones(1, 1), low, high)
    loss.backward()
    return float(loss.detach()), float(logprobs.grad), metrics["clipped"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, 0.2, 0.2, -2.0, -2.0, 0),
        (1.0, -2.0, 0.2, 0.2, 2.0, 2.0, 0),
        (1.1, 1.0, 0.2, 0.2, -1.1, -1.1, 0),
        (1.5, 1.0, 0.2, 0.2, -1.2, 0.0, 1),  # pushed far enough up
        (0.5, 1.0, 0.2, 0.2, -0.5, -0.5, 0),  # but back up at any time
        (0.5, -1.0, 0.2, 0.2, 0.8, 0.0, 1),  # pushed far enough down
        (1.5, -1.0, 0.2, 0.2, 1.5, 1.5, 0),
        (1.25, 1.0, 0.2, 0.28, -1.25, -1.25, 0),  # asymmetric: the upper end is DAPO's
        (1.5, 1.0, 0.2, 0.28, -1.28, 0.0, 1),
        (0.75, -1.0, 0.2, 0.28, 0.8, 0.0, 1),
        (0.75, -1.0, 0.3, 0.28, 0.75, 0.75, 0),
        (1.5, 0.0, 0.2, 0.2, 0.0, 0.0, 0),
        (1.0001, 1.0, 0.0, 0.0, -1.0, 0.0, 1),
    ],
)
def test_the_clipped_loss_by_hand(ratio, advantage, low, high, loss, gradient, clipped):
    """l = -min(r A, clip(r, 1 - low, 1 + high) A); where it does not clip, dl/dlogp = -r A."""
    found = one(math.log(ratio), advantage, low, high)
    assert found == pytest.approx((loss, gradient, clipped), rel=1e-9, abs=1e-12)


def test_on_policy_the_loss_is_about_zero_and_its_gradient_is_not():
    """F01: ratio 1 and centred advantages cancel in the value; the gradient is minus weight times advantage."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 0]))
    weights = token_weights(mask(6, 6, 6, 6), torch.ones(4, dtype=torch.bool), "token", 6)
    logprobs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    loss, metrics = policy_loss(logprobs, logprobs.detach(), advantages, weights, 0.2, 0.2)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-7
    torch.testing.assert_close(logprobs.grad, -weights * advantages[:, None], rtol=1e-6, atol=0)
    assert metrics["clipped"] == 0 and metrics["tokens"] == 24


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_what_lies_outside_the_mask_does_not_leak(hole):
    """F14, F13: in the log-probabilities of the policy, the old policy and the reference."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(3, 6, generator=generator) for _ in range(3)]
    responses = mask(2, 6, 3)
    weights = token_weights(responses, torch.tensor([True, False, True]), "sequence", 6)
    used = weights > 0
    losses, gradients = [], []
    for value in (0.0, hole):
        logprobs, old, reference = (torch.where(used, tensor, value) for tensor in clean)
        logprobs.requires_grad_(True)
        loss, metrics = policy_loss(
            logprobs, old, torch.tensor([1.0, 2.0, -1.0]), weights, 0.2, 0.2, reference, reference_kl=0.1
        )
        loss.backward()
        assert math.isfinite(metrics["reference_kl"])
        losses.append(float(loss.detach()))
        gradients.append(logprobs.grad)
    assert losses[0] == losses[1] and math.isfinite(losses[0])
    assert torch.equal(gradients[0], gradients[1])
    assert not gradients[0][~used].any()


def test_enormous_log_ratios_stay_finite():
    """F13: the ratio and the k3 estimate are bounded, in value and in gradient."""
    logprobs = torch.tensor([[-1e4, -1e-4, -500.0]], requires_grad=True)
    old, reference = torch.tensor([[-1e-4, -1e4, -1.0]]), torch.tensor([[-1e-4, -1e4, -1.0]])
    loss, _ = policy_loss(
        logprobs, old, torch.tensor([-1.0]), torch.full((1, 3), 1 / 3), 0.2, 0.2, reference, reference_kl=1.0
    )
    loss.backward()
    assert torch.isfinite(loss.detach()) and torch.isfinite(logprobs.grad).all()


def test_k3_equals_its_formula_and_its_gradient():
    """exp(d) - d - 1, d = logp_ref - logp; its derivative by logp is 1 - exp(d). The policy term is off (A = 0)."""
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (torch.randn(2, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    logprobs.requires_grad_(True)
    weights = token_weights(mask(6, 6), torch.ones(2, dtype=torch.bool), "token", 6)
    loss, metrics = policy_loss(
        logprobs, logprobs.detach(), torch.zeros(2), weights, 0.2, 0.2, reference, reference_kl=0.3
    )
    loss.backward()
    gap = reference - logprobs.detach()
    expected = float((gap.exp() - gap - 1).mean())
    assert metrics["reference_kl"] / metrics["tokens"] == pytest.approx(expected, rel=1e-6)
    assert float(loss.detach()) == pytest.approx(0.3 * expected, rel=1e-6)
    torch.testing.assert_close(logprobs.grad, 0.3 * (1 - gap.exp()) / 12, rtol=1e-6, atol=1e-12)


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    """Over 200,000 tokens sampled from the policy its mean is KL(policy || reference), torch's, within 4.5 errors."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(8, dtype=torch.float64, generator=generator) * 0.7 for _ in range(2))
    p, q = torch.log_softmax(policy, 0), torch.log_softmax(reference, 0)
    sampled = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    weights = torch.full((200, 1000), 1 / 200_000)
    _, metrics = policy_loss(
        p[sampled].view(200, 1000),
        p[sampled].view(200, 1000),
        torch.zeros(200),
        weights,
        0.2,
        0.2,
        q[sampled].view(200, 1000),
        reference_kl=1.0,
    )
    exact = float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
    gap = (q - p)[sampled]
    error = float((gap.exp() - gap - 1).std()) / 200_000**0.5
    assert error < 0.01 * exact
    assert abs(metrics["reference_kl"] / metrics["tokens"] - exact) < 4.5 * error


def test_a_filtered_dead_group_has_no_gradient_even_with_the_reference_kl():
    """F04: kept, its KL term still moves the weights; filtered, its rows have weight 0 in every term."""
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(rewards, groups)
    generator = torch.Generator().manual_seed(0)
    start, reference = (torch.randn(4, 6, generator=generator) for _ in range(2))
    for filtered in (False, True):
        used = ~dead_groups(rewards, groups)[groups] if filtered else torch.ones(4, dtype=torch.bool)
        weights = token_weights(mask(6, 6, 6, 6), used, "sequence", 6)
        logprobs = start.clone().requires_grad_(True)
        loss, _ = policy_loss(logprobs, start, advantages, weights, 0.2, 0.2, reference, reference_kl=0.1)
        loss.backward()
        assert bool(logprobs.grad[:2].any()) is not filtered
        assert logprobs.grad[2:].all()


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_microbatches_add_up_to_the_batch(aggregation, size):
    """F08, F34: loss, gradient and metrics of 8 rows, some unused, whatever the split."""
    generator = torch.Generator().manual_seed(0)
    base, old, reference = (torch.randn(8, 6, dtype=torch.float64, generator=generator) * 0.3 for _ in range(3))
    advantages = torch.randn(8, dtype=torch.float64, generator=generator)
    used = torch.tensor([True, True, False, True, True, True, False, True])
    weights = token_weights(mask(1, 6, 4, 2, 5, 3, 6, 6), used, aggregation, 6)
    totals = []
    for step in (8, size):
        logprobs = base.clone().requires_grad_(True)
        sums = {"loss": 0.0, "clipped": 0.0, "tokens": 0.0, "reference_kl": 0.0}
        for start in range(0, 8, step):
            rows = slice(start, start + step)
            loss, metrics = policy_loss(
                logprobs[rows], old[rows], advantages[rows], weights[rows], 0.2, 0.2, reference[rows], 0.05
            )
            loss.backward()
            for key, value in ({"loss": float(loss.detach())} | metrics).items():
                sums[key] += value
        totals.append((sums, logprobs.grad))
    assert totals[1][0] == pytest.approx(totals[0][0], rel=1e-12)
    assert totals[0][0]["clipped"] > 0 and totals[0][0]["tokens"] == float(mask(1, 6, 2, 5, 3, 6).sum())
    torch.testing.assert_close(totals[1][1], totals[0][1], rtol=1e-12, atol=1e-15)
