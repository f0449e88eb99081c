"""Where the time of an update goes: `python -m analysis.speed ROOT` prints a table, `--csv FILE` also writes it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

TRAINING_PHASES = ("forward", "backward", "reduce", "step")
"""The training step: what is left of an update without its rollout, its scoring and the control's probe."""

NOTE = (
    "seconds over the updates of all seeds, warm-ups apart; warm-up: mean of the first update of each process, which\n"
    "also makes caches and optimizer state; update: end to end, evaluations apart; training step: forward, backward,\n"
    "reduce and step together; tokens/s: of the rollout, response tokens over rollout seconds; of the training step,\n"
    "prompt and response tokens over its seconds; each a sum over a sum; n: updates that had the part"
)


def warm_ups(folder: Path) -> set[int]:
    """Return the first update of each process that was at a run: update 1, and the one after each resume."""
    import json

    found = {1}
    path = folder / "events.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            if row["kind"] == "resumed":
                found.add(row["update"] + 1)
        except (ValueError, KeyError, TypeError):  # torn, or no event
            continue
    return found


def times(metrics: "pd.DataFrame", runs: "pd.DataFrame") -> "pd.DataFrame":
    """One row an arm and part of an update: update, training step, then its phases in their order.

    Columns: name, part, p50, p90, p99, worst, warm_up (seconds; `NOTE` says of what), share (of all updates' time),
    tokens_per_second (rollout and training step only), updates (how many had the part), in_updates (their share). NaN:
    not logged.
    """
    import numpy as np
    import pandas as pd

    from src.records import PHASES

    columns = [f"time/{phase}_seconds" for phase in ("update", *PHASES)]
    tokens = ["rollout/prompt_tokens", "rollout/response_tokens"]
    metrics = metrics.reindex(columns=[*metrics.columns.union([*columns, *tokens], sort=False)])
    firsts = {run["id"]: warm_ups(Path(run["folder"])) for run in runs.to_dict("records")}
    first = np.array([row.update in firsts[row.id] for row in metrics[["id", "update"]].itertuples()], dtype=bool)
    rows = []
    for name in runs["name"].unique():
        own = metrics["name"] == name
        parts = {"update": ["update"], "training step": [*TRAINING_PHASES]} | {phase: [phase] for phase in PHASES}
        for part, phases in parts.items():
            keys = [f"time/{phase}_seconds" for phase in phases]
            seconds = metrics[keys].sum(axis=1, min_count=1)
            counted = own & ~first & seconds.notna()
            steady, warm = seconds[counted], seconds[own & first]
            if steady.empty and warm.notna().sum() == 0:
                continue
            worked = {"rollout": tokens[1:], "training step": tokens}.get(part)
            amount = np.nan if worked is None else metrics.loc[counted, worked].sum(axis=1, min_count=len(worked)).sum()
            whole = metrics.loc[own & ~first, "time/update_seconds"].sum()
            quantiles = steady.quantile([0.5, 0.9, 0.99]) if len(steady) else [np.nan] * 3
            rows.append(
                {"name": name, "part": part}
                | dict(zip(("p50", "p90", "p99"), quantiles, strict=True))
                | {
                    "worst": steady.max(),
                    "warm_up": warm.mean(),
                    "share": steady.sum() / whole if whole else np.nan,
                    "tokens_per_second": (amount or np.nan) / (steady.sum() or np.nan),
                    "updates": len(steady),
                    "in_updates": len(steady) / max(1, int((own & ~first).sum())),
                }
            )
    columns = ["name", "part", "p50", "p90", "p99", "worst", "warm_up", "share", "tokens_per_second"]
    columns += ["updates", "in_updates"]
    return pd.DataFrame(rows, columns=columns)


def times_text(table: "pd.DataFrame") -> str:
    """Return the table for a terminal; `NOTE` explains it."""
    headers = ["arm", "part of an update", "p50 s", "p90 s", "p99 s", "worst s", "warm-up s", "share", "tokens/s", "n"]
    rows = [
        [row.name, row.part]
        + [number(value, ".3g") for value in (row.p50, row.p90, row.p99, row.worst, row.warm_up)]
        + [number(row.share, ".0%"), number(row.tokens_per_second, ".0f"), str(row.updates)]
        for row in table.itertuples(index=False)
    ]
    return aligned(headers, rows, texts=2)


def number(value: float, form: str) -> str:
    """Return a number, or `-` for NaN."""
    return format(value, form) if value == value else "-"


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table; headers may have several lines, the first `texts` columns stand on the left."""
    heads = [header.split("\n") for header in headers]
    height = max(map(len, heads))
    lines = [list(line) for line in zip(*([""] * (height - len(head)) + head for head in heads), strict=True)]
    lines += [list(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    sides = "<" * texts + ">" * (len(headers) - texts)
    return "\n".join(
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.speed", description="Where the time of an update goes.")
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--study", help="only this study (default: every one)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows, with the study as first column")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.runs import RunsError, load_metrics, studies

    tables = []
    try:
        for study, runs in studies(args.root, args.study):
            table = times(load_metrics(runs), runs)
            print(f"study {study}\n{times_text(table)}\n")
            tables.append(table.assign(study=study))
        print(NOTE)
        if args.csv:
            rows = pd.concat(tables)
            rows[["study", *rows.columns.drop("study")]].to_csv(args.csv, index=False, float_format="%.6g")
            print(args.csv)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
