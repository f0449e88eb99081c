"""The bench on a tiny model: what it writes, and that its figures are those of the methods."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from src import models
from src.bench.compare import compare, floor_bytes, spread
from src.bench.contestants import CONTESTANTS, Entrant, configured, synthetic_batch, workload
from src.bench.head import heads
from src.bench.minimum import minimum
from src.memory import COMPONENTS

SMALL = ["model.warm_start=null", "model.hidden_size=32", "model.intermediate_size=64", "prompts_per_update=2"]
SMALL += ["responses_per_prompt=2", "microbatch_responses=4", "max_response_tokens=6", "threads=1"]
RANK = ["method.rank=4"]


@pytest.fixture(scope="module")
def work():
    return workload(configured("sketch", [*SMALL, *RANK]), prompt_tokens=5)


def test_every_contestant_composes():
    for name in CONTESTANTS:
        rank = RANK if name in ("sketch", "lora", "lora_frozen_a", "galore", "apollo", "flora") else []
        small = [word for word in SMALL if "hidden_size" not in word] if name.endswith("_64") else SMALL
        configured(name, [*small, *rank])


def test_the_synthetic_batch_has_no_padding_and_teaches_something(work):
    batch = work.batch
    assert batch.rollout.tokens_BS.shape == (4, 11) and bool(batch.rollout.attention_BS.all())
    assert batch.rollout.response_BL.shape == (4, 6) and work.tokens == 44
    assert float(batch.weights_BL.sum()) == pytest.approx(1.0) and batch.advantages_B.tolist() == [1, -1, 1, -1]
    again = synthetic_batch(work.config, 18, 5, torch.device("cpu"))
    assert torch.equal(
        again.rollout.tokens_BS, synthetic_batch(work.config, 18, 5, torch.device("cpu")).rollout.tokens_BS
    )


def test_rows_hold_what_each_method_is_known_for(work):
    names = ["adamw", "adamw_foreach", "dense", "sketch", "adamw_all"]
    rows = {row["contestant"]: row for row in compare(names, [*SMALL], work, rounds=2, updates=1)}
    modules = list(models.targets(work.config.model, work.policy.model).values())
    trained = 4 * sum(module.weight.numel() for module in modules)
    for name, row in rows.items():
        assert "error" not in row, row
        assert len(row["seconds"]) == 2 and row["flops"] > 0
        memory = row["memory"]
        split = {part: memory[f"memory/peak_{part}_bytes"] for part in COMPONENTS}
        assert sum(split.values()) == memory["memory/peak_bytes"]
        assert floor_bytes(row) == row["floor_bytes"] < memory["memory/peak_bytes"]
        at_step = memory.get("memory/step_peak_gradients_bytes", 0), memory["memory/step_peak_optimizer_state_bytes"]
        if name == "sketch":
            assert at_step[0] == 0 and at_step[1] == 4 * sum(module.out_features for module in modules)
        elif name != "adamw_all":
            assert at_step[0] == trained and 2 * trained <= at_step[1] < 2.1 * trained
    assert rows["dense"]["flops"] == rows["adamw"]["flops"] < rows["adamw_all"]["flops"]
    (narrow,) = compare(["sketch"], [*SMALL, *RANK], work, rounds=1, updates=1)
    assert narrow["flops"] < rows["adamw"]["flops"]
    sketches = 4 * 4 * sum(module.out_features for module in modules)
    assert narrow["memory"]["memory/step_peak_sketches_bytes"] == sketches
    assert rows["dense"]["saved_bytes"] == rows["adamw"]["saved_bytes"]
    assert rows["adamw_all"]["memory"]["memory/step_peak_gradients_bytes"] > trained


def test_a_contestant_that_cannot_be_had_is_told_and_the_others_are_measured(work):
    rows = compare(["adamw", "sketch_64"], SMALL, work, rounds=1, updates=1)  # rank 64 of 32 inputs
    assert "error" not in rows[0] and "rank" in rows[1]["error"]


def test_contestants_that_stay_alive_take_turns_too(work):
    apart = compare(["adamw", "sketch", "sketch_64"], SMALL, work, rounds=3, updates=2)
    together = compare(["adamw", "sketch", "sketch_64"], SMALL, work, rounds=3, updates=2, together=True)
    for one, other in zip(apart, together, strict=True):
        assert one.keys() == other.keys() and len(one["seconds"]) == len(other["seconds"]) == (
            0 if "error" in one else 6
        )
        assert all("time/backward_seconds" in update for update in other["seconds"])
        assert one.get("memory", {}).get("memory/peak_bytes") == other.get("memory", {}).get("memory/peak_bytes")
        # a round's first timed update waits for the others' turns, which are none of its time
        for update in other["seconds"]:
            assert (
                sum(seconds for key, seconds in update.items() if "update" not in key)
                > 0.5 * update["time/update_seconds"]
            )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("error", [FloatingPointError("no number\nin it"), MemoryError(), KeyError("x")])
def test_a_contestant_that_fails_is_let_go_and_the_others_go_on(work, together, error, monkeypatch):
    failing, alive = [], []
    plain = Entrant.update

    def update(self, phase):
        if self._method.__class__.__name__ == "Plain":
            alive.append([one for one in failing if vars(one)])
        elif len(failing) < 4:
            failing.append(self)  # bytes, FLOPs
        else:
            failing.append(self)
            raise error
        plain(self, phase)

    monkeypatch.setattr(Entrant, "update", update)
    rows = compare(["adamw", "dense"], SMALL, work, rounds=4, updates=1, together=together)
    assert len(rows[0]["seconds"]) == 4 and rows[1]["error"].startswith(type(error).__name__)
    assert "\n" not in rows[1]["error"] and len(failing) == 5 and not alive[-1]


def test_bisection_ends_at_a_byte(work):
    assert minimum("adamw", SMALL, work, updates=1, tolerance=1e-9)["trials"] < 40


def test_the_smallest_cap_is_the_peak(work):
    for name in ("adamw", "sketch"):
        overrides = [*SMALL, *(RANK if name == "sketch" else [])]
        row = minimum(name, overrides, work, updates=2, tolerance=0.002)
        (measured,) = compare([name], overrides, work, rounds=1, updates=1)
        peak = max(measured["memory"]["memory/peak_bytes"], measured["first_update"]["memory/peak_bytes"])
        assert peak <= row["cap_bytes"] <= 1.003 * peak
        assert row["below"]["wanted_bytes"] > 0 and all(len(times) == 2 for times in row["seconds"].values())


def test_all_heads_have_one_gradient():
    rows = heads(width=16, vocabulary=1000, tokens=32, rounds=1, device=torch.device("cpu"))
    assert [row["way"] for row in rows][:3] == ["chunks", "chunks_at_once", "whole"]
    for row in rows:
        assert row["deviation"] < 1e-4 and row["peak_bytes"] > 0 and len(row["seconds"]) == 1


def test_percentiles_are_those_of_the_values():
    found = spread([float(value) for value in range(1, 101)])
    assert found == {"p50": 50.5, "p90": pytest.approx(90.1), "p99": pytest.approx(99.01), "worst": 100.0}


def door(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "src.bench", *words], capture_output=True, text=True, timeout=300)


def test_the_door_writes_a_table_and_json(tmp_path: Path):
    file = tmp_path / "out" / "bench.json"
    ended = door("--json", str(file), "--rounds", "1", "--contestants", "adamw,sketch", *SMALL)
    assert ended.returncode == 0, ended.stderr
    written: dict[str, Any] = json.loads(file.read_text())
    assert written["kind"] == "compare" and [row["contestant"] for row in written["rows"]] == ["adamw", "sketch"]
    assert "adamw" in ended.stdout and "FLOPs" in ended.stdout and str(file) in ended.stdout
    ended = door("bookkeeping", "--json", str(file), "--rounds", "1", "--updates", "2", f"root={tmp_path}", *SMALL)
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert min(row["bare_cpu_seconds"], row["full_cpu_seconds"]) > 0
    assert row["bare_seconds"] > 0 and 0 < row["probe_seconds"] < row["update_seconds"] < row["full_seconds"]


@pytest.mark.parametrize("words", [["--contestants", "adamw,nobody"], ["method.rank=x"], ["no_such_key=1"]])
def test_refusals_are_one_sentence(tmp_path: Path, words: list[str]):
    ended = door("--json", str(tmp_path / "x.json"), *SMALL, *words)
    assert ended.returncode == 1 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        (["model=shape", "model.shape=nope"], 1, "model.shape=nope is no shape that is known"),
        (["--contestants", "adamw", "model.targets=[nope]"], 1, "the pattern 'nope' matches no module"),
        (["--contestants", "adamw,adamw"], 1, "has a name twice"),
        (["--contestants", ""], 1, "--contestants: '' is none of adamw"),
        (["--json", "/proc/none/bench.json"], 1, "/proc/none/bench.json cannot be written"),
        (["minimum", "--tolerance", "nan"], 2, "a number between 0 and 1 is wanted"),
        (["minimum", "--tolerance", "x"], 2, "a number between 0 and 1 is wanted"),
        (["--rounds", "x"], 2, "a whole number from 1 to 10^9 is wanted"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(line, code, sentence, tmp_path):
    place = [] if "--json" in line else ["--json", str(tmp_path / "bench.json")]
    ended = door(*line, *place, "model.warm_start=null" if "model=shape" not in line else "threads=1")
    assert ended.returncode == code and sentence in ended.stderr and "Traceback" not in ended.stderr
