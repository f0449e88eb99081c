"""The head's product by parts of the vocabulary: equal to torch's own linear layer, forward, backward and tangents."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from torch import nn

from src import head
from src.bench.head import heads
from src.memory import Ledger
from src.models import LOGIT_BYTES, positions_at_a_time


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PART", 7)  # 20 = 7 + 7 + 6


def layer(bias: bool, trained: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 20, bias=bias, dtype=torch.float64).requires_grad_(trained)


@pytest.mark.parametrize("trained", [False, True])
def test_values_and_gradients_are_a_linear_layers(trained: bool):
    ours, theirs = layer(False, trained), layer(False, trained)
    torch.manual_seed(1)
    x, weights = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 20, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(True) for _ in range(2)]
    logits = head.head_product(ours, inputs[0])
    assert type(logits.grad_fn).__name__ == "_ProductBackward"
    torch.testing.assert_close(logits, theirs(x))
    (logits * weights).sum().backward()
    (theirs(inputs[1]) * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if trained:
            torch.testing.assert_close(own.grad, other.grad)
        else:
            assert own.grad is None
    ours.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda y: head.head_product(ours, y), x.requires_grad_(True), check_forward_ad=True)


@pytest.mark.parametrize("recorded", [False, True])
def test_tangents_are_the_products(recorded: bool):
    module = layer(bias=False, trained=True)
    x, tangent = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.set_grad_enabled(recorded), fwad.dual_level():
        primal, found = fwad.unpack_dual(head.head_product(module, fwad.make_dual(x, tangent)))
        torch.testing.assert_close(found, F.linear(tangent, module.weight))
        torch.testing.assert_close(primal, module(x))


def test_nothing_is_held_but_the_logits():
    """The plain product's bytes: in float32 torch allocates the result and a view for each part."""
    module, x = layer(bias=False, trained=False).float(), torch.randn(50, 5).requires_grad_(True)
    peaks = []
    for product in (head.head_product, lambda module, x: module(x)):
        with Ledger(torch.device("cpu")) as ledger:
            ledger.track([*module.parameters(), x])
            before = ledger.live_bytes()
            with ledger.phase("forward"):
                product(module, x)
            peaks.append(ledger.close_update()[0]["memory/peak_bytes"] - before)
    assert peaks == [50 * 20 * 4] * 2


def test_a_layer_with_more_to_it_is_called():
    x = torch.randn(3, 5, dtype=torch.float64)
    hooked = layer(bias=False, trained=False)
    hooked.register_forward_hook(lambda module, args, output: output + 1.0)
    torch.testing.assert_close(head.head_product(hooked, x), hooked(x))

    replaced = layer(bias=False, trained=False)  # as accelerate's hooks do
    own = replaced.forward
    replaced.forward = lambda x: 2.0 * own(x)  # type: ignore[method-assign]
    torch.testing.assert_close(head.head_product(replaced, x), 2.0 * own(x))
    seen = []
    watched = layer(bias=False, trained=True)
    watched.register_full_backward_pre_hook(lambda module, grads: seen.append(module))
    head.head_product(watched, x.clone().requires_grad_(True)).sum().backward()
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    plain = layer(bias=False, trained=False)
    head.head_product(plain, x)
    everywhere.remove()
    assert seen == [watched, plain]
    biased = layer(bias=True, trained=False)
    torch.testing.assert_close(head.head_product(biased, x), biased(x))

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(x)

    scaled = Scaled(5, 20, dtype=torch.float64)
    torch.testing.assert_close(head.head_product(scaled, x), scaled(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert head.head_product(layer(False, False).float(), x.float()).dtype == torch.bfloat16


def test_a_large_head_is_read_seldom():
    assert positions_at_a_time(torch.empty(49152, 576, device="meta")) == LOGIT_BYTES // (4 * 49152)
    wide = torch.empty(152064, 3584, device="meta", dtype=torch.bfloat16)
    assert positions_at_a_time(wide) == 3584 // 32
    assert positions_at_a_time(torch.empty(10**7, 2, device="meta")) == 1


def test_the_bench_measures_this_product():
    assert all(row["deviation"] < 1e-5 for row in heads(8, 30, 12, 1, torch.device("cpu")))
