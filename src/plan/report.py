"""What predictions say, in tables, sentences and rows."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from src.memory import COMPONENTS
from src.plan.prediction import Plan

# What training keeps beside the weights. A saving elsewhere is one of activations, which recomputing them gives too.
_STATE = ("master_weights", "gradients", "sketches", "projections", "optimizer_state")
_LAYOUTS = ("replicated", "sharded")
# Beyond so many ranks nothing is looked for.
_MOST_RANKS = 4096


def size(nbytes: float) -> str:
    """Return bytes as text in GiB, MiB or KiB."""
    power, unit = next((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if abs(nbytes) >= 2**p or p == 10)
    return f"{nbytes / 2**power:.2f} {unit}" if nbytes else "0"


def highest(phases: Mapping[str, Mapping[str, int]]) -> int:
    """Return the peak over phases, in bytes."""
    return max(sum(split.values()) for split in phases.values())


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Return lines of columns, the first aligned left and the others right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if number == 0 else cell.rjust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in ([*zip(line, widths, strict=True)] for line in lines)
    )


def phases_text(plan: Plan) -> str:
    """Return each phase's peak and its components, and the bottleneck in words."""
    phases = {"step (first)": plan.first_step} | plan.phases
    used = [name for name in COMPONENTS if any(split.get(name) for split in phases.values())]
    rows = [
        [phase, size(sum(split.values())), *(size(split.get(name, 0)) if split.get(name) else "-" for name in used)]
        for phase, split in sorted(phases.items(), key=lambda item: -sum(item[1].values()))
    ]
    largest = max(plan.split, key=lambda name: plan.split[name])
    share = plan.split[largest] / plan.peak
    return (
        f"{table(['phase', 'peak', *used], rows)}\n"
        f"Predicted peak {size(plan.peak)}, in {plan.phase}, of which {share:.0%} {largest}."
    )


def comparison_text(sketch: Plan, dense: Plan) -> str:
    """Return what the sketch saves of dense training's peak, by component, and where a saving comes from."""
    used = [name for name in COMPONENTS if sketch.split.get(name) or dense.split.get(name)]
    saved = {name: dense.split.get(name, 0) - sketch.split.get(name, 0) for name in used}
    rows = [[name, size(dense.split.get(name, 0)), size(sketch.split.get(name, 0)), size(saved[name])] for name in used]
    rows.append(["peak", size(dense.peak), size(sketch.peak), size(dense.peak - sketch.peak)])
    text = table(["predicted at the peak", "dense", "sketch", "saved"], rows)
    whole = dense.peak - sketch.peak
    if whole <= 0:
        return f"{text}\nThe sketch would not help: its peak is {size(-whole)} higher ({-whole / dense.peak:.1%})."
    state = sum(saved.get(name, 0) for name in _STATE)
    text += (
        f"\nThe sketch would save {size(whole)} of the peak ({whole / dense.peak:.1%}): {size(state)} of gradients and "
        f"what is kept for them, {size(whole - state)} of activations and the rest."
    )
    if whole - state > state:
        text += "\nActivations, not gradients or state, supply most of the saving."
        if not getattr(sketch.config.model, "gradient_checkpointing", True):
            text += " Dense training can have that too: compare with model.gradient_checkpointing=true."
    return text


def ranks_text(plans: Mapping[str, Plan], ranks: list[int]) -> str:
    """Return the peak of one rank for each method, layout and number of ranks; and from where on sharding beats it."""
    kinds = list(itertools.product(plans, _LAYOUTS))
    rows = [
        [f"{count}", *(size(highest(getattr(plans[name], layout)(count))) for name, layout in kinds)] for count in ranks
    ]
    text = table(["ranks (predicted)", *(f"{name}, {layout}" for name, layout in kinds)], rows)
    if {"sketch", "dense"} <= set(plans):
        for layout in _LAYOUTS:
            least = break_even(plans["sketch"], plans["dense"], layout)
            text += (
                f"\nFrom {least} ranks on `dense, sharded` needs less a rank than `sketch, {layout}`."
                if least
                else f"\n`dense, sharded` needs as much a rank as `sketch, {layout}` or more, up to {_MOST_RANKS} "
                "ranks: activations are not sharded, and dense training keeps more of them."
            )
    return text


def cap_text(plans: Mapping[str, Plan], cap: int) -> str:
    """Return for each method whether one process stays below `cap` bytes, and how many sharded ranks do."""
    lines = [
        f"Predicted against memory.cap_bytes ({size(cap)}) of an update; an evaluation has evaluation.batch responses "
        "at a time and is not predicted, and workspace, context and fragmentation come on top:"
    ]
    for name, plan in plans.items():
        phases = {"step (first)": plan.first_step} | plan.phases
        over = {phase: sum(split.values()) for phase, split in phases.items() if sum(split.values()) > cap}
        if not over:
            lines.append(f"{name} fits, with {size(cap - highest(phases))} left.")
            continue
        worst = sorted(over, key=lambda phase: -over[phase])
        both = plan, replace(plan, phases={"step": plan.first_step})
        ranks = range(2, _MOST_RANKS + 1)
        least = next((n for n in ranks if all(highest(part.sharded(n)) <= cap for part in both)), None)
        lines.append(
            f"{name} does not fit in {', '.join(f'{phase} ({size(over[phase] - cap)} too much)' for phase in worst)}; "
            + (f"sharded it fits from {least} ranks on." if least else "sharding does not make it fit.")
        )
    return "\n".join(lines)


def break_even(sketch: Plan, dense: Plan, layout: str = "sharded") -> int | None:
    """Return the smallest number of ranks at which sharded dense training needs less a rank than a sketch in a layout.

    None if there is none.
    """
    ranks = range(1, _MOST_RANKS + 1)
    return next((n for n in ranks if highest(dense.sharded(n)) < highest(getattr(sketch, layout)(n))), None)


def table_rows(name: str, plan: Plan, prompt_tokens: int, ranks: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase, layout and number of ranks; `kind` and the names say that it is predicted."""
    config = plan.config
    settings = asdict(config.model)
    what = {
        "kind": "predicted",
        "model": settings.get("shape") or config.model.name,
        "dtype": settings.get("dtype", "float32"),
        "gradient_checkpointing": settings.get("gradient_checkpointing"),
        "method": name,
        "rank": getattr(config.method, "rank", None),
        "responses": config.prompts_per_update * config.responses_per_prompt,
        "microbatch_responses": config.microbatch_responses,
        "prompt_tokens": prompt_tokens,
        "response_tokens": config.max_response_tokens,
    }
    for count, layout in [(1, "single"), *itertools.product([n for n in ranks if n > 1], _LAYOUTS)]:
        phases = plan.phases if layout == "single" else getattr(plan, layout)(count)
        if layout == "single":
            phases = {"first_step": plan.first_step} | phases
        for phase, split in phases.items():
            numbers = {f"predicted_{part}_bytes": split.get(part, 0) for part in COMPONENTS}
            yield (
                what
                | {"layout": layout, "ranks": count, "phase": phase}
                | {"predicted_peak_bytes": sum(split.values())}
                | numbers
            )
