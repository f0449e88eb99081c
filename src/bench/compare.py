"""Bytes by component, seconds by phase and FLOPs of an update of each contestant."""

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from src import config as cfg
from src.bench.contestants import Entrant, Workload, configured, entered, reason, untimed
from src.memory import COMPONENTS, Ledger, saved_for_backward

_PHASES = ("forward", "backward", "step")


def compare(
    names: list[str], overrides: list[str], work: Workload, rounds: int, updates: int, together: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each contestant: bytes of two updates, FLOPs of another, seconds by phase of every timed update.

    A contestant is made anew for each round and let go after it, or `together`: all are alive from the first round to
    the last, so that a round is as short as its timed updates.
    """
    rows: dict[str, dict[str, Any]] = {name: {"contestant": name, "seconds": []} for name in names}
    configs: dict[str, cfg.Config] = {}
    device = torch.device(work.config.device)

    @contextmanager
    def reported(name: str) -> Iterator[None]:
        """Keep an error of a contestant in its row; it takes no further part."""
        try:
            yield
        except Exception as error:  # of a package's code, or out of memory: the others are measured all the same
            rows[name]["error"] = reason(error)
            print(f"  {name}: {rows[name]['error']}", file=sys.stderr)

    def started(name: str, holder: ExitStack) -> tuple[Entrant, Ledger]:
        """Return a contestant that has made its optimizer's state, and a ledger that takes the time."""
        with ExitStack() as own:  # until it has: one that fails is let go at once
            entrant = own.enter_context(entered(name, configs[name], work))
            ledger = own.enter_context(Ledger(device))
            ledger.measure(False)
            entrant.update(ledger.phase)
            ledger.close_update()
            holder.enter_context(own.pop_all())
        return entrant, ledger

    for name in names:
        print(f"bytes and FLOPs: {name}", file=sys.stderr, flush=True)
        with reported(name):
            configs[name] = configured(name, overrides)
            rows[name] |= _measured(name, configs[name], work)
    with ExitStack() as kept:
        ready: dict[str, tuple[Entrant, Ledger]] = {}
        for turn in range(rounds):
            for name in (name for name in names if "error" not in rows[name]):
                print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                with reported(name), ExitStack() as own:
                    entrant, ledger = ready.get(name) or started(name, kept if together else own)
                    if together:
                        ready[name] = entrant, ledger
                        ledger.close_update()  # what the others took is none of its time
                    for _ in range(updates):
                        entrant.update(ledger.phase)
                        rows[name]["seconds"].append(ledger.close_update()[1])
    return list(rows.values())


def _measured(name: str, config: cfg.Config, work: Workload) -> dict[str, Any]:
    """Return the bytes of a contestant's first update and of another, and its floors."""
    with entered(name, config, work) as entrant, Ledger(torch.device(work.config.device)) as ledger:
        entrant.watched(ledger)
        entrant.update(ledger.phase)
        creation, seconds = ledger.close_update()
        entrant.update(ledger.phase)
        row: dict[str, Any] = {"first_update": creation, "first_seconds": seconds, "memory": ledger.close_update()[0]}
        ledger.measure(False)
        row |= floors(entrant)
    return row | {"floor_bytes": floor_bytes(row)}


def floors(entrant: Entrant) -> dict[str, int]:
    """Return what an update cannot do without: its FLOPs, and the bytes that it saves for backward at most.

    FLOPs are those of matrix products and attention as torch's FlopCounterMode counts them (of attention kernels that
    it knows), recomputed layers included. saved_bytes: tensors held for backward, weights apart; what a recomputed
    layer holds while it is computed again is not in it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        entrant.update(untimed)
    with saved_for_backward(entrant.model) as sizes:
        entrant.update(untimed)
    return {"flops": counter.get_total_flops(), "saved_bytes": max(sizes)}


def floor_bytes(row: dict[str, Any]) -> int:
    """Return the bytes that must be alive at some moment of a contestant's update, whatever its code is.

    Weights, masters, projections and optimizer state, with the larger of what is saved for backward at the end of a
    forward pass and the gradients or sketches at the end of backward.
    """
    at_step = {name: row["memory"].get(f"memory/step_peak_{name}_bytes", 0) for name in COMPONENTS}
    held = sum(at_step[name] for name in ("weights", "master_weights", "projections", "optimizer_state"))
    return held + max(row["saved_bytes"], at_step["gradients"] + at_step["sketches"])


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 90th and 99th percentile, and the worst, of seconds."""
    at = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64))
    return dict(zip(("p50", "p90", "p99"), at.tolist(), strict=True)) | {"worst": max(values)}


def table(rows: list[dict[str, Any]], tokens: int) -> str:
    """Return the comparison for a terminal; ratios are to the first row that has numbers."""
    measured = [row for row in rows if "error" not in row]
    yardstick = measured[0]
    lines = [
        f"{'contestant':18} {'time':>5} {'range':>12} {'FLOPs':>6} {'p50 s':>7} {'p90':>7} {'p99':>7} {'worst':>7}"
    ]
    lines[0] += f" {'tokens/s':>8} {'forward':>8} {'backward':>8} {'step':>7} {'peak MiB':>9} {'peak':>5} {'floor':>6}"
    for row in measured:
        own, base = ([update["time/update_seconds"] for update in found["seconds"]] for found in (row, yardstick))
        ratios = [one / other for one, other in zip(own, base, strict=True)]
        times = spread(own)
        phases = [statistics.median(u.get(f"time/{phase}_seconds", 0.0) for u in row["seconds"]) for phase in _PHASES]
        peak = row["memory"]["memory/peak_bytes"]
        text = f"{row['contestant']:18} {statistics.median(ratios):5.2f} {min(ratios):5.2f} to {max(ratios):4.2f}"
        text += f" {row['flops'] / yardstick['flops']:6.2f}" + "".join(f" {value:7.3f}" for value in times.values())
        text += f" {tokens / times['p50']:8.0f} {phases[0]:8.3f} {phases[1]:8.3f} {phases[2]:7.3f} {peak / 2**20:9.1f}"
        text += f" {peak / yardstick['memory']['memory/peak_bytes']:5.2f} {peak / row['floor_bytes']:6.3f}"
        lines.append(text)
    lines.append("")
    shown = [name for name in COMPONENTS if any(row["memory"][f"memory/peak_{name}_bytes"] for row in measured)]
    lines.append(f"{'at the peak, MiB':18}" + "".join(f" {name:>15}" for name in shown) + "  first update's peak")
    for row in measured:
        parts = [row["memory"][f"memory/peak_{name}_bytes"] / 2**20 for name in shown]
        first = row["first_update"]["memory/peak_bytes"] / 2**20
        lines.append(f"{row['contestant']:18}" + "".join(f" {part:15.1f}" for part in parts) + f"  {first:.1f}")
    lines += [f"{row['contestant']:18} not measured: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


NOTE = (
    "time: of an update (forward, backward, clip, step) over the first row's of the same round, median and range;\n"
    "FLOPs: matrix products and attention, over the first row's; tokens/s: prompt and response tokens trained on;\n"
    "peak: bytes of living tensors, weights included, over the first row's; floor: the peak over what must be alive:\n"
    "weights, the method's state, and the larger of what is saved for backward and the gradients or sketches"
)
