"""Methods compared at equal settings, at equal tuning, and where each has moved the policy as far.

    python -m analysis.peers outputs
    python -m analysis.peers outputs --study peers --csv peers.csv --figure peers.png

Equal settings: the arms of the study with method.rate_factor 1, the rate published for each. Equal tuning: the arms of
the study of that name and `_tuned`, each at the best factor of its grid. Both tables have the accuracy at the end, and
that where the realised divergences of all updates add up to the same: who moves the policy further is not better for
it.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.arms import Arm, load_arms, outcome, record
from analysis.memory import PEAK, mib
from analysis.speed import aligned, number, times

# numpy, pandas, matplotlib and seaborn take seconds to import: the functions that need them do it; --help is quick.
if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NOTE = (
    "seeds: finished/all; accuracy: held out, at the last evaluation of the finished seeds, mean (range); peak:\n"
    "maximum of update peaks of each seed, mean over seeds; p50: of an update of any seed, warm-ups apart; KL: the\n"
    "realised divergences of all updates (nats per token) added up, mean over finished seeds; an update between two\n"
    "probes counts as the linear interpolation of these, one after the last probe as that one; accuracy at the common\n"
    "KL: where that sum is the largest that every seed of every arm reaches, linear between two evaluations"
)

_COMMON: dict[str, Any] = {"color": "0.4", "linewidth": 0.8, "linestyle": (0, (4, 2))}
_GUESS: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1.5))}


class Seed(NamedTuple):
    """A finished seed: the KL of its updates added up, and its held-out accuracy, at each evaluation. E of them."""

    kl_E: "NDArray[np.float64]"
    accuracy_E: "NDArray[np.float64]"


class Comparison(NamedTuple):
    """A table of arms: its rows, the curves of their seeds, and the largest KL that all of these reach (or NaN)."""

    title: str
    rows: list[dict[str, Any]]
    seeds: dict[str, list[Seed]]
    common_kl: float
    sentences: list[str]


def cumulative_kl(metrics: "pd.DataFrame") -> "NDArray[np.float64]":
    """Return the realised KL of a run's updates added up, (U + 1,): after update u at u. U is its last update.

    NaN, 0 at update 0 apart: from where a probe's was not finite, or where there was no probe at all.
    """
    import numpy as np

    updates = int(metrics["update"].max()) if len(metrics) else 0
    probed = metrics[metrics["control/realised_kl"].notna() | (metrics["control/probed"] == 1)]
    each_U = np.full(updates, np.nan)
    if len(probed):
        each_U = np.interp(np.arange(1, updates + 1), probed["update"], probed["control/realised_kl"])
    return np.concatenate([[0.0], np.cumsum(each_U)])


def compare(title: str, runs: "pd.DataFrame") -> Comparison:
    """Return the comparison of runs from `analysis.runs.load_runs`, each name of which is an arm."""
    import numpy as np

    from analysis.runs import load_evals, load_metrics

    arms = load_arms(runs)
    metrics, evals = load_metrics(runs), load_evals(runs)
    keys = ["control/realised_kl", "control/probed"]
    metrics = metrics.reindex(columns=[*metrics.columns.union(keys, sort=False)])
    evals = evals.reindex(columns=[*evals.columns.union(["eval/accuracy"], sort=False)])
    finals = final_accuracies(evals)
    curves = {arm.name: [seed for run in arm.runs if (seed := _curve(run.id, evals, metrics))] for arm in arms}
    reached = {name: min(seed.kl_E[-1] for seed in seeds) for name, seeds in curves.items() if seeds}
    common = min(reached.values(), default=math.nan)
    seconds = times(metrics, runs)
    p50 = seconds[seconds["part"] == "update"].set_index("name")["p50"].to_dict()
    rows = []
    for arm in arms:
        own = list(finals.get(arm.name, {}).values())
        at_common = [float(np.interp(common, seed.kl_E, seed.accuracy_E)) for seed in curves[arm.name]]
        row: dict[str, Any] = {
            "arm": arm.name,
            "seeds": " ".join(str(run.seed) for run in arm.runs if run.status == "finished"),
        }
        row |= {"finished": f"{sum(run.status == 'finished' for run in arm.runs)}/{len(arm.runs)}"}
        row |= _spread("accuracy", own)
        row["peak_bytes"] = math.nan if arm.unmeasured else record(arm, PEAK).value_bytes
        row["update_seconds_p50"] = p50.get(arm.name, math.nan)
        row["cumulative_kl"] = _mean([float(seed.kl_E[-1]) for seed in curves[arm.name]])
        row["common_kl"] = common
        row |= _spread("accuracy_at_common_kl", at_common)
        row["guessed_at_common_kl"] = any(seed.kl_E[1] > common for seed in curves[arm.name])
        row["outcome"] = outcome(arm)
        rows.append(row)
    sentences = [f"{row['arm']}: {row['outcome']}" for row in rows if row["outcome"]]
    if reached:
        least = min(reached, key=lambda name: reached[name])
        sentences.append(f"common KL: {common:.3g}, beyond which {least} does not go")
        if early := [row["arm"] for row in rows if row["guessed_at_common_kl"]]:
            sentences.append(
                "~: past it before the first evaluation after the start, so that the accuracy is a guess on a straight "
                f"line from there: {', '.join(early)}; evaluate more often"
            )
    if without := [arm.name for arm in arms if not curves[arm.name]]:
        sentences.append(
            f"no realised KL and accuracy of a finished seed, so not at the common KL: {', '.join(without)}"
        )
    return Comparison(title, rows, curves, common, [*sentences, *_differences(arms)])


def _curve(run_id: str, evals: "pd.DataFrame", metrics: "pd.DataFrame") -> Seed | None:
    """Return the curve of a finished run, as far as both of its numbers are known beyond the start."""
    import numpy as np

    own = evals[(evals["id"] == run_id) & (evals["status"] == "finished")].dropna(subset="eval/accuracy")
    kl = cumulative_kl(metrics[metrics["id"] == run_id])
    own = own[own["update"] < len(kl)]
    kl_E = kl[own["update"].to_numpy(dtype=int)]
    known_E = np.isfinite(kl_E)
    return Seed(kl_E[known_E], own["eval/accuracy"].to_numpy(dtype=float)[known_E]) if known_E.sum() > 1 else None


def final_accuracies(evals: "pd.DataFrame") -> dict[str, dict[int, float]]:
    """Return the accuracy at the last evaluation of each finished run: by name, then by seed."""
    last = evals[evals["status"] == "finished"].drop_duplicates("id", keep="last").dropna(subset="eval/accuracy")
    found: dict[str, dict[int, float]] = {}
    for name, seed, accuracy in last[["name", "seed", "eval/accuracy"]].itertuples(index=False):
        found.setdefault(str(name), {})[int(seed)] = float(accuracy)
    return found


def at_published_rates(runs: "pd.DataFrame") -> "tuple[pd.DataFrame, list[str]]":
    """Return the runs of the arms with method.rate_factor 1, and a sentence on the others."""
    factors = {arm.name: _factor(arm) for arm in load_arms(runs)}
    others = [name for name, factor in factors.items() if factor != 1]
    sentences = [f"left out, at other rates than their own: {', '.join(others)}"] if others else []
    return runs[~runs["name"].isin(others)], sentences


class Choice(NamedTuple):
    """The grid of an arm: mean accuracy by factor (NaN: no finished seed), the seeds of the mean, the best factor."""

    arm: str
    scores: dict[float, float]
    seeds: list[int]
    best: float
    names: dict[float, str]  # of the variants
    at_edge: bool


def choose(runs: "pd.DataFrame") -> list[Choice]:
    """Return the grid of each arm of a tuned study, with the factor of the best mean final accuracy.

    The mean is over the seeds that all factors with a finished one share; of equals the factor nearest 1 is chosen. An
    arm without a finished run is left out.
    """
    from analysis.runs import load_evals

    evals = load_evals(runs)
    finals = final_accuracies(evals.reindex(columns=[*evals.columns.union(["eval/accuracy"], sort=False)]))
    grids: dict[str, dict[float, str]] = {}
    for arm in load_arms(runs):
        config = arm.runs[0].config
        method = {key: value for key, value in (config.get("method") or {}).items() if key != "rate_factor"}
        grids.setdefault(json.dumps([method, config.get("control")]), {})[_factor(arm)] = arm.name
    choices = []
    for grid in grids.values():
        names = dict(sorted(grid.items()))
        finished = [set(finals[name]) for name in names.values() if name in finals]
        seeds = sorted(set.intersection(*finished)) if finished else []
        scores = {
            factor: _mean([finals[name][seed] for seed in seeds]) if name in finals else math.nan
            for factor, name in names.items()
        }
        if known := [factor for factor, score in scores.items() if score == score]:
            best = max(known, key=lambda factor: (scores[factor], -abs(math.log(factor))))
            short = re.sub(r"-rate_factor=[0-9.]+(e[-+]?[0-9]+)?", "", names[best])
            choices.append(Choice(short, scores, seeds, best, names, best in (min(names), max(names))))
    return choices


def at_best_rates(runs: "pd.DataFrame", choices: Sequence[Choice]) -> "tuple[pd.DataFrame, list[str]]":
    """Return the runs at the chosen factors, under seeds that did not choose where there are some; and what to know."""
    import pandas as pd

    kept, both = [], []
    for choice in choices:
        own = runs[runs["name"] == choice.names[choice.best]]
        others = own[~own["seed"].isin(choice.seeds)]
        if not (others["status"] == "finished").any():
            others = own
            both.append(choice.arm)
        kept.append(others.assign(name=choice.arm))
    sentences = []
    if both:
        whose = "every arm" if len(both) == len(choices) else ", ".join(both)
        sentences.append(
            f"compared under the seeds that also chose, so that the best is too high by chance: {whose}; run the "
            "chosen factors under other seeds in this study"
        )
    return pd.concat(kept) if kept else runs.iloc[:0], sentences


def grid_text(choices: Sequence[Choice]) -> str:
    """Return the grids, a row an arm, with the factors chosen."""
    factors = sorted({factor for choice in choices for factor in choice.scores})
    rows = []
    for choice in choices:
        scores = [number(choice.scores.get(factor, math.nan), ".3f") for factor in factors]
        seeds = " ".join(map(str, choice.seeds))
        edge = "at the edge of its grid: a better one may lie beyond" if choice.at_edge else ""
        rows.append([choice.arm, seeds, *scores, f"{choice.best:g}", edge])
    width = max(len(row[-1]) for row in rows)
    rows = [[*row[:-1], row[-1].ljust(width)] for row in rows]
    title = (
        "final accuracy by method.rate_factor, mean over the seeds that all factors of the arm have; the best is chosen"
    )
    headers = ["arm", "seeds", *(f"{factor:g}" for factor in factors), "chosen", ""]
    return f"{title}\n{aligned(headers, rows, texts=2)}"


def table_text(comparison: Comparison) -> str:
    """Return a comparison for a terminal; `NOTE` explains its columns."""
    rows = [
        [row["arm"], row["finished"], _with_range(row, "accuracy")]
        + ["out of memory" if row["outcome"].startswith("out of memory") else mib(row["peak_bytes"])]
        + [number(row["update_seconds_p50"], ".3g"), number(row["cumulative_kl"], ".3g")]
        + ["~" * row["guessed_at_common_kl"] + _with_range(row, "accuracy_at_common_kl")]
        for row in comparison.rows
    ]
    headers = ["arm", "seeds", "final accuracy", "peak MiB", "update\np50 s", "cumulative\nrealised KL"]
    headers.append(f"accuracy at\nKL {number(comparison.common_kl, '.3g')}")
    return "\n".join([comparison.title, aligned(headers, rows), *comparison.sentences])


def figure(comparisons: Sequence[Comparison]) -> "Figure":
    """Held-out accuracy against cumulative realised KL, a panel a comparison and a colour an arm.

    A thick line is the mean over seeds as far as all of them reach, its band their range; before the first evaluation
    after the start, where it is a guess, it is dotted. Thin lines are the seeds.

    Raises:
        RunsError: no finished run has both.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    from analysis.curves import LEGEND_ROW, looks, style
    from analysis.runs import RunsError

    moved = [{name: seeds for name, seeds in one.seeds.items() if _moved(seeds)} for one in comparisons]
    names = list(dict.fromkeys(name for seeds in moved for name in seeds))
    if not names:
        raise RunsError("nothing to draw: no finished run has both control/realised_kl above 0 and eval/accuracy")
    look_of = looks(names)
    with style():
        result = Figure(layout="constrained")
        axes = result.subplots(1, len(comparisons), sharey=True, squeeze=False)[0]
        handles: dict[str, Any] = {}
        for ax, one, arms in zip(axes, comparisons, moved, strict=True):
            ax.set_title(f"{one.title.split(':')[0]}; band: range over seeds")
            ax.set_xlabel("cumulative realised KL (nats per token)")
            ax.set_xscale("log")
            left = min((float(seed.kl_E[seed.kl_E > 0][0]) for seeds in arms.values() for seed in seeds), default=1e-3)
            for name, seeds in arms.items():
                _draw_arm(ax, name, seeds, min(left, one.common_kl or left) / 1.5, look_of[name]._asdict())
            handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
            low, high = ax.get_xlim()
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
            if one.common_kl > 0:
                ax.axvline(one.common_kl, **_COMMON)
        axes[0].set_ylabel("held-out accuracy")
        handles["common KL"] = Line2D([], [], **_COMMON)
        handles["guess, before the first evaluation"] = Line2D([], [], color="0.4", **_GUESS)
        texts = [textwrap.fill(text, 40) for text in handles]
        columns = len(comparisons) * (2 if max(map(len, handles)) <= 28 else 1)
        legend = result.legend(list(handles.values()), texts, loc="outside lower left", ncols=columns, handlelength=2.2)
        for text in legend.get_texts():
            text.set_parse_math(False)
        result.set_size_inches(
            3.5 * len(comparisons), 2.6 + LEGEND_ROW * -(-sum(text.count("\n") + 1 for text in texts) // columns)
        )
    return result


def _moved(seeds: Sequence[Seed]) -> bool:
    return bool(seeds) and all(seed.kl_E[-1] > 0 for seed in seeds)


def _draw_arm(ax: "Axes", name: str, seeds: Sequence[Seed], left: float, look: dict[str, Any]) -> None:
    """Draw an arm on a logarithmic axis that begins at `left`, many points a line, for it is straight in KL itself."""
    import numpy as np

    for seed in seeds:
        kl_K = np.geomspace(left, seed.kl_E[-1], 200)
        ax.plot(kl_K, np.interp(kl_K, seed.kl_E, seed.accuracy_E), color=look["color"], linewidth=0.6, alpha=0.4)
    kl_K = np.geomspace(left, min(seed.kl_E[-1] for seed in seeds), 200)
    accuracy_SK = np.stack([np.interp(kl_K, seed.kl_E, seed.accuracy_E) for seed in seeds])
    mean_K, known_K = accuracy_SK.mean(0), kl_K >= min(kl_K[-1], max(seed.kl_E[1] for seed in seeds))
    ax.fill_between(kl_K, accuracy_SK.min(0), accuracy_SK.max(0), color=look["color"], alpha=0.15, linewidth=0)
    ax.plot(kl_K[~known_K], mean_K[~known_K], color=look["color"], **_GUESS)
    ax.plot(
        kl_K[known_K],
        mean_K[known_K],
        label=name,
        linewidth=1.4,
        markersize=4.5,
        markeredgecolor="w",
        markeredgewidth=0.4,
        markevery=[-1],
        **look,
    )


def _differences(arms: Sequence[Arm]) -> list[str]:
    """Return sentences on what arms differ in beside their method."""
    counted = [arm for arm in arms if arm.counted]
    sentences = []
    for arm in counted[1:]:
        keys: list[str] = []
        for ours, base in zip(_conditions(arm), _conditions(counted[0]), strict=True):
            keys += [key for key in sorted({*ours, *base}) if ours.get(key) != base.get(key)]
        if keys:
            sentences.append(f"not at equal settings: {arm.name} differs from {counted[0].name} in {', '.join(keys)}")
    return sentences


def _conditions(arm: Arm) -> tuple[Mapping[str, Any], ...]:
    one = record(arm, PEAK)
    control = arm.counted[0].config.get("control") or {}
    return one.settings, one.hardware, {f"control.{key}": value for key, value in control.items()}


def _factor(arm: Arm) -> float:
    return float((arm.runs[0].config.get("method") or {}).get("rate_factor", 1.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _spread(key: str, values: Sequence[float]) -> dict[str, float]:
    low, high = (min(values), max(values)) if values else (math.nan, math.nan)
    return {key: _mean(values), f"{key}_lowest": low, f"{key}_highest": high}


def _with_range(row: Mapping[str, Any], key: str) -> str:
    if row[key] != row[key]:
        return "-"
    return f"{row[key]:.3f} ({row[f'{key}_lowest']:.3f} to {row[f'{key}_highest']:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.peers",
        description="Methods compared at equal settings, at equal tuning and at equal cumulative KL.",
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--study", default="peers", help="the study (default: peers); tuned is the one of NAME_tuned")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows of both comparisons")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="also draw accuracy against cumulative KL")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.curves import style
    from analysis.runs import RunsError, studies

    tuned = f"{args.study}_tuned"
    comparisons: list[Comparison] = []
    rows: list[dict[str, Any]] = []
    try:
        found = dict(studies(args.root))
        if not {args.study, tuned} & set(found):
            raise RunsError(f"no study {args.study} or {tuned} below {args.root}: there is {', '.join(found)}")
        for study, name in ((args.study, "equal settings"), (tuned, "equal tuning")):
            if study not in found:
                print(f"{name}: there is no study {study}\n")
                continue
            runs = found[study]
            if study == tuned:
                choices = choose(runs)
                if not choices:
                    print(f"{name}: no run of study {study} is finished\n")
                    continue
                print(f"{grid_text(choices)}\n")
                kept, sentences = at_best_rates(runs, choices)
                title = f"at {name}: study {study}, each arm at the best factor of its grid"
                about = {one.arm: (one.best, one.at_edge) for one in choices}
            else:
                kept, sentences = at_published_rates(runs)
                title = f"at {name}: study {study}, each arm at its default rate (method.rate_factor 1)"
                about = {}
            comparison = compare(title, kept)
            print("\n".join([table_text(comparison), *sentences]) + "\n")
            comparisons.append(comparison)
            for row in comparison.rows:
                factor, at_edge = about.get(row["arm"], (1.0, False))
                rows.append({"study": study, "compared": name, "rate_factor": factor, "at_edge": at_edge} | row)
        print(NOTE)
        if args.csv:
            pd.DataFrame(rows).to_csv(args.csv, index=False, float_format="%.12g")
            print(args.csv)
        if args.figure:
            with style():
                figure(comparisons).savefig(args.figure)
            print(args.figure)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
