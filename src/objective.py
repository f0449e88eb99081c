"""Group-relative policy optimisation: advantages, token weights, the clipped loss.

Legend: B responses, G responses of one group (prompt), L response length, V vocabulary.

The loss is sum_{b,t} w_bt l_bt: the weights w carry the normaliser of the WHOLE batch, so that the sum over
microbatches is the batch's loss whatever the split.
"""

from typing import Any, Literal

import torch
from torch import Tensor


def group_advantages(
    rewards_B: Tensor, groups_B: Tensor, normalise: Literal["std", "none"] = "std", eps: float = 1e-4
) -> Tensor:
    """Return r - mean(group), divided by the group's standard deviation plus eps for "std"; shape (B,).

    The deviation is the unbiased one (G - 1), as in DeepSeekMath (arXiv 2402.03300, section 4.1) and its public
    implementations; "none" is Dr. GRPO (arXiv 2503.20783, section 3.1). A group of equal rewards gets exactly 0.

    Args:
        rewards_B: one reward a response.
        groups_B: the group's index of each response: groups are formed by index, never by the prompt's text.

    Raises:
        ValueError: "std" and a group of one response, whose deviation is undefined.
    """
    num_groups = int(groups_B.max()) + 1
    count_G = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, torch.ones_like(rewards_B).double())
    mean_G = torch.zeros_like(count_G).index_add_(0, groups_B, rewards_B.double()) / count_G
    centred_B = rewards_B.double() - mean_G[groups_B]
    centred_B = torch.where(dead_groups(rewards_B, groups_B)[groups_B], 0.0, centred_B)
    if normalise == "std":
        if count_G.min() < 2:
            raise ValueError("objective.advantage=std needs at least 2 responses in every group")
        variance_G = torch.zeros_like(count_G).index_add_(0, groups_B, centred_B.square()) / (count_G - 1)
        centred_B = centred_B / (variance_G.sqrt()[groups_B] + eps)
    return centred_B.to(rewards_B.dtype)


def dead_groups(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return for each group whether all its rewards are equal, so that it teaches nothing; shape (groups,)."""
    num_groups = int(groups_B.max()) + 1
    empty = torch.zeros(num_groups, dtype=rewards_B.dtype)
    highest_G = empty.scatter_reduce(0, groups_B, rewards_B, "amax", include_self=False)
    lowest_G = empty.scatter_reduce(0, groups_B, rewards_B, "amin", include_self=False)
    return highest_G == lowest_G


def token_weights(
    response_BL: Tensor, used_B: Tensor, aggregation: Literal["token", "sequence", "fixed"], max_tokens: int
) -> Tensor:
    """Return the weight of each token's loss, (B, L) float32; 0 outside responses and on rows that are not used.

    With K used rows of lengths n_b:
        token:    1 / sum_b n_b          every token alike (DAPO, arXiv 2503.14476, eq. 8)
        sequence: 1 / (K n_b)            every response alike (DeepSeekMath, arXiv 2402.03300, eq. 3)
        fixed:    1 / (K max_tokens)     a constant, no length bias (Dr. GRPO, arXiv 2503.20783)
    Numerator and denominator hold the same rows. Without a used row all weights are 0 and the loss is a finite 0.
    """
    used_BL = response_BL & used_B[:, None]
    lengths_B1 = response_BL.sum(-1, keepdim=True).clamp(min=1)
    num_used = used_B.sum().clamp(min=1)
    match aggregation:
        case "token":
            weights_BL = 1.0 / used_BL.sum().clamp(min=1).float().expand(used_BL.shape)
        case "sequence":
            weights_BL = (1.0 / (num_used * lengths_B1)).expand(used_BL.shape)
        case "fixed":
            weights_BL = (1.0 / (num_used * max_tokens)).expand(used_BL.shape)
    return torch.where(used_BL, weights_BL.float(), 0.0)


def policy_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages_B: Tensor,
    weights_BL: Tensor,
    clip_low: float,
    clip_high: float,
    reference_logprobs_BL: Tensor | None = None,
    reference_kl: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Return (loss, metrics) of a microbatch.

        l = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + reference_kl * k3
        ratio = exp(logp - logp_old)            k3 = exp(d) - d - 1, d = logp_ref - logp  (Schulman, "Approximating KL")

    Tokens of weight 0 are masked by selection, so NaN outside the responses does not leak in. On the policy that
    sampled, the ratio is 1 and the loss's value is about 0: it is its gradient that trains.

    Returns:
        The loss, 0-d, and sums that add up over microbatches: clipped (tokens on which the clip is active), tokens
        (of non-zero weight), reference_kl (k3).
    """
    used_BL = weights_BL > 0
    log_ratio_BL = torch.where(used_BL, logprobs_BL - old_logprobs_BL, 0.0)
    ratio_BL = log_ratio_BL.clamp(-20.0, 20.0).exp()
    advantages_B1 = advantages_B[:, None].to(ratio_BL.dtype)
    unclipped_BL = ratio_BL * advantages_B1
    clipped_BL = ratio_BL.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_B1
    token_loss_BL = -torch.minimum(unclipped_BL, clipped_BL)
    metrics = {
        "clipped": float(((clipped_BL < unclipped_BL) & used_BL).sum()),
        "tokens": float(used_BL.sum()),
        "reference_kl": 0.0,
    }
    if reference_logprobs_BL is not None and reference_kl > 0:
        gap_BL = torch.where(used_BL, reference_logprobs_BL - logprobs_BL, 0.0).clamp(-20.0, 20.0)
        k3_BL = gap_BL.exp() - gap_BL - 1.0
        token_loss_BL = token_loss_BL + reference_kl * k3_BL
        metrics["reference_kl"] = float(k3_BL.detach().sum())
    return (weights_BL * token_loss_BL).sum(), metrics


def chosen_logprobs(logits_BLV: Tensor, tokens_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the tokens, entropies), both (B, L) in float32, of softmax(logits / temperature).

    Entropies have no gradient. Beside the logits one tensor of their size is kept for backward, which makes the
    logits' gradient in its place: a second backward of the same graph (retain_graph) is an error, as far as torch sees
    the change (not under `save_on_cpu`). A logit of -inf rules its token out.
    """
    chosen_BL, entropies_BL = _Chosen.apply(logits_BLV, tokens_BL, temperature)
    return chosen_BL, entropies_BL


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BLV: Tensor, tokens_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled_BLV = logits_BLV.float() if temperature == 1.0 else logits_BLV.float() / temperature
        logprobs_BLV = torch.log_softmax(scaled_BLV, -1)
        del scaled_BLV, logits_BLV
        rows_TV = logprobs_BLV.flatten(0, -2)
        # In parts, as the caller still holds the logits: no third tensor of that size.
        parts = rows_TV.split(max(1, len(rows_TV) // 8))
        least = torch.finfo(rows_TV.dtype).min  # of a token that is ruled out: 0 times it is 0, 0 times -inf is not
        entropies = [part_TV.exp().mul_(part_TV.clamp(min=least)).sum(-1) for part_TV in parts]
        entropies_BL = -torch.cat(entropies).view_as(tokens_BL)
        ctx.save_for_backward(logprobs_BLV, tokens_BL)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies_BL)
        return logprobs_BLV.gather(-1, tokens_BL[..., None])[..., 0], entropies_BL

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logprobs_BLV, tokens_BL = ctx.saved_tensors
        grad_BL1 = grads[0][..., None]
        grad_BLV = logprobs_BLV.exp_().mul_(-grad_BL1)  # d log p_i / d z_j = [i = j] - p_j
        grad_BLV.scatter_add_(-1, tokens_BL[..., None], grad_BL1)
        return grad_BLV if ctx.temperature == 1.0 else grad_BLV.div_(ctx.temperature), None, None
