"""One row a variant: `python -m analysis.tables ROOT` prints the table of every study, `--csv FILE` also writes it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

NOTE = (
    "seeds: finished/all; start: held-out accuracy at update 0, all seeds; final, range, tokens a response: at the\n"
    "last evaluation of the finished seeds; std: of the lengths of a batch's training responses, mean over updates;\n"
    "binds: share of updates that the control scaled down; predicted, realised: KL of an update, nats per token;\n"
    "MiB (peak bytes of an update; more: python -m analysis.memory), seconds (of an update): medians over the updates\n"
    "of all seeds that were measured, evaluations apart"
)

# Column of the summary -> (key of metrics.jsonl, statistic over the updates of all seeds).
_OF_UPDATES = {
    "tokens_std": ("rollout/response_tokens_std", "mean"),
    "binds": ("control/binds", "mean"),
    "predicted_kl": ("control/predicted_kl", "median"),
    "realised_kl": ("control/realised_kl", "median"),
    "peak_bytes": ("memory/peak_bytes", "median"),
    "update_seconds": ("time/update_seconds", "median"),
}


def summary(evals: "pd.DataFrame", metrics: "pd.DataFrame", runs: "pd.DataFrame") -> "pd.DataFrame":
    """One row a variant of the study. Accuracies and tokens are those of evaluations, without smoothing.

    Columns: variant, finished, seeds (counts), start (accuracy at update 0, mean of all seeds), final, lowest, highest
    (accuracy at the last evaluation, mean and range of the finished seeds), tokens (response length there); over the
    updates of all seeds tokens_std (of the training responses), binds (share of updates whose step the control scaled),
    predicted_kl, realised_kl (nats per token), peak_bytes, update_seconds (medians). NaN: not logged.
    """
    import pandas as pd

    keys = [key for key, _ in _OF_UPDATES.values()]
    evals = evals.reindex(columns=[*evals.columns.union(["eval/accuracy", "eval/response_tokens"], sort=False)])
    metrics = metrics.reindex(columns=[*metrics.columns.union(keys, sort=False)])
    first = evals[evals["update"] == 0]
    last = evals[evals["status"] == "finished"].drop_duplicates("id", keep="last")
    rows = []
    for name, variant in runs.groupby("name", sort=False):
        final, updates = last[last["name"] == name], metrics[metrics["name"] == name]
        rows.append(
            {
                "variant": name,
                "finished": int((variant["status"] == "finished").sum()),
                "seeds": len(variant),
                "start": first.loc[first["name"] == name, "eval/accuracy"].mean(),
                "final": final["eval/accuracy"].mean(),
                "lowest": final["eval/accuracy"].min(),
                "highest": final["eval/accuracy"].max(),
                "tokens": final["eval/response_tokens"].mean(),
            }
            | {column: updates[key].agg(how) for column, (key, how) in _OF_UPDATES.items()}
        )
    return pd.DataFrame(rows)


def table_text(table: "pd.DataFrame") -> str:
    """Return the summary for a terminal; `NOTE` explains its columns."""

    def column(name: str, form: str) -> list[str]:
        return [format(value, form) if value == value else "-" for value in table[name]]

    shown = table[["variant"]].assign(
        seeds=[f"{row.finished}/{row.seeds}" for row in table.itertuples()],
        start=column("start", ".3f"),
        final=column("final", ".3f"),
        range=[
            f"{row.lowest:.3f} to {row.highest:.3f}" if row.final == row.final else "-" for row in table.itertuples()
        ],
        tokens=column("tokens", ".1f"),
        std=column("tokens_std", ".2f"),
        binds=column("binds", ".0%"),
        predicted=column("predicted_kl", ".1e"),
        realised=column("realised_kl", ".1e"),
        MiB=[format(value / 2**20, ".1f") if value == value else "-" for value in table["peak_bytes"]],
        seconds=column("update_seconds", ".2f"),
    )
    return shown.to_string(index=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tables", description="One row a variant, for every study."
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder with runs at any depth, e.g. outputs")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows, with the study as first column")
    args = parser.parse_args(argv)

    import pandas as pd

    from analysis.runs import RunsError, load_evals, load_metrics, load_runs

    tables = []
    try:
        for study, runs in load_runs(args.root).groupby("study"):
            table = summary(load_evals(runs), load_metrics(runs), runs)
            print(f"study {study}\n{table_text(table)}\n")
            tables.append(table.assign(study=study))
        print(NOTE)
        if args.csv:
            rows = pd.concat(tables)
            rows[["study", *rows.columns.drop("study")]].to_csv(args.csv, index=False, float_format="%.4g")
            print(args.csv)
    except (RunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
