"""At which model sizes a sketch saves memory: dense and sketch at each size of a study.

    python -m analysis.scale outputs
    python -m analysis.scale outputs --study scale --csv scale.csv --figure scale.png

A size is the `parameters` of run.json. Savings are those of `python -m analysis.memory`: between numbers that agree in
everything but method and control. A baseline that ran out of memory has none: what it would have needed is not guessed.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.arms import Arm, load_arms, outcome, record, savings
from analysis.memory import PEAK, mib, plain, unit_of
from analysis.speed import aligned, number

# numpy, pandas, matplotlib and seaborn take seconds to import: the functions that need them do it; --help is quick.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from src.records import Saving

MEAN = "time mean"
"""The second statistic of which savings are shown."""

_METHODS = ("dense", "sketch")

NOTE = (
    "peak: maximum of update peaks of each seed, mean over seeds; saving: of the dense peak, negative where the\n"
    "sketch needs more; time mean: the same of the bytes averaged over time; of that: what the saving at the peak\n"
    "(a negative one: the excess) is made of, in percent of it, its largest components; finished: seeds, dense and\n"
    "sketch; accuracy: held out, at the last evaluation of the finished seeds, dense / sketch"
)


class Size(NamedTuple):
    """A model of the study with its two arms, of which one may be missing. Parameters are NaN where no run has them."""

    parameters: float
    model: str
    arms: dict[str, Arm]  # by method: dense, sketch


def sizes(arms: Sequence[Arm]) -> list[Size]:
    """Return the models of a study by their number of parameters; arms of other methods are passed over.

    Raises:
        RunsError: nothing to compare, or two arms of one method at one model.
    """
    from analysis.runs import RunsError

    found: dict[str, Size] = {}
    for arm in arms:
        config = arm.runs[0].config
        method = (config.get("method") or {}).get("name")
        if method not in _METHODS:
            continue
        model = _model(config)
        counts = [run.record["parameters"] for run in arm.runs if run.record.get("parameters")]
        size = found.setdefault(model, Size(math.nan, model, {}))
        if method in size.arms:
            raise RunsError(
                f"two {method} arms of model {model}, {size.arms[method].name} and {arm.name}: a row has one of each; "
                "give the others a study of their own"
            )
        found[model] = size._replace(
            parameters=float(counts[0]) if counts else size.parameters, arms=size.arms | {method: arm}
        )
    if not found:
        raise RunsError("no arm here is dense or sketch: `python -m src.train +ablation=scale` makes a study of both")
    return sorted(found.values(), key=lambda size: (math.isnan(size.parameters), size.parameters))


def rows_of(found: Sequence[Size], accuracies: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row a size: bytes, fractions, accuracies, and words for what has no number.

    Args:
        accuracies: held-out accuracy at the end by arm; an arm without one has run.json's words.
    """
    return [_row(size, accuracies) for size in found]


def _row(size: Size, accuracies: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"parameters": size.parameters, "model": size.model}
    for method in _METHODS:
        arm = size.arms.get(method)
        measured = arm is not None and not arm.unmeasured
        for what, over_time in (("peak", PEAK), ("time_mean", MEAN)):
            row[f"{method}_{what}_bytes"] = record(arm, over_time).value_bytes if arm and measured else math.nan
        row[f"{method}_outcome"] = outcome(arm) if arm else ""
        finished = sum(run.status == "finished" for run in arm.runs) if arm else 0
        row[f"{method}_finished"] = f"{finished}/{len(arm.runs)}" if arm else "-"
        accuracy = accuracies.get(arm.name, math.nan) if arm else math.nan
        known = accuracy == accuracy
        row[f"{method}_accuracy"] = accuracy if known else (arm and arm.runs[0].record.get("accuracy")) or "-"
        row[f"{method}_cap_bytes"] = (arm.runs[0].config.get("memory") or {}).get("cap_bytes") if arm else None
    row |= {"saving": math.nan, "saving_time_mean": math.nan, "saved_bytes": math.nan, "of_that": "-"}
    row |= {"mostly_activations": False, "not_measured": ""}
    for over_time, key in ((MEAN, "saving_time_mean"), (PEAK, "saving")):
        saved = _saving(size, over_time)
        if isinstance(saved, str):
            row["not_measured"] = saved
            continue
        row[key] = saved.fraction
        if over_time == PEAK:
            row |= {"saved_bytes": saved.saved_bytes, "of_that": _largest(saved)}
            row["mostly_activations"] = saved.mostly_activations
    return row


def _saving(size: Size, over_time: str) -> "Saving | str":
    """Return what the sketch saves, or why that is not known."""
    from src.records import NotComparable

    if missing := [method for method in _METHODS if method not in size.arms]:
        return f"no {missing[0]} arm"
    for method in _METHODS:
        if words := outcome(size.arms[method]):
            return f"{method} {words}"
    try:
        return savings(size.arms["sketch"], size.arms["dense"], over_time)
    except NotComparable as reason:
        return str(reason)


def _largest(saved: "Saving") -> str:
    """Return the components that a saving is of, in percent of it."""
    if not saved.by_component or saved.saved_bytes == 0:
        return "-"
    shares = {name: count / saved.saved_bytes for name, count in saved.by_component.items()}
    largest = [name for name in sorted(shares, key=lambda name: -shares[name])[:3] if shares[name] > 0.05]
    words = ", ".join(f"{plain(name)} {shares[name]:.0%}" for name in largest)
    return f"{words} (activations, not gradients and state)" if saved.mostly_activations else words


def report(study: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, a sentence on what is missing, and the sentences on where savings begin."""
    cells = []
    sentences = []
    for row in rows:
        name = _short_name(row)
        peaks = [mib(row[f"{method}_peak_bytes"]) for method in _METHODS]
        for position, method in enumerate(_METHODS):
            words = row[f"{method}_outcome"]
            if words.startswith("out of memory"):
                peaks[position] = "out of memory"
            if words:
                other = "sketch" if method == "dense" else "dense"
                needs = f", and {other} has a peak of {_bytes(row[f'{other}_peak_bytes'])}"
                known = row[f"{other}_peak_bytes"] == row[f"{other}_peak_bytes"]
                sentences.append(f"{name}: {method} {words}: the saving is not measurable{needs if known else ''}")
        if row["not_measured"] and not any(row[f"{method}_outcome"] for method in _METHODS):
            sentences.append(f"{name}: {row['not_measured']}")
        if row["mostly_activations"]:
            sentences.append(
                f"{name}: over half of the saving is activations and logits, not gradients and state: ask whether the "
                "arms' batches and checkpointing are the same"
            )
        without = "not measurable" if row["not_measured"] else "-"
        fractions = [f"{row[key]:.1%}" if row[key] == row[key] else without for key in ("saving", "saving_time_mean")]
        cells.append([number(row["parameters"], ",.0f"), row["model"], *peaks, *fractions])
        cells[-1] += [f"{row['dense_finished']} {row['sketch_finished']}", _accuracies(row), row["of_that"]]
    width = max(len(line[-1]) for line in cells)
    cells = [[*line[:-1], line[-1].ljust(width)] for line in cells]
    headers = ["parameters", "model", "dense peak\nMiB", "sketch peak\nMiB", "saving", "saving,\ntime mean", "finished"]
    headers += ["accuracy", "of that".ljust(width)]
    table = aligned(headers, cells, texts=2)
    boundaries = [boundary(rows, "saving", PEAK), boundary(rows, "saving_time_mean", MEAN)]
    return "\n".join([f"study {study}", table, *sentences, "", *boundaries, "", NOTE])


def boundary(rows: Sequence[Mapping[str, Any]], key: str, statistic: str) -> str:
    """Return one sentence: between which sizes the saving changes its sign, or that it does not."""
    known = [row for row in rows if row[key] == row[key] and row["parameters"] == row["parameters"]]
    unknown = [_short_name(row) for row in rows if row not in known]
    rest = f"; not measured at {', '.join(unknown)}" if unknown else ""
    start = f"saving in the {statistic}"
    if not known:
        return f"{start}: not measured at any size"
    changes = [
        f"between {_short_name(one)} ({one[key]:.1%}) and {_short_name(other)} ({other[key]:.1%})"
        for one, other in zip(known, known[1:], strict=False)
        if (one[key] > 0) != (other[key] > 0)
    ]
    if changes:
        return f"{start}: changes its sign {' and '.join(changes)}{rest}"
    sign = "above zero" if known[0][key] > 0 else "zero or below, that is, none"
    where = f"from {_short_name(known[0])} to {_short_name(known[-1])}" if len(known) > 1 else _short_name(known[0])
    return f"{start}: never changes its sign in what was measured ({where}): it is {sign}{rest}"


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Saving in percent against parameters, and beside it the peaks of both methods; sizes without a number are marked.

    Raises:
        RunsError: no run has its number of parameters.
    """
    from matplotlib.figure import Figure

    from analysis.curves import style
    from analysis.runs import RunsError

    drawn = [row for row in rows if row["parameters"] == row["parameters"]]
    if not drawn:
        raise RunsError("no run.json has `parameters`: the figure's axis; train the study with this version")
    with style():
        result = Figure(figsize=(7.0, 2.9), layout="constrained")
        left, right = result.subplots(1, 2)
        _draw_savings(left, drawn)
        _draw_peaks(right, drawn)
        for ax in (left, right):
            ax.set_xscale("log")
            low, high = drawn[0]["parameters"], drawn[-1]["parameters"]
            room = max(2.0, (high / low) ** 0.09)
            ax.set_xlim(low / room, high * room)
            ax.set_xlabel("parameters of the model")
            ax.xaxis.set_major_formatter(lambda value, _: _count(value))
    return result


def _draw_savings(ax: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    import seaborn

    colors = seaborn.color_palette("colorblind")
    ax.axhline(0, color="0.3", linewidth=0.8, zorder=1.5)
    looks = (
        ("saving", PEAK, {"color": colors[0], "marker": "o"}),
        (
            "saving_time_mean",
            MEAN,
            {"color": colors[1], "marker": "s", "markerfacecolor": "w", "linestyle": (0, (4, 1))},
        ),
    )
    for key, label, look in looks:
        ax.plot(
            [row["parameters"] for row in rows],
            [100 * row[key] for row in rows],
            label=label,
            linewidth=1.0,
            markersize=4,
            **look,
        )
    for row in rows:
        if row["saving"] == row["saving"]:
            above = not row["saving"] < row["saving_time_mean"]
            ax.annotate(
                f"{row['saving']:.1%}",
                (row["parameters"], 100 * row["saving"]),
                (0, 5 if above else -5),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=6.5,
            )
        else:
            ax.axvline(row["parameters"], color="0.5", linewidth=0.8, linestyle=(0, (1, 2)))
            words = next((f"{m} out of memory" for m in _METHODS if "out of" in row[f"{m}_outcome"]), "not measured")
            ax.text(
                row["parameters"],
                0.5,
                words,
                transform=ax.get_xaxis_transform(),
                rotation=90,
                ha="right",
                va="center",
                fontsize=6.5,
            )
    ax.margins(y=0.15)
    ax.set_ylabel("saved of the dense arm's bytes (%)")
    ax.legend(loc="best")


def _draw_peaks(ax: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    import seaborn
    from matplotlib.ticker import LogLocator, NullLocator

    colors = seaborn.color_palette("colorblind")
    peaks = [row[f"{method}_peak_bytes"] for row in rows for method in _METHODS]
    unit, size = unit_of(peaks)
    for method, color, marker in zip(_METHODS, (colors[7], colors[2]), ("s", "o"), strict=True):
        ax.plot(
            [row["parameters"] for row in rows],
            [row[f"{method}_peak_bytes"] / size for row in rows],
            color=color,
            marker=marker,
            linewidth=1.0,
            markersize=4,
            label=method,
        )
        short = [row for row in rows if "out of" in row[f"{method}_outcome"] and row[f"{method}_cap_bytes"]]
        if short:
            ax.plot(
                [row["parameters"] for row in short],
                [row[f"{method}_cap_bytes"] / size for row in short],
                color=color,
                marker="x",
                markersize=6,
                linestyle="none",
                label=f"{method}: out of memory",
                zorder=3,
            )
    caps = {row[f"{method}_cap_bytes"] for row in rows for method in _METHODS} - {None}
    for cap in sorted(caps):
        under = [row["parameters"] for row in rows if cap in (row["dense_cap_bytes"], row["sketch_cap_bytes"])]
        ax.plot(
            [min(under) / 1.6, max(under) * 1.6],
            [cap / size] * 2,
            color="0.3",
            linewidth=0.8,
            linestyle=(0, (4, 2)),
            label=f"cap {_bytes(cap)}",
        )
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel(f"{unit} at the peak")
    ax.set_title(f"{PEAK}, mean over seeds")
    ax.legend(loc="best")


def _model(config: Mapping[str, Any]) -> str:
    """Return a model in a few words, different for models of different size."""
    model = config.get("model") or {}
    known = model.get("shape") or model.get("path") or model.get("source")
    if known or "hidden_size" not in model:
        return str(known or model.get("name") or "-")
    return f"{model.get('name')} {model.get('num_layers')}x{model['hidden_size']}x{model.get('intermediate_size')}"


def _short_name(row: Mapping[str, Any]) -> str:
    return _count(row["parameters"]) if row["parameters"] == row["parameters"] else row["model"]


def _accuracies(row: Mapping[str, Any]) -> str:
    texts = [
        f"{value:.3f}" if isinstance(value, float) else value
        for value in (row["dense_accuracy"], row["sketch_accuracy"])
    ]
    return texts[0] if texts[0] == texts[1] and not isinstance(row["dense_accuracy"], float) else " / ".join(texts)


def _count(value: float) -> str:
    """Return 131 k, 1.2 M, 1.24 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _bytes(count: float) -> str:
    from src.records import readable

    return readable(count)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.scale", description="What the sketch saves over dense at each model size of a study."
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--study", default="scale", help="the study (default: scale)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows, with the study as first column")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="also draw savings and peaks by size")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.curves import style
    from analysis.runs import RunsError, load_evals, load_metrics, studies
    from analysis.tables import summary

    try:
        ((study, runs),) = studies(args.root, args.study)
        ends = summary(load_evals(runs), load_metrics(runs), runs)
        rows = rows_of(sizes(load_arms(runs)), dict(zip(ends["variant"], ends["final"], strict=True)))
        print(report(study, rows))
        if args.csv:
            pd.DataFrame([{"study": study} | row for row in rows]).to_csv(args.csv, index=False, float_format="%.12g")
            print(args.csv)
        if args.figure:
            with style():
                figure(rows).savefig(args.figure)
            print(args.figure)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
