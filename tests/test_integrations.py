"""Sketches inside the trainers of transformers and TRL, through docs/examples and beyond them."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.adoption import changed_lines, code_lines, pairs
from src.callback import attach, check
from src.sketch import SketchOptimizer, sketching
from tests.tinymodels import PROJECTIONS, llama

pytest.importorskip("trl", reason="needs the extra trl: pip install -e '.[trl]'")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

# TRL turns activation checkpointing on by the name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning")
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


class Spy(TrainerCallback):
    """Stands where the reporters (W&B, TensorBoard) stand, before a user's callbacks, and notes what it sees."""

    seen: "Spy"

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.weight_gradients: list[str] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []
        Spy.seen = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = {name: p.detach().clone() for name, p in kwargs["model"].named_parameters()}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weight_gradients += [name for name, p in kwargs["model"].named_parameters() if p.grad is not None]
        groups = kwargs["optimizer"].param_groups
        self.norms.append(float(torch.cat([p.grad.flatten() for group in groups for p in group["params"]]).norm()))
        self.rates.append(groups[0]["lr"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs) | {"step": state.global_step})


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run an example with a Spy among the Trainer's own callbacks; return its variables."""
    import transformers.trainer

    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Spy])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("kind", ["loop", "trainer", "grpo"])
def test_the_dense_example_gives_every_weight_a_gradient(kind, monkeypatch, capsys):
    model = run(f"{kind}_dense", monkeypatch)["model"]
    assert f"{sum(p.nbytes for p in model.parameters()) / 1024:.0f} KiB" in capsys.readouterr().out
    if kind != "loop":
        assert set(Spy.seen.weight_gradients) == {name for name, _ in model.named_parameters()}


def test_the_loop_learns_without_gradients_of_weights(monkeypatch, capsys):
    model = run("loop_sketch", monkeypatch)["model"]
    losses = [
        float(found) for found in re.findall(r"loss ([\d.]+), gradients of weights 0 KiB", capsys.readouterr().out)
    ]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    assert all(parameter.requires_grad for parameter in model.parameters()), "restored"


@pytest.mark.parametrize("kind", ["trainer", "grpo"])
def test_the_trainer_s_example_trains_the_targets_alone(kind, monkeypatch, capsys):
    found, seen = run(f"{kind}_sketch", monkeypatch), Spy.seen
    args, state = found["args"], found["trainer"].state
    assert "weights that require a gradient: 0 KiB" in capsys.readouterr().out

    moved = {name for name, p in found["model"].named_parameters() if not torch.equal(p, seen.before[name])}
    assert moved == {name for name in seen.before if name.endswith("_proj.weight")} and len(moved) == 14
    assert seen.weight_gradients == []

    assert seen.rates == pytest.approx([args.learning_rate * (1 - k / args.max_steps) for k in range(args.max_steps)])
    history = [logs for logs in state.log_history if "loss" in logs]
    assert len(history) == len(seen.logs) == args.max_steps // args.logging_steps
    for logs in (*history, *seen.logs):
        step = logs["step"] - 1
        assert logs["grad_norm"] == pytest.approx(seen.norms[step], rel=1e-5)
        assert logs["learning_rate"] == seen.rates[step]
        assert logs["sketch/clip_scale"] == pytest.approx(1.0 / max(1.0, logs["grad_norm"]), rel=1e-5)
        assert logs["sketch/estimate_norm"] >= logs["grad_norm"] and 0 <= logs["sketch/moved_share"] <= 1
    assert history[0]["grad_norm"] > 0 and history[0]["sketch/moved_share"] > 0.99
    if kind == "grpo":
        assert history[-1]["reward"] > history[0]["reward"] + 0.1
    else:
        assert history[-1]["loss"] < 0.7 * history[0]["loss"]


# Rows of one length and with different numbers of labels, so that the mean over a batch is not the mean of means.
ROWS = [
    {
        "input_ids": [2 + (7 * row + 3 * place) % 27 for place in range(8)],
        "labels": [-100] * (row % 5) + [2 + (7 * row + 3 * place) % 27 for place in range(row % 5, 8)],
    }
    for row in range(24)
]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "save_strategy": "no"}
    fixed = {"output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(**(settings | fixed | options))


def trainer(model: Any, optimizer: SketchOptimizer, args: TrainingArguments, **options: Any) -> Trainer:
    settings = {"optimizers": (optimizer, None)}
    made = Trainer(model=model, args=args, train_dataset=ROWS, **(settings | options))
    attach(optimizer, made)
    return made


def trained(
    args: TrainingArguments, dtype: torch.dtype = torch.float32, resume: str | None = None, **options: Any
) -> Any:
    """Return a model after training; one that goes on from a checkpoint begins with weights of no worth."""
    model = llama(dtype)
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    with sketching(model, PROJECTIONS, rank=8, lr=args.learning_rate, **options) as optimizer:
        trainer(model, optimizer, args).train(resume_from_checkpoint=resume)
    return model


def distance(one: Any, other: Any) -> float:
    weights = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in weights)


# Steps that are as long as the gradient: RowAdam and clipping would hide a wrong scale.
PLAIN: dict[str, Any] = {"direction": "sgd", "clip_norm": "none"}
LONG = {"learning_rate": 0.1, "max_grad_norm": 0.0}


@pytest.mark.parametrize(("options", "settings"), [({}, {}), (PLAIN, LONG)], ids=["row_adam", "sgd"])
def test_accumulated_microbatches_are_one_batch(tmp_path, options, settings):
    whole = trained(arguments(tmp_path, **settings), **options)
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert distance(whole, llama()) > 1e-3
    assert distance(whole, trained(arguments(tmp_path, **settings, **split), **options)) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(tmp_path, reentrant):
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert distance(trained(arguments(tmp_path)), trained(arguments(tmp_path, **options))) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"direction": "adam", "refresh_every": 4}),
        (torch.bfloat16, {"storage": "master"}),
        (torch.bfloat16, {"storage": "stochastic"}),
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_weights_of_the_straight_one(tmp_path, dtype, options):
    args = arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    straight = trained(args, dtype, **options)
    assert distance(straight, trained(args, dtype, str(tmp_path / "checkpoint-3"), **options)) == 0


def test_grpo_accumulates_and_resumes(tmp_path, monkeypatch):
    """The example's parts with other arguments: samples are the same where the random state is."""
    found = run("grpo_sketch", monkeypatch)

    def again(resume: str | None = None, **options: Any) -> Any:
        from trl import GRPOConfig, GRPOTrainer

        torch.manual_seed(0)
        model = type(found["model"])(found["config"])
        settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 32, "num_generations": 8}
        settings |= {"max_completion_length": 1, "learning_rate": 3e-3, "logging_steps": 1, "bf16": False}
        settings |= {"output_dir": str(tmp_path), "report_to": "none", "disable_tqdm": True, "use_cpu": True}
        args = GRPOConfig(**(settings | options))
        with sketching(model, ["*_proj"], rank=16, lr=args.learning_rate) as optimizer:
            made = GRPOTrainer(
                model=model,
                args=args,
                train_dataset=found["dataset"],
                processing_class=found["tokenizer"],
                reward_funcs=found["reward"],
                optimizers=(optimizer, None),
            )
            attach(optimizer, made)
            made.train(resume_from_checkpoint=resume)
        return model

    straight = again()
    assert distance(straight, again(str(tmp_path / "checkpoint-2"))) == 0
    assert distance(straight, again(per_device_train_batch_size=8, gradient_accumulation_steps=4)) < 1e-5


def test_what_a_gradient_scaler_skips_is_cleared(tmp_path):
    model = llama()
    with sketching(model, PROJECTIONS, rank=8, lr=3e-3) as optimizer:
        scaler = torch.amp.GradScaler("cpu")
        ids = torch.tensor([ROWS[0]["input_ids"]])
        scaler.scale(model(input_ids=ids, labels=ids).loss * float("inf")).backward()
        scaler.step(optimizer)
        (group,) = optimizer.param_groups
        assert optimizer.updates == 0 and all(p.grad is not None for p in group["params"])
        trainer(model, optimizer, arguments(tmp_path)).callback_handler.callbacks[0].on_optimizer_step(None, None, None)
        assert all(p.grad is None for p in group["params"])


def test_a_trainer_that_steps_another_optimizer_is_refused(tmp_path):
    model = llama()
    with sketching(model, PROJECTIONS, rank=8, lr=3e-3) as optimizer:
        with pytest.raises(ValueError, match=r"steps AdamW, .* optimizers=\(optimizer, None\)"):
            trainer(model, optimizer, arguments(tmp_path), optimizers=(None, None)).train()
        with pytest.raises(ValueError, match=r"q_proj of the Trainer's model is not the layer that was sketched"):
            trainer(llama().requires_grad_(False), optimizer, arguments(tmp_path)).train()
        with pytest.raises(ValueError, match=r"max_grad_norm=0.5 of the Trainer .* clips at 1.0"):
            trainer(model, optimizer, arguments(tmp_path, max_grad_norm=0.5)).train()
        with pytest.raises(ValueError, match=r"learning_rate=0.01 of the Trainer is not used.* has 0.003"):
            trainer(model, optimizer, arguments(tmp_path, learning_rate=0.01)).train()
        trainer(model, optimizer, arguments(tmp_path, max_grad_norm=0.0)).train()
    with pytest.raises(ValueError, match=r"require gradients.*inside `with sketching"):
        trainer(model, optimizer, arguments(tmp_path)).train()


def test_more_devices_and_a_model_that_was_moved_are_refused():
    model = llama()
    one = {"world_size": 1, "n_gpu": 1, "max_grad_norm": 1.0, "fp16": False}
    one |= {"learning_rate": 1e-3, "weight_decay": 0.0}
    with sketching(model, PROJECTIONS, rank=8, lr=1e-3) as optimizer:
        check(optimizer, SimpleNamespace(**one), model, optimizer)
        with pytest.raises(ValueError, match=r"to 2 devices in one process .* torchrun"):
            check(optimizer, SimpleNamespace(**one | {"n_gpu": 2}), model, optimizer)
        with pytest.raises(ValueError, match="Use bf16=True"):
            check(optimizer, SimpleNamespace(**one | {"world_size": 2, "fp16": True}), model, optimizer)
        model.to("meta")
        with pytest.raises(ValueError, match=r"q_proj was sketched on cpu .* moved it to meta"):
            check(optimizer, SimpleNamespace(**one), model, optimizer)


def test_a_checkpoint_without_the_optimizer_s_state_is_refused(tmp_path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True)
    trained(args)
    with pytest.raises(ValueError, match=r"goes on at step 1 .* no optimizer.pt"):
        trained(args, resume=str(tmp_path / "checkpoint-1"))


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.test_integrations import LONG, PLAIN, PROJECTIONS, arguments, llama, sketching, trainer
folder = Path(sys.argv[1])
args = arguments(folder, per_device_train_batch_size=2, ddp_backend="gloo", **LONG)
model = llama()
with sketching(model, PROJECTIONS, rank=8, lr=args.learning_rate, **PLAIN) as optimizer:
    made = trainer(model, optimizer, args)
    # accelerate wraps a frozen model on CPUs, which torch refuses, and leaves it alone on GPUs: as there
    made.accelerator.prepare_model = lambda model, **options: model
    made.train()
torch.save(model.state_dict(), folder / f"{args.process_index}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_processes_are_one_batch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launcher, str(tmp_path / "script.py"), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    whole = trained(arguments(tmp_path, **LONG), **PLAIN).state_dict()
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, weight in whole.items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], weight, rtol=0, atol=1e-5)


def test_changed_lines(tmp_path):
    before, after = tmp_path / "a_dense.py", tmp_path / "a_sketch.py"
    before.write_text("# a\nimport torch\n\noptimizer = Adam()\nstep()\nend()\n")
    after.write_text("# b\nimport torch\nimport sketch\n\nwith sketch() as optimizer:\n    step()\n")
    assert changed_lines(before, before) == 0
    assert changed_lines(before, after) == 3  # added, replaced, removed; not the comment, not the indentation
    assert pairs(tmp_path) == {"a": (before, after)} and len(code_lines(after)) == 4
    with pytest.raises(FileNotFoundError, match="no pair"):
        pairs(tmp_path / "empty")


def test_few_lines_of_the_examples_change():
    counts = {name: changed_lines(*pair) for name, pair in pairs(EXAMPLES).items()}
    assert counts == {"loop": 2, "trainer": 5, "grpo": 5}
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text().splitlines()[0] == f"# python docs/examples/{path.name}"
