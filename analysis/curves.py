"""Training curves: one figure and one table a study.

    python -m analysis.curves outputs
    python -m analysis.curves outputs --study main --window 50 --metrics eval/accuracy policy/entropy

What a figure shows: each seed is smoothed by itself, with a trailing moving average that starts where its
window is full; a thick line is the mean of the smoothed seeds, its band their range (least to greatest).
Where a seed has ended early, mean and band break and go on paler over the seeds that are left, so that a
change of who is counted never looks like a change of what was learnt.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# pandas, matplotlib and seaborn take seconds to import: the functions that need them do it; --help is quick.
if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS = ("eval/accuracy", "rollout/response_tokens_mean", "control/predicted_kl")
"""The panels of a figure. The last draws realised KL and budget, too."""

LABELS = {
    "eval/accuracy": "held-out accuracy",
    "rollout/response_tokens_mean": "response length\nin training (tokens)",
    "control/predicted_kl": "KL of an update\n(nats per token)",
    "control/step_scale": "step scale",
    "memory/peak_bytes": "peak memory",
    "time/update_seconds": "time per update (s)",
    "reward/mean": "mean training reward",
    "policy/entropy": "policy entropy (nats)",
}
"""Axis labels; any other key is its own."""

WIDTH, PANEL_HEIGHT, LEGEND_ROW = 3.3, 1.45, 0.135
"""Inches: one column of a paper, and what a panel and a line of the legend add to the height."""


DIVERGENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "control/realised_kl": ("KL: realised", {"linewidth": 0.7}),
    "control/predicted_kl": ("KL: predicted", {"linewidth": 2.4, "alpha": 0.35}),
    "control/budget": ("KL: budget", {"linewidth": 1.0, "linestyle": (0, (1, 1))}),
}
"""What the panel of control/predicted_kl shows: key -> (words in the legend, line)."""


_MEAN: dict[str, Any] = {"linewidth": 1.4, "markersize": 4, "markeredgewidth": 0.4}
_SEED: dict[str, Any] = {"linewidth": 0.6}
_UNFINISHED: dict[str, Any] = {"linewidth": 0.6, "linestyle": (0, (3, 2)), "marker": "x", "markersize": 4}
_START: dict[str, Any] = {"linewidth": 0.8, "linestyle": (0, (1, 2)), "color": "0.4"}


class Look(NamedTuple):
    """How a variant is drawn; no two of 90 variants share all three."""

    color: Any
    marker: str
    linestyle: Any


@contextmanager
def style() -> Iterator[None]:
    """Print sizes, text that stays text in PDF and SVG, nothing random in the files; undone on leaving."""
    import matplotlib

    settings: dict[Any, Any] = {
        "font.size": 8,
        "axes.labelsize": 8,
        "axes.titlesize": 6.5,
        "axes.titlelocation": "left",
        "axes.titlepad": 3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "grid.color": "0.9",
        "grid.linewidth": 0.5,
        "axes.axisbelow": True,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "figure.dpi": 150,
        "savefig.dpi": 300,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "curves",
    }
    with matplotlib.rc_context(settings):
        yield


def moving_average(values: "Sequence[float] | np.ndarray", window: int) -> "np.ndarray":
    """Mean of each value and the `window - 1` before it; NaN where there are not that many. (T,) -> (T,)"""
    import numpy as np

    values = np.asarray(values, dtype=float)
    averages = np.full(len(values), np.nan)
    if len(values) >= window:
        averages[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return averages


def smooth(rows: "pd.DataFrame", key: str, window: int) -> "pd.DataFrame":
    """`key` of each run by itself as a trailing moving average, over `window` evaluations or updates.

    A key that only every k-th update has is averaged over its `window // k` last values (at least one). Columns: name,
    id, seed, status, update, value. Rows without a finite value are left out before, those where the window is not yet
    full after.
    """
    import numpy as np

    def averaged(run: "pd.Series") -> "np.ndarray":
        updates = kept.loc[run.index, "update"]
        every = 1 if key.startswith("eval/") or len(run) < 3 else int(updates.diff().median())
        return moving_average(run, max(1, window // every))

    kept = rows.loc[np.isfinite(rows[key]), ["name", "id", "seed", "status", "update", key]]
    kept = kept.rename(columns={key: "value"}).sort_values(["id", "update"], kind="stable")
    kept["value"] = kept.groupby("id")["value"].transform(averaged)
    return kept.dropna(subset="value")


def default_window(rows: "pd.DataFrame", key: str) -> int:
    """A fifth of the evaluations of the longest run, at most 3; a tenth of its updates, at most 20."""
    there = rows[rows[key].notna()]
    if key.startswith("eval/"):
        return min(3, max(1, int(there["id"].value_counts().max()) // 5))
    return min(20, max(1, int(there["update"].max()) // 10))


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each variant: colours for colour-blind readers, and markers that survive grey print."""
    import seaborn

    colors = seaborn.color_palette("colorblind")
    markers = "os^DvPX<>"
    lines: list[Any] = ["-", (0, (4, 1)), (0, (4, 1, 1, 1)), (0, (1, 1))]
    return {
        name: Look(colors[i % len(colors)], markers[i % len(markers)], lines[i // len(colors) % len(lines)])
        for i, name in enumerate(names)
    }


def figure(
    evals: "pd.DataFrame",
    metrics: "pd.DataFrame",
    runs: "pd.DataFrame",
    keys: Sequence[str] = KEYS,
    window: int | None = None,
    eval_window: int | None = None,
) -> "Figure":
    """One panel a key, one under the other, one column wide, from the frames of analysis.runs for one study.

    `window` is in updates, `eval_window` in evaluations; without them `default_window` chooses. Of the
    default `keys`, those that nobody logged are left out.

    Raises:
        RunsError: more than one study, a key that nobody logged, a window longer than every run, or no data.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    from analysis.runs import RunsError

    if runs["study"].nunique() != 1:
        raise RunsError(f"a figure shows one study, not {runs['study'].nunique()}: select it from the runs first")
    rows_of = _rows_of_panels(evals, metrics, keys)
    labels = _legend_labels(runs)
    look_of = looks(list(labels))
    with style():
        result = Figure(layout="constrained")
        panels = result.subplots(len(rows_of), 1, sharex=True, squeeze=False)[:, 0]
        ended = False
        for ax, (key, rows) in zip(panels, rows_of.items(), strict=True):
            asked = eval_window if key.startswith("eval/") else window
            width = asked or default_window(rows, key)
            smoothed = smooth(rows, key, width)
            if smoothed.empty:
                raise RunsError(f"no run has {width} values of {key}: ask for a smaller window")
            ax.set_title(_window_note(key, width))
            if key == "control/predicted_kl":
                _draw_divergence(ax, rows, width, look_of)
            else:
                ended |= bool((smoothed["status"] != "finished").any())
                _draw_seeds(ax, smoothed, look_of)
            ax.set_xlabel("")
            ax.set_ylabel(LABELS.get(key, key))
            if key == "eval/accuracy":
                _frame_accuracy(ax, rows)
            elif key.endswith("_bytes"):
                ax.yaxis.set_major_formatter(EngFormatter("B"))
        panels[-1].set_xlabel("update")
        panels[-1].set_xlim(left=min(0.0, panels[-1].get_xlim()[0]))
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        result.align_ylabels(panels)
        lines = _draw_legend(result, labels, look_of, ended)
        result.set_size_inches(WIDTH, 0.3 + PANEL_HEIGHT * len(panels) + LEGEND_ROW * lines)
    return result


def save(result: "Figure", folder: Path, stem: str) -> list[Path]:
    """`result` as PNG, SVG and PDF in `folder`, without dates: the same figure gives the same bytes."""
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with style():
        for suffix, metadata in dates.items():
            paths.append(folder / f"{stem}.{suffix}")
            result.savefig(paths[-1], metadata=metadata)
    return paths


def _rows_of_panels(evals: "pd.DataFrame", metrics: "pd.DataFrame", keys: Sequence[str]) -> "dict[str, pd.DataFrame]":
    """Each key that gets a panel -> the frame that has it; errors as in `figure`."""
    from analysis.runs import RunsError

    logged = {
        key: rows
        for rows in (metrics, evals)
        for key in rows.select_dtypes(["number", "bool"]).dropna(axis=1, how="all")
        if "/" in key
    }
    if not logged:
        raise RunsError("nothing to draw yet: no evaluation and no update was written")
    if tuple(keys) == KEYS:
        keys = [key for key in KEYS if key in logged]
    for key in keys:
        if key not in logged:
            raise RunsError(f"no run of the study logged {key}: it has {', '.join(sorted(logged))}")
    if not keys:
        raise RunsError(f"none of {', '.join(KEYS)} was logged: choose from {', '.join(sorted(logged))}")
    return {key: logged[key] for key in keys}


def _stretches(variant: "pd.DataFrame") -> "Iterator[tuple[bool, pd.DataFrame]]":
    """The smoothed rows of a variant, split by how many of its seeds are there: (all of them?, rows)."""
    present = variant.groupby("update")["id"].transform("size")
    for count, stretch in variant.groupby(present):
        yield count == variant["id"].nunique(), stretch


def _draw_seeds(ax: "Axes", smoothed: "pd.DataFrame", look_of: dict[str, Look]) -> None:
    """Thin lines for the seeds, then the mean and the range over those that are present at an update."""
    import seaborn

    fade = min(1.0, 5 / len(look_of))  # of many variants only the means can be told apart
    for (name, _), seed in smoothed.groupby(["name", "id"], sort=False):
        ended = seed["status"].iloc[0] != "finished"
        ax.plot(
            seed["update"],
            seed["value"],
            label=f"{name} seed {seed['seed'].iloc[0]}",
            color=look_of[name].color,
            alpha=0.9 if ended else 0.6 * fade,
            zorder=2.5 if ended else 2,  # where a seed ended must not be hidden
            **(_UNFINISHED if ended else _SEED),
            markevery=[-1],
        )
    for number, (name, variant) in enumerate(smoothed.groupby("name", sort=False)):
        gap = max(1, variant["update"].nunique() // 5)
        for complete, stretch in _stretches(variant):
            first = min(number * gap // len(look_of), stretch["update"].nunique() - 1)
            seaborn.lineplot(
                data=stretch,
                x="update",
                y="value",
                errorbar=("pi", 100),
                err_kws={"alpha": 0.15 * fade, "linewidth": 0},
                ax=ax,
                legend=False,
                label=name,
                alpha=1.0 if complete else 0.4,
                markevery=(first, gap),
                **_MEAN,
                **look_of[name]._asdict(),
            )


def _draw_divergence(ax: "Axes", rows: "pd.DataFrame", window: int, look_of: dict[str, Look]) -> None:
    """Means over seeds only: three quantities a variant leave no room for bands."""
    from matplotlib.ticker import LogLocator, NullLocator

    for key in DIVERGENCES:
        if key in rows and rows[key].notna().any():
            for name, variant in smooth(rows, key, window).groupby("name", sort=False):
                for _, stretch in _stretches(variant):
                    mean = stretch.groupby("update")["value"].mean()
                    ax.plot(
                        mean.index,
                        mean,
                        color=look_of[name].color,
                        label=f"{name} {key}",
                        **DIVERGENCES[key][1],
                    )
    ax.set_yscale("log", nonpositive="mask")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")


def _frame_accuracy(ax: "Axes", rows: "pd.DataFrame") -> None:
    """Mark where training started; never zoom in so far that noise looks like a result."""
    start = rows.loc[rows["update"] == 0, "eval/accuracy"].mean()
    if start == start:
        ax.axhline(start, label="start", **_START)
    low, high = ax.get_ylim()
    spare = max(0.0, 0.2 - (high - low)) / 2
    ax.set_ylim(max(-0.02, low - spare), min(1.02, high + spare))


def _window_note(key: str, window: int) -> str:
    unit = "evaluation" if key.startswith("eval/") else "update"
    return f"every {unit}, not smoothed" if window == 1 else f"each seed: mean of the last {window} {unit}s"


def _legend_labels(runs: "pd.DataFrame") -> dict[str, str]:
    """Text of each variant: `decay (3 seeds)`, or `decay (2 of 3 seeds finished)`."""
    labels = {}
    for name, variant in runs.groupby("name", sort=False):
        seeds, finished = len(variant), int((variant["status"] == "finished").sum())
        count = f"{seeds} seed{'s' * (seeds > 1)}" if finished == seeds else f"{finished} of {seeds} seeds finished"
        labels[str(name)] = f"{name} ({count})"
    return labels


def _draw_legend(result: "Figure", labels: dict[str, str], look_of: dict[str, Look], ended: bool) -> int:
    """One legend below the panels, for all of them; returns how many lines of text it takes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {str(line.get_label()) for ax in result.axes for line in ax.get_lines()}
    grey: dict[str, Any] = {"color": "0.4"}
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], markeredgecolor="w", **_MEAN, **look_of[name]._asdict()), label)
        for name, label in labels.items()
    ]
    band = (Patch(alpha=0.3, linewidth=0, **grey), Line2D([], [], **_MEAN, **grey))
    entries.append((band, "mean, band: range over seeds"))
    entries.append((Line2D([], [], **_SEED, **grey), "one seed"))
    if ended:
        entries.append((Line2D([], [], **_UNFINISHED, **grey), "unfinished seed (after it, the mean is pale)"))
    if "start" in drawn:
        entries.append((Line2D([], [], **_START), "accuracy at update 0"))
    for key, (words, line) in DIVERGENCES.items():
        if any(label.endswith(f" {key}") for label in drawn):
            entries.append((Line2D([], [], **line, **grey), words))
    columns = 2 if max(len(text) for _, text in entries) <= 28 else 1
    texts = [text if len(text) <= 48 else textwrap.fill(text.replace(",", ", "), 48) for _, text in entries]
    legend = result.legend(
        [handle for handle, _ in entries],
        texts,
        loc="outside lower left",
        ncols=columns,
        handlelength=2.2,
        columnspacing=1.0,
        labelspacing=0.25,
        borderaxespad=0.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a label is a user's word, a dollar sign included
    return -(-sum(text.count("\n") + 1 for text in texts) // columns)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.curves", description="Draw the training curves of every study below ROOT."
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--study", help="only this study (default: every one)")
    parser.add_argument("--window", type=_positive, metavar="W", help="moving average over W updates")
    parser.add_argument("--eval-window", type=_positive, metavar="W", help="moving average over W evaluations")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: ROOT/figures)")
    parser.add_argument("--metrics", nargs="+", metavar="KEY", default=KEYS, help="a panel for each of these keys")
    args = parser.parse_args(argv)

    from analysis.runs import RunsError, load_evals, load_metrics, studies
    from analysis.tables import NOTE, summary, table_text

    written: list[Path] = []
    try:
        for study, part in studies(args.root, args.study):
            evals, metrics = load_evals(part), load_metrics(part)
            print(f"study {study}\n{table_text(summary(evals, metrics, part))}\n{NOTE}")
            try:
                result = figure(evals, metrics, part, args.metrics, args.window, args.eval_window)
            except RunsError as reason:  # the other studies may have what this one lacks
                print(f"error: study {study}: {reason}", file=sys.stderr)
                continue
            for path in save(result, args.out or args.root / "figures", f"curves-{_file_name(study)}"):
                print(path)
                written.append(path)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if written else 2


def _file_name(study: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", study)


if __name__ == "__main__":
    sys.exit(main())
