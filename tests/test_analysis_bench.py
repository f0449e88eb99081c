"""What src.bench measured, read again; its files written by hand."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.bench import figure, load, main, report, table
from analysis.runs import RunsError

MIB = 2**20
ABOUT = {"command": "python -m src.bench x", "torch": "2.13.0", "machine": "", "threads": 2}


def contestant(name: str, seconds: list[float], mib: dict[str, float], flops: int = 100) -> dict[str, Any]:
    """Updates of which forward has 0.2, backward 0.5 and step 0.3; the first update needs 1 MiB less."""
    parts = {f"memory/peak_{key}_bytes": count * MIB for key, count in mib.items()}
    peak = sum(parts.values())
    shares = {"forward": 0.2, "backward": 0.5, "step": 0.3}
    return {
        "contestant": name,
        "seconds": [
            {"time/update_seconds": s} | {f"time/{phase}_seconds": s * share for phase, share in shares.items()}
            for s in seconds
        ],
        "memory": parts | {"memory/peak_bytes": peak},
        "first_update": {"memory/peak_bytes": peak - MIB},
        "flops": flops,
        "floor_bytes": peak / 2,
    }


@pytest.fixture
def compared() -> dict[str, Any]:
    """The first contestant ended in its second round, so that the second is the yardstick; the last never began."""
    ended = contestant("galore", [1.0], {"weights": 99}) | {"error": "MemoryError: too much"}
    rows = [
        ended,
        contestant("adamw", [1.0, 2.0, 4.0], {"weights": 10, "optimizer_state": 20, "activations": 10}),
        contestant("sketch", [1.5, 2.0, 2.0], {"weights": 10, "sketches": 2, "activations": 18}, flops=75),
        {"contestant": "apollo", "seconds": [], "error": "ConfigError: apollo-torch is not installed"},
    ]
    return ABOUT | {"kind": "compare", "tokens": 600, "rows": rows}


@pytest.fixture
def smallest() -> dict[str, Any]:
    below = {"phase": "backward", "wanted_bytes": MIB, "update": 2}
    about = {"updates": 3, "tolerance": 0.01, "trials": 9, "below": below}
    rows = [
        about | {"contestant": "adamw", "cap_bytes": 40 * MIB, "seconds": {"1.0": [9.0, 1.0, 2.0], "1.5": [9.0, 0.5]}},
        about | {"contestant": "sketch", "cap_bytes": 30 * MIB, "seconds": {"1.0": None, "1.5": [4.0]}},
        {"contestant": "apollo", "error": "ConfigError: not installed"},
    ]
    return ABOUT | {"kind": "minimum", "tokens": 600, "rows": rows}


def line_of(text: str, start: str, after: str = "") -> str:
    lines = [" ".join(line.split()) for line in text[text.index(after) :].splitlines()]
    return next(line for line in lines if line.startswith(start))


def test_ratios_are_of_the_same_round_and_to_the_first_with_numbers(compared):
    galore, adamw, sketch, apollo = table(compared)
    assert apollo == {"contestant": "apollo", "error": "ConfigError: apollo-torch is not installed"}
    assert galore == {"contestant": "galore", "error": "MemoryError: too much"}
    assert adamw["time_ratio"] == adamw["peak_ratio"] == adamw["flops_ratio"] == 1
    assert [sketch[f"time_ratio{part}"] for part in ("", "_low", "_high")] == [1.0, 0.5, 1.5]
    assert (sketch["flops_ratio"], sketch["peak_ratio"], sketch["peak_over_floor"]) == (0.75, 0.75, 2)
    assert (sketch["p50_seconds"], sketch["worst_seconds"], sketch["tokens_per_second"]) == (2, 2, 300)
    assert adamw["p90_seconds"] == pytest.approx(2 + 0.8 * 2)
    assert [sketch[f"{phase}_seconds"] for phase in ("forward", "backward", "step")] == pytest.approx([0.4, 1.0, 0.6])
    assert sketch["first_update_peak_bytes"] == 29 * MIB


def test_the_tables_of_compare(compared):
    text = report(compared)
    assert text.splitlines()[:2] == ["python -m src.bench x", "torch 2.13.0, 2 threads"]
    expected = "sketch 1.00 0.50 to 1.50 0.75 2.000 2.000 2.000 2.000 300 0.400 1.000 0.600 30.0 0.75 2.000"
    assert line_of(text, "sketch") == expected
    assert line_of(text, "contestant", "at the peak").endswith("weights sketches state activations peak peak")
    assert line_of(text, "sketch", "at the peak") == "sketch 10.0 2 0 18.0 30.0 29.0"
    assert "apollo: not measured: ConfigError: apollo-torch is not installed" in text
    assert "galore: not measured: MemoryError: too much" in text


def test_the_bars_are_the_numbers_and_an_error_has_no_bar(compared):
    result = figure(compared)
    sizes, seconds = result.axes
    assert [label.get_text() for label in sizes.get_yticklabels()] == ["adamw", "sketch"]
    ends: dict[int, float] = {}
    for ax in result.axes:
        for bar in ax.patches:
            row = round(bar.get_y() + bar.get_height() / 2) + 10 * (ax is seconds)
            assert bar.get_x() == pytest.approx(ends.get(row, 0.0)) or bar.get_width() == 0
            ends[row] = max(ends.get(row, 0.0), bar.get_x() + bar.get_width())
    assert ends == pytest.approx({0: 40, 1: 30, 10: 2, 11: 2})
    assert [text.get_text().strip() for text in sizes.texts] == ["40.0 (1.00)", "30.0 (0.75)"]
    assert [text.get_text().strip() for text in seconds.texts] == ["2 (1.00)", "2 (1.00)"]
    left, right = ([text.get_text() for text in legend.get_texts()] for legend in result.legends)
    assert left == ["weights", "sketches", "optimizer state", "activations"] and right == [
        "forward",
        "backward",
        "step",
    ]


def test_the_smallest_caps(smallest):
    text = report(smallest)
    assert line_of(text, "adamw") == "adamw 40.0 1.00 2.000 0.500 backward, 1.0 MiB"
    assert line_of(text, "sketch") == "sketch 30.0 0.75 - 4.000 backward, 1.0 MiB"
    assert "apollo: not measured: ConfigError: not installed" in text
    (ax,) = figure(smallest).axes
    assert [bar.get_width() for bar in ax.patches] == [40, 30]
    assert [text.get_text().strip() for text in ax.texts] == ["40.0 (1.00)", "30.0 (0.75)"]


def test_bookkeeping(tmp_path, capsys):
    rows = [
        {"bare_seconds": 2.0, "full_seconds": 2.0 + extra, "probe_seconds": 0.5, "update_seconds": 2.0}
        | {"bare_cpu_seconds": 1.0, "full_cpu_seconds": 1.0 + extra}
        for extra in (0.1, 0.4, 0.2)
    ]
    path = tmp_path / "b.json"
    for damaged in ({"rows": [1]}, {"rows": [{}]}, {"rows": "text"}):
        path.write_text(json.dumps(ABOUT | {"kind": "minimum"} | damaged))
        assert main([str(path)]) == 2 and "another version of src.bench; measure again" in capsys.readouterr().err
    older = [{key: value for key, value in row.items() if "cpu" not in key} for row in rows]
    path.write_text(json.dumps(ABOUT | {"kind": "bookkeeping", "rows": older}))
    assert main([str(path)]) == 2
    assert "lacks 'bare_cpu_seconds': damaged, or of another version of src.bench" in capsys.readouterr().err
    path.write_text(json.dumps(ABOUT | {"kind": "bookkeeping", "rows": rows}))
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "ledger, rows, record: 10.0% (5.0% to 20.0%) of a bare run's time; median and range of" in printed
    assert "the same: 20.0% (10.0% to 40.0%) of its processor time; median and range of 3 rounds" in printed
    assert "probes: 25.0% (25.0% to 25.0%) of the updates' time" in printed
    assert line_of(printed, "2 ") == "2 2.00 2.40 1.00 1.40 2.00 0.50"
    assert main([str(path), "--figure", str(tmp_path / "b.png")]) == 2
    assert "bookkeeping is two shares of a time" in capsys.readouterr().err


def test_the_door_writes_what_it_prints(tmp_path, capsys, compared, smallest):
    for result in (compared, smallest):
        path = tmp_path / f"{result['kind']}.json"
        path.write_text(json.dumps(result))
        outputs = path.with_suffix(".csv"), path.with_suffix(".png")
        assert main([str(path), "--csv", str(outputs[0]), "--figure", str(outputs[1])]) == 0
        assert capsys.readouterr().out.splitlines()[-2:] == [str(output) for output in outputs]
        assert outputs[1].read_bytes().startswith(b"\x89PNG")
        with outputs[0].open() as file:
            rows = {row["contestant"]: row for row in csv.DictReader(file)}
        key = "peak_bytes" if result is compared else "cap_bytes"
        assert float(rows["sketch"][key]) == 30 * MIB and rows["apollo"][key] == ""
        assert rows["apollo"]["error"].startswith("ConfigError")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has nothing to show (kind: None)"),
        ('{"kind": "head", "rows": [{}]}', "has nothing to show (kind: head): give a file that `python -m src.bench"),
        ('{"kind": "compare", "rows": []}', "nothing to show (kind: compare)"),
        ('{"kind": "compare", "rows": [{"contestant": "a", "error": "E: no"}]}', "could be measured: a: E: no"),
    ],
)
def test_a_bad_file_gives_one_sentence(tmp_path, capsys, text, sentence):
    path = tmp_path / "f.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and sentence in line


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main([str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err
    with pytest.raises(OSError, match=r"no\.json"):
        load(Path(tmp_path / "no.json"))
    with pytest.raises(RunsError):
        table({"kind": "minimum", "rows": [{"contestant": "a", "error": "E"}]})
