"""Every training method on one model shape, side by side in one process.

    python -m src.bench --json FILE model=shape model.shape=smollm2-135m prompts_per_update=1 responses_per_prompt=4
    python -m src.bench minimum --json FILE ...        the smallest cap on memory at which each method completes updates
    python -m src.bench bookkeeping --json FILE ...    what ledger, tracking and control take of a training update
    python -m src.bench head --json FILE ...           logits by chunks beside fused kernels

An update here is forward, backward, clip and step on synthetic tokens, the same for all: no rollout, no probe. Methods
take turns, round by round, each on its own copy of the weights; in each round an update that is not timed makes the
optimizer's state first (with --together in the first round only). Times are ratios to dense AdamW of the same round.
Bytes are those of two updates before, followed by the ledger while nothing is timed.
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from src import config as cfg
from src import models
from src.bench.bookkeeping import bookkeeping
from src.bench.compare import NOTE, compare, table
from src.bench.contestants import CONTESTANTS, configured, reason, workload
from src.bench.head import heads
from src.bench.head import table as head_table
from src.bench.minimum import PRESSURES, minimum
from src.commandline import whole_number, writable
from src.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m src.bench",
        usage="%(prog)s [compare | minimum | bookkeeping | head] --json FILE ... [KEY=VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"contestants: {', '.join(CONTESTANTS)}",
    )
    words = sys.argv[1:]
    what = words.pop(0) if words and words[0] in ("compare", "minimum", "bookkeeping", "head") else "compare"
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where everything measured goes")
    parser.add_argument(
        "--contestants", default=",".join(CONTESTANTS), help="names, the first is the yardstick; default: all"
    )
    parser.add_argument("--rounds", type=whole_number, default=5, help="turns of each contestant (5)")
    parser.add_argument(
        "--together", action="store_true", help="keep all contestants alive between turns: finer turns, more memory"
    )
    parser.add_argument("--updates", type=whole_number, help="timed in a round (1); of a trial (2); of a run (40)")
    parser.add_argument("--prompt-tokens", type=whole_number, default=64, help="length of a prompt (64)")
    parser.add_argument("--tolerance", type=_share, default=0.01, help="of minimum's caps, relative (0.01)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of src.train")
    options = parser.parse_intermixed_args(words)
    try:
        _measure(what, options)
    except cfg.ConfigError as error:
        sys.exit(f"error: {error}")


def _measure(what: str, options: argparse.Namespace) -> None:
    overrides, names = options.overrides, options.contestants.split(",")
    if unknown := [name for name in names if name not in CONTESTANTS]:
        raise cfg.ConfigError(f"--contestants: {unknown[0]!r} is none of {', '.join(CONTESTANTS)}.")
    if len(set(names)) < len(names):
        raise cfg.ConfigError(f"--contestants: {options.contestants} has a name twice. Name each once.")
    config = configured(names[0], overrides)
    writable(options.json)
    skeleton = models.skeleton(config.model, getattr(load_task(config.task), "alphabet", None))
    if skeleton is not None:
        models.targets(config.model, skeleton)
    torch.set_num_threads(config.threads)
    result: dict[str, Any] = {"kind": what, "command": "python -m src.bench " + " ".join(sys.argv[1:])}
    result |= {"torch": torch.__version__, "machine": platform.processor(), "threads": config.threads}
    if what == "bookkeeping":
        result["rows"] = bookkeeping(overrides, options.rounds, options.updates or 40)
        probes = [row["probe_seconds"] / row["update_seconds"] for row in result["rows"]]
        for clock, kind in (("", "time"), ("cpu_", "processor time")):
            ratios = [row[f"full_{clock}seconds"] / row[f"bare_{clock}seconds"] - 1 for row in result["rows"]]
            print(
                f"ledger, rows, record: {statistics.median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%}) of a "
                f"bare run's {kind}"
            )
        print(f"probes: {statistics.median(probes):.1%} ({min(probes):.1%} to {max(probes):.1%}) of the updates' time")
    elif what == "head":
        if skeleton is None:
            raise cfg.ConfigError("model=custom has no head before it is built. Use another model.")
        head = skeleton.get_output_embeddings()
        tokens = config.prompts_per_update * config.responses_per_prompt * config.max_response_tokens
        result |= {"width": head.in_features, "vocabulary": head.out_features, "tokens": tokens}
        result["rows"] = heads(head.in_features, head.out_features, tokens, options.rounds, torch.device(config.device))
        print(head_table(result["rows"]))
    else:
        work = workload(config, options.prompt_tokens)
        result["tokens"] = work.tokens
        if what == "compare":
            result["rows"] = compare(names, overrides, work, options.rounds, options.updates or 1, options.together)
            _some(result["rows"])
            print(f"{table(result['rows'], work.tokens)}\n{NOTE}")
        else:
            result["rows"] = []
            for name in names:
                try:
                    row = minimum(name, overrides, work, options.updates or 2, options.tolerance)
                except Exception as error:  # of a package's code: the others are measured all the same
                    print(f"{name:18} not measured: {reason(error)}")
                    result["rows"].append({"contestant": name, "error": reason(error)})
                    continue
                result["rows"].append(row)
                base = next(row["cap_bytes"] for row in result["rows"] if "cap_bytes" in row)
                slowest = [max(times[1:] or times) if times else None for times in row["seconds"].values()]
                pressed = " ".join("-" if seconds is None else f"{seconds:.3f}" for seconds in slowest)
                below = row.get("below") or {"update": 0, "phase": "none", "wanted_bytes": 0}
                print(
                    f"{name:18} {row['cap_bytes'] / 2**20:9.1f} MiB  {row['cap_bytes'] / base:5.2f}  update at "
                    f"{', '.join(map(str, PRESSURES))} x: {pressed} s; below it update {below['update']} ends in "
                    f"{below['phase']}, {below['wanted_bytes'] / 2**20:.1f} MiB wanted"
                )
            _some(result["rows"])
    options.json.write_text(json.dumps(result, indent=1))
    print(options.json)


def _some(rows: list[dict[str, Any]]) -> None:
    if all("error" in row for row in rows):
        raise cfg.ConfigError(f"no contestant could be measured: {rows[0]['error']}")


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"a number between 0 and 1 is wanted, as 0.01, got {text!r}")
    return number


if __name__ == "__main__":
    main()
