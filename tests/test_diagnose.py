"""Estimates of gradients and their costs: the door and its two tables."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from src import diagnose
from src.memory import saved_for_backward
from tests.launching import PROJECT, fast


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "src.diagnose", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_family_and_reconstruction_has_a_row(tmp_path):
    """Cosines lie where the families' errors put them; what is saved for backward is smaller than dense AdamW's."""
    place = tmp_path / "deep" / "estimates.csv"
    ended = run(
        "--csv",
        str(place),
        "--ranks",
        "8",
        "--rounds",
        "1",
        "--draws",
        "3",
        *fast(f"root={tmp_path}", without="method"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "srht" in ended.stdout and str(place) in ended.stdout
    found = table(place)
    assert len(found) == 18 and len({row["family"] for row in found}) == 6
    for row in found:
        one_sided, recomputed = row["sides"] == "one", row["recomputed"] == "True"
        assert one_sided or recomputed
        assert int(row["sketch_bytes"]) <= int(found[0]["sketch_bytes"]) < int(row["gradient_bytes"])
        assert 0 < float(row["cosine"]) < float(row["cosine_best"]) <= 1 + 1e-9
        assert float(row["update_ratio_low"]) <= float(row["update_ratio"]) <= float(row["update_ratio_high"])
        assert 0 < int(row["saved_bytes"]) < int(row["peak_bytes"])
        assert int(row["saved_bytes"]) < int(row["saved_bytes_dense"]) or recomputed
        assert int(row["peak_bytes"]) < int(row["peak_bytes_dense"]) or not one_sided
    spectra = table(place.with_name("estimates.spectrum.csv"))
    assert len(spectra) == 7
    for row in spectra:
        shares = [float(row[f"gradient_share_{k}"]) for k in (1, 4, 16)]
        assert 0 < shares[0] <= shares[1] <= shares[2] <= 1 + 1e-9 and float(row["gradient_decay"]) > 0
        assert float(row["sketch_share_16"]) == pytest.approx(1.0)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--draws", "x"], ["--ranks", "4,0"]])
def test_counts_are_positive(tmp_path, words):
    ended = run("--csv", str(tmp_path / "x.csv"), *words)
    assert ended.returncode == 2 and words[0] in ended.stderr and "Traceback" not in ended.stderr


def test_a_rank_too_small_for_two_sides_has_none():
    targets = {"a": nn.Linear(64, 64)}
    assert {arm.co_rank for arm in diagnose.arms_of(2, targets)} == {None}
    assert {arm.co_rank for arm in diagnose.arms_of(9, targets)} == {None, 6}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--ranks", "1000"], "got 1000"),
        (["model.hiden_size=3"], "model.hiden_size is not a key"),
        (["model=nope"], "model/nope"),
        (["method.rank=3"], "at the ranks of --ranks"),
        (["model.gradient_checkpointing=true"], "with and without"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(tmp_path, words, reason):
    ended = run("--csv", str(tmp_path / "x.csv"), *words)
    assert ended.returncode == 1 and ended.stderr.startswith("error: ") and reason in ended.stderr
    assert "Traceback" not in ended.stderr and not list(tmp_path.iterdir())


def test_the_estimates_cosine_is_the_families():
    """One layer, one gradient: cos = 1 / sqrt(1 + error) within 10% for Rademacher's (N - 1) / R."""
    targets = {"a": nn.Linear(60, 30, bias=False)}
    gradient = torch.randn(30, 60, generator=torch.Generator().manual_seed(0))
    row = diagnose.estimate(diagnose.Arm("rademacher", 12), targets, [{"a": gradient}], draws=20)
    assert row["cosine"] == pytest.approx((1 + 59 / 12) ** -0.5, rel=0.1)
    exact = torch.outer(torch.arange(1.0, 31.0), torch.arange(1.0, 61.0))  # of rank 1: two-sided finds it
    row = diagnose.estimate(diagnose.Arm("gaussian", 2, 5), targets, [{"a": exact}], draws=2)
    assert row["cosine"] == pytest.approx(1.0, abs=1e-4) and row["cosine_best"] == pytest.approx(1.0, abs=1e-6)


def test_what_is_saved_for_backward_is_counted_once_and_without_the_model():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    x = torch.randn(5, 8)
    with saved_for_backward(model) as sizes:
        y = model(x)  # keeps x and the hidden state, and the weights, which are the model's
        assert max(sizes) == 4 * (5 * 8 + 5 * 8)
        (y * y).sum().backward()
    assert max(sizes) == 4 * (5 * 8 + 5 * 8 + 5 * 4)
