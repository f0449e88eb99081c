"""Resume: from every checkpoint of every kind of run, the rest comes out bit for bit as it would have."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from src import checkpoint
from tests.launching import fast, launch, record, rows, run_folders

QUIET = "wandb.mode=disabled"
UPDATES = 6
EVERY = [f"updates={UPDATES}", "eval_every=2", "checkpoint.every=1", "checkpoint.keep=100", QUIET]
ARMS = {
    "sketch": ["method.weight_decay=0.1", "method.warmup=4"],
    "redraw": ["control=fixed", "method.refresh_every=3"],
    "never": ["control=none", "method.direction=sgd", "method.refresh_every=never"],
    "adam": ["method.direction=adam", "method.moments=transfer", "method.refresh_every=3", "method.beta1=0.5"],
    "two-sided": ["method.reconstruction=two_sided", "model.gradient_checkpointing=true", "method.projection=gaussian"],
    "dense": ["method=dense", "control=none", "method.warmup=3"],
    "dense-all": ["method=dense", "control=fixed", "method.train_all=true", "method.weight_decay=0.1"],
    "batches": ["objective.updates_per_batch=3", "objective.reference_kl=0.1", "objective.mask_truncated=true"],
    "random-rewards": ["objective.random_rewards=true", "objective.updates_per_batch=2", "control.schedule=linear"],
}

# Everywhere where there is most to come back; else before and at an evaluation or a redraw.
WHERE = {"sketch": range(1, UPDATES + 1), "batches": range(1, UPDATES + 1), "dense": (1, 5)}


def words(arm: str, root: Path, *more: str) -> list[str]:
    left_out = "method.rank" if "method=dense" in ARMS[arm] else ""
    return fast(*EVERY, *ARMS[arm], f"root={root}", *more, without=left_out)


def content(folder: Path) -> dict[str, Any]:
    """All that a run leaves, what the clock says apart."""
    names = ("metrics", "memory", "evals", "samples")
    files = {path.name: path.read_bytes() for path in sorted((folder / "policy").iterdir())}
    return {name: rows(folder, name) for name in names} | {"policy": files}


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints hold the same bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def set_record(folder: Path, **fields: Any) -> None:
    (folder / "run.json").write_text(json.dumps(record(folder) | fields))


@pytest.mark.parametrize("arm", ARMS)
def test_from_every_checkpoint_the_rest_is_the_same(arm: str, root: Path, tmp_path: Path) -> None:
    """F26, F61, F62, M19, M34: at any update, at a redraw, inside a batch of several updates; memory included."""
    ended = launch(*words(arm, root))
    assert ended.code == 0, ended.err
    (folder,) = run_folders(root)
    expected = content(folder)
    last = checkpoint.load(checkpoint.found(folder / "checkpoints")[0][1], record(folder)["id"])
    assert [update for update, _ in checkpoint.found(folder / "checkpoints")] == list(range(UPDATES, 0, -1))
    for update in WHERE.get(arm, (2, 3)):
        again = tmp_path / str(update)
        shutil.copytree(root, again)
        (copy,) = run_folders(again)
        shutil.rmtree(copy / "policy")
        for at, path in checkpoint.found(copy / "checkpoints"):
            if at > update:
                path.unlink()
        set_record(copy, status="interrupted")
        ended = launch(*words(arm, again))
        assert ended.code == 0 and f"goes on after update {update}" in ended.out, ended.err
        assert content(copy) == expected
        newest = checkpoint.load(checkpoint.found(copy / "checkpoints")[0][1], record(copy)["id"])
        assert same(newest, last)
        kinds = [row["kind"] for row in rows(copy, "events")]
        assert [kind for kind in kinds if kind != "conditions_changed"] == ["started", "resumed"]
        assert record(copy)["start"] == record(folder)["start"] and record(copy)["status"] == "finished"
