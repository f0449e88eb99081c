"""Responses sampled from a causal language model with its own KV cache.

Legend: B rows (prompts x responses), P padded prompt length, L response length, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.randomness import uniform


@dataclass(frozen=True)
class Rollout:
    """Sampled responses. Prompts are padded on the left, responses on the right.

    tokens_BS: (B, P + L) ids; what lies after a response's end is padding.
    attention_BS: (B, P + L) 1 where a token is real: the prompt, and the response up to and with its end.
    response_BL: (B, L) True on response tokens, the end-of-sequence token included.
    logprobs_BL: (B, L) log-probabilities of the sampled tokens at sampling time, at the sampling temperature.
    finished_B: (B,) True where the policy ended the response itself; False is a truncated response.
    """

    tokens_BS: Tensor
    attention_BS: Tensor
    response_BL: Tensor
    logprobs_BL: Tensor
    finished_B: Tensor

    @property
    def lengths_B(self) -> Tensor:
        """Response lengths in tokens, the end-of-sequence token included."""
        return self.response_BL.sum(-1)

    @property
    def response_tokens_BL(self) -> Tensor:
        """Ids of the response positions."""
        return self.tokens_BS[:, -self.response_BL.shape[1] :]

    @property
    def positions_BS(self) -> Tensor:
        """Position ids: real tokens count from 0, whatever the padding."""
        return (self.attention_BS.cumsum(-1) - 1).clamp(min=0)

    def rows(self, index: slice | Tensor) -> "Rollout":
        """Return some of the rows."""
        return Rollout(
            self.tokens_BS[index],
            self.attention_BS[index],
            self.response_BL[index],
            self.logprobs_BL[index],
            self.finished_B[index],
        )


def pad_left(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tokens, attention), both (B, P), of prompts padded on the left."""
    width = max(map(len, prompts))
    tokens = [[pad_id] * (width - len(ids)) + ids for ids in prompts]
    attention = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(attention, device=device)


def sample(
    logits_BV: Tensor, uniforms_B: Tensor | None, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (token ids, log-probabilities at the temperature), both (B,).

    Without uniforms the most probable token is taken. With them the distribution softmax(logits / temperature) is
    inverted at the row's number; nucleus sampling (top_p < 1) keeps the smallest set of most probable tokens whose
    probability reaches top_p. The log-probability is always that of the full distribution.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if uniforms_B is None:
        tokens_B = logprobs_BV.argmax(-1)
    elif top_p < 1.0:
        sorted_BV, order_BV = logprobs_BV.exp().double().sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        kept_BV = torch.where(before_BV < top_p, sorted_BV, 0.0)
        tokens_B = order_BV.gather(-1, _invert(kept_BV, uniforms_B)[:, None])[:, 0]
    else:
        tokens_B = _invert(logprobs_BV.exp().double(), uniforms_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return for each row the index at which its cumulative weight passes `uniform * total`, never one of weight 0."""
    cumulative_BV = weights_BV.cumsum(-1)
    thresholds_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    index_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True)[:, 0]
    last_B = weights_BV.shape[-1] - 1 - (weights_BV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index_B, last_B)


@torch.no_grad()
def generate(
    model: Any,
    prompts: list[list[int]],
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    max_tokens: int,
    keys: list[int] | None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seen: Callable[[list[Tensor]], None] | None = None,
) -> Rollout:
    """Sample one response for each prompt.

    A response ends with its first token of `eos_ids` or after `max_tokens`.

    Args:
        model: a transformers causal language model, in evaluation mode.
        prompts: token ids, one list a row.
        keys: one 64-bit key a row; token t of a row is drawn with the number (key, t), so that a row's response
            depends on its key alone, not on the batch around it. None is greedy.
        temperature, top_p: see `sample`.
        seen: gets the tensors of the cache of keys and values after every token.
    """
    from transformers import DynamicCache

    device = model.device
    tokens_BP, attention_BS = pad_left(prompts, pad_id, device)
    keys_B = None if keys is None else torch.tensor(keys, device=device)
    positions_BS = (attention_BS.cumsum(-1) - 1).clamp(min=0)
    ends = torch.tensor(eos_ids, device=device)
    running_B = torch.ones(len(prompts), dtype=torch.bool, device=device)
    inputs, cache = tokens_BP, DynamicCache(config=model.config)
    tokens, logprobs, alive = [], [], []
    for step in range(max_tokens):
        output = model(
            input_ids=inputs,
            attention_mask=attention_BS,
            position_ids=positions_BS,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if seen is not None:
            seen(_kept(cache))  # named here it would live as long as the next call, beside the next keys and values
        uniforms_B = None if keys_B is None else uniform(keys_B, step)
        tokens_B, logprobs_B = sample(output.logits[:, -1], uniforms_B, temperature, top_p)
        tokens.append(torch.where(running_B, tokens_B, pad_id))
        logprobs.append(torch.where(running_B, logprobs_B, 0.0))
        alive.append(running_B)
        attention_BS = torch.cat([attention_BS, running_B[:, None].to(attention_BS.dtype)], dim=1)
        running_B = running_B & ~torch.isin(tokens_B, ends)
        if not running_B.any():
            break
        inputs, positions_BS = tokens[-1][:, None], positions_BS[:, -1:] + 1
    return Rollout(
        torch.cat([tokens_BP, torch.stack(tokens, 1)], dim=1),
        attention_BS,
        torch.stack(alive, 1),
        torch.stack(logprobs, 1),
        ~running_B,
    )


def _kept(cache: Any) -> list[Tensor]:
    """Return the keys and values of a cache, of the layers that have some."""
    found = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return [tensor for tensor in found if tensor is not None]
