"""Methods compared at equal settings, tuning and KL, on run folders written by hand."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.peers import at_best_rates, at_published_rates, choose, compare, cumulative_kl, figure, main, table_text
from analysis.runs import RunsError, load_runs
from tests.runfolders import MIB, memory_config, write_run

ABOUT = {"memory_includes": ["tensors"], "hardware": {"cpu": "one"}}


def config(method: str, factor: float, seed: int) -> dict[str, Any]:
    plain = memory_config(method, seed)
    return plain | {"method": plain["method"] | {"rate_factor": factor}}


def write_arm(
    root: Path,
    method: str,
    kl: float,
    finals: dict[int, float],
    factor: float = 1.0,
    study: str = "peers",
    **about: Any,
) -> None:
    """Runs of 10 updates, evaluated at 0, 5 and 10: 0.3, halfway, and what `finals` says for the seed.

    Every update realises `kl`, probed in updates 1, 4, 7 and 10; it takes 2 s, the first 9 s.
    """
    label = {"dense": "baseline", "sketch": "none"}.get(method, f"{method}-none")
    label += "" if factor == 1 else f"-rate_factor={factor:g}"
    for seed, final in finals.items():
        metrics: list[dict[str, Any]] = []
        for update in range(1, 11):
            metrics.append({"update": update, "time/update_seconds": 9.0 if update == 1 else 2.0})
            metrics[-1]["control/probed"] = float(update % 3 == 1)
            if update % 3 == 1:
                metrics[-1]["control/realised_kl"] = kl
        evals = [{"update": at, "eval/accuracy": 0.3 + (final - 0.3) * at / 10} for at in (0, 5, 10)]
        memory = [{"update": u, "memory/peak_bytes": 10 * u * MIB, "memory/byte_seconds": 1.0} for u in (1, 2, 3)]
        written = {"evals": evals, "metrics": metrics, "memory": memory, "config": config(method, factor, seed)}
        write_run(root, label, seed, study=study, **(ABOUT | written | about))


def study_of(root: Path, name: str) -> pd.DataFrame:
    runs = load_runs(root)
    return runs[runs["study"] == name]


def cells(text: str, start: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.startswith(start))


# Cumulative KL


def frame(kl: dict[int, float | None], updates: int) -> pd.DataFrame:
    rows = [
        {"update": u, "control/probed": float(u in kl), "control/realised_kl": kl.get(u)} for u in range(1, updates + 1)
    ]
    return pd.DataFrame(rows).astype(float)


def test_updates_between_probes_are_interpolated_and_added_up():
    found = cumulative_kl(frame({1: 1.0, 4: 4.0, 6: 2.0}, 8))
    np.testing.assert_allclose(found, [0, 1, 3, 6, 10, 13, 15, 17, 19])


def test_a_probe_without_a_finite_value_ends_the_sum():
    found = cumulative_kl(frame({1: 1.0, 3: 1.0, 5: None, 7: 1.0}, 8))
    np.testing.assert_allclose(found, [0, 1, 2, 3, *[math.nan] * 5])
    np.testing.assert_allclose(cumulative_kl(frame({}, 2)), [0, math.nan, math.nan])
    np.testing.assert_allclose(cumulative_kl(frame({}, 0).reindex(columns=["update", *frame({}, 1).columns[1:]])), [0])


# Equal settings


def test_a_row_an_arm(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5, 1: 0.7, 2: 0.9})
    write_arm(tmp_path, "sketch", 0.04, {0: 0.6, 1: 0.6})
    write_arm(tmp_path, "sketch", 0.04, {2: 0.9}, status="failed")
    found = compare("at equal settings: x", study_of(tmp_path, "peers"))
    dense, sketch = found.rows
    assert (dense["arm"], dense["finished"], dense["seeds"]) == ("baseline", "3/3", "0 1 2")
    assert [dense[f"accuracy{part}"] for part in ("", "_lowest", "_highest")] == pytest.approx([0.7, 0.5, 0.9])
    assert (dense["peak_bytes"], dense["update_seconds_p50"]) == (30 * MIB, 2.0)
    assert dense["cumulative_kl"] == pytest.approx(0.1) == found.common_kl
    assert dense["accuracy_at_common_kl"] == pytest.approx(0.7)
    assert (sketch["finished"], sketch["accuracy"]) == ("2/3", pytest.approx(0.6))
    # At a KL of 0.1 of 0.4 it is a quarter of the way from 0.3 to 0.6, before its first evaluation at 0.2.
    assert sketch["accuracy_at_common_kl"] == pytest.approx(0.375)
    assert sketch["guessed_at_common_kl"] and not dense["guessed_at_common_kl"]
    text = table_text(found)
    assert cells(text, "baseline") == "baseline 3/3 0.700 (0.500 to 0.900) 30.0 2 0.1 0.700 (0.500 to 0.900)"
    assert cells(text, "none ") == "none 2/3 0.600 (0.600 to 0.600) 30.0 2 0.4 ~0.375 (0.375 to 0.375)"
    assert "common KL: 0.1, beyond which baseline does not go" in text
    assert "on a straight line from there: none; evaluate more often" in text


def test_the_common_kl_is_that_of_the_seed_that_goes_least_far(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5})
    write_arm(tmp_path, "sketch", 0.02, {0: 0.5})
    write_arm(tmp_path, "sketch", 0.008, {1: 0.5})
    found = compare("t", study_of(tmp_path, "peers"))
    assert found.common_kl == pytest.approx(0.08)
    assert found.rows[1]["cumulative_kl"] == pytest.approx((0.2 + 0.08) / 2)
    assert [row["guessed_at_common_kl"] for row in found.rows] == [False, True], "evaluated at 0.05, and at 0.1"


def test_missing_numbers_are_dashes(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5})
    shortage = {"type": "MemoryCapExceeded", "phase": "backward", "wanted_bytes": MIB, "live_bytes": 3 * MIB}
    nothing: dict[str, Any] = {"evals": [], "metrics": [], "memory": []}
    write_arm(tmp_path, "lora", 0.01, {0: 0.5}, status="out_of_memory", error=shortage, **nothing)
    write_arm(tmp_path, "sketch", 0.01, {0: 0.5})
    write_arm(tmp_path, "sketch", 0.01, {1: 0.5}, status="out_of_memory", error=shortage)
    write_arm(tmp_path, "flora", 0.01, {0: 0.5}, **nothing)
    plain = [{"update": 1, "time/update_seconds": 1.0}, {"update": 2, "time/update_seconds": 1.0}]
    write_arm(tmp_path, "galore", 0.01, {0: 0.5}, metrics=plain)
    found = compare("t", study_of(tmp_path, "peers"))
    assert math.isnan({row["arm"]: row for row in found.rows}["none"]["peak_bytes"]), "one of two seeds is enough"
    text = table_text(found)
    assert cells(text, "lora-none ") == "lora-none 0/1 - out of memory - - -"
    assert cells(text, "flora-none ") == "flora-none 1/1 - - - - -"
    assert cells(text, "galore-none ") == "galore-none 1/1 0.500 (0.500 to 0.500) 30.0 1 - -"
    assert "lora-none: out of memory in backward (wanted 1.0 MiB beside 3.0 MiB)" in text
    assert "so not at the common KL: flora-none, galore-none, lora-none" in text


def test_arms_at_other_settings_are_told(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5})
    other = config("sketch", 1.0, 0) | {"microbatch_responses": 8, "control": {"name": "none", "probe_every": 9}}
    write_arm(tmp_path, "sketch", 0.01, {0: 0.5}, config=other, hardware={"cpu": "two"})
    write_arm(tmp_path, "lora", 0.01, {0: 0.5}, factor=3.0)
    kept, sentences = at_published_rates(study_of(tmp_path, "peers"))
    assert sentences == ["left out, at other rates than their own: lora-none-rate_factor=3"]
    found = compare("t", kept)
    assert [row["arm"] for row in found.rows] == ["baseline", "none"]
    expected = "none differs from baseline in microbatch_responses, cpu, control.probe_every"
    assert f"not at equal settings: {expected}" in found.sentences


# Equal tuning


def write_tuned(root: Path) -> None:
    """Of baseline 0.3 is the best of 0.1, 0.3 and 1; of none the largest; seed 1 has only 3, and would win for 1."""
    for factor, finals in ((0.1, {0: 0.4}), (0.3, {0: 0.8}), (1.0, {0: 0.5, 1: 1.0})):
        write_arm(root, "dense", 0.01, finals, factor, study="peers_tuned")
    for factor, final in ((0.1, 0.4), (0.3, 0.5), (1.0, 0.6)):
        write_arm(root, "sketch", 0.02, {0: final}, factor, study="peers_tuned")
    write_arm(root, "sketch", 0.02, {1: 0.55, 2: 0.45}, 1.0, study="peers_tuned")


def test_the_best_factor_is_chosen_over_shared_seeds(tmp_path):
    write_tuned(tmp_path)
    runs = study_of(tmp_path, "peers_tuned")
    dense, sketch = choose(runs)
    assert (dense.arm, dense.best, dense.seeds, dense.at_edge) == ("baseline", 0.3, [0], False)
    assert dense.scores == pytest.approx({0.1: 0.4, 0.3: 0.8, 1.0: 0.5})
    assert (sketch.arm, sketch.best, sketch.seeds, sketch.at_edge) == ("none", 1.0, [0], True)
    kept, sentences = at_best_rates(runs, [dense, sketch])
    assert kept[["name", "seed"]].values.tolist() == [["baseline", 0], ["none", 1], ["none", 2]]
    (sentence,) = sentences
    assert "too high by chance: baseline; run" in sentence
    found = compare("t", kept)
    assert [row["accuracy"] for row in found.rows] == pytest.approx([0.8, 0.5])


def test_factors_that_failed_are_no_candidates_and_bound_the_grid(tmp_path):
    for factor, final, status in ((0.1, 0.4, "finished"), (1.0, 0.5, "finished"), (10.0, 0.9, "failed")):
        write_arm(tmp_path, "dense", 0.01, {0: final, 1: final}, factor, study="t", status=status)
    (choice,) = choose(study_of(tmp_path, "t"))
    assert (choice.best, choice.at_edge, choice.seeds) == (1.0, False, [0, 1])
    assert math.isnan(choice.scores[10.0])


def test_of_equal_factors_the_one_nearest_1_is_chosen(tmp_path):
    for factor in (0.1, 1.0, 3.0):
        write_arm(tmp_path, "dense", 0.01, {0: 0.5}, factor, study="t")
    assert choose(study_of(tmp_path, "t"))[0].best == 1.0


def test_an_arm_of_which_nothing_is_finished_has_no_choice(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5}, study="t", status="failed")
    assert choose(study_of(tmp_path, "t")) == []


# Figure and door


def test_the_figure_is_the_curves(tmp_path):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5})
    write_arm(tmp_path, "dense", 0.012, {1: 0.9})  # 0.8 at a KL of 0.1
    write_arm(tmp_path, "sketch", 0.04, {0: 0.6})
    write_arm(tmp_path, "lora", 0.0, {0: 0.3})
    found = compare("at equal settings: x", study_of(tmp_path, "peers"))
    assert found.common_kl == 0
    result = figure([found._replace(common_kl=0.1)] * 2)
    for ax in result.axes:
        lines = {line.get_label(): line for line in ax.get_lines()}
        assert ax.get_xscale() == "log"
        dense, sketch = lines["baseline"], lines["none"]
        assert dense.get_color() != sketch.get_color() and "lora-none" not in lines
        for line, end, kl, final in ((dense, 0.1, 0.06, 0.65), (sketch, 0.4, 0.2, 0.6)):
            x, y = line.get_data()
            assert (x[-1], y[-1]) == pytest.approx((end, final))
            assert x[0] == pytest.approx(kl, rel=0.05), "from the first evaluation after the start"
            np.testing.assert_allclose(y, 0.3 + (final - 0.3) * x / end)
        band = ax.collections[0].get_paths()[0].vertices
        assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.3, 0.8), abs=0.1)
        assert [list(line.get_xdata()) for line in ax.get_lines()][-1] == [0.1, 0.1]
    (legend,) = result.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["baseline", "none", "common KL", "guess, before the first evaluation"]
    with pytest.raises(RunsError, match="nothing to draw"):
        figure([found._replace(seeds={"lora-none": found.seeds["lora-none"]})])


def test_the_door_writes_what_it_prints(tmp_path, capsys):
    write_arm(tmp_path, "dense", 0.01, {0: 0.5})
    write_arm(tmp_path, "sketch", 0.02, {0: 0.6})
    write_tuned(tmp_path)
    table, drawing = tmp_path / "p.csv", tmp_path / "p.png"
    assert main([str(tmp_path), "--csv", str(table), "--figure", str(drawing)]) == 0
    printed = capsys.readouterr().out
    assert "at equal settings: study peers, each arm at its default rate" in printed
    assert "at equal tuning: study peers_tuned, each arm at the best factor of its grid" in printed
    grid = printed[printed.index("final accuracy by method.rate_factor") :]
    assert cells(grid, "baseline") == "baseline 0 0.400 0.800 0.500 0.3"
    assert cells(grid, "none") == "none 0 0.400 0.500 0.600 1 at the edge of its grid: a better one may lie beyond"
    assert printed.splitlines()[-2:] == [str(table), str(drawing)] and drawing.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        rows = [
            (row["compared"], row["arm"], row["rate_factor"], row["at_edge"], row["accuracy"])
            for row in csv.DictReader(file)
        ]
    assert rows == [
        ("equal settings", "baseline", "1", "False", "0.5"),
        ("equal settings", "none", "1", "False", "0.6"),
        ("equal tuning", "baseline", "0.3", "False", "0.8"),
        ("equal tuning", "none", "1", "True", "0.5"),
    ]


def test_one_study_is_enough(tmp_path, capsys):
    write_tuned(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "equal settings: there is no study peers\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{root}/nowhere"], "is not a folder"),
        (["{root}"], "no study peers or peers_tuned below {root}: there is main"),
        (["{root}", "--study", "main", "--figure", "{root}/f.png"], "nothing to draw: no finished run has both"),
    ],
)
def test_a_bad_argument_gives_one_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path, "lora-none", 0, config=config("lora", 1.0, 0))
    assert main([argument.format(root=tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and sentence.format(root=tmp_path) in line
