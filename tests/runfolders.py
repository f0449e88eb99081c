"""Writes run folders as docs/design.md, section 5, describes them, without anything of src/."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_run(
    root: Path,
    label: str,
    seed: int,
    evals: Sequence[Mapping[str, Any]] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    study: str = "main",
    variant: str | None = None,
    status: str = "finished",
    **record: Any,
) -> Path:
    """One run folder below `root`; `record` overrides keys of run.json. Returns the folder."""
    variant = variant or f"{zlib.crc32(label.encode()):08x}"
    run_id = f"{label}-s{seed}-{variant}"
    folder = root / study / run_id
    folder.mkdir(parents=True)
    about = {
        "schema_version": 1,
        "id": run_id,
        "study": study,
        "label": label,
        "variant": variant,
        "seed": seed,
        "status": status,
        "phase": "done" if status == "finished" else "rollout",
        "error": None,
        "start": 1000.0,
        "end": 2000.0 if status == "finished" else None,
        "heartbeat": 2000.0,
        "updates": max((row["update"] for row in metrics), default=0),
        "updates_done": max((row["update"] for row in metrics), default=0),
        "threads": 2,
        "device": "cpu",
        "task": {"name": "addition", "version": 1},
        "warm_start": {"hash": "0123abcd", "accuracy": 0.3, "entropy": 1.0, "dead_group_share": 0.2},
    }
    (folder / "run.json").write_text(json.dumps(about | record))
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "evals.jsonl", evals)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_ablation(root: Path) -> None:
    """Variants none and decay, seeds 0, 1, 2, 40 updates, evaluated every 10; all numbers are straight lines.

    Seed 2 of decay was killed in update 21, while it wrote that update's line.
    """
    for label in ("none", "decay"):
        for seed in range(3):
            killed = label == "decay" and seed == 2
            done = 20 if killed else 40
            folder = write_run(
                root,
                label,
                seed,
                evals=[
                    {
                        "update": update,
                        "eval/accuracy": 0.3 + 0.1 * seed + 0.01 * update,
                        "eval/response_tokens": 20 - 0.2 * update,
                    }
                    for update in range(0, done + 1, 10)
                ],
                metrics=[_update_row(label, seed, update) for update in range(1, done + 1)],
                status="running" if killed else "finished",
            )
            if killed:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write('{"update": 21, "reward/me')


def _update_row(label: str, seed: int, update: int) -> dict[str, float]:
    budget = {"control/budget": 0.01 / update} if label == "decay" else {}
    return budget | {
        "update": update,
        "rollout/response_tokens_mean": 10 + seed + update,
        "control/predicted_kl": 0.01 / update,
        "control/realised_kl": 0.012 / update,
        "control/step_scale": 0.5 if label == "decay" else 1.0,
        "control/binds": update % 2 if label == "decay" else 0,
        "memory/peak_bytes": 100_000_000 + update,
        "time/update_seconds": 0.1,
    }
