"""Ways from last hidden states to the loss's gradient: logits by chunks, whole, or in a fused kernel.

Legend: T positions, D width, V vocabulary.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from src import models
from src.head import head_product
from src.objective import chosen_logprobs


def heads(width: int, vocabulary: int, tokens: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return for each way seconds, the allocator's highest bytes beyond what went in, and the gradient's deviation.

    The loss is a weighted sum of log-probabilities, as a policy's is. `entropy` tells whether the way also gives the
    entropies that a run logs. On a CPU the bytes are those of the profiler's allocation events: a fused kernel's own
    workspace is in them, which no ledger of tensors sees.
    """
    generator = torch.Generator().manual_seed(0)
    weight_VD = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device)
    states_TD = torch.randn(tokens, width, generator=generator).to(device)
    head = torch.nn.Linear(width, vocabulary, bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    tokens_T = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    weights_T = torch.randn(tokens, generator=generator).to(device) / tokens
    ways: dict[str, tuple[Callable[[Tensor], None], bool]] = {
        "chunks": (lambda x: _by_chunks(x, head, head_product, tokens_T, weights_T), True),
        "chunks_at_once": (lambda x: _by_chunks(x, head, _at_once, tokens_T, weights_T), True),
        "whole": (lambda x: _whole(x, weight_VD, tokens_T, weights_T), True),
        "torch_reference": (lambda x: _torch(x, weight_VD, tokens_T, weights_T, None), False),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        ways["torch_chunked"] = lambda x: _torch(x, weight_VD, tokens_T, weights_T, options), False
    if device.type == "cuda":
        ways["liger"] = lambda x: _liger(x, weight_VD, tokens_T, weights_T), False
    rows: dict[str, dict[str, Any]] = {
        name: {"way": name, "entropy": has, "seconds": []} for name, (_, has) in ways.items()
    }
    expected = None
    for _ in range(rounds):
        for name, (run, _) in ways.items():
            x = states_TD.clone().requires_grad_(True)
            run(x)
            assert x.grad is not None
            expected = x.grad.double() if expected is None else expected
            rows[name]["deviation"] = float((x.grad.double() - expected).norm() / expected.norm())
            x.grad = None
            begin = time.perf_counter()
            run(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rows[name]["seconds"].append(time.perf_counter() - begin)
            x.grad = None
            if "peak_bytes" not in rows[name]:
                rows[name]["peak_bytes"] = _peak(lambda run=run, x=x: run(x), device)  # type: ignore[misc]
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a terminal; ratios are to the logits by chunks."""
    base = rows[0]
    lines = [f"{'way':16} {'time':>6} {'range':>14} {'peak MiB':>9} {'deviation':>10}  entropy"]
    for row in rows:
        ratios = [one / other for one, other in zip(row["seconds"], base["seconds"], strict=True)]
        lines.append(
            f"{row['way']:16} {statistics.median(ratios):6.2f} {min(ratios):5.2f} to {max(ratios):5.2f} "
            f"{row['peak_bytes'] / 2**20:9.1f} {row['deviation']:10.1e}  {'yes' if row['entropy'] else 'no'}"
        )
    return "\n".join(lines)


def _at_once(head: torch.nn.Module, states_TD: Tensor) -> Tensor:
    """The head's own product, of which `head_product` takes parts of the vocabulary."""
    return cast(Tensor, head(states_TD))


def _by_chunks(
    x_TD: Tensor,
    head: torch.nn.Linear,
    product: Callable[[torch.nn.Module, Tensor], Tensor],
    tokens_T: Tensor,
    weights_T: Tensor,
) -> None:
    """As `trainer.accumulate` does: log-probabilities and entropies of some positions, backward, the next."""
    size = models.positions_at_a_time(head.weight)
    parts = x_TD.detach().split(size)
    gradients = []
    for part_tD, tokens_t, weights_t in zip(parts, tokens_T.split(size), weights_T.split(size), strict=True):
        leaf_tD = part_tD.requires_grad_(True)
        chosen_t, _ = chosen_logprobs(product(head, leaf_tD), tokens_t, 1.0)
        (chosen_t * weights_t).sum().backward()
        gradients.append(leaf_tD.grad)
    x_TD.grad = torch.cat(gradients)  # type: ignore[arg-type]


def _whole(x_TD: Tensor, weight_VD: Tensor, tokens_T: Tensor, weights_T: Tensor) -> None:
    """As it is usually written: torch keeps log-probabilities and makes another tensor for their gradient."""
    logprobs_TV = torch.log_softmax(x_TD @ weight_VD.T, -1)
    with torch.no_grad():
        (logprobs_TV.exp() * logprobs_TV).sum(-1)
    (logprobs_TV.gather(-1, tokens_T[:, None])[:, 0] * weights_T).sum().backward()


def _torch(x_TD: Tensor, weight_VD: Tensor, tokens_T: Tensor, weights_T: Tensor, options: Any) -> None:
    losses_T = F.linear_cross_entropy(x_TD, weight_VD, tokens_T, reduction="none", options=options)
    (-losses_T * weights_T).sum().backward()


def _liger(x_TD: Tensor, weight_VD: Tensor, tokens_T: Tensor, weights_T: Tensor) -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    losses_T = LigerFusedLinearCrossEntropyFunction.apply(x_TD, weight_VD, tokens_T, None, None, -100, 0.0, 0.0, "none")
    (-losses_T[0] * weights_T).sum().backward()


def _peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the highest bytes that the allocator handed out beyond what was alive before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    highest = live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest
