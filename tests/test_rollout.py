"""Rollouts sample the policy's own distribution, row by row, and their log-probabilities are those of a fresh pass."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from src.models import Policy
from src.objective import policy_loss, token_weights
from src.randomness import hash_key, uniform
from src.rollout import Rollout, generate, pad_left, sample
from src.trainer import all_logprobs
from tests.tinymodels import llama

EOS, PAD = 1, 0
LENGTHS = (3, 9, 5, 1, 7, 9, 2, 4)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 29, (length,), generator=generator).tolist() for length in lengths]


def keys(count: int) -> list[int]:
    return [hash_key("rollout", 0, 1, index) for index in range(count)]


def sampled(model: Any, rows: list[list[int]], **options: Any) -> Rollout:
    """Generate with this file's defaults."""
    defaults = {"eos_ids": (EOS,), "pad_id": PAD, "max_tokens": 12, "keys": keys(len(rows))}
    return generate(model, rows, **(defaults | options))


def responses(rollout: Rollout) -> list[list[int]]:
    """Each row's response without padding, by its length."""
    width = rollout.response_BL.shape[1]
    lengths = rollout.lengths_B.tolist()
    return [row[-width:][:length] for row, length in zip(rollout.tokens_BS.tolist(), lengths, strict=True)]


def fresh_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probabilities (length,) of a response from one pass over the sequence alone, without padding or cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, torch.tensor(response)[:, None])[:, 0]


# --- one token ---


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_frequencies_match_softmax(temperature, top_p):
    """A chi-square over 60,000 numbers; a fault of 1 % in one probability would show."""
    count = 60_000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.2, -4.0, 0.0])
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    kept = torch.zeros(6, dtype=torch.bool)
    kept[order[before < top_p]] = True
    expected = torch.where(kept, probs, 0.0) / probs[kept].sum()
    uniforms = uniform(torch.tensor(keys(count)), 3)
    drawn, logprobs = sample(logits.expand(count, -1), uniforms, temperature, top_p)
    counts = torch.bincount(drawn, minlength=6).double()
    assert counts[~kept].sum() == 0
    chi2 = float(((counts - count * expected) ** 2 / (count * expected))[kept].sum())
    assert chi2 < 25.0  # at most 5 degrees of freedom: 1.4e-4 by chance
    # Whatever the nucleus, the log-probability is that of the full distribution at the temperature.
    torch.testing.assert_close(logprobs.double(), probs.log()[drawn], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [(0.01, {2}), (0.49, {2}), (0.51, {2, 0}), (0.79, {2, 0}), (0.81, {2, 0, 3}), (0.96, {2, 0, 3, 1})],
)
def test_top_p_keeps_exactly_the_nucleus(top_p, nucleus):
    """Probabilities 0.3, 0.05, 0.5, 0.15: the smallest set of most probable tokens that reaches top_p."""
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000
    drawn, _ = sample(logits.expand(1000, -1), uniforms, 1.0, top_p)
    assert set(drawn.tolist()) == nucleus


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_token(top_p):
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 1.0, -math.inf]).expand(2, -1)
    drawn, logprobs = sample(logits, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64), 1.0, top_p)
    assert set(drawn.tolist()) == {1, 3}
    assert torch.isfinite(logprobs).all()


def test_a_number_maps_to_a_token_by_the_cumulative_distribution():
    logits = torch.tensor([0.25, 0.5, 0.25]).log().expand(5, -1)
    numbers = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76], dtype=torch.float64)
    assert sample(logits, numbers)[0].tolist() == [0, 0, 1, 1, 2]
    assert sample(logits, None)[0].tolist() == [1] * 5


# --- whole responses ---


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-6), (torch.float32, 1e-4)])
def test_logprobs_equal_a_fresh_pass_over_the_unpadded_sequence(temperature, dtype, tolerance):
    """F10: at the sampling temperature, whatever the padding of mixed prompt lengths; sample() computes in float32."""
    model = llama(dtype)
    rollout = sampled(model, prompts(), temperature=temperature)
    for row, (prompt, response) in enumerate(zip(prompts(), responses(rollout), strict=True)):
        expected = fresh_logprobs(model, prompt, response, temperature)
        found = rollout.logprobs_BL[row, : len(response)].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert not rollout.logprobs_BL[row, len(response) :].any()


def test_token_t_of_a_row_is_drawn_with_the_number_of_its_key_and_t():
    """Token by token against the inverted cumulative distribution at 0.7, from passes without cache or padding."""
    model = llama(torch.float64)
    rollout = sampled(model, prompts(), temperature=0.7)
    assert int(rollout.lengths_B.max()) > 5
    for prompt, key, response in zip(prompts(), keys(8), responses(rollout), strict=True):
        for position, token in enumerate(response):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + response[:position]])).logits[0, -1]
            cumulative = torch.softmax(logits / 0.7, -1).cumsum(0)
            number = float(uniform(torch.tensor([key]), position)) * float(cumulative[-1])
            assert token == int((cumulative <= number).sum())


def test_absolute_positions_count_from_the_prompts_first_token():
    """With learned positions (GPT-2) a padded position that counted would show; rotary ones are relative."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
        model = GPT2LMHeadModel(settings).double().eval()
    rollout = sampled(model, prompts(), temperature=0.7)
    again = all_logprobs(Policy(model, None, (EOS,)), rollout, 0.7)
    for row, (prompt, response) in enumerate(zip(prompts(), responses(rollout), strict=True)):
        expected = fresh_logprobs(model, prompt, response, 0.7)
        for found in (rollout.logprobs_BL, again.detach()):
            torch.testing.assert_close(found[row, : len(response)].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_rows_response_does_not_depend_on_the_batch_around_it(top_p):
    model = llama(torch.float64)
    together = sampled(model, prompts(), top_p=top_p)
    for row, (prompt, key) in enumerate(zip(prompts(), keys(8), strict=True)):
        alone = sampled(model, [prompt], keys=[key], top_p=top_p)
        assert responses(alone)[0] == responses(together)[row]
        assert bool(alone.finished_B[0]) == bool(together.finished_B[row])
    order = [5, 2, 7, 0, 1]
    shuffled = sampled(model, [prompts()[i] for i in order], keys=[keys(8)[i] for i in order], top_p=top_p)
    assert responses(shuffled) == [responses(together)[i] for i in order]


def test_keys_decide_the_response():
    """F58, F59: the same keys repeat it bit for bit; others change it."""
    model = llama()
    first, again = sampled(model, prompts()), sampled(model, prompts())
    assert torch.equal(first.tokens_BS, again.tokens_BS) and torch.equal(first.logprobs_BL, again.logprobs_BL)
    other = sampled(model, prompts(), keys=[key + 1 for key in keys(8)])
    assert responses(other) != responses(first)


def test_first_tokens_are_distributed_as_the_models_softmax():
    """4,000 rows of one prompt at temperature 0.7; tokens expected fewer than 5 times are pooled."""
    model, prompt, count = llama(), prompts((6,))[0], 4000
    rollout = sampled(model, [prompt] * count, keys=keys(count), max_tokens=1, temperature=0.7)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = count * torch.softmax(logits.double() / 0.7, -1)
    counts = torch.bincount(rollout.tokens_BS[:, -1], minlength=29).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    assert len(counts) > 5
    chi2 = float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    degrees = len(counts) - 1
    assert chi2 < degrees + 4.5 * (2 * degrees) ** 0.5


def test_greedy_equals_transformers_generate():
    """On a left-padded batch, tokens and stops; and no number is needed."""
    model = llama(torch.float64)
    rollout = sampled(model, prompts(), keys=None, max_tokens=20)
    tokens, attention = pad_left(prompts(), PAD, torch.device("cpu"))
    expected = model.generate(
        tokens, attention_mask=attention, do_sample=False, max_new_tokens=20, pad_token_id=PAD, eos_token_id=EOS
    )
    assert torch.equal(rollout.tokens_BS, expected)
    best = fresh_logprobs(model, prompts()[1], responses(rollout)[1], 1.0)
    torch.testing.assert_close(rollout.logprobs_BL[1, : len(best)].double(), best, rtol=0, atol=5e-6)


def test_a_response_ends_with_its_first_end_token_and_only_there():
    """Several end tokens; one end keeps the mask up to and with it."""
    ends = (EOS, 5, 7, 11)
    rollout = sampled(llama(), prompts() * 8, keys=keys(64), eos_ids=ends)
    found = responses(rollout)
    assert {response[-1] for response in found} >= set(ends)  # all of them occur
    for response, finished in zip(found, rollout.finished_B.tolist(), strict=True):
        assert not set(response[:-1]) & set(ends)
        assert finished == (response[-1] in ends)
        assert finished or len(response) == rollout.response_BL.shape[1]
    assert 0 < int(rollout.finished_B.sum()) < 64
    assert torch.equal(rollout.response_BL, torch.arange(12) < rollout.lengths_B[:, None])
    after = rollout.tokens_BS[:, -12:][~rollout.response_BL]
    assert set(after.tolist()) == {PAD}


def test_truncation_is_the_absence_of_an_end_token():
    """An end exactly at the last position is finished; one token less and the same response is truncated."""
    model, rows = llama(), prompts() * 4
    free = sampled(model, rows, keys=keys(32))
    lengths = {length for length, done in zip(free.lengths_B.tolist(), free.finished_B.tolist(), strict=True) if done}
    length = max(lengths - {1})
    row = next(i for i in range(32) if free.finished_B[i] and free.lengths_B[i] == length)
    exact = sampled(model, rows, keys=keys(32), max_tokens=length)
    assert bool(exact.finished_B[row]) and responses(exact)[row] == responses(free)[row]
    short = sampled(model, rows, keys=keys(32), max_tokens=length - 1)
    assert not bool(short.finished_B[row]) and responses(short)[row] == responses(free)[row][:-1]


def test_prompt_and_response_tokens_add_up():
    """F37: the attention mask holds the prompts and the responses, nothing else; positions count real tokens from 0."""
    rollout = sampled(llama(), prompts())
    assert int(rollout.attention_BS.sum()) == sum(LENGTHS) + int(rollout.lengths_B.sum())
    width = max(LENGTHS)
    for row, length in enumerate(LENGTHS):
        real = rollout.attention_BS[row].bool()
        assert rollout.tokens_BS[row, width - length : width].tolist() == prompts()[row]
        assert rollout.tokens_BS[row][real].tolist() == prompts()[row] + responses(rollout)[row]
        assert rollout.positions_BS[row][real].tolist() == list(range(int(real.sum())))
    part = rollout.rows(slice(2, 4))
    assert responses(part) == responses(rollout)[2:4]
    assert torch.equal(part.finished_B, rollout.finished_B[2:4])


def test_the_end_token_is_trained_where_padding_is_the_end_token():
    """F11: with pad = eos the end of each finished response keeps its weight and its gradient, the padding has none."""
    model = llama()
    rollout = sampled(model, prompts() * 4, keys=keys(32), pad_id=EOS)
    plain = sampled(model, prompts() * 4, keys=keys(32))
    assert responses(rollout) == responses(plain)
    assert torch.equal(rollout.response_BL, plain.response_BL)
    assert torch.equal(rollout.attention_BS, plain.attention_BS)
    weights = token_weights(rollout.response_BL, torch.ones(32, dtype=torch.bool), "token", 12)
    logprobs = rollout.logprobs_BL.clone().requires_grad_(True)
    loss, _ = policy_loss(logprobs, rollout.logprobs_BL, torch.ones(32), weights, 0.2, 0.2)
    loss.backward()
    finished = rollout.finished_B.nonzero()[:, 0]
    assert len(finished) > 0
    ends = rollout.lengths_B[finished] - 1
    width = rollout.response_BL.shape[1]
    assert rollout.tokens_BS[:, -width:][finished, ends].tolist() == [EOS] * len(finished)
    assert (logprobs.grad[finished, ends] < 0).all()
    assert not logprobs.grad[~rollout.response_BL].any()


def test_showing_the_cache_keeps_none_of_it_alive():
    """The largest number of bytes of a rollout is the same whether somebody looks at keys and values or not."""
    from src.memory import Ledger

    model, found = llama(), {}
    for name in ("unseen", "seen"):
        with Ledger(torch.device("cpu")) as ledger:
            sizes: list[int] = []
            look = {"seen": lambda kept, sizes=sizes: sizes.append(sum(t.nbytes for t in kept)), "unseen": None}[name]
            sampled(model, prompts(), seen=look)
            found[name] = ledger.close_update()[0]["memory/peak_bytes"]
    assert found["seen"] == found["unseen"] and len(sizes) > 1 and sizes == sorted(sizes)
