"""How well sketches estimate the gradients of a model and task, and what they cost.

    python -m src.diagnose --csv estimates.csv [--ranks 4,16] [--batches 2] [--draws 4] [--rounds 5] [overrides]

Overrides are those of `python -m src.train` (model=..., task=..., prompts_per_update=...), apart from method and
control. The policy is the one that training starts from; the gradients are those of its first updates. Files: CSV, a
row for each family, reconstruction and rank, one-sided ones also with decoder layers that are recomputed in backward;
CSV's name with `.spectrum` before its end, a row for each layer (first gradient). docs/estimates.md explains columns.
"""

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from src import composition, models, trainer
from src import config as cfg
from src.memory import Ledger, saved_for_backward
from src.sketch import SketchedLayers, SketchOptimizer
from src.sketch.direction import reconstruct
from src.sketch.layer import check_rank
from src.sketch.projection import Family, hash_key, rademacher
from src.tasks import Task, load_task
from src.warmstart import warm_up


@dataclass(frozen=True)
class Arm:
    """A way to estimate the gradient: `rank` columns of S, and with `co_rank` as many rows of Z."""

    family: Family
    rank: int
    co_rank: int | None = None

    @property
    def sides(self) -> str:
        return "one" if self.co_rank is None else "two"


def main() -> None:
    """Measure what the command line asks for and write the two files."""
    parser = argparse.ArgumentParser(prog="python -m src.diagnose", description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True, help="where the table goes")
    parser.add_argument("--ranks", type=_counts, default=[16], help="ranks of the one-sided sketch: 4,16")
    parser.add_argument("--batches", type=_count, default=2, help="gradients, each of one update's batch")
    parser.add_argument("--draws", type=_count, default=4, help="projections drawn for each gradient")
    parser.add_argument("--rounds", type=_count, default=5, help="timed updates of every arm, one after the other")
    parser.add_argument("overrides", nargs="*", help="configuration, as for python -m src.train")
    options = parser.parse_intermixed_args()
    try:
        for word in options.overrides:
            if word.lstrip("+").split("=")[0].split(".")[0] in ("method", "control", "ablation"):
                raise cfg.ConfigError(f"{word}: all families are compared, at the ranks of --ranks. Leave it out.")
        config = cfg.from_dict(composition.compose(options.overrides))
        if getattr(config.model, "gradient_checkpointing", False):
            raise cfg.ConfigError("model.gradient_checkpointing=true: it is measured with and without. Leave it out.")
        torch.set_num_threads(config.threads)
        task = load_task(config.task)
        shapes = models.skeleton(config.model, getattr(task, "alphabet", None))
        if shapes is None:
            raise cfg.ConfigError("model=custom has no shapes before it is built. Save the model and use model=hf.")
        arms = [arm for rank in options.ranks for arm in arms_of(rank, models.targets(config.model, shapes))]
        policy = models.load(config.model, task, torch.device(config.device), config.seed)
        warm_up(policy, task, config, lambda text: None)
    except (cfg.ConfigError, ValueError) as error:
        sys.exit(f"error: {error}")
    targets = models.targets(config.model, policy.model)
    batches = list(usable_batches(config, policy, task, options.batches))
    gradients = [dense_gradients(config, policy, targets, batch) for batch in batches]
    if not all(any(gradient.any() for gradient in found.values()) for found in gradients):
        sys.exit("error: a gradient is zero. Raise prompts_per_update.")
    where = {"model": config.model.name, "task": config.task.name}
    estimates = {arm: where | vars(arm) | estimate(arm, targets, gradients, options.draws) for arm in arms}
    spectra = [spectrum(name, gradients[0][name], max(options.ranks)) for name in gradients[0]]
    del gradients
    rows = [estimates[arm] | costs for arm, costs in cost(config, policy, arms, batches[0], options.rounds)]
    beside = options.csv.with_suffix(f".spectrum{options.csv.suffix}")
    write(options.csv, rows)
    write(beside, spectra)
    print(f"{'family':12} {'sides':6} {'rank':>4} {'cosine':>7} {'best':>6} {'recomputed':>10} {'peak':>6} {'time':>6}")
    for row in rows:
        rank = f"{row['rank']}" if row["co_rank"] is None else f"{row['rank']}/{row['co_rank']}"
        peak = row["peak_bytes"] / row["peak_bytes_dense"]
        print(
            f"{row['family']:12} {row['sides']:6} {rank:>4} {row['cosine']:7.3f} {row['cosine_best']:6.3f} "
            f"{row['recomputed']!s:>10} {peak:6.2f} {row['update_ratio']:6.2f}"
        )
    print(f"peak (weights apart) and time are ratios to dense AdamW's\n{options.csv}\n{beside}")


def arms_of(rank: int, targets: dict[str, nn.Linear]) -> list[Arm]:
    """Return every family at a rank, one-sided, and two-sided with as many floats or a few less: l about 2 r.

    r sum M + l sum N <= R sum M; ranks that are too small for it have no two-sided arm.
    """
    heights = sum(module.out_features for module in targets.values())
    widths = sum(module.in_features for module in targets.values())
    r = rank * heights // (heights + 2 * widths)
    pairs: list[tuple[int, int | None]] = [(rank, None)]
    if r >= 1:
        pairs.append((r, (rank - r) * heights // widths))
    for one, other in pairs:
        check_rank(targets, one, other)
    return [Arm(family, *pair) for pair in pairs for family in get_args(Family)]


def usable_batches(config: cfg.Config, policy: models.Policy, task: Task, count: int) -> Iterator[trainer.Batch]:
    """Yield the batches of the first updates in which not all groups are dead."""
    for update in range(1, 10 * count + 1):
        items = trainer.draw(config, task, update)
        rollout = trainer.roll_out(config, policy, task, items, update)
        batch = trainer.score(config, policy, task, rollout, items, update)
        if batch.advantages_B.any():
            yield batch
            count -= 1
            if count == 0:
                return
    sys.exit(
        "error: every group of these batches has equal rewards, so there are no gradients. Raise prompts_per_update."
    )


def dense_gradients(
    config: cfg.Config, policy: models.Policy, targets: dict[str, nn.Linear], batch: trainer.Batch
) -> dict[str, Tensor]:
    """Return autograd's gradients (M, N) of the targets."""
    policy.model.requires_grad_(False)
    for module in targets.values():
        module.weight.requires_grad_(True)
    trainer.accumulate(config, policy, batch, None, _untimed)
    gradients = {name: module.weight.grad for name, module in targets.items()}
    for module in targets.values():
        module.weight.grad = None
        module.weight.requires_grad_(False)
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def estimate(arm: Arm, targets: dict[str, nn.Linear], gradients: list[dict[str, Tensor]], draws: int) -> dict[str, Any]:
    """Return the cosine of the estimate to the gradient, all layers as one vector: mean and deviation over draws.

    Also `cosine_best`, that of the best approximation of the same rank, the truncated SVD.
    """
    layers = SketchedLayers(nn.Module(), targets, arm.rank, 0, arm.family, arm.co_rank)
    cosines = []
    for draw in range(draws * len(gradients)):
        layers.draw = draw
        inner = own = true = 0.0
        for name, gradient in gradients[draw % len(gradients)].items():
            left_MR, right_RN = gradient @ layers.projection(name).T, layers.projection(name)
            if arm.co_rank is not None:
                co_sketch_LN = layers.co_projection(name) @ gradient
                left_MR, right_RN = reconstruct(left_MR, co_sketch_LN, layers.co_projection(name))
            found = left_MR @ right_RN
            inner += float((found * gradient).sum())
            own += float(found.square().sum())
            true += float(gradient.square().sum())
        cosines.append(inner / math.sqrt(own * true))
    layers.remove()
    floats = sum(arm.rank * m.out_features + (arm.co_rank or 0) * m.in_features for m in targets.values())
    return {
        "sketch_bytes": 4 * floats,
        "gradient_bytes": 4 * sum(module.weight.numel() for module in targets.values()),
        "cosine": statistics.mean(cosines),
        "cosine_std": statistics.stdev(cosines) if len(cosines) > 1 else 0.0,
        "cosine_best": statistics.mean(_best_cosine(gradient, arm.rank) for gradient in gradients),
    }


def _best_cosine(gradients: dict[str, Tensor], rank: int) -> float:
    """Return the cosine of the truncated SVDs, all layers as one vector."""
    kept = total = 0.0
    for gradient in gradients.values():
        energy = torch.linalg.svdvals(gradient).double().square()
        kept, total = kept + float(energy[:rank].sum()), total + float(energy.sum())
    return math.sqrt(kept / total)


def spectrum(name: str, gradient: Tensor, rank: int) -> dict[str, Any]:
    """Return how a gradient's singular values fall, and how those of its sketch do, which training can see.

    share_K: of the squared norm in the K largest; decay: a of a fit i^-a to the `rank` largest that are no round-off,
    least squares in logs.
    """
    sketch = gradient @ rademacher(rank, gradient.shape[1], hash_key("spectrum", name)).T
    row: dict[str, Any] = {"layer": name, "rows": gradient.shape[0], "columns": gradient.shape[1]}
    for prefix, values in (("gradient", torch.linalg.svdvals(gradient)), ("sketch", torch.linalg.svdvals(sketch))):
        energy = values.double().square()
        real = int((values > values[0] * max(gradient.shape) * torch.finfo(values.dtype).eps).sum())
        places = torch.arange(1, min(rank, real) + 1).double().log()
        logs = values[: len(places)].double().log()
        centred = places - places.mean()
        row |= {f"{prefix}_share_{k}": float(energy[:k].sum() / energy.sum()) for k in (1, 4, 16)}
        row[f"{prefix}_decay"] = None if len(places) < 2 else -float((centred * logs).sum() / centred.square().sum())
    return row


def cost(
    config: cfg.Config, policy: models.Policy, arms: list[Arm], batch: trainer.Batch, rounds: int
) -> list[tuple[Arm, dict[str, Any]]]:
    """Return for each arm, and one-sided arms twice, what an update takes, beside dense AdamW's on the same matrices.

    An update here is forward, backward, clip, step; all do one after the other, `rounds` times, each time after one
    that is not timed. The two-sided sketch recomputes the decoder layers in backward, the one-sided one also without.
    Ratios are medians over rounds. peak_bytes: the largest in an update, weights apart (what is saved for backward,
    gradients or sketches, logits, the step). saved_bytes: held for backward at the largest, except inside the layer
    that is just being recomputed.
    """
    recomputed = deepcopy(policy.model)
    models.recompute_layers(recomputed)
    variants = {False: policy, True: replace(policy, model=recomputed)}
    dense = {again: _dense(config, variants[again]) for again in variants}
    contestants: list[tuple[bool, Arm | None]] = [(again, None) for again in variants]
    contestants += [(again, arm) for arm in arms for again in variants if again or arm.co_rank is None]
    seconds: dict[Any, list[float]] = {key: [] for key in contestants}
    sizes: dict[Any, dict[str, int]] = {}
    for _ in range(rounds):
        for key in contestants:
            again, arm = key
            with dense[again]() if arm is None else _sketched(config, variants[again], arm) as step:
                if key not in sizes:
                    sizes[key] = _sizes(config, variants[again], batch, step)
                else:
                    _update(config, variants[again], batch, step)
                begin = time.perf_counter()
                _update(config, variants[again], batch, step)
                seconds[key].append(time.perf_counter() - begin)
    rows = []
    for again, arm in contestants[len(variants) :]:
        assert arm is not None
        own, base = seconds[again, arm], seconds[again, None]
        ratios = [one / other for one, other in zip(own, base, strict=True)]
        row: dict[str, Any] = {"sides": arm.sides, "recomputed": again}
        for name, size in sizes[again, arm].items():
            row |= {name: size, f"{name}_dense": sizes[again, None][name]}
        row |= {"update_seconds": statistics.median(own), "update_seconds_dense": statistics.median(base)}
        row |= {"update_ratio": statistics.median(ratios)}
        row |= {"update_ratio_low": min(ratios), "update_ratio_high": max(ratios)}
        rows.append((arm, row))
    return rows


def _update(config: cfg.Config, policy: models.Policy, batch: trainer.Batch, step: Callable[[], None]) -> None:
    trainer.accumulate(config, policy, batch, None, _untimed)
    step()


def _sizes(config: cfg.Config, policy: models.Policy, batch: trainer.Batch, step: Callable[[], None]) -> dict[str, int]:
    """Return peak_bytes and saved_bytes of two updates: the first one's step makes the optimizer's state."""
    with Ledger(torch.device(config.device)) as ledger:
        ledger.track([*policy.model.parameters(), *policy.model.buffers()])
        weights = ledger.live_bytes()
        _update(config, policy, batch, step)
        ledger.close_update()
        _update(config, policy, batch, step)
        peak = int(ledger.close_update()[0]["memory/peak_bytes"])
    with saved_for_backward(policy.model) as saved:
        _update(config, policy, batch, step)
    return {"peak_bytes": peak - weights, "saved_bytes": max(saved)}


@contextmanager
def _sketched(config: cfg.Config, policy: models.Policy, arm: Arm) -> Iterator[Callable[[], None]]:
    """Sketch the model's targets and yield the optimizer's step."""
    layers = SketchedLayers(
        policy.model, models.targets(config.model, policy.model), arm.rank, 0, arm.family, arm.co_rank
    )
    try:
        yield SketchOptimizer(layers, lr=1e-6).step
    finally:
        layers.remove()


def _dense(config: cfg.Config, policy: models.Policy) -> Callable[[], Any]:
    """Return a context that makes the targets trainable and yields AdamW's clip and step; its moments stay."""
    parameters = [module.weight for module in models.targets(config.model, policy.model).values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @contextmanager
    def training() -> Iterator[Callable[[], None]]:
        policy.model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            yield step
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    return training


def _untimed(name: str, component: str | None = None) -> Any:
    return nullcontext()


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of the same keys as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
