"""The door: see `src.plan`."""

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import src.plan
from src import composition, models
from src import config as cfg
from src.commandline import whole_number, writable
from src.plan import check, published, report
from src.plan.prediction import NO_SHAPES, Plan, predict
from src.sketch.layer import check_rank
from src.tasks import load_task


def main() -> None:
    """Print the predictions that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m src.plan", description=src.plan.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompt-tokens", type=whole_number, help="length of a prompt; default: the task's longest, if known"
    )
    parser.add_argument(
        "--world-sizes", type=_counts, default=[1, 2, 4, 8, 16, 32, 64], help="default: 1,2,4,8,16,32,64"
    )
    parser.add_argument("--rank", type=whole_number, help="of the sketch that another method is compared with")
    parser.add_argument(
        "--csv", type=Path, help="where all predictions go, a row for each phase, layout and world size"
    )
    parser.add_argument("--published", action="store_true", help="predictions beside published numbers")
    parser.add_argument("--check", type=Path, metavar="CSV", help="predict and measure a list of configurations")
    parser.add_argument("overrides", nargs="*", help="configuration, as for python -m src.train")
    options = parser.parse_intermixed_args()
    try:
        for path in (options.csv, options.check):
            if path is not None:
                writable(path)
        if options.published:
            print(published.report())
        elif options.check:
            _check(options.check)
        else:
            _plan(options)
    except cfg.ConfigError as error:
        sys.exit(f"error: {error}")


def _plan(options: argparse.Namespace) -> None:
    config = cfg.from_dict(composition.compose(options.overrides))
    tokens = options.prompt_tokens or check.longest_prompt(config, 1)
    if tokens is None:
        raise cfg.ConfigError("the length of this task's prompts is not known here. Type --prompt-tokens 256.")
    contenders = [config, *others(config, options.overrides, options.rank)]
    skeleton = models.skeleton(config.model, getattr(load_task(config.task), "alphabet", None))
    if skeleton is None:
        raise cfg.ConfigError(NO_SHAPES)
    for contender in contenders:
        if isinstance(contender.method, cfg.SketchMethod):
            try:
                check_rank(models.targets(config.model, skeleton), contender.method.rank, contender.method.co_rank)
            except ValueError as error:
                raise cfg.ConfigError(str(error)) from None
    plans: dict[str, Plan] = {}
    for contender in contenders:
        name = contender.method.name
        print(f"predicting {name} (a minute or two for billions of parameters)", file=sys.stderr, flush=True)
        try:
            plans[name] = predict(contender, tokens)
        except cfg.ConfigError:
            raise
        except Exception as error:  # a package's code may want values, of which there are none
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            print(f"{name}: not predicted ({type(error).__name__}: {reason})\n")
            continue
        responses = config.prompts_per_update * config.responses_per_prompt
        rank = getattr(contender.method, "rank", None)
        print(
            f"{name}{'' if rank is None else f', rank {rank}'}: {responses} responses of {tokens} + "
            f"{config.max_response_tokens} tokens, {min(responses, config.microbatch_responses)} in a microbatch"
        )
        print(report.phases_text(plans[name]), end="\n\n")
    if {"sketch", "dense"} <= set(plans):
        print(report.comparison_text(plans["sketch"], plans["dense"]), end="\n\n")
    if plans:
        print(report.ranks_text(plans, options.world_sizes))
        if config.memory.cap_bytes is not None:
            print("\n" + report.cap_text(plans, config.memory.cap_bytes))
    if not plans:
        raise cfg.ConfigError("nothing could be predicted (reasons above).")
    if options.csv:
        rows = (
            row for name, plan in plans.items() for row in report.table_rows(name, plan, tokens, options.world_sizes)
        )
        _write(options.csv, rows)


def others(config: cfg.Config, overrides: list[str], rank: int | None) -> list[cfg.Config]:
    """Return the same with dense training of the same matrices; a dense one with the sketch."""
    kept = [word for word in overrides if word.lstrip("+").split("=")[0].split(".")[0] != "method"]
    if config.method.name != "dense":
        return [cfg.from_dict(composition.compose([*kept, "method=dense"]))]
    if getattr(config.method, "train_all", False):
        print("Dense training of all parameters: the sketch trains the matrices of model.targets alone.\n")
    words = ["method=sketch"] if rank is None else ["method=sketch", f"method.rank={rank}"]
    return [cfg.from_dict(composition.compose([*kept, *words]))]


def _check(path: Path) -> None:
    rows = []
    for row in check.check(check.CONFIGURATIONS):
        rows.append(row)
        _write(path, rows)  # what is known stays, whatever stops the rest
        if row["phase"] == "update":
            print(
                f"{row['deviation']:+9.4%}  {report.size(row['measured_bytes']):>10}  {row['configuration']}",
                flush=True,
            )
    worst = max((row for row in rows if row["phase"] == "update"), key=lambda row: abs(row["deviation"]))
    print(f"largest deviation of a peak: {worst['deviation']:+.4%}\n{path}")


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _counts(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
