"""What `python -m src.bench` measured, as a table again and as a figure.

    python -m analysis.bench bench.json --figure bench.png
    python -m analysis.bench minimum.json --csv minimum.csv

A contestant that could not be measured is listed with its error and has no bar. Ratios are to the first that could.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.memory import Bars, mib, plain, short, stacked, unit_of
from analysis.speed import aligned, number

# numpy, pandas, matplotlib and seaborn take seconds to import: the functions that need them do it; --help is quick.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

NOTE = (
    "time: of an update (forward, backward, clip, step) over the first contestant's of the same round, median and\n"
    "range; p50 to worst: seconds of an update; forward, backward, step: medians; tokens/s: prompt and response\n"
    "tokens over p50; FLOPs: of matrix products and attention, over the first's; peak: bytes of living tensors,\n"
    "weights included, of an update after the first one, over the first contestant's; floor: the peak over what must\n"
    "be alive: weights, the method's state, and the larger of what is saved for backward and the gradients or sketches"
)
MINIMUM_NOTE = (
    "cap: the smallest number of bytes at which the updates are completed, by bisection; seconds: the slowest update\n"
    "after the first at so many times that cap; below: where the last trial under the cap ended, and what it wanted"
)


def load(path: Path) -> dict[str, Any]:
    """Return what a file of src.bench holds.

    Raises:
        RunsError: it is none, of a kind that has no contestants to show, damaged, or without a measured contestant.
    """
    from analysis.runs import RunsError

    try:
        result = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunsError(f"{path} cannot be read as JSON ({error})") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind not in ("compare", "minimum", "bookkeeping") or not result.get("rows"):
        raise RunsError(
            f"{path} has nothing to show (kind: {kind}): give a file that `python -m src.bench [compare | minimum | "
            "bookkeeping] --json FILE` wrote"
        )
    try:
        table(result)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be understood ({error})"
        raise RunsError(f"{path} {what}: damaged, or of another version of src.bench; measure again") from error
    return result


def measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have numbers.

    Raises:
        RunsError: none has.
    """
    from analysis.runs import RunsError

    found = [row for row in rows if "error" not in row]
    if not found:
        raise RunsError(f"no contestant could be measured: {rows[0]['contestant']}: {rows[0]['error']}")
    return found


def table(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a flat row each contestant, or round of bookkeeping: what the text shows and the CSV holds.

    Bytes and seconds; ratios to the first contestant with numbers. One without has its name and its error.
    """
    if result["kind"] == "bookkeeping":
        return [
            {"round": turn}
            | {key: row[key] for key in _SPENT}
            | {
                "share_of_bookkeeping": row["full_seconds"] / row["bare_seconds"] - 1,
                "cpu_share_of_bookkeeping": row["full_cpu_seconds"] / row["bare_cpu_seconds"] - 1,
                "share_of_probes": row["probe_seconds"] / row["update_seconds"],
            }
            for turn, row in enumerate(result["rows"], start=1)
        ]
    base = measured(result["rows"])[0]
    flat = _compared if result["kind"] == "compare" else _smallest
    return [
        {"contestant": row["contestant"], "error": row["error"]} if "error" in row else flat(row, base, result)
        for row in result["rows"]
    ]


def _compared(row: Row, base: Row, result: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    from src.records import COMPONENTS

    own, other = (np.array([update["time/update_seconds"] for update in one["seconds"]]) for one in (row, base))
    ratios = own / other
    quantiles = dict(zip(("p50", "p90", "p99"), np.quantile(own, [0.5, 0.9, 0.99]).tolist(), strict=True))
    peak = row["memory"]["memory/peak_bytes"]
    flat = {"contestant": row["contestant"], "error": "", "time_ratio": float(np.median(ratios))}
    flat |= {"time_ratio_low": float(ratios.min()), "time_ratio_high": float(ratios.max())}
    flat |= {"flops_ratio": row["flops"] / base["flops"]}
    flat |= {f"{name}_seconds": value for name, value in quantiles.items()} | {"worst_seconds": float(own.max())}
    flat["tokens_per_second"] = result["tokens"] / quantiles["p50"]
    flat |= {
        f"{phase}_seconds": float(np.median([update.get(f"time/{phase}_seconds", 0.0) for update in row["seconds"]]))
        for phase in _phases(result["rows"])
    }
    flat |= {"peak_bytes": peak, "peak_ratio": peak / base["memory"]["memory/peak_bytes"]}
    flat |= {"peak_over_floor": peak / row["floor_bytes"]}
    flat |= {f"peak_{name}_bytes": row["memory"].get(f"memory/peak_{name}_bytes", 0) for name in COMPONENTS}
    return flat | {"first_update_peak_bytes": row["first_update"]["memory/peak_bytes"]}


def _smallest(row: Row, base: Row, result: Mapping[str, Any]) -> dict[str, Any]:
    below = row.get("below") or {}
    flat = {"contestant": row["contestant"], "error": "", "cap_bytes": row["cap_bytes"]}
    flat |= {"cap_ratio": row["cap_bytes"] / base["cap_bytes"], "tolerance": row["tolerance"]}
    flat |= {
        f"seconds_at_{times}": max(seconds[1:] or seconds) if seconds else None
        for times, seconds in row["seconds"].items()
    }
    return flat | {"below_phase": below.get("phase"), "below_wanted_bytes": below.get("wanted_bytes")}


def _phases(rows: Sequence[Row]) -> list[str]:
    """The phases that a contestant's timed updates have, in their order."""
    from src.records import PHASES

    had = {key for row in rows if "error" not in row for update in row["seconds"] for key in update}
    return [phase for phase in PHASES if f"time/{phase}_seconds" in had]


def report(result: Mapping[str, Any]) -> str:
    """Return the tables of a file for a terminal."""
    rows = table(result)
    facts = [f"torch {result.get('torch')}", f"{result.get('threads')} threads", str(result.get("machine") or "")]
    lines = [str(result.get("command")), ", ".join(filter(None, facts))]
    found = [row for row in rows if not row.get("error")]
    if result["kind"] == "bookkeeping":
        lines += [_bookkeeping_text(found)]
    elif result["kind"] == "minimum":
        lines += [_minimum_text(found)]
    else:
        lines += [_compare_text(found, _phases(result["rows"]))]
    lines += [f"{row['contestant']}: not measured: {row['error']}" for row in rows if row.get("error")]
    lines += {"compare": [NOTE], "minimum": [MINIMUM_NOTE]}.get(result["kind"], [])
    return "\n".join(lines)


def _compare_text(rows: Sequence[Row], phases: Sequence[str]) -> str:
    headers = ["contestant", "time", "range", "FLOPs", "p50 s", "p90 s", "p99 s", "worst s", "tokens/s"]
    headers += [f"{phase} s" for phase in phases] + ["peak MiB", "peak", "floor"]
    cells = [
        [row["contestant"], f"{row['time_ratio']:.2f}", f"{row['time_ratio_low']:.2f} to {row['time_ratio_high']:.2f}"]
        + [f"{row['flops_ratio']:.2f}"]
        + [f"{row[f'{name}_seconds']:.3f}" for name in ("p50", "p90", "p99", "worst")]
        + [f"{row['tokens_per_second']:.0f}"]
        + [f"{row[f'{phase}_seconds']:.3f}" for phase in phases]
        + [f"{row['peak_bytes'] / 2**20:.1f}", f"{row['peak_ratio']:.2f}", f"{row['peak_over_floor']:.3f}"]
        for row in rows
    ]
    shown = _components(rows)
    split = [
        [row["contestant"], *(mib(row[f"peak_{name}_bytes"]) for name in shown)]
        + [mib(row["peak_bytes"]), mib(row["first_update_peak_bytes"])]
        for row in rows
    ]
    heads = ["contestant", *(plain(name).replace(" ", "\n") for name in shown), "peak", "first update's\npeak"]
    return "\n".join([aligned(headers, cells), "at the peak by component, MiB", aligned(heads, split)])


def _minimum_text(rows: Sequence[Row]) -> str:
    from src.records import readable

    timed = [key for key in rows[0] if key.startswith("seconds_at_")]
    headers = ["contestant", "cap MiB", "ratio", *(f"seconds at\n{key.split('_')[-1]} x" for key in timed), "below"]
    cells = []
    for row in rows:
        below = "-" if row["below_phase"] is None else f"{row['below_phase']}, {readable(row['below_wanted_bytes'])}"
        seconds = ["-" if row[key] is None else number(row[key], ".3f") for key in timed]
        cells.append([row["contestant"], mib(row["cap_bytes"]), f"{row['cap_ratio']:.2f}", *seconds, below])
    return aligned(headers, cells)


_SPENT = {
    "bare_seconds": "bare s",
    "full_seconds": "with ledger,\nrows, record s",
    "bare_cpu_seconds": "processor:\nbare s",
    "full_cpu_seconds": "processor: with\nledger ... s",
    "update_seconds": "its\nupdates s",
    "probe_seconds": "of that\nprobes s",
}
"""The columns of bookkeeping's seconds, and their headers."""


def _bookkeeping_text(rows: Sequence[Row]) -> str:
    import statistics

    headers = ["round", *_SPENT.values()]
    cells = [[str(row["round"]), *(f"{row[key]:.2f}" for key in _SPENT)] for row in rows]
    sentences = [
        f"{what}: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}) of {whole}; median "
        f"and range of {len(shares)} round{'s' * (len(shares) > 1)}"
        for what, whole, shares in (
            ("ledger, rows, record", "a bare run's time", [row["share_of_bookkeeping"] for row in rows]),
            ("the same", "its processor time", [row["cpu_share_of_bookkeeping"] for row in rows]),
            ("probes", "the updates' time", [row["share_of_probes"] for row in rows]),
        )
    ]
    return "\n".join([aligned(headers, cells), *sentences])


def _components(rows: Sequence[Row]) -> list[str]:
    from src.records import COMPONENTS

    return [name for name in COMPONENTS if any(row[f"peak_{name}_bytes"] for row in rows)]


def figure(result: Mapping[str, Any]) -> "Figure":
    """Bars a contestant that was measured, with ratios to the first at their ends.

    compare: bytes at the peak by component, and beside them the medians of the phases' seconds. minimum: smallest caps.

    Raises:
        RunsError: nothing to draw.
    """
    from analysis.runs import RunsError

    rows = [row for row in table(result) if not row.get("error")]
    if result["kind"] == "bookkeeping":
        raise RunsError("--figure draws what compare and minimum measured: bookkeeping is two shares of a time")
    names = [row["contestant"] for row in rows]
    key = "peak_bytes" if result["kind"] == "compare" else "cap_bytes"
    unit, size = unit_of(row[key] for row in rows)
    ends = [f" {short(row[key] / size)} ({row[key] / rows[0][key]:.2f})" for row in rows]
    if result["kind"] == "minimum":
        return _draw_caps(names, [row["cap_bytes"] / size for row in rows], ends, unit)
    pieces = [(name, [row[f"peak_{name}_bytes"] / size for row in rows]) for name in _components(rows)]
    spent = [(phase, [row[f"{phase}_seconds"] for row in rows]) for phase in _phases(result["rows"])]
    times = [f" {row['p50_seconds']:.3g} ({row['time_ratio']:.2f})" for row in rows]
    return stacked(
        names,
        Bars(pieces, ends, f"highest bytes of an update (over {names[0]}'s)", unit),
        Bars(spent, times, f"median of each phase; number: of the update (over {names[0]}'s)", "seconds"),
    )


def _draw_caps(names: Sequence[str], values: Sequence[float], ends: Sequence[str], unit: str) -> "Figure":
    import seaborn
    from matplotlib.figure import Figure

    from analysis.curves import WIDTH, style

    with style():
        result = Figure(figsize=(WIDTH + 0.6, 0.7 + 0.27 * len(names)), layout="constrained")
        ax = result.subplots()
        ax.barh(range(len(names)), values, height=0.7, color=seaborn.color_palette("colorblind")[0])
        for row, (value, text) in enumerate(zip(values, ends, strict=True)):
            ax.text(value, row, text, va="center", fontsize=6.5).set_in_layout(False)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_xlim(0, 1.3 * max(values))
        ax.set_xlabel(f"smallest cap, {unit} (over {names[0]}'s)")
        ax.grid(visible=False, axis="y")
        ax.tick_params(axis="y", length=0)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.bench", description="Table and figure of what src.bench measured."
    )
    parser.add_argument("file", metavar="FILE.json", type=Path, help="what `python -m src.bench --json FILE` wrote")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write a row each contestant")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="also draw bytes and seconds, or smallest caps")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.curves import style
    from analysis.runs import RunsError

    try:
        result = load(args.file)
        print(report(result))
        if args.csv:
            pd.DataFrame(table(result)).to_csv(args.csv, index=False, float_format="%.12g")
            print(args.csv)
        if args.figure:
            with style():
                figure(result).savefig(args.figure)
            print(args.figure)
    except (RunsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
