"""Logits by chunks of positions: the same numbers, and never all of them at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src import models
from src.memory import Ledger
from src.objective import chosen_logprobs
from src.probe import ControlledStep
from src.trainer import accumulate, as_probed, columns
from tests.test_trainer import build, gradients, phase, scored, setup
from tests.tinymodels import llama

KINDS: dict[str, tuple[str, ...]] = {
    "sketch": (),
    "dense": ("method=dense",),
    "dense-all": ("method=dense", "method.train_all=true"),
    "head": ("model.targets=[q_proj,lm_head]",),
    "head-alone": ("method=dense", "model.targets=[lm_head]"),
    "batches": ("objective.updates_per_batch=2", "objective.reference_kl=0.1"),
}


def update(kind: str, parted: bool) -> tuple[list[Tensor], dict[str, float], list[Tensor]]:
    """Return the gradients of an update in float64, its metrics, and the weights after it."""
    config, policy, task = setup(*KINDS[kind], "control=fixed", dtype=torch.float64)
    policy = replace(policy, parted=parted)
    batch = scored(config, policy, task)
    reference = llama(torch.float64, vocab_size=18, initializer_range=0.2) if kind == "batches" else None
    method = build(config, policy)
    metrics = accumulate(config, policy, batch, reference, phase)
    found = gradients(method)
    metrics |= method.propose()
    metrics |= ControlledStep(config, as_probed(config, policy), method, phase).make(batch, 1)
    return found, metrics, [parameter.detach().clone() for parameter in policy.model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_parts_change_no_number(kind, monkeypatch):
    """One chunk and many, the head apart and not: gradients, metrics, prediction, realised divergence, weights."""
    expected = update(kind, parted=False)
    for size, parted in ((1 << 24, True), (16 * 2 * 18 * 4, True), (16 * 3 * 18 * 4, False)):
        monkeypatch.setattr(models, "LOGIT_BYTES", size)
        found = update(kind, parted)
        for actual, want in zip(found[0] + found[2], expected[0] + expected[2], strict=True):
            torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-7)  # Llama's norms compute in float32
        assert found[1].keys() == expected[1].keys()
        for key, value in expected[1].items():
            assert found[1][key] == pytest.approx(value, rel=1e-4, abs=1e-9), key


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor with a last axis of the vocabulary's size."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.elements = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[-1] == self.vocabulary:
                held = (
                    leaf.untyped_storage().nbytes() // leaf.element_size()
                )  # an expanded weight holds less than it shows
                self.elements = max(self.elements, min(leaf.numel(), held))
        return out


@pytest.mark.parametrize("kind", ["sketch", "dense", "batches"])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(kind, monkeypatch):
    """B x L x V: 16 responses; two positions of each at a time, old and reference log-probabilities and probe too."""
    vocabulary = 18
    monkeypatch.setattr(models, "LOGIT_BYTES", 16 * 2 * vocabulary * 4)
    config, policy, task = setup(*KINDS[kind], "control=fixed", "microbatch_responses=16")
    policy = replace(policy, parted=True)
    batch = scored(config, policy, task)
    method = build(config, policy)
    reference = llama(vocab_size=vocabulary) if kind == "batches" else None
    with Largest(vocabulary) as watch:
        accumulate(config, policy, batch, reference, phase)
        method.propose()
        ControlledStep(config, as_probed(config, policy), method, phase).make(batch, 1)
    length = batch.rollout.response_BL.shape[1]
    assert length > 4 and watch.elements == 16 * 2 * vocabulary


def test_slices_cover_the_positions_and_one_position_is_the_least(monkeypatch):
    _, policy, _ = setup()
    states = torch.zeros(4, 7, 18)
    for size, step in ((1, 1), (4 * 18 * 4, 1), (2 * 4 * 18 * 4, 2), (1 << 24, (1 << 24) // (4 * 18 * 4))):
        monkeypatch.setattr(models, "LOGIT_BYTES", size)
        slices = columns(policy, states)
        assert [at for piece in slices for at in range(7)[piece]] == list(range(7))
        assert slices[0].stop - slices[0].start == step


def test_a_model_that_scales_its_logits_is_not_parted():
    """Its head alone would give other logits; a Llama's does not."""
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    assert not models._can_be_parted(CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.5)).eval())
    assert models._can_be_parted(llama())


def test_the_probe_takes_a_model_whole_whose_head_is_trained():
    for kind, parted in (("sketch", True), ("dense", True), ("dense-all", False), ("head", False)):
        config, policy, _ = setup(*KINDS[kind])
        assert as_probed(config, replace(policy, parted=True)).parted == parted


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(2, 3), (1, 40)])
def test_chosen_logprobs_are_log_softmax_s_with_its_gradient(temperature, shape):
    """Beside autograd's in float64; two tensors of the logits' size are there at most, in either direction."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*shape, 500, generator=generator)).requires_grad_(True)
    tokens, weights = torch.randint(500, shape, generator=generator), torch.randn(shape, generator=generator)
    chosen, entropies = chosen_logprobs(logits, tokens, temperature)
    assert not entropies.requires_grad
    (chosen * weights).sum().backward()

    exact = logits.detach().double().requires_grad_(True)
    logprobs = torch.log_softmax(exact / temperature, -1)
    expected = logprobs.gather(-1, tokens[..., None])[..., 0]
    (expected * weights).sum().backward()
    torch.testing.assert_close(chosen.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), -(logprobs.exp() * logprobs).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_a_token_that_is_ruled_out_has_no_part_in_the_entropy():
    logits = torch.randn(2, 3, 50)
    logits[..., 40:] = -torch.inf
    logits.requires_grad_(True)
    chosen, entropies = chosen_logprobs(logits, torch.full((2, 3), 7), 1.0)
    chosen.sum().backward()
    expected = torch.special.entr(torch.softmax(logits.detach().double(), -1)).sum(-1)
    torch.testing.assert_close(entropies.double(), expected, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[..., 40:].any()


def test_no_third_tensor_of_the_logits_size():
    with Ledger(torch.device("cpu")) as ledger:
        hidden = torch.randn(64, 2, requires_grad=True)
        weight = torch.randn(2000, 2)
        tokens = torch.zeros(64, dtype=torch.long)
        ledger.close_update()
        before = ledger.live_bytes()
        with ledger.phase("forward"):
            chosen, _ = chosen_logprobs(hidden @ weight.T, tokens, 1.0)
        with ledger.phase("backward"):
            chosen.sum().backward()
        sizes = ledger.close_update()[0]
    whole = 64 * 2000 * 4
    for phase_name, times in (("forward", 2.3), ("backward", 1.1)):
        assert whole < sizes[f"memory/{phase_name}_peak_bytes"] - before < times * whole


def test_a_second_backward_of_the_same_logits_is_refused():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    chosen, _ = chosen_logprobs(logits, torch.zeros(2, 3, dtype=torch.long), 1.0)
    chosen.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chosen.sum().backward()


def test_a_slice_of_states_is_one_product():
    """Rows of a slice are not neighbours in memory, and torch would take one slow product a row."""
    model = llama()
    with CountedProducts() as count:
        logits = models.Policy(model, None, (1,), parted=True).logits(torch.randn(4, 9, 24)[:, 2:5])
    assert logits.shape == (4, 3, 29) and count.names == ["mm"]


class CountedProducts(TorchDispatchMode):
    """The matrix products that torch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
