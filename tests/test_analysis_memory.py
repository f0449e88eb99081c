"""The reading half's memory and time tables, on run folders written by hand (tests/runfolders.py)."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.arms import Arm, choose_baseline, load_arms, record, savings
from analysis.curves import figure as curves_figure
from analysis.memory import figure, main, report
from analysis.runs import RunsError, load_evals, load_metrics, load_runs
from analysis.speed import main as speed_main
from analysis.speed import times, warm_ups
from analysis.tables import summary
from src.records import DEFINITIONS, NotComparable
from tests.runfolders import MIB, memory_config, memory_row, write_memory_study, write_run

REPO = Path(__file__).parent.parent
SHORTAGE = {
    "type": "MemoryCapExceeded",
    "message": "too much",
    "phase": "optimizer_state_creation",
    "wanted_bytes": 12 * MIB,
    "cap_bytes": 80 * MIB,
    "live_bytes": 75 * MIB,
    "components": {"weights": 20 * MIB, "activations": 40 * MIB, "gradients": 15 * MIB, "other": 0},
}
SKETCHED = {"memory_includes": ["tensor storages returned by operators", "tracked tensors"]}
SKETCHED |= {"hardware": {"machine": "x86_64", "cores": 2, "cpu": "one"}}


def arms_of(root: Path) -> dict[str, Arm]:
    return {arm.name: arm for arm in load_arms(load_runs(root))}


def text_of(root: Path, baseline: str | None = None, steady: bool = False) -> str:
    arms = list(arms_of(root).values())
    return report("study", arms, choose_baseline(arms, baseline), steady)


def line_of(text: str, start: str, after: str = "") -> str:
    """The first line that starts so, below the line that holds `after`, with single spaces."""
    lines = [" ".join(line.split()) for line in text[text.index(after) :].splitlines()]
    return next(line for line in lines if line.startswith(start))


def test_the_five_statistics(tmp_path):
    """Dense: 62, 102, 100, then 101 + seed and so on; measured are updates 1, 2, 3, 4, 6, ..., 24."""
    write_memory_study(tmp_path)
    dense = arms_of(tmp_path)["baseline"]
    measured = [1, 2, 3, *range(4, 25, 2)]
    peaks = {(s, u): 60 + s + u % 3 + 40 * (u > 1) for s in range(3) for u in measured}
    expected = {
        "time mean": np.mean(
            [
                sum((3 if u == 1 else 1) * 50 + 0.4 * (peaks[s, u] - 50) for u in measured) / (len(measured) + 2)
                for s in range(3)
            ]
        ),
        "mean of update peaks": np.mean(list(peaks.values())),
        "maximum of update peaks": 103,
        "maximum of the seed-mean curve": 103,
        "worst instant": 104,
    }
    for name in DEFINITIONS:
        assert record(dense, name).value_bytes == pytest.approx(expected[name] * MIB), name
    assert record(dense, "maximum of update peaks", "backward").value_bytes == 103 * MIB
    rollout = record(dense, "maximum of update peaks", "rollout")
    assert rollout.value_bytes == 50 * MIB and sum(rollout.components.values()) == pytest.approx(50 * MIB)
    assert record(dense, "time mean", "backward").value_bytes == pytest.approx(expected["mean of update peaks"] * MIB)
    assert math.isnan(record(dense, "worst instant", "probe").value_bytes)


def test_the_report_names_every_statistic_and_says_what_is_counted(tmp_path):
    write_memory_study(tmp_path)
    text = text_of(tmp_path)
    assert "the first, which makes optimizer state, included" in text
    assert "what the bytes include: tensor storages returned by operators, tracked tensors" in text
    assert line_of(text, "baseline").startswith("baseline bytes in use 3/3 14 of 1 to 24 ")
    assert line_of(text, "baseline").endswith(" 103.0 103.0 104.0")
    assert line_of(text, "decay").endswith(" 47.0 47.0 48.0")


def test_the_first_update_can_be_left_out(tmp_path):
    """M34: the first update lacks the state that it makes; it is shown apart in any case."""
    write_memory_study(tmp_path)
    dense = arms_of(tmp_path)["baseline"]
    steady = record(dense, "mean of update peaks", steady=True)
    assert steady.includes.updates[0] == 2 and not steady.includes.includes_optimizer_creation
    assert steady.value_bytes > record(dense, "mean of update peaks").value_bytes
    assert "without the first update of each process" in text_of(tmp_path, steady=True)
    assert line_of(text_of(tmp_path), "baseline", "by phase") == "baseline 50.0 103.0 62.0 103.0 - 33.0"


def test_the_first_update_after_a_resume_is_shown_apart(tmp_path):
    rows = [memory_row(u, "sketch", 90 if u == 11 else 30) for u in range(1, 21)]
    events = [{"update": 0, "kind": "started"}, {"update": 10, "kind": "resumed"}, {"update": 10, "kind": "failed"}]
    folder = write_run(tmp_path, "decay", 0, memory=rows, events=events)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"update": 20, "kind": "resu')
    assert warm_ups(folder) == {1, 11}
    assert line_of(text_of(tmp_path), "decay", "by phase") == "decay 10.0 104.0 44.0 44.0 104.0 -"
    assert record(arms_of(tmp_path)["decay"], "worst instant", steady=True).value_bytes == 44 * MIB


def test_the_split_at_the_peak_says_of_which_updates_it_is(tmp_path):
    for seed, at in enumerate((4, 2)):
        rows = [memory_row(u, "dense", 50 if u == at else 30) for u in range(1, 6)]
        write_run(tmp_path, "baseline", seed, memory=rows)
    text = text_of(tmp_path)
    assert line_of(text, "arm", "at the peak by component").startswith("arm weights gradients state activations peak")
    row = line_of(text, "baseline", "at the peak by component")
    assert row == "baseline 10.0 20.0 40.0 50.0 120.0 4, 2"
    assert "baseline: activations are 42% of the peak; optimizer state 33%; gradients 17%" in text
    assert "baseline: optimizer state is 39% of" in text_with_study(tmp_path / "b")


def text_with_study(root: Path) -> str:
    write_memory_study(root)
    return text_of(root)


def test_savings_over_the_dense_arm(tmp_path):
    write_memory_study(tmp_path)
    arms = arms_of(tmp_path)
    for name in DEFINITIONS:
        ours, dense = (record(arms[arm], name).value_bytes for arm in ("decay", "baseline"))
        assert savings(arms["decay"], arms["baseline"], name).saved_bytes == dense - ours
    saved = savings(arms["decay"], arms["baseline"], "worst instant")
    expected = {"gradients": 20 * MIB, "sketches": -4 * MIB, "optimizer_state": 40 * MIB}
    assert {name: count for name, count in saved.by_component.items() if count} == expected
    text = text_of(tmp_path)
    row = line_of(text, "decay", "saved over baseline")
    assert row.startswith("decay 0, 1, 2 ") and row.endswith("54.4% (56.0) 54.4% (56.0) 53.8% (56.0)")
    assert line_of(text, "decay", "of that by component") == "decay 20.0 -4 40.0 56.0"
    assert "half of what it saves" not in text
    reverse = text_of(tmp_path, baseline="decay")
    assert line_of(reverse, "baseline", "saved over decay").endswith("-119.1% (-56.0) -119.1% (-56.0) -116.7% (-56.0)")


def test_only_seeds_that_both_finished_are_compared(tmp_path):
    write_memory_study(tmp_path)
    rows = [memory_row(u, "sketch", 500) for u in range(1, 25) if u <= 3 or u % 2 == 0]
    for seed, status in ((1, "finished"), (7, "finished"), (0, "interrupted")):
        write_run(
            tmp_path,
            "fixed",
            seed,
            study="study",
            memory=rows,
            config=memory_config("sketch", seed),
            status=status,
            **SKETCHED,
        )
    arms = arms_of(tmp_path)
    assert arms["fixed"].seeds == [1, 7]
    saved = savings(arms["fixed"], arms["baseline"], "worst instant")
    assert saved.saved_bytes == (103 - 514) * MIB
    assert line_of(text_of(tmp_path), "fixed", "saved over").startswith("fixed 1 ")


def test_a_saving_that_is_activations_is_said_to_be(tmp_path):
    """M17."""
    write_memory_study(tmp_path)
    for seed in range(3):
        rows = [memory_row(u, "dense", 5) for u in range(1, 25) if u <= 3 or u % 2 == 0]
        config = memory_config("dense", seed)
        write_run(tmp_path, "other", seed, study="study", memory=rows, config=config, **SKETCHED)
    assert "other: over half of what it saves is activations and logits, not gradients" in text_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"config": memory_config("sketch", 0) | {"microbatch_responses": 8}},
            "setting microbatch_responses differs: 8",
        ),
        ({"hardware": {"cpu": "two"}}, "hardware cores differs: not there, the baseline's 2"),
        ({"mixed": ["hardware.cpu: one -> two"]}, "hardware changed later differs"),
        ({"memory_includes": ["other things"]}, "what the bytes include differs: other things"),
        ({"device": "cuda"}, "scope differs: process on cuda, the baseline's process on cpu"),
        ({"seed": 9}, "there is no seed whose updates both have"),
        (
            {"status": "failed", "error": {"type": "ValueError"}, "phase": "step"},
            "ours unmeasurable: failed in step (Val",
        ),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(tmp_path, change, reason):
    write_memory_study(tmp_path)
    rows = [memory_row(u, "sketch", 30) for u in range(1, 25) if u <= 3 or u % 2 == 0]
    about = {"seed": 0, "study": "study", "memory": rows, "config": memory_config("sketch", 0)} | SKETCHED | change
    write_run(tmp_path, "other", about.pop("seed"), **about)
    lines = [line for line in text_of(tmp_path).splitlines() if line.startswith("other: ")]
    assert len([line for line in lines if reason in line]) == 1, lines
    assert "other  " not in text_of(tmp_path).split("saved over")[1].split("growth")[0]


def test_a_baseline_without_memory_is_never_a_number(tmp_path):
    """One of three seeds is enough: the others are those that happened to fit."""
    write_memory_study(tmp_path)
    for folder in (tmp_path / "study").glob("baseline-s2-*"):
        (folder / "run.json").write_text(
            (folder / "run.json").read_text().replace('"status": "finished"', '"status": "out_of_memory"')
        )
    arms = arms_of(tmp_path)
    assert arms["baseline"].unmeasured is not None and arms["baseline"].seeds == [0, 1]
    for name in DEFINITIONS:
        with pytest.raises(NotComparable, match="^baseline unmeasurable: out_of_memory in"):
            savings(arms["decay"], arms["baseline"], name)


def test_out_of_memory_runs_are_listed(tmp_path):
    write_run(tmp_path, "baseline", 0, status="out_of_memory", error=SHORTAGE, config=memory_config("dense", 0))
    write_run(
        tmp_path, "decay", 0, memory=[memory_row(u, "sketch", 30) for u in (1, 2)], config=memory_config("sketch", 0)
    )
    old = {"type": "OutOfMemoryError", "message": "-"}
    write_run(tmp_path, "old", 1, status="out_of_memory", phase="backward", error=old)
    text = text_of(tmp_path)
    assert (
        "out_of_memory baseline seed 0: in optimizer_state_creation wanted 12.0 MiB beside 75.0 MiB alive of cap "
        "80.0 MiB (largest: activations 40.0 MiB, weights 20.0 MiB, gradients 15.0 MiB)"
    ) in text
    assert "out_of_memory old seed 1: in backward (OutOfMemoryError)" in text
    sentence = "baseline unmeasurable: out_of_memory in optimizer_state_creation (wanted 12.0 MiB of cap 80.0 MiB)"
    assert f"decay: {sentence}" in text and "saved over baseline" in text
    assert line_of(text, "baseline") == "baseline bytes in use 0/1 none - - - - -"


def leaking(updates: int, peak: float = 0.0, live: float = 0.0) -> list[dict]:
    rows = [memory_row(u, "sketch", 30) for u in range(1, updates + 1)]
    for row in rows:
        row["memory/peak_bytes"] += row["update"] * peak * MIB
        row["memory/live_bytes"] += row["update"] * live * MIB
    return rows


def test_growth_raises_an_alarm_before_the_cap(tmp_path):
    """F25; also of a run that has not ended."""
    config = memory_config("sketch", 0, cap=144 * MIB)
    write_run(tmp_path, "leaky", 0, memory=leaking(30, peak=1, live=1), config=config, status="running")
    write_run(tmp_path, "longer", 1, memory=leaking(30, peak=0.5), config=memory_config("sketch", 1))
    write_run(tmp_path, "steady", 0, memory=leaking(30), config=config)
    write_run(tmp_path, "short", 0, memory=leaking(8, peak=9), config=config)
    text = text_of(tmp_path)
    alarms = [line for line in text.splitlines() if line.startswith("ALARM")]
    assert [re.sub(r" \(.*?\)", "", line) for line in alarms] == [
        "ALARM leaky seed 0: the peak grows by 1 MiB an update; 70 updates to the cap",
        "ALARM leaky seed 0: what is alive between updates grows by 1 MiB an update",
        "ALARM longer seed 1: the peak grows by 0.5 MiB an update",
    ]
    assert line_of(text, "steady", "growth of each run").endswith("not growing 0 0 to 0 not growing")
    assert line_of(text, "short", "growth of each run") == "short 0 7 - - too few points - - too few points"


def test_folders_of_before_are_read(tmp_path):
    """Neither components nor byte-seconds, and peaks in metrics.jsonl only; nothing is made up for them."""
    peaks = [{"update": u, "memory/peak_bytes": (50 + u) * MIB, "time/update_seconds": 1.0} for u in range(1, 6)]
    write_run(tmp_path, "baseline", 0, metrics=peaks)
    phases = [row | {"memory/step_peak_bytes": 7 * MIB} for row in peaks]
    write_run(tmp_path, "decay", 0, metrics=peaks, memory=phases)
    write_run(tmp_path, "nothing", 0, metrics=[{"update": 1, "reward/mean": 0.0}])
    arms = arms_of(tmp_path)
    text = text_of(tmp_path)
    assert line_of(text, "baseline") == "baseline bytes in use 1/1 5 of 1 to 5 - 53.0 55.0 55.0 55.0"
    assert line_of(text, "nothing") == "nothing bytes in use 1/1 none - - - - -"
    assert "at the peak by component: not recorded" in text and "include: not recorded" in text
    assert record(arms["decay"], "worst instant", "step").value_bytes == 7 * MIB
    assert savings(arms["decay"], arms["baseline"], "worst instant").by_component == {}
    assert "decay: the baseline's time mean was not recorded" in text
    for door in (main, speed_main):
        assert door([str(tmp_path)]) == 0


def test_what_the_allocator_has_beyond_the_ledger_is_other(tmp_path):
    rows = [memory_row(u, "sketch", 30) for u in (1, 2)]
    for row in rows:
        row["memory/backward_peak_bytes"] += 5 * MIB
        row |= {"memory/peak_reserved_bytes": 64 * MIB, "memory/backward_peak_reserved_bytes": 60 * MIB}
    unmeasured = {"update": 3, "memory/peak_bytes": 1 << 40, "memory/peak_reserved_bytes": 1 << 40}
    write_run(tmp_path, "decay", 0, memory=[*rows, unmeasured])
    arm = arms_of(tmp_path)["decay"]
    backward = record(arm, "worst instant", "backward")
    assert backward.components["other"] == 5 * MIB and sum(backward.components.values()) == backward.value_bytes
    assert record(arm, "worst instant", quantity="reserved bytes").value_bytes == 64 * MIB
    assert record(arm, "worst instant", "backward", "reserved bytes").components == {}
    assert line_of(text_of(tmp_path), "decay reserved").endswith("2 of 1 to 2 - 64.0 64.0 64.0 64.0")


def test_choosing_the_baseline(tmp_path):
    for label in ("baseline", "baseline-lr=1", "decay"):
        write_run(tmp_path, label, 0)
    arms = list(arms_of(tmp_path).values())
    assert choose_baseline(arms, None).name == "baseline"
    assert choose_baseline(arms[1:2], None).name == "baseline-lr=1"
    assert choose_baseline(arms[2:], None) is None
    assert choose_baseline([arms[1], arms[1]], None) is None, "which of several is meant?"
    assert choose_baseline(arms, "decay").name == "decay"
    with pytest.raises(RunsError, match="no arm x to compare with: there is baseline, baseline-lr=1, decay"):
        choose_baseline(arms, "x")
    assert "--baseline LABEL names one of: decay" in report("main", arms[2:], None, False)


# Time


def test_times_of_an_arm(tmp_path):
    write_memory_study(tmp_path)
    runs = load_runs(tmp_path)
    table = times(load_metrics(runs), runs).set_index(["name", "part"]).loc["decay"]
    assert list(table.index) == ["update", "training step", "rollout", "forward", "backward", "step"]
    assert table.loc["update", ["p50", "p90", "p99", "worst", "warm_up", "updates"]].tolist() == [1, 1, 1, 1, 3, 69]
    assert table.at["rollout", "warm_up"] == pytest.approx(2.3)
    assert table.at["training step", "p50"] == pytest.approx(0.55) == table.at["training step", "share"]
    assert table.at["rollout", "tokens_per_second"] == pytest.approx(600 / 0.3)
    assert table.at["training step", "tokens_per_second"] == pytest.approx(1100 / 0.55)
    assert table["tokens_per_second"].notna().sum() == 2


def test_quantiles_are_those_of_the_updates_after_the_warm_ups(tmp_path):
    rows = [{"update": u, "time/update_seconds": 1000.0 if u in (1, 51) else float(u)} for u in range(1, 102)]
    write_run(tmp_path, "none", 0, metrics=rows, events=[{"update": 50, "kind": "resumed"}])
    runs = load_runs(tmp_path)
    (row,) = times(load_metrics(runs), runs).to_dict("records")
    kept = [u for u in range(1, 102) if u not in (1, 51)]
    assert [row["p50"], row["p90"], row["p99"]] == pytest.approx(list(np.quantile(kept, [0.5, 0.9, 0.99])))
    assert (row["worst"], row["warm_up"], row["updates"]) == (101, 1000, 99)


def test_a_batch_used_twice_is_rolled_out_once(tmp_path):
    rows = [
        {"update": u, "rollout/prompt_tokens": 1, "rollout/response_tokens": 9, "time/forward_seconds": 1.0}
        | ({"time/rollout_seconds": 3.0} if u % 2 else {})
        for u in range(1, 6)
    ]
    write_run(tmp_path, "none", 0, metrics=rows)
    runs = load_runs(tmp_path)
    table = times(load_metrics(runs), runs).set_index("part")
    assert table.at["rollout", "tokens_per_second"] == 3.0
    assert table.at["training step", "tokens_per_second"] == 10.0


def test_a_phase_of_few_updates_is_in_the_table_and_not_in_the_median_update(tmp_path):
    rows = [{"update": u, "time/update_seconds": 1.0, "time/step_seconds": 0.5} for u in range(1, 10)]
    for row in rows[3::4]:
        row["time/probe_seconds"] = 7.0
    write_run(tmp_path, "none", 0, metrics=rows)
    runs = load_runs(tmp_path)
    table = times(load_metrics(runs), runs)
    probe = table.set_index("part").loc["probe"]
    assert (probe["p50"], probe["updates"], probe["in_updates"]) == (7.0, 2, 0.25)
    assert {bar.get_width() for bar in figure(load_arms(runs), table).axes[1].patches} == {0.5}


# Figure and doors


def test_the_bars_are_the_numbers(tmp_path):
    write_memory_study(tmp_path)
    write_run(tmp_path, "old", 0, study="study", metrics=[{"update": 1, "memory/peak_bytes": 9 * MIB}])
    write_run(tmp_path, "z$a_b$", 0, study="study", status="out_of_memory", error=SHORTAGE)
    runs = load_runs(tmp_path)
    arms = load_arms(runs)
    result = figure(arms, times(load_metrics(runs), runs))
    assert isinstance(result, Figure)
    bytes_, seconds = result.axes
    ends = {}
    for bar in bytes_.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(ends.get(row, 0.0)) or bar.get_width() == 0
        ends[row] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx({0: 103, 1: 47, 2: 9, 3: 0})
    texts = [text.get_text().strip() for text in bytes_.texts]
    assert texts == ["103.0", "47.0", "9", "out of memory in\n optimizer state creation"]
    assert [text.get_text().strip() for text in seconds.texts] == ["1", "1", "", ""]
    assert sum(bar.get_width() for bar in seconds.patches if bar.get_y() < 0.5) == pytest.approx(0.85)
    left, right = result.legends
    assert [text.get_text() for text in right.get_texts()] == ["rollout", "forward", "backward", "step"]
    assert [text.get_text() for text in left.get_texts()][-1] == "not recorded by component"
    result.draw_without_rendering()
    assert not left.get_window_extent().overlaps(bytes_.get_tightbbox())
    assert not left.get_window_extent().overlaps(right.get_window_extent())


def test_the_door_writes_what_it_prints(tmp_path, capsys):
    write_memory_study(tmp_path)
    paths = tmp_path / "m.csv", tmp_path / "m.png"
    assert main([str(tmp_path), "--csv", str(paths[0]), "--figure", str(paths[1])]) == 0
    printed = capsys.readouterr().out
    assert str(paths[0]) in printed and paths[1].read_bytes().startswith(b"\x89PNG")
    for name, statistic in DEFINITIONS.items():
        assert f"{name}: {statistic.definition}" in printed
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    (row,) = [r for r in rows if r["arm"] == "decay" and r["phase"] == "update" and r["over_time"] == "worst instant"]
    assert (float(row["value"]), float(row["saved"])) == (48 * MIB, 56 * MIB)
    assert (row["seeds"], row["baseline"], row["over_seeds"], row["unit"]) == ("0 1 2", "baseline", "maximum", "bytes")
    assert float(row["activations"]) == 34 * MIB and row["includes_optimizer_creation"] == "True"
    assert {r["phase"] for r in rows} == {"update", "rollout", "backward"}


@pytest.mark.parametrize(
    ("door", "arguments", "sentence"),
    [
        (main, ["{root}/nowhere"], "is not a folder"),
        (main, ["{root}", "--study", "nope"], "no study nope below {root}: there is main, study"),
        (main, ["{root}", "--study", "study", "--baseline", "x"], "no arm x to compare with: there is baseline, decay"),
        (main, ["{root}", "--figure", "f.png"], "--figure draws one study: name it, --study main"),
        (speed_main, ["{root}", "--study", "nope"], "no study nope below {root}: there is main, study"),
        (speed_main, ["{root}", "--csv", "{root}/nowhere/f.csv"], "nowhere"),
    ],
)
def test_a_bad_argument_gives_one_sentence(tmp_path, capsys, door, arguments, sentence):
    write_memory_study(tmp_path)
    write_run(tmp_path, "none", 0)
    assert door([argument.format(root=tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and sentence.format(root=tmp_path) in line


@pytest.mark.parametrize("door", ["memory", "speed"])
def test_help_is_quick_because_it_imports_nothing_heavy(door):
    code = (
        f"import sys; from analysis.{door} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert not {'pandas', 'numpy', 'matplotlib', 'seaborn', 'torch', 'scipy'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, capture_output=True, text=True)
    assert shown.stdout.startswith(f"usage: python -m analysis.{door}")


# The other doors, where most updates have no memory


def test_tables_and_curves_pass_over_updates_that_were_not_measured(tmp_path):
    rows = [
        {"update": u, "reward/mean": 0.5} | ({"memory/peak_bytes": u * MIB} if u % 4 == 0 else {}) for u in range(1, 41)
    ]
    write_run(tmp_path, "none", 0, [{"update": 0, "eval/accuracy": 0.5}], rows)
    runs = load_runs(tmp_path)
    evals, metrics = load_evals(runs), load_metrics(runs)
    assert summary(evals, metrics, runs)["peak_bytes"].tolist() == [22 * MIB]
    (ax,) = curves_figure(evals, metrics, runs, ["memory/peak_bytes"], window=8).axes
    assert ax.get_title(loc="left") == "each seed: mean of the last 8 updates"
    (line,) = [line for line in ax.get_lines() if line.get_label() == "none"]
    assert list(line.get_xdata()) == list(range(8, 41, 4))
    np.testing.assert_allclose(line.get_ydata(), (np.arange(8, 41, 4) - 2) * MIB)


@pytest.mark.parametrize("value", ["many", [1], -5])
def test_a_row_whose_bytes_cannot_be_is_left_out_and_told(value, tmp_path, capsys):
    write_memory_study(tmp_path)
    before = arms_of(tmp_path)["baseline"].counted[0].rows
    (folder,) = [Path(r) for r in load_runs(tmp_path).query("name == 'baseline' and seed == 0")["folder"]]
    lines = (folder / "memory.jsonl").read_text().splitlines()
    row = json.loads(lines[1]) | {"memory/peak_bytes": value}
    (folder / "memory.jsonl").write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    after = arms_of(tmp_path)["baseline"].counted[0].rows
    assert len(after) == len(before) - 1 and "skipped line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"hardware": "abc"},
        {"mixed": 7},
        {"memory_includes": 5},
        {"parameters": "many"},
        {"error": {"wanted_bytes": "x"}},
    ],
)
def test_one_damaged_run_does_not_take_the_others_with_it(damage, tmp_path, capsys):
    write_memory_study(tmp_path)
    runs = load_runs(tmp_path)
    record = Path(runs["folder"][0]) / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | damage))
    assert len(load_runs(tmp_path)) == len(runs) - 1
    assert f"its {next(iter(damage))} is" in capsys.readouterr().err
    main([str(tmp_path)])
