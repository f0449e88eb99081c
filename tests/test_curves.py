"""The reading half: run folders (written by hand, tests/runfolders.py) -> frames -> curves."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.curves import default_window, figure, main, moving_average, smooth, style
from analysis.runs import RunsError, find_runs, load_evals, load_metrics, load_runs, read_rows
from analysis.tables import summary
from tests.runfolders import write_ablation, write_run

REPO = Path(__file__).parent.parent


def mean_lines(ax: Axes, name: str) -> list[tuple[list[float], list[float]]]:
    lines = [line for line in ax.get_lines() if line.get_label() == name]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


def seed_line(ax: Axes, name: str, seed: int) -> list[float]:
    (line,) = [line for line in ax.get_lines() if line.get_label() == f"{name} seed {seed}"]
    return list(line.get_ydata())


def legend_texts(result: Figure) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in result.legends[0].get_texts()]


def frames(root: Path):
    runs = load_runs(root)
    return load_evals(runs), load_metrics(runs), runs


# Reading


def test_every_row_is_read_and_only_the_torn_one_is_not(tmp_path, capsys):
    """F56: row counts are exact, and the same at every call; a torn last line is no row and no warning."""
    write_ablation(tmp_path)
    evals, metrics, runs = frames(tmp_path)
    assert len(runs) == 6
    assert metrics.groupby(["label", "seed"]).size().to_dict() == {
        **{("none", seed): 40 for seed in range(3)},
        **{("decay", 0): 40, ("decay", 1): 40, ("decay", 2): 20},
    }
    assert evals.groupby(["label", "seed"]).size().to_list() == [5, 5, 3, 5, 5, 5]
    assert list(evals.columns[:8]) == ["id", "study", "label", "variant", "name", "seed", "status", "update"]
    assert metrics.equals(load_metrics(runs))
    assert capsys.readouterr().err == ""


def test_a_last_line_counts_if_it_is_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"update": 1, "a/b": 1}\n{"update": 2, "a/b": 2}')
    assert [row["a/b"] for row in read_rows(path)] == [1, 2]


def test_a_resumed_update_counts_once_and_the_later_row_wins(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"update": {u}, "a/b": {v}}}\n' for u, v in [(1, 1), (2, 2), (3, 3), (2, 9)]))
    assert [(row["update"], row["a/b"]) for row in read_rows(path)] == [(1, 1), (2, 9), (3, 3)]


def test_a_damaged_line_in_the_middle_is_reported(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"update": 1}\n\x00\xff\n[3]\n{"update": true}\n{"update": 4}\n')
    assert [row["update"] for row in read_rows(path)] == [1, 4]
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(" of ")[0] for line in warnings] == [f"warning: skipped line {n}" for n in (2, 3, 4)]


def test_runs_are_found_at_any_depth_but_not_in_hidden_or_wandb_folders(tmp_path):
    deep = write_run(tmp_path / "a" / "b", "none", 0)
    write_run(tmp_path / "wandb", "none", 1)
    write_run(tmp_path / ".trash", "none", 2)
    assert find_runs(tmp_path) == [deep]
    assert find_runs(deep) == [deep]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, not an object"),
        ('{"schema_version": 2}', "has schema_version 2"),
        ('{"schema_version": 1, "id": "x"}', "damaged: its study is None"),
        (
            '{"schema_version": 1, "id": "x", "study": "s", "label": "l", "variant": "v", "seed": 0, '
            '"status": "running", "heartbeat": "noon"}',
            "damaged: its heartbeat is 'noon'",
        ),
    ],
)
def test_a_damaged_record_costs_one_line_and_not_the_other_runs(tmp_path, capsys, content, reason):
    broken = write_run(tmp_path, "none", 0)
    (broken / "run.json").write_text(content)
    with pytest.raises(RunsError, match="none of the 1 runs"):
        load_runs(tmp_path)
    capsys.readouterr()
    write_run(tmp_path, "none", 1)
    assert list(load_runs(tmp_path)["seed"]) == [1]
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line and str(broken) in line


def test_a_run_without_a_heartbeat_for_a_minute_was_killed(tmp_path):
    write_run(tmp_path, "none", 0, status="running", heartbeat=1000.0)
    assert list(load_runs(tmp_path, now=1059.0)["status"]) == ["running"]
    assert list(load_runs(tmp_path, now=1061.0)["status"]) == ["killed"]


def test_a_failed_run_is_data(tmp_path):
    write_run(
        tmp_path,
        "baseline",
        0,
        status="out_of_memory",
        phase="backward",
        error={"type": "OutOfMemoryError", "message": "-"},
    )
    (run,) = load_runs(tmp_path).to_dict("records")
    assert (run["status"], run["phase"], run["error"]) == ("out_of_memory", "backward", "OutOfMemoryError")
    assert (run["task"], run["warm_start_accuracy"], run["updates"]) == ("addition", 0.3, 0)


def test_order_and_names(tmp_path, capsys):
    """F41: two variants of one label stay two; numbers sort by value; a copy of a run is no further seed."""
    for label, variant in [("rank=16", "aaaaaaaa"), ("rank=4", "bbbbbbbb"), ("rank=4", "cccccccc")]:
        write_run(tmp_path, label, 0, variant=variant)
    write_run(tmp_path / "copy", "rank=16", 0, variant="aaaaaaaa", start=900.0)
    assert list(load_runs(tmp_path)["name"]) == ["rank=4 [bbbbbbbb]", "rank=4 [cccccccc]", "rank=16"]
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "copy") in line


# The numbers that are drawn


def test_moving_average_is_trailing_and_starts_where_the_window_is_full():
    np.testing.assert_allclose(moving_average([1, 2, 6, 4], 2), [np.nan, 1.5, 4, 5])
    np.testing.assert_allclose(moving_average([1, 2, 6, 4], 1), [1, 2, 6, 4])
    assert np.isnan(moving_average([1, 2], 3)).all()
    spike = moving_average([1e20, 1, 1, 1], 2)
    assert spike[-1] == 1.0  # a running sum would have lost the ones beside the spike


def test_each_seed_is_smoothed_by_itself(tmp_path):
    """Smoothing after pooling would mix seeds; here seed 1 lies far above seed 0."""
    for seed, accuracies in enumerate([[0.0, 0.2, 0.4], [0.5, 0.7, 0.6]]):
        write_run(tmp_path, "none", seed, [{"update": u, "eval/accuracy": a} for u, a in enumerate(accuracies)])
    evals, _, _ = frames(tmp_path)
    smoothed = smooth(evals, "eval/accuracy", 2)
    assert list(smoothed["seed"]) == [0, 0, 1, 1] and list(smoothed["update"]) == [1, 2, 1, 2]
    np.testing.assert_allclose(smoothed["value"], [0.1, 0.3, 0.6, 0.65])


def test_the_lines_are_the_numbers(tmp_path):
    """Three seeds to update 20, two after it: the mean breaks there and goes on over the two."""
    write_ablation(tmp_path)
    result = figure(*frames(tmp_path), window=10, eval_window=2)
    accuracy, tokens, divergence = result.axes
    # decay: accuracy = 0.3 + 0.1 seed + 0.01 update, evaluated every 10; window 2 shifts by 5 updates
    for seed, end in [(0, 40), (1, 40), (2, 20)]:
        expected = [0.3 + 0.1 * seed + 0.01 * (u - 5) for u in range(10, end + 1, 10)]
        np.testing.assert_allclose(seed_line(accuracy, "decay", seed), expected)
    (few_x, few_y), (all_x, all_y) = mean_lines(accuracy, "decay")
    assert (all_x, few_x) == ([10, 20], [30, 40])
    np.testing.assert_allclose(all_y, [0.45, 0.55])
    np.testing.assert_allclose(few_y, [0.6, 0.7])
    # tokens = 10 + seed + update, window 10 shifts by 4.5
    ((x, y),) = mean_lines(tokens, "none")
    assert x == list(range(10, 41))
    np.testing.assert_allclose(y, np.arange(10, 41) - 4.5 + 11)
    low, high = _band(tokens, "none", update=10)
    np.testing.assert_allclose([low, high], [15.5, 17.5])
    assert divergence.get_yscale() == "log"
    assert len(mean_lines(divergence, "decay control/budget")) == 2
    assert mean_lines(divergence, "none control/budget") == []


def _band(ax: Axes, name: str, update: int) -> tuple[float, float]:
    """Least and greatest edge of the variant's band at `update`."""
    names = [line.get_label() for line in ax.get_lines() if " seed " not in str(line.get_label())]
    vertices = ax.collections[names.index(name)].get_paths()[0].vertices
    at_update = vertices[vertices[:, 0] == update, 1]
    return at_update.min(), at_update.max()


def test_the_legend_counts_seeds_and_says_what_the_band_is(tmp_path):
    """F64."""
    write_ablation(tmp_path)
    result = figure(*frames(tmp_path), window=10, eval_window=2)
    texts = legend_texts(result)
    assert texts[:3] == ["decay (2 of 3 seeds finished)", "none (3 seeds)", "mean, band: range over seeds"]
    assert "unfinished seed (after it, the mean is pale)" in texts
    titles = [ax.get_title(loc="left") for ax in result.axes]
    assert titles == ["each seed: mean of the last 2 evaluations"] + 2 * ["each seed: mean of the last 10 updates"]
    unfinished = [line for line in result.axes[0].get_lines() if line.get_label() == "decay seed 2"]
    assert [line.get_marker() for line in unfinished] == ["x"] and unfinished[0].is_dashed()


def test_the_legend_overlaps_no_panel(tmp_path):
    for number in range(12):
        write_run(tmp_path, f"method.rank={number},method.refresh_every=never,control.name=decay", 0, [ROW])
    result = figure(*frames(tmp_path))
    result.draw_without_rendering()
    legend = result.legends[0].get_window_extent()
    assert legend.y0 >= 0 and legend.x1 <= result.bbox.x1
    for ax in result.axes:
        assert not legend.overlaps(ax.get_tightbbox())


ROW = {"update": 0, "eval/accuracy": 0.5}


def test_more_variants_than_colours_stay_apart(tmp_path):
    names = [f"rank={number}" for number in range(1, 31)]
    for name in names:
        write_run(tmp_path, name, 0, [ROW])
    (ax,) = figure(*frames(tmp_path)).axes
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    shapes = {(str(lines[name].get_color()), lines[name].get_marker()) for name in names}
    dashes = {(str(lines[name].get_color()), str(lines[name]._unscaled_dash_pattern)) for name in names}
    assert len(shapes) == len(dashes) == 30


def test_default_windows_fit_short_runs(tmp_path):
    def rows(updates: int) -> list[dict]:
        return [{"update": update, "a/b": 1.0, "eval/a": 1.0} for update in range(1, updates + 1)]

    for seed, updates in enumerate([8, 200]):
        write_run(tmp_path / str(updates), "none", seed, rows(updates), rows(updates))
    for updates, window, eval_window in [(8, 1, 1), (200, 20, 3)]:
        evals, metrics, _ = frames(tmp_path / str(updates))
        assert (default_window(metrics, "a/b"), default_window(evals, "eval/a")) == (window, eval_window)


def test_values_that_are_not_finite_are_left_out(tmp_path):
    values = [1.0, float("nan"), float("inf"), None, 3.0]
    write_run(tmp_path, "none", 0, [], [{"update": u, "a/b": v} for u, v in enumerate(values, 1)])
    (ax,) = figure(*frames(tmp_path), keys=["a/b"], window=2).axes
    assert mean_lines(ax, "none") == [([5], [2.0])]


def test_a_window_is_in_updates_where_only_some_have_the_value(tmp_path):
    """Every 4th update: the last 8 updates have two values."""
    write_run(
        tmp_path, "none", 0, [], [{"update": u} | ({"a/b": float(u)} if u % 4 == 0 else {}) for u in range(1, 17)]
    )
    (ax,) = figure(*frames(tmp_path), keys=["a/b"], window=8).axes
    assert mean_lines(ax, "none") == [([8, 12, 16], [6.0, 10.0, 14.0])]
    assert ax.get_title(loc="left") == "each seed: mean of the last 8 updates"


def test_style_is_undone_and_no_figure_is_left_open(tmp_path):
    write_ablation(tmp_path)
    before = plt.rcParams["font.size"], plt.get_fignums()
    with style():
        assert plt.rcParams["pdf.fonttype"] == 42 and plt.rcParams["svg.fonttype"] == "none"
    figure(*frames(tmp_path))
    assert before == (plt.rcParams["font.size"], plt.get_fignums())


def test_summary(tmp_path):
    write_ablation(tmp_path)
    decay, none = summary(*frames(tmp_path)).to_dict("records")
    assert decay["variant"] == "decay" and (decay["finished"], decay["seeds"]) == (2, 3)
    assert decay["start"] == pytest.approx(0.4)  # of all three seeds
    assert [decay[key] for key in ("final", "lowest", "highest")] == pytest.approx([0.75, 0.7, 0.8])
    assert (decay["tokens"], none["tokens"]) == (pytest.approx(12.0), pytest.approx(12.0))
    assert (decay["binds"], none["binds"]) == (0.5, 0.0)


def test_summary_of_runs_that_never_evaluated(tmp_path):
    write_run(tmp_path, "baseline", 0, status="out_of_memory")
    (row,) = summary(*frames(tmp_path)).to_dict("records")
    assert (row["finished"], row["seeds"]) == (0, 1) and np.isnan(row["final"])


# The door


def test_files_are_complete_and_the_same_at_every_run(tmp_path, capsys):
    """F56, F64: also from another process with other hashes."""
    write_ablation(tmp_path)
    names = [f"curves-main.{suffix}" for suffix in ("png", "svg", "pdf")]
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-3:] == [str(tmp_path / "figures" / name) for name in names]
    assert out[2].split()[:-5] == ["decay", "2/3", "0.400", "0.750", "0.700", "to", "0.800", "12.0", "-"]
    assert out[2].split()[-5] == "50%"
    assert b"range over seeds" in (tmp_path / "figures" / "curves-main.svg").read_bytes()
    again = [sys.executable, "-m", "analysis.curves", str(tmp_path), "--out", str(tmp_path / "again")]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run(again, check=True, cwd=REPO, capture_output=True, env=environment)
    for name in names:
        assert (tmp_path / "figures" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_studies_never_mix(tmp_path, capsys):
    for study, seed in [("main", 0), ("main", 1), ("other/one", 0)]:
        write_run(tmp_path, "none", seed, [ROW], study=study)
    assert main([str(tmp_path)]) == 0
    written = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert written == {"curves-main.svg", "curves-other_one.svg"}
    assert "none (2 seeds)" in (tmp_path / "figures" / "curves-main.svg").read_text()
    with pytest.raises(RunsError, match="one study"):
        figure(*frames(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{root}/nowhere"], "is not a folder: give the root of your runs"),
        (["{root}/empty"], "make some with `python -m src.train"),
        (["{root}", "--study", "nope"], "no study nope below {root}: there is main"),
        (["{root}", "--metrics", "eval/acuracy"], "logged eval/acuracy: it has control/binds"),
        (["{root}", "--window", "500"], "no run has 500 values"),
        (["{root}", "--out", "{root}/file"], "file"),
    ],
)
def test_a_bad_argument_gives_one_sentence(tmp_path, capsys, arguments, sentence):
    write_ablation(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main([argument.format(root=tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and sentence.format(root=tmp_path) in line


@pytest.mark.parametrize("window", ["0", "-1", "x"])
def test_a_window_is_a_whole_number_above_zero(tmp_path, capsys, window):
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path), f"--window={window}"])
    assert exit_.value.code == 2
    assert f"'{window}' is not a whole number above 0" in capsys.readouterr().err


def test_a_study_without_rows_yet_does_not_hide_the_others(tmp_path, capsys):
    write_run(tmp_path, "baseline", 0, study="first", status="out_of_memory")
    write_run(tmp_path, "none", 0, [ROW], study="second")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "curves-second.png" in printed.out and "study first: nothing to draw yet" in printed.err


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys; from analysis.curves import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert not {'pandas', 'numpy', 'matplotlib', 'seaborn', 'torch'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: python -m analysis.curves")
