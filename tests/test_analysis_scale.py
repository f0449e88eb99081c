"""Savings by model size, on run folders written by hand."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.arms import load_arms
from analysis.runs import RunsError, load_runs
from analysis.scale import boundary, figure, main, report, rows_of, sizes
from tests.runfolders import MIB, memory_config, write_run

REPO = Path(__file__).parent.parent
ABOUT = {"study": "scale", "memory_includes": ["tensors"], "hardware": {"cpu": "one"}}
CAP = 2000 * MIB
SHORTAGE = {"type": "MemoryCapExceeded", "phase": "optimizer_state_creation", "cap_bytes": CAP}
SHORTAGE |= {"wanted_bytes": 300 * MIB, "live_bytes": 1800 * MIB}


def config(method: str, width: int, cap: int | None = None) -> dict[str, Any]:
    model = {"name": "tiny", "hidden_size": width, "intermediate_size": 4 * width, "num_layers": 2}
    return memory_config(method, 0, cap) | {"model": model}


def write_arm(root: Path, method: str, width: int, parameters: int | None, mib: dict[str, int], **about: Any) -> None:
    """Three updates of 2 s, of which the last has the components `mib` at its peak and the others half of each.

    The bytes are at the peak for half of an update's time, and at nothing for the rest.
    """
    rows = []
    for update in (1, 2, 3):
        parts = {name: count * MIB * (1 if update == 3 else 0.5) for name, count in mib.items()}
        peak = sum(parts.values())
        row = {"update": update, "memory/peak_bytes": peak, "memory/byte_seconds": peak}
        rows.append(row | {f"memory/peak_{name}_bytes": count for name, count in parts.items()})
    metrics = [{"update": update, "time/update_seconds": 2.0} for update in (1, 2, 3)]
    label = f"{'baseline' if method == 'dense' else 'none'}-hidden_size={width}"
    known = {} if parameters is None else {"parameters": parameters}
    about = ABOUT | known | {"config": config(method, width), "memory": rows, "metrics": metrics} | about
    write_run(root, label, 0, **about)


def write_scale(root: Path) -> None:
    """100 k: the sketch needs 10 MiB more of 40; 1 M: 20 less of 100; 1.2 B: dense has no room under its cap."""
    ends = [{"update": 0, "eval/accuracy": 0.3}, {"update": 3, "eval/accuracy": 0.5}]
    write_arm(root, "dense", 64, 100_000, {"weights": 10, "optimizer_state": 20, "activations": 10}, evals=ends)
    sketch = {"weights": 10, "sketches": 25, "activations": 15}
    write_arm(root, "sketch", 64, 100_000, sketch, evals=[*ends[:1], ends[1] | {"eval/accuracy": 0.45}])
    write_arm(root, "dense", 256, 1_000_000, {"weights": 40, "gradients": 20, "optimizer_state": 40})
    write_arm(root, "sketch", 256, 1_000_000, {"weights": 40, "sketches": 40})
    large = {"config": config("dense", 2048, CAP), "accuracy": "not measured: random weights"}
    ended = {"status": "out_of_memory", "error": SHORTAGE, "memory": [], "metrics": []}
    write_arm(root, "dense", 2048, None, {}, **large, **ended)
    large["config"] = config("sketch", 2048, CAP)
    write_arm(root, "sketch", 2048, 1_235_814_400, {"weights": 1200}, **large)


def rows_below(root: Path, accuracies: dict[str, float] | None = None) -> list[dict[str, Any]]:
    return rows_of(sizes(load_arms(load_runs(root))), accuracies or {})


def test_a_row_a_size(tmp_path):
    write_scale(tmp_path)
    small, middle, large = rows_below(tmp_path)
    assert [row["parameters"] for row in (small, middle, large)] == [100_000, 1_000_000, 1_235_814_400]
    assert (small["dense_peak_bytes"], small["sketch_peak_bytes"]) == (40 * MIB, 50 * MIB)
    assert (small["saving"], small["saved_bytes"], small["saving_time_mean"]) == pytest.approx(
        (-0.25, -10 * MIB, -0.25)
    )
    assert small["of_that"] == "sketches 250%, activations 50%"
    assert (middle["saving"], middle["of_that"]) == (0.2, "optimizer state 200%, gradients 100%")
    assert middle["dense_time_mean_bytes"] == pytest.approx((50 + 50 + 100) / 6 * MIB)
    assert (large["saving"], large["dense_peak_bytes"]) == pytest.approx((float("nan"), float("nan")), nan_ok=True)
    assert large["sketch_peak_bytes"] == 1200 * MIB


def test_the_time_mean_is_of_its_own_bytes(tmp_path):
    write_arm(tmp_path, "dense", 64, 100_000, {"weights": 40})
    rows = [{"update": u, "memory/peak_bytes": 20 * MIB, "memory/byte_seconds": 60 * MIB} for u in (1, 2, 3)]
    write_arm(tmp_path, "sketch", 64, 100_000, {}, memory=rows)
    (row,) = rows_below(tmp_path)
    assert (row["saving"], row["saving_time_mean"]) == (0.5, pytest.approx(1 - 30 / ((10 + 10 + 20) / 3)))


def test_the_report_says_what_is_not_measurable_and_why(tmp_path):
    write_scale(tmp_path)
    names = {"baseline-hidden_size=64": 0.5, "none-hidden_size=64": 0.45}
    text = report("scale", rows_below(tmp_path, names))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "100,000 tiny 2x64x256 40.0 50.0 -25.0% -25.0% 1/1 1/1 0.500 / 0.450 sketches 250%, activations 50%" in lines
    assert (
        "1,235,814,400 tiny 2x2048x8192 out of memory 1200.0 not measurable not measurable 0/1 1/1 not measured: "
        "random weights -"
    ) in lines
    assert (
        "1.24 B: dense out of memory in optimizer_state_creation (wanted 300.0 MiB beside 1.8 GiB, cap 2.0 GiB): the "
        "saving is not measurable, and sketch has a peak of 1.2 GiB"
    ) in lines
    assert (
        "saving in the maximum of update peaks: changes its sign between 100 k (-25.0%) and 1 M (20.0%); not measured "
        "at 1.24 B"
    ) in lines
    assert (
        "saving in the time mean: changes its sign between 100 k (-25.0%) and 1 M (20.0%); not measured at 1.24 B"
        in (lines)
    )


@pytest.mark.parametrize(
    ("savings", "sentence"),
    [
        (
            [-0.2, -0.1],
            "never changes its sign in what was measured (from 10 to 20): it is zero or below, that is, none",
        ),
        ([0.1, 0.2, 0.3], "never changes its sign in what was measured (from 10 to 30): it is above zero"),
        ([0.1], "never changes its sign in what was measured (10): it is above zero"),
        ([-0.1, None, 0.2], "changes its sign between 10 (-10.0%) and 30 (20.0%); not measured at 20"),
        (
            [-0.1, 0.2, -0.3],
            "changes its sign between 10 (-10.0%) and 20 (20.0%) and between 20 (20.0%) and 30 (-30.0%)",
        ),
        ([None], "not measured at any size"),
    ],
)
def test_the_boundary_in_one_sentence(savings, sentence):
    rows = [
        {"parameters": 10.0 * place, "model": "m", "saving": float("nan") if saving is None else saving}
        for place, saving in enumerate(savings, start=1)
    ]
    assert boundary(rows, "saving", "peak") == f"saving in the peak: {sentence}"


def test_a_saving_of_activations_is_flagged(tmp_path):
    write_arm(tmp_path, "dense", 64, 100_000, {"weights": 10, "activations": 30})
    write_arm(tmp_path, "sketch", 64, 100_000, {"weights": 10, "activations": 10})
    (row,) = rows_below(tmp_path)
    assert row["mostly_activations"] and row["of_that"] == "activations 100% (activations, not gradients and state)"
    assert "100 k: over half of the saving is activations and logits" in report("scale", [row])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"config": config("sketch", 64) | {"microbatch_responses": 8}},
            "not comparable: setting microbatch_responses",
        ),
        (
            {"status": "failed", "error": {"type": "ValueError"}, "phase": "step"},
            "sketch failed in step (ValueError): the",
        ),
        ({"memory": [], "metrics": []}, "there is no seed whose updates both have"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(tmp_path, change, sentence):
    write_arm(tmp_path, "dense", 64, 100_000, {"weights": 10})
    if "status" in change:
        change |= {"memory": [], "metrics": []}
    write_arm(tmp_path, "sketch", 64, 100_000, {"weights": 5}, **change)
    (row,) = rows_below(tmp_path)
    text = report("scale", [row])
    assert row["saving"] != row["saving"] and f"100 k: {sentence}" in text.replace("not comparable: there", "there")
    assert "not measurable" in text


def test_a_size_with_one_arm_and_one_without_parameters(tmp_path):
    write_arm(tmp_path, "sketch", 64, 100_000, {"weights": 10})
    write_arm(tmp_path, "dense", 128, None, {"weights": 10})
    rows = rows_below(tmp_path)
    text = report("scale", rows)
    assert "100 k: no dense arm" in text and "tiny 2x128x512: no sketch arm" in text
    assert [tick for tick in figure(rows).axes[0].get_lines()[1].get_xdata()] == [100_000]
    with pytest.raises(RunsError, match="no run.json has `parameters`"):
        figure(rows[1:])


def test_one_seed_out_of_memory_is_enough_for_no_number(tmp_path):
    """The others are those that happened to fit. The parameters of one run are those of the size."""
    write_arm(tmp_path, "dense", 64, 100_000, {"weights": 10})
    ended = {"status": "out_of_memory", "error": SHORTAGE, "config": config("dense", 64)}
    write_run(tmp_path, "baseline-hidden_size=64", 1, **ABOUT, **ended)
    write_arm(tmp_path, "sketch", 64, None, {"weights": 5})
    (row,) = rows_below(tmp_path)
    assert (row["parameters"], row["dense_finished"], row["sketch_peak_bytes"]) == (100_000, "1/2", 5 * MIB)
    for key in ("dense_peak_bytes", "dense_time_mean_bytes", "saving", "saving_time_mean"):
        assert row[key] != row[key]


def test_two_arms_for_one_cell_are_refused(tmp_path):
    write_arm(tmp_path, "dense", 64, 100_000, {"weights": 10})
    write_run(tmp_path, "baseline-lr=1", 0, config=config("dense", 64), **ABOUT)
    with pytest.raises(
        RunsError, match="two dense arms of model tiny 2x64x256, baseline-hidden_size=64 and baseline-lr"
    ):
        rows_below(tmp_path)


def test_the_figure_is_the_rows(tmp_path):
    write_scale(tmp_path)
    result = figure(rows_below(tmp_path))
    left, right = result.axes
    lines = {line.get_label(): line for line in left.get_lines()}
    assert list(lines["maximum of update peaks"].get_ydata())[:2] == [-25, 20]
    assert list(lines["maximum of update peaks"].get_xdata()) == [100_000, 1_000_000, 1_235_814_400]
    assert [text.get_text() for text in left.texts] == ["-25.0%", "20.0%", "dense out of memory"]
    assert left.texts[2].get_position()[0] == 1_235_814_400
    assert left.get_xscale() == right.get_xscale() == right.get_yscale() == "log"
    peaks = {line.get_label(): list(line.get_ydata()) for line in right.get_lines()}
    assert peaks["sketch"] == [50, 80, 1200] and peaks["dense"][:2] == [40, 100]
    assert peaks["dense: out of memory"] == [2000] and peaks["cap 2.0 GiB"] == [2000, 2000]


def test_the_door_writes_what_it_prints(tmp_path, capsys):
    write_scale(tmp_path)
    table, drawing = tmp_path / "s.csv", tmp_path / "s.png"
    assert main([str(tmp_path), "--csv", str(table), "--figure", str(drawing)]) == 0
    printed = capsys.readouterr().out
    assert "study scale" in printed and "0.500 / 0.450" in printed and printed.splitlines()[-1] == str(drawing)
    assert drawing.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["study"], row["saving"], row["dense_accuracy"]) for row in rows] == [
        ("scale", "-0.25", "0.5"),
        ("scale", "0.2", "-"),
        ("scale", "", "not measured: random weights"),
    ]
    assert rows[2]["dense_outcome"].startswith("out of memory in optimizer_state_creation (wanted 300.0 MiB beside")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{root}/nowhere"], "is not a folder"),
        (["{root}"], "no study scale below {root}: there is main"),
        (["{root}", "--study", "main"], "no arm here is dense or sketch"),
    ],
)
def test_a_bad_argument_gives_one_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path, "lora-none", 0, config=config("lora", 64))
    assert main([argument.format(root=tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and sentence.format(root=tmp_path) in line


@pytest.mark.parametrize("door", ["scale", "bench", "peers"])
def test_help_is_quick_because_it_imports_nothing_heavy(door):
    code = (
        f"import sys; from analysis.{door} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert not {'pandas', 'numpy', 'matplotlib', 'seaborn', 'torch', 'scipy'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, capture_output=True, text=True)
    assert shown.stdout.startswith(f"usage: python -m analysis.{door}")
