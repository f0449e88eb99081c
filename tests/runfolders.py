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
    memory: Sequence[Mapping[str, Any]] = (),
    events: Sequence[Mapping[str, Any]] = (),
    config: Mapping[str, Any] | None = None,
    **record: Any,
) -> Path:
    """One run folder below `root`; `record` overrides keys of run.json. Returns the folder.

    `memory` (the rows of memory.jsonl), `events` and `config` make no file where they are left out.
    """
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
    for name, rows in (("memory", memory), ("events", events)):
        if rows:
            write_rows(folder / f"{name}.jsonl", rows)
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))  # which is yaml, too
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


MIB = 2**20


def write_memory_study(root: Path, updates: int = 24, cap: int | None = None) -> None:
    """Arms baseline (dense) and decay (sketch), seeds 0, 1, 2; the bytes of updates 1 to 3 and every 2nd are measured.

    MiB, at the peak, which is in backward: weights 10; baseline: gradients 20, activations 30 + seed + length;
    decay: sketches 4, activations 30 + seed + length; optimizer state, from update 2 on: baseline 40, decay 0. The
    length is 0 to 2 and repeats every three updates. An update takes 1 s, of which backward takes 0.4.
    """
    for label, method in (("baseline", "dense"), ("decay", "sketch")):
        for seed in range(3):
            measured = [update for update in range(1, updates + 1) if update <= 3 or update % 2 == 0]
            write_run(
                root,
                label,
                seed,
                study="study",
                evals=[{"update": 0, "eval/accuracy": 0.3, "memory/evaluation_peak_bytes": 33 * MIB}],
                metrics=[_timed_row(update) for update in range(1, updates + 1)],
                memory=[memory_row(update, method, 30 + seed + update % 3) for update in measured],
                config=memory_config(method, seed, cap),
                memory_includes=["tensor storages returned by operators", "tracked tensors"],
                hardware={"machine": "x86_64", "cores": 2, "cpu": "one"},
            )


def memory_config(method: str, seed: int, cap: int | None = None) -> dict[str, Any]:
    return {
        "seed": seed,
        "updates": 24,
        "threads": 1,
        "device": "cpu",
        "root": "outputs",
        "microbatch_responses": 256,
        "memory": {"cap_bytes": cap, "every": 2},
        "method": {"name": method, "learning_rate": 1e-4},
        "control": {"name": "none"},
    }


def memory_row(update: int, method: str, activations: int) -> dict[str, float]:
    """The row of memory.jsonl of an update as `write_memory_study` has it, with `activations` MiB of these."""
    dense = method == "dense"
    parts = {"weights": 10, "gradients": 20 * dense, "sketches": 4 * (not dense), "activations": activations}
    parts["optimizer_state"] = 40 * (dense and update > 1)
    names = ("weights", "master_weights", "reference", "gradients", "sketches", "projections", "optimizer_state")
    names += ("activations", "logits", "probe", "kv_cache", "communication", "other")
    peak, between = sum(parts.values()), 10 + 40 * dense
    row: dict[str, float] = {"update": update, "memory/peak_bytes": peak * MIB, "memory/live_bytes": between * MIB}
    row |= {f"memory/peak_{name}_bytes": parts.get(name, 0) * MIB for name in names}
    row |= {f"memory/backward_peak_{name}_bytes": count * MIB for name, count in parts.items() if count}
    seconds = 3.0 if update == 1 else 1.0
    row |= {"memory/byte_seconds": (seconds * between + 0.4 * (peak - between)) * MIB}
    row |= {"memory/backward_peak_bytes": peak * MIB, "memory/backward_byte_seconds": 0.4 * peak * MIB}
    row |= {"memory/rollout_peak_bytes": between * MIB, "memory/rollout_byte_seconds": (seconds - 0.7) * between * MIB}
    return row | {"memory/rollout_peak_weights_bytes": between * MIB}


def _timed_row(update: int) -> dict[str, float]:
    """Seconds of an update: 1 in all, 3 of the first; its tokens."""
    seconds = {"update": 1.0, "rollout": 0.3, "forward": 0.1, "backward": 0.4, "step": 0.05}
    if update == 1:
        seconds |= {"update": 3.0, "rollout": 2.3}
    row: dict[str, float] = {"update": update, "rollout/prompt_tokens": 500, "rollout/response_tokens": 600}
    return row | {f"time/{name}_seconds": value for name, value in seconds.items()}
