"""What memory a method needs and saves, of what it is made, and whether it grows.

    python -m analysis.memory outputs
    python -m analysis.memory outputs --study study --baseline baseline --csv memory.csv --figure memory.png

A number of bytes is one of five statistics (`src.records.DEFINITIONS`); a saving is computed between equal ones only,
under equal settings, hardware and seeds, or a sentence says why not. A baseline that ran out of memory has no number.
"""

import argparse
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.arms import Arm, Run, choose_baseline, load_arms, record, savings, series
from analysis.speed import aligned, number, times, times_text

# numpy, pandas, matplotlib and seaborn take seconds to import: the functions that need them do it; --help is quick.
if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from src.records import Saving

MIB = 2**20
PEAK = "maximum of update peaks"
"""The statistic whose bytes are split by component, and by phase."""

_DRAWN_FIRST = ("weights", "gradients", "sketches", "optimizer_state", "projections", "logits", "probe") + (
    ("activations", "kv_cache", "other", "master_weights", "reference", "communication")
)
"""The components in the order of their colours, of which ten can be told apart; the others are hatched."""

_HEADERS = {
    "time mean": "time\nmean",
    "mean of update peaks": "mean of\nupdate peaks",
    "maximum of update peaks": "maximum of\nupdate peaks",
    "maximum of the seed-mean curve": "maximum of the\nseed-mean curve",
    "worst instant": "worst\ninstant",
}


def report(study: str, arms: Sequence[Arm], baseline: Arm | None, steady: bool) -> str:
    """Return all tables of a study, and what follows from them in sentences."""
    parts = [f"study {study}", _statistics_text(arms, steady), _split_text(arms, steady), _phases_text(arms, steady)]
    parts += [_savings_text(arms, baseline, steady), _growth_text(arms), _ended_text(arms)]
    return "\n\n".join(part for part in parts if part)


def _statistics_text(arms: Sequence[Arm], steady: bool) -> str:
    from src.records import DEFINITIONS, spans

    rows = []
    notes: dict[str, None] = {}
    for arm in arms:
        kinds = ["bytes in use"]
        if any("memory/peak_reserved_bytes" in run.rows for run in arm.counted):
            kinds.append("reserved bytes")
        for kind in kinds:
            found = [record(arm, over_time, quantity=kind, steady=steady) for over_time in DEFINITIONS]
            finished = sum(run.status == "finished" for run in arm.runs)
            rows.append([arm.name, kind, f"{finished}/{len(arm.runs)}", spans(found[0].includes.updates)])
            rows[-1] += [mib(one.value_bytes) for one in found]
            if arm.counted:
                notes[", ".join(found[0].includes.tensors) or "not recorded"] = None
    headers = ["arm", "quantity", "finished", "updates", *(_HEADERS[over_time] for over_time in DEFINITIONS)]
    which = "without the first update of each process" if steady else "the first, which makes optimizer state, included"
    lines = [
        f"memory in MiB of the measured updates, {which}; what the bytes include: {' | '.join(notes)}",
        aligned(headers, rows, texts=2),
    ]
    return "\n".join(lines)


def _split_text(arms: Sequence[Arm], steady: bool) -> str:
    """The components of the peak, and the sentence on the bottleneck."""
    peaks = {arm.name: record(arm, PEAK, steady=steady) for arm in arms if arm.counted}
    split = {name: peak for name, peak in peaks.items() if peak.components}
    if not split:
        return "at the peak by component: not recorded"
    shown = _nonzero(split.values())
    rows = []
    sentences = []
    for arm in arms:
        if arm.name in split:
            parts = split[arm.name].components
            total = split[arm.name].value_bytes
            at = [str(_peak_update(run, steady)) for run in arm.counted]
            rows.append([arm.name, *(mib(parts[name]) for name in shown), mib(total), ", ".join(at)])
            largest = sorted(parts, key=lambda name: -parts[name])[:3]
            first = f"{plain(largest[0])} {'are' if largest[0].endswith('s') else 'is'}"
            others = [
                f"; {plain(name)} {parts[name] / total:.0%}" for name in largest[1:] if parts[name] > 0.05 * total
            ]
            sentences.append(f"{arm.name}: {first} {parts[largest[0]] / total:.0%} of the peak{''.join(others)}")
    headers = ["arm", *(plain(name).replace(" ", "\n") for name in shown), "peak", "at update\nof each seed"]
    title = "at the peak by component, MiB: of each seed the update with its highest peak, then the mean over seeds"
    return "\n".join([title, aligned(headers, rows), *sentences])


def _phases_text(arms: Sequence[Arm], steady: bool) -> str:
    """Peaks of the phases, of the first update and of the evaluation."""
    import pandas as pd

    from src.records import PHASES

    peaks = {
        (arm.name, phase): record(arm, PEAK, phase, steady=steady).value_bytes
        for arm in arms
        if arm.counted
        for phase in PHASES
    }
    shown = [phase for phase in PHASES if any(peaks.get((arm.name, phase), 0) > 0 for arm in arms)]
    rows = []
    for arm in arms:
        if arm.counted:
            moments = pd.DataFrame([_moments(run) for run in arm.counted]).mean()
            numbers = [*(peaks[arm.name, phase] for phase in shown), *moments]
            rows.append([arm.name, *map(mib, numbers)])
    if not rows:
        return ""
    headers = ["arm", *shown, "first\nupdate", "later\nupdates", "first after\na resume", "evaluation"]
    return f"{PEAK} by phase and by when, MiB, mean over seeds\n" + aligned(headers, rows)


def _savings_text(arms: Sequence[Arm], baseline: Arm | None, steady: bool) -> str:
    from src.records import DEFINITIONS, NotComparable

    if baseline is None:
        names = ", ".join(arm.name for arm in arms)
        return f"savings: not one dense arm to compare with; --baseline LABEL names one of: {names}"
    rows, splits, sentences = [], [], []
    found: dict[str, Saving] = {}
    for arm in arms:
        if arm is baseline:
            continue
        cells: list[str] = []
        reasons: dict[str, None] = {}
        for over_time in DEFINITIONS:
            try:
                one = savings(arm, baseline, over_time, steady)
                cells.append(f"{one.fraction:.1%} ({mib(one.saved_bytes)})")
                if over_time == PEAK:
                    found[arm.name] = one
            except NotComparable as reason:
                cells.append("-")
                reasons[str(reason)] = None
        if set(cells) != {"-"}:
            shared = sorted({*arm.seeds} & {*baseline.seeds})
            rows.append([arm.name, ", ".join(map(str, shared)), *cells])
        sentences += [f"{arm.name}: {reason}" for reason in reasons]
    shown = [
        name for name in _component_names() if any(abs(one.by_component.get(name, 0)) > 0 for one in found.values())
    ]
    for name, one in found.items():
        if one.by_component:
            splits.append([name, *(mib(one.by_component.get(part, 0.0)) for part in shown), mib(one.saved_bytes)])
        if one.mostly_activations:
            sentences.append(
                f"{name}: over half of what it saves is activations and logits, not gradients, optimizer state or "
                "master weights: ask whether the arms' batches and checkpointing are the same"
            )
    lines = [f"saved over {baseline.name}, percent (MiB); negative: it needs more"]
    if rows:
        headers = ["arm", "seeds", *(_HEADERS[over_time] for over_time in DEFINITIONS)]
        lines.append(aligned(headers, rows, texts=2))
    if splits:
        headers = ["arm", *(plain(name).replace(" ", "\n") for name in shown), "saved"]
        lines += [f"of that by component, MiB, at the {PEAK}", aligned(headers, splits)]
    return "\n".join([*lines, *sentences])


def _growth_text(arms: Sequence[Arm]) -> str:
    """A line a run, and an alarm where its peaks or what stays alive grow."""
    from src.stats import GROWTH_DEFINITION, growth, updates_to_cap

    rows, alarms = [], []
    for run in (run for arm in arms for run in arm.runs if len(run.rows)):
        kept = run.rows[~run.rows.index.isin(run.warm_ups)]
        verdicts = []
        for key, what in (("memory/peak_bytes", "the peak"), ("memory/live_bytes", "what is alive between updates")):
            if key not in kept or not len(kept):
                verdicts.append(["-", "-", "not recorded"])
                continue
            found = growth(kept[key].to_numpy(dtype=float), kept.index.to_numpy())
            interval = f"{found.low / MIB:.3g} to {found.high / MIB:.3g}"
            verdicts.append([number(found.slope / MIB, ".2g"), "-" if found.slope != found.slope else interval])
            verdicts[-1].append(found.verdict)
            if found.verdict == "growing":
                cap = (run.config.get("memory") or {}).get("cap_bytes")
                left = ""
                if cap is not None and key == "memory/peak_bytes":
                    left = f"; {updates_to_cap(found.slope, float(kept[key].max()), cap):.0f} updates to the cap"
                alarms.append(
                    f"ALARM {run.name} seed {run.seed}: {what} grows by {found.slope / MIB:.2g} MiB an update "
                    f"({found.relative:.2%} in 100 updates, p {found.p:.1g}){left}"
                )
        rows.append([run.name, str(run.seed), str(len(kept)), *verdicts[0], *verdicts[1]])
    if not rows:
        return ""
    headers = ["arm", "seed", "points", "peak:\nMiB/update", "interval", "verdict"]
    headers += ["alive between:\nMiB/update", "interval", "verdict"]
    title = f"growth of each run, warm-ups apart; {GROWTH_DEFINITION}"
    return "\n".join([title, aligned(headers, rows), *alarms])


def _ended_text(arms: Sequence[Arm]) -> str:
    """A line for each run that ended before it was finished and not by a stop."""
    from src.records import readable

    lines = []
    for run in (run for arm in arms for run in arm.runs if run.status in ("out_of_memory", "failed")):
        error = run.record.get("error") or {}
        facts = [f"in {error.get('phase') or run.record.get('phase')}"]
        for key, words in (("wanted", "wanted {}"), ("live", "beside {} alive"), ("cap", "of cap {}")):
            if error.get(f"{key}_bytes") is not None:
                facts.append(words.format(readable(error[f"{key}_bytes"])))
        parts = error.get("components") or {}
        largest = [f"{plain(name)} {readable(parts[name])}" for name in sorted(parts, key=lambda n: -parts[n])[:3]]
        what = f" (largest: {', '.join(largest)})" if largest else "" if len(facts) > 1 else f" ({error.get('type')})"
        lines.append(f"{run.status} {run.name} seed {run.seed}: {' '.join(facts)}{what}")
    return "\n".join(lines)


def csv_rows(study: str, arms: Sequence[Arm], baseline: Arm | None, steady: bool) -> "Iterator[dict[str, Any]]":
    """Yield a row an arm, phase and statistic; savings over the baseline are beside those of whole updates."""
    from src.records import COMPONENTS, DEFINITIONS, PHASES, NotComparable, spans

    for arm in arms:
        for phase in ("update", *PHASES):
            for over_time in DEFINITIONS:
                one = record(arm, over_time, phase, steady=steady)
                if one.value_bytes != one.value_bytes and (phase != "update" or arm.counted):
                    continue
                row: dict[str, Any] = {"study": study, "arm": arm.name, "phase": phase, "over_time": over_time}
                row |= {"over_seeds": one.over_seeds, "quantity": one.quantity, "scope": one.scope, "unit": one.unit}
                row |= {"value": one.value_bytes, "seeds": " ".join(map(str, one.seeds))}
                row |= {"updates": spans(one.includes.updates), "includes": "; ".join(one.includes.tensors)}
                row["includes_optimizer_creation"] = one.includes.includes_optimizer_creation
                row |= {name: one.components.get(name) for name in COMPONENTS}
                row |= {"outcome": str(arm.unmeasured or ""), "baseline": "", "saved": None, "saved_fraction": None}
                if baseline is not None and arm is not baseline and phase == "update":
                    row["baseline"] = baseline.name
                    try:
                        saved = savings(arm, baseline, over_time, steady)
                        row |= {"saved": saved.saved_bytes, "saved_fraction": saved.fraction}
                    except NotComparable as reason:
                        row["outcome"] = str(reason)
                yield row


class Bars(NamedTuple):
    """A panel of stacked bars, one a row: the pieces with a value for each row, and the words at the bars' ends."""

    pieces: Sequence[tuple[str, Sequence[float]]]
    ends: Sequence[str]
    title: str
    unit: str


def figure(arms: Sequence[Arm], seconds: "pd.DataFrame", steady: bool = False) -> "Figure":
    """Bars of the components at the peak, and beside them of the phases' median seconds, an arm each.

    `seconds` is the frame of `analysis.speed.times`.
    """
    from src.records import PHASES

    names = [arm.name for arm in arms]
    peaks = [record(arm, PEAK, steady=steady) for arm in arms]
    unit, size = unit_of(peak.value_bytes for peak in peaks)
    pieces = [(name, [peak.components.get(name, 0.0) / size for peak in peaks]) for name in _nonzero(peaks)]
    whole = [0.0 if peak.components else _or_zero(peak.value_bytes) / size for peak in peaks]
    if any(whole):
        pieces.append(("not recorded by component", whole))
    ends = []
    for arm, peak in zip(arms, peaks, strict=True):
        known = peak.value_bytes == peak.value_bytes
        ends.append(f" {short(peak.value_bytes / size)}" if known else "" if arm.unmeasured else " not recorded")
        if arm.unmeasured:
            ends[-1] += f" {plain(arm.unmeasured.status)} in\n {plain(str(arm.unmeasured.phase))}"
    # A phase of few updates (a probe that only watches) has no part in the median update.
    often = {(row.name, row.part): row.p50 for row in seconds.itertuples(index=False) if row.in_updates >= 0.5}
    spent = [
        (phase, [_or_zero(often.get((name, phase))) for name in names])
        for phase in PHASES
        if any((name, phase) in often for name in names)
    ]
    updates = [often.get((name, "update"), math.nan) for name in names]
    return stacked(
        names,
        Bars(pieces, ends, f"{PEAK}, mean over seeds", unit),
        Bars(
            spent,
            [f" {update:.3g}" if update == update else "" for update in updates],
            "median of each phase; number: of the update",
            "seconds",
        ),
    )


def stacked(names: Sequence[str], size: Bars, time: Bars) -> "Figure":
    """Return bars of bytes by component and, beside them, of seconds by phase, a row each name."""
    import seaborn
    from matplotlib.figure import Figure

    from analysis.curves import LEGEND_ROW, style
    from src.records import PHASES

    labels = ["\n".join(textwrap.wrap(name, 30)) for name in names]
    colors = seaborn.color_palette("colorblind")
    size_looks: dict[str, Any] = {
        name: (colors[i % 10], "////" if i > 9 else None) for i, name in enumerate(_DRAWN_FIRST)
    }
    time_looks: dict[str, Any] = {name: (colors[i], None) for i, name in enumerate(PHASES)}
    lines = 0
    with style():
        result = Figure(figsize=(7.0, 0.0), layout="constrained")
        axes = result.subplots(1, 2, sharey=True)
        for ax, side, bars, looks in zip(axes, ("left", "right"), (size, time), (size_looks, time_looks), strict=True):
            lines = max(lines, _stack(ax, side, bars.pieces, looks))
            for row, text in enumerate(bars.ends):
                end = sum(values[row] for _, values in bars.pieces)
                ax.text(end, row, text, va="center", fontsize=6.5, parse_math=False).set_in_layout(False)
            ax.set_title(bars.title)
            ax.set_xlabel(f"{bars.unit} at the peak" if bars is size else bars.unit)
            ax.grid(visible=False, axis="y")
            ax.tick_params(axis="y", length=0)
            room = 1.1 + 0.02 * max(map(len, "\n".join(bars.ends).split("\n")))
            ax.set_xlim(0, room * max(bar.get_x() + bar.get_width() for bar in ax.patches) if ax.patches else 1)
        axes[0].set_yticks(range(len(names)), labels)
        for label in axes[0].get_yticklabels():
            label.set_parse_math(False)
        axes[0].set_ylim(len(names) - 0.4, -0.6)
        row_height = max(0.27, 0.13 * max((label.count("\n") + 1 for label in labels), default=1))
        result.set_size_inches(7.0, 0.85 + row_height * len(names) + LEGEND_ROW * lines)
    return result


def _stack(ax: Any, side: str, pieces: Sequence[tuple[str, Sequence[float]]], looks: dict[str, Any]) -> int:
    """Draw stacked bars with their legend below them; return the lines of the legend."""
    start = [0.0] * len(pieces[0][1]) if pieces else []
    for name, values in pieces:
        color, hatch = looks.get(name, ("0.9", None))
        ax.barh(
            range(len(values)),
            values,
            left=start,
            height=0.7,
            color=color,
            hatch=hatch,
            edgecolor="w",
            linewidth=0.4,
            label=plain(name),
        )
        start = [a + b for a, b in zip(start, values, strict=True)]
    if pieces:
        handles, labels = ax.get_legend_handles_labels()
        ax.figure.legend(
            handles,
            labels,
            loc=f"outside lower {side}",
            ncols=3,
            handlelength=1.2,
            columnspacing=1.0,
            labelspacing=0.25,
        )
    return -(-len(pieces) // 3)


def _nonzero(records: Any) -> list[str]:
    """The components that one of the records has, in their order."""
    every = list(records)
    return [name for name in _component_names() if any(abs(one.components.get(name, 0)) > 0 for one in every)]


def _component_names() -> tuple[str, ...]:
    from src.records import COMPONENTS

    return COMPONENTS


def _peak_update(run: Run, steady: bool) -> int:
    one = series(run, steady=steady)
    return int(one.updates_U[one.peak_bytes_U.argmax()])


def _moments(run: Run) -> list[float]:
    """Return the highest peak of the first update, of later ones, of those after a resume, and of evaluations."""
    peaks = run.rows["memory/peak_bytes"].astype(float)
    first, warm = peaks.index == 1, peaks.index.isin(run.warm_ups)
    return [*(float(peaks[of].max()) for of in (first, ~warm, warm & ~first)), run.evaluation_peak]


def unit_of(counts: Iterable[float]) -> tuple[str, int]:
    """Return the unit for bytes that are shown side by side, and its size."""
    return ("GiB", 2**30) if any(count > 4 * 2**30 for count in counts) else ("MiB", MIB)


def mib(count: float) -> str:
    """Return bytes as a number of MiB, `-` for NaN."""
    return short(count / MIB)


def short(value: float) -> str:
    """Return a number with three digits or one decimal, `-` for NaN."""
    return number(value, ".1f" if abs(value) >= 9.995 else ".3g")


def _or_zero(value: float | None) -> float:
    return value if value is not None and value == value else 0.0


def plain(name: str) -> str:
    """Return a component or a status as it is written in a text."""
    return name.replace("_", " ").replace("kv cache", "KV cache")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.memory", description="What memory the arms of every study need, save, and leak."
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--study", help="only this study (default: every one)")
    parser.add_argument("--baseline", metavar="LABEL", help="the arm that savings are over (default: the dense one)")
    parser.add_argument("--steady", action="store_true", help="leave out the first update of each process")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write every statistic of every phase")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="also draw components and phases, of one study")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.curves import style
    from analysis.runs import RunsError, load_metrics, studies
    from analysis.speed import NOTE
    from src.records import DEFINITIONS

    rows: list[dict[str, Any]] = []
    try:
        parts = list(studies(args.root, args.study))
        if args.figure and len(parts) > 1:
            raise RunsError(f"--figure draws one study: name it, --study {parts[0][0]}")
        for study, runs in parts:
            arms = load_arms(runs)
            baseline = choose_baseline(arms, args.baseline)
            seconds = times(load_metrics(runs), runs)
            print(f"{report(study, arms, baseline, args.steady)}\n\n{times_text(seconds)}\n")
            rows += csv_rows(study, arms, baseline, args.steady)
            if args.figure:
                with style():
                    figure(arms, seconds, args.steady).savefig(args.figure)
                print(args.figure)
        print(NOTE)
        print(*(f"{name}: {statistic.definition}" for name, statistic in DEFINITIONS.items()), sep="\n")
        if args.csv:
            pd.DataFrame(rows).to_csv(args.csv, index=False, float_format="%.12g")
            print(args.csv)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
