"""Every training method on one model shape, side by side in one process.

    python -m src.bench --json FILE model=shape model.shape=smollm2-135m prompts_per_update=1 responses_per_prompt=4
    python -m src.bench minimum --json FILE ...        the smallest cap on memory at which each method completes updates
    python -m src.bench bookkeeping --json FILE ...    what ledger, tracking and control take of a training update

An update here is forward, backward, clip and step on synthetic tokens, the same for all: no rollout, no probe. Methods
take turns, round by round, each on its own copy of the weights; in each round an update that is not timed makes the
optimizer's state first. Times are ratios to dense AdamW of the same round. Bytes are those of one more update, followed
by the ledger while nothing is timed.
"""

import argparse
import gc
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src import composition, methods, models, trainer
from src import config as cfg
from src.memory import COMPONENTS, Ledger, MemoryCapExceeded, saved_for_backward
from src.monitor import Progress
from src.rollout import Rollout
from src.sketch.layer import SketchedLayers
from src.sketch.optimizer import SketchOptimizer
from src.stop import Stop
from src.tasks import load_task
from src.track import open_run
from src.trainer import Batch
from src.warmstart import warm_up

# What a name on the command line stands for: overrides of src.train's, or a baseline that only exists here.
CONTESTANTS: dict[str, list[str]] = {
    "adamw": [],  # torch.optim.AdamW(foreach=False) and clip_grad_norm_ on the sketch's matrices: the yardstick
    "adamw_foreach": [],
    "adamw_all": [],  # on every parameter
    "adamw_all_foreach": [],
    "dense": ["method=dense"],
    "sketch": ["method=sketch"],
    "sketch_64": ["method=sketch", "method.rank=64"],
    "sketch_two_sided": ["method=sketch", "method.reconstruction=two_sided", "method.rank=5", "method.co_rank=11"],
    "published_64": ["method=sketch", "method.rank=64"],  # each layer's A drawn and stored in float32
    "lora": ["method=lora"],
    "lora_frozen_a": ["method=lora", "method.freeze_a=true"],
    "galore": ["method=galore"],
    "galore_layerwise": ["method=galore", "method.layerwise=true", "method.max_grad_norm=null"],
    "apollo": ["method=apollo"],
    "flora": ["method=flora"],
    "adafactor": ["method=adafactor"],
    "adam8bit": ["method=adam8bit"],
}
_YARDSTICK = "adamw"
_PHASES = ("forward", "backward", "step")
# Beside the smallest cap, at which step times are taken.
_PRESSURES = (1.0, 1.1, 1.5)


@dataclass(frozen=True)
class Workload:
    """What all contestants do: the configuration, a policy that is copied, and a batch of synthetic responses."""

    config: cfg.Config
    policy: models.Policy
    batch: Batch

    @property
    def tokens(self) -> int:
        return int(self.batch.rollout.attention_BS.sum())


def synthetic_batch(config: cfg.Config, vocabulary: int, prompt_tokens: int, device: torch.device) -> Batch:
    """Return a batch of random tokens: prompts of `prompt_tokens`, responses of `max_response_tokens`, no padding."""
    rows, length = config.prompts_per_update * config.responses_per_prompt, config.max_response_tokens
    generator = torch.Generator().manual_seed(config.seed)
    tokens_BS = torch.randint(3, vocabulary, (rows, prompt_tokens + length), generator=generator)
    response_BL = torch.ones(rows, length, dtype=torch.bool, device=device)
    rollout = Rollout(
        tokens_BS.to(device),
        torch.ones_like(tokens_BS).to(device),
        response_BL,
        torch.full((rows, length), -1.0, device=device),
        torch.ones(rows, dtype=torch.bool, device=device),
    )
    advantages_B = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
    groups_B = torch.arange(config.prompts_per_update).repeat_interleave(config.responses_per_prompt)
    weights_BL = torch.full((rows, length), 1.0 / (rows * length), device=device)
    return Batch(rollout, groups_B, {}, advantages_B.clamp(min=0), advantages_B.to(device), weights_BL, None)


class Plain:
    """torch.optim.AdamW as a method: the yardstick."""

    def __init__(self, parameters: list[nn.Parameter], foreach: bool):
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=foreach)
        self._foreach = foreach

    def propose(self) -> dict[str, float]:
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=self._foreach)
        return {"gradient_norm": float(norm)}

    def apply(self, step_scale: float) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def memory(self) -> dict[str, list[Tensor]]:
        return {
            "gradients": [p.grad for p in self._parameters if p.grad is not None],
            "optimizer_state": [t for state in self._optimizer.state.values() for t in state.values()],
        }


def build(name: str, config: cfg.Config, model: Any) -> Any:
    """Return a contestant's method on a model, which it freezes and hooks as it needs."""
    targets = models.targets(config.model, model)
    if name.startswith("adamw"):
        model.requires_grad_("_all" in name)
        for module in targets.values():
            module.weight.requires_grad_(True)
        return Plain([p for p in model.parameters() if p.requires_grad], name.endswith("foreach"))
    if name.startswith("published"):
        assert isinstance(config.method, cfg.SketchMethod)
        layers = SketchedLayers(model, targets, config.method.rank, config.seed, share=False)
        return SketchOptimizer(layers, lr=1e-6)
    return methods.build(config.method, model, targets, config.seed)


class Entrant:
    """A contestant on its own copy of the weights."""

    def __init__(self, name: str, config: cfg.Config, work: Workload):
        self._config = config
        self._batch = work.batch
        self._policy = replace(work.policy, model=deepcopy(work.policy.model))
        if getattr(config.model, "gradient_checkpointing", False):
            models.recompute_layers(self._policy.model)
        self._method = build(name, config, self._policy.model)
        for group in getattr(self._method, "param_groups", []):
            group["lr"] = 1e-6

    @property
    def model(self) -> Any:
        return self._policy.model

    def update(self, phase: Callable[..., Any]) -> None:
        """Forward, backward, clip and step."""
        trainer.accumulate(self._config, self._policy, self._batch, None, phase)
        with phase("step"):
            self._method.propose()
            self._method.apply(1.0)

    def watched(self, ledger: Ledger) -> None:
        """Show a ledger what is alive."""
        model = self._policy.model
        ledger.watch(lambda: {"weights": [*model.parameters(), *model.buffers()]})
        ledger.watch(getattr(self._method, "memory", dict), after=("backward", "step"))


@contextmanager
def entered(name: str, config: cfg.Config, work: Workload) -> Iterator[Entrant]:
    """Yield a contestant, and let go of all that it held."""
    entrant = Entrant(name, config, work)
    try:
        yield entrant
    finally:
        vars(entrant).clear()
        gc.collect()


def configured(name: str, overrides: list[str]) -> cfg.Config:
    """Return a contestant's configuration: that of the command line, with its own method.

    Raises:
        ConfigError: the method cannot be had, or not with these values.
    """
    return cfg.from_dict(composition.compose([*overrides, *CONTESTANTS[name], "control=none"]))


def workload(config: cfg.Config, prompt_tokens: int) -> Workload:
    """Load the model once and make the batch."""
    task = load_task(config.task)
    plain: Any = {} if isinstance(config.model, cfg.CustomModel) else {"gradient_checkpointing": False}
    policy = models.load(replace(config.model, **plain), task, torch.device(config.device), config.seed)
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return Workload(config, policy, synthetic_batch(config, vocabulary, prompt_tokens, policy.model.device))


def compare(names: list[str], overrides: list[str], work: Workload, rounds: int, updates: int) -> list[dict[str, Any]]:
    """Return a row for each contestant: seconds by phase of every timed update, bytes of one more, FLOPs of another."""
    configs = {name: configured(name, overrides) for name in names}
    rows: dict[str, dict[str, Any]] = {name: {"contestant": name, "seconds": []} for name in names}
    device = torch.device(work.config.device)
    for turn in range(rounds):
        for name, config in configs.items():
            if "error" in rows[name]:
                continue
            print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                with entered(name, config, work) as entrant, Ledger(device) as ledger:
                    entrant.watched(ledger)
                    ledger.measure(turn == 0)
                    entrant.update(ledger.phase)
                    creation, first = ledger.close_update()
                    if turn == 0:
                        entrant.update(ledger.phase)
                        rows[name] |= {
                            "first_update": creation,
                            "first_seconds": first,
                            "memory": ledger.close_update()[0],
                        }
                        ledger.measure(False)
                        rows[name] |= floors(entrant)
                        rows[name]["floor_bytes"] = floor_bytes(rows[name])
                    for _ in range(updates):
                        entrant.update(ledger.phase)
                        rows[name]["seconds"].append(ledger.close_update()[1])
            except (RuntimeError, MemoryError, NotImplementedError, TypeError, ValueError) as error:
                rows[name]["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                print(f"  {rows[name]['error']}", file=sys.stderr)
    return list(rows.values())


def floors(entrant: Entrant) -> dict[str, int]:
    """Return what an update cannot do without: its FLOPs, and the bytes that it saves for backward at most.

    FLOPs are those of matrix products and attention as torch's FlopCounterMode counts them (of attention kernels that
    it knows), recomputed layers included. saved_bytes: tensors held for backward, weights apart; what a recomputed
    layer holds while it is computed again is not in it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        entrant.update(_untimed)
    with saved_for_backward(entrant.model) as sizes:
        entrant.update(_untimed)
    return {"flops": counter.get_total_flops(), "saved_bytes": max(sizes)}


def floor_bytes(row: dict[str, Any]) -> int:
    """Return the bytes that must be alive at some moment of a contestant's update, whatever its code is.

    Weights, masters, projections and optimizer state, with the larger of what is saved for backward at the end of a
    forward pass and the gradients or sketches at the end of backward.
    """
    at_step = {name: row["memory"].get(f"memory/step_peak_{name}_bytes", 0) for name in COMPONENTS}
    held = sum(at_step[name] for name in ("weights", "master_weights", "projections", "optimizer_state"))
    return held + max(row["saved_bytes"], at_step["gradients"] + at_step["sketches"])


def minimum(name: str, overrides: list[str], work: Workload, updates: int, tolerance: float) -> dict[str, Any]:
    """Return the smallest cap (bytes) at which a contestant completes updates, to a relative tolerance, by bisection.

    Beside it the seconds of an update at 1, 1.1 and 1.5 times the cap. Below the cap the phase of the failure and what
    was wanted are those of the last trial that failed.
    """
    config = configured(name, overrides)
    low = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in work.policy.model.parameters()}.values()
    )
    row: dict[str, Any] = {"contestant": name, "updates": updates, "tolerance": tolerance, "trials": 0}

    def completes(cap: int) -> list[float] | None:
        """Return the seconds of the updates, None where the cap was passed."""
        row["trials"] += 1
        seconds = []
        phase = ["method_creation"]

        def told(ledger: Ledger) -> Callable[..., Any]:
            def enter(name: str, component: str | None = None) -> Any:
                phase[0] = name
                return ledger.phase(name, component)

            return enter

        try:
            with Ledger(torch.device(work.config.device), cap) as ledger, entered(name, config, work) as entrant:
                entrant.watched(ledger)
                for _ in range(updates):
                    entrant.update(told(ledger))
                    seconds.append(ledger.close_update()[1]["time/update_seconds"])
        except MemoryCapExceeded as error:
            row["below"] = {"phase": phase[0], "wanted_bytes": error.wanted_bytes, "update": len(seconds) + 1}
            return None
        return seconds

    high = 2 * low
    while completes(high) is None:
        low, high = high, 2 * high
    while high > low * (1 + tolerance):
        middle = (low + high) // 2
        low, high = (low, middle) if completes(middle) is not None else (middle, high)
    row["cap_bytes"] = high
    row["seconds"] = {str(times): completes(int(high * times)) for times in _PRESSURES}
    return row


def bookkeeping(overrides: list[str], rounds: int, updates: int) -> list[dict[str, Any]]:
    """Return the seconds of training runs, bare and with ledger, rows, record and heartbeat, in turns.

    Both are `trainer.train` from the same policy; bare writes and measures nothing. The full runs also have the seconds
    of their probes, and of their updates.
    """
    evaluation = ["evaluation.samples=0", "evaluation.pass_k=[]", "task.held_out=8", "checkpoint.keep=0", "export=last"]
    length = [f"updates={updates}", f"eval_every={updates}", "wandb.mode=disabled"]
    config = cfg.from_dict(composition.compose([*overrides, *evaluation, *length]))
    task = load_task(config.task)
    policy = models.load(config.model, task, torch.device(config.device), config.seed)
    warm_up(policy, task, config, print)
    rows: list[dict[str, Any]] = []
    for _ in range(rounds):
        row: dict[str, Any] = {}
        for name in ("bare", "full"):
            own = replace(policy, model=deepcopy(policy.model))
            with tempfile.TemporaryDirectory() as folder:
                begin = time.perf_counter()
                if name == "bare":
                    silent: Any = Silent(Path(folder))
                    trainer.train(config, own, task, silent, silent, silent, Stop(), None)
                else:
                    record = {"id": "bench", "label": "bench", "study": "bench", "seed": config.seed}
                    with (
                        open_run(Path(folder), record, asdict(config), config.wandb) as run,
                        Ledger(torch.device(config.device)) as ledger,
                    ):
                        progress = Progress("bench", updates, stream=io.StringIO())
                        trainer.train(config, own, task, run, ledger, progress, Stop(), None)
                    written = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
                    row["probe_seconds"] = sum(line.get("time/probe_seconds", 0.0) for line in written)
                    row["update_seconds"] = sum(line["time/update_seconds"] for line in written)
                row[f"{name}_seconds"] = time.perf_counter() - begin
        rows.append(row)
    return rows


class Silent:
    """A run, ledger and progress that do nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.id = "bench"
        self.accuracies: dict[int, float] = {}
        self.wandb_id = None
        self.phase: Any = _untimed

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "phase" or callable(value):  # the trainer says where it is: nobody asks
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    @contextmanager
    def apart(self) -> Iterator[dict[str, float]]:
        yield {"seconds": 0.0, "peak_bytes": 0}

    def close_update(self) -> tuple[dict[str, float], dict[str, float]]:
        return {}, {}


def _untimed(name: str, component: str | None = None) -> Any:
    return nullcontext()


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 90th and 99th percentile, and the worst, of seconds."""
    at = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64))
    return dict(zip(("p50", "p90", "p99"), at.tolist(), strict=True)) | {"worst": max(values)}


def table(rows: list[dict[str, Any]], tokens: int) -> str:
    """Return the comparison for a terminal; ratios are to the first row that has numbers."""
    measured = [row for row in rows if "error" not in row]
    yardstick = measured[0]
    lines = [
        f"{'contestant':18} {'time':>5} {'range':>12} {'FLOPs':>6} {'p50 s':>7} {'p90':>7} {'p99':>7} {'worst':>7}"
    ]
    lines[0] += f" {'tokens/s':>8} {'forward':>8} {'backward':>8} {'step':>7} {'peak MiB':>9} {'peak':>5} {'floor':>6}"
    for row in measured:
        own, base = ([update["time/update_seconds"] for update in found["seconds"]] for found in (row, yardstick))
        ratios = [one / other for one, other in zip(own, base, strict=True)]
        times = spread(own)
        phases = [statistics.median(u.get(f"time/{phase}_seconds", 0.0) for u in row["seconds"]) for phase in _PHASES]
        peak = row["memory"]["memory/peak_bytes"]
        text = f"{row['contestant']:18} {statistics.median(ratios):5.2f} {min(ratios):5.2f} to {max(ratios):4.2f}"
        text += f" {row['flops'] / yardstick['flops']:6.2f}" + "".join(f" {value:7.3f}" for value in times.values())
        text += f" {tokens / times['p50']:8.0f} {phases[0]:8.3f} {phases[1]:8.3f} {phases[2]:7.3f} {peak / 2**20:9.1f}"
        text += f" {peak / yardstick['memory']['memory/peak_bytes']:5.2f} {peak / row['floor_bytes']:6.3f}"
        lines.append(text)
    lines.append("")
    shown = [name for name in COMPONENTS if any(row["memory"][f"memory/peak_{name}_bytes"] for row in measured)]
    lines.append(f"{'at the peak, MiB':18}" + "".join(f" {name:>15}" for name in shown) + "  first update's peak")
    for row in measured:
        parts = [row["memory"][f"memory/peak_{name}_bytes"] / 2**20 for name in shown]
        first = row["first_update"]["memory/peak_bytes"] / 2**20
        lines.append(f"{row['contestant']:18}" + "".join(f" {part:15.1f}" for part in parts) + f"  {first:.1f}")
    lines += [f"{row['contestant']:18} not measured: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


NOTE = (
    "time: of an update (forward, backward, clip, step) over the first row's of the same round, median and range;\n"
    "FLOPs: matrix products and attention, over the first row's; tokens/s: prompt and response tokens trained on;\n"
    "peak: bytes of living tensors, weights included, over the first row's; floor: the peak over what must be alive:\n"
    "weights, the method's state, and the larger of what is saved for backward and the gradients or sketches"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m src.bench",
        usage="%(prog)s [compare | minimum | bookkeeping] --json FILE ... [KEY=VALUE ...]",
    )
    words = sys.argv[1:]
    what = words.pop(0) if words and words[0] in ("compare", "minimum", "bookkeeping") else "compare"
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where everything measured goes")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="names, the first is the yardstick")
    parser.add_argument("--rounds", type=_count, default=5)
    parser.add_argument(
        "--updates", type=_count, default=None, help="timed in a round (1); of a trial (2); of a run (40)"
    )
    parser.add_argument("--prompt-tokens", type=_count, default=64)
    parser.add_argument("--tolerance", type=float, default=0.01, help="of minimum's caps")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of src.train")
    options = parser.parse_intermixed_args(words)
    overrides = options.overrides
    try:
        names = options.contestants.split(",")
        if unknown := [name for name in names if name not in CONTESTANTS]:
            raise cfg.ConfigError(f"--contestants: {unknown[0]} is none of {', '.join(CONTESTANTS)}.")
        config = configured(names[0], overrides)
        for name in names:
            configured(name, overrides)
    except cfg.ConfigError as error:
        sys.exit(f"error: {error}")
    torch.set_num_threads(config.threads)
    result: dict[str, Any] = {"kind": what, "command": "python -m src.bench " + " ".join(sys.argv[1:])}
    result |= {"torch": torch.__version__, "machine": platform.processor(), "threads": config.threads}
    if what == "bookkeeping":
        result["rows"] = bookkeeping(overrides, options.rounds, options.updates or 40)
        ratios = [row["full_seconds"] / row["bare_seconds"] - 1 for row in result["rows"]]
        probes = [row["probe_seconds"] / row["update_seconds"] for row in result["rows"]]
        print(
            f"ledger, rows, record: {statistics.median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%}) of a run"
        )
        print(f"probes: {statistics.median(probes):.1%} ({min(probes):.1%} to {max(probes):.1%}) of the updates' time")
    else:
        work = workload(config, options.prompt_tokens)
        result["tokens"] = work.tokens
        if what == "compare":
            result["rows"] = compare(names, overrides, work, options.rounds, options.updates or 1)
            print(f"{table(result['rows'], work.tokens)}\n{NOTE}")
        else:
            result["rows"] = []
            for name in names:
                row = minimum(name, overrides, work, options.updates or 2, options.tolerance)
                result["rows"].append(row)
                base = result["rows"][0]["cap_bytes"]
                pressed = " ".join(f"{max(times[1:] or times):.3f}" for times in row["seconds"].values())
                print(
                    f"{name:18} {row['cap_bytes'] / 2**20:9.1f} MiB  {row['cap_bytes'] / base:5.2f}  update at "
                    f"{', '.join(map(str, _PRESSURES))} x: {pressed} s; below it: {row['below']}"
                )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1))
    print(options.json)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
