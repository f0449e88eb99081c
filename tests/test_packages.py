"""Methods of other people's packages against those packages used directly."""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from src import checkpoint, methods
from src import config as cfg
from src.methods.packages import PackageOptimizer
from src.preflight import preflight
from src.randomness import hash_key
from src.sketch import select_targets
from tests.launching import config, fast, launch, record, rows, run_folders
from tests.test_dense import loss_of
from tests.tinymodels import Mlp, composed, mlp, tokens

for package in ("galore_torch", "apollo_torch", "flora_opt", "bitsandbytes"):
    pytest.importorskip(package, reason="needs the extra peers: pip install -e '.[peers]'")

NAMES = ["galore", "apollo", "flora", "adafactor", "adam8bit"]
RANK = 4
# (80, 64) and (64, 80), large enough for moments of eight bits. A new projection every second update.
SHORT = {"rank": RANK, "update_gap": 2}
CPU = torch.device("cpu")


def small() -> Mlp:
    return mlp(torch.float32, width=64, hidden=80)


def configuration(name: str, **values: Any) -> cfg.PackageMethod:
    """The method's defaults of conf/ with other values, its rate large enough for steps that show."""
    config = composed(f"method={name}", "control=none").method
    assert isinstance(config, cfg.PackageMethod)
    values |= {key: value for key, value in SHORT.items() if hasattr(config, key)}
    return replace(config, **({"learning_rate": 1e-2, "weight_decay": 0.1} | values))


def build(config: cfg.PackageMethod, model: nn.Module, seed: int = 0) -> PackageOptimizer:
    method = methods.build(config, model, select_targets(model, ["up", "down"]), seed)
    assert isinstance(method, PackageOptimizer)
    return method


def train(model: nn.Module, method: PackageOptimizer, steps: range) -> list[dict[str, float]]:
    """Updates as the trainer makes them, each with another rate; their metrics."""
    metrics = []
    for step in steps:
        for group in method.param_groups:
            group["lr"] = rate(step)
        loss_of(model, tokens(4, 7, 17, seed=step)).backward()
        proposed = method.propose()
        metrics.append(proposed | method.apply(1.0))
    return metrics


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def direct(config: Any, parameters: list[Tensor], first: int = 0, seed: int = 0) -> torch.optim.Optimizer:
    """The package's optimizer as its documentation makes it; `first` is the number of its first matrix."""
    betas = {"betas": (config.beta1, config.beta2), "eps": config.eps} if hasattr(config, "beta2") else {}
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1} | betas
    adafactor = {"beta1": config.beta1, "relative_step": False}
    if config.name == "galore":
        from galore_torch import GaLoreAdamW

        group = {"params": parameters, "rank": RANK, "update_proj_gap": 2, "scale": config.scale, "proj_type": "std"}
        optimizer: torch.optim.Optimizer = GaLoreAdamW([group], no_deprecation_warning=True, **options)
    elif config.name == "apollo":
        from apollo_torch import APOLLOAdamW

        group = {"params": parameters, "rank": RANK, "proj": "random", "scale_type": config.scale_type}
        group |= {"scale": config.scale, "update_proj_gap": 2, "proj_type": "std"}
        optimizer = APOLLOAdamW([group], **options)
    elif config.name == "flora":
        from flora_opt import Flora

        optimizer = Flora(parameters, rank=RANK, kappa=2, **(options | adafactor))
    elif config.name == "adafactor":
        from transformers import Adafactor

        optimizer = Adafactor(parameters, scale_parameter=False, **(options | adafactor))
    else:
        from bitsandbytes.optim import AdamW8bit

        optimizer = AdamW8bit(parameters, **options)
    for parameter, index in zip(parameters, count(first), strict=False):
        if "seed" in optimizer.state[parameter]:
            optimizer.state[parameter]["seed"] = hash_key("projection", seed, index) & (2**63 - 1)
    return optimizer


def matrices(model: Any) -> list[Tensor]:
    return [model.up.weight, model.down.weight]


def held(method: PackageOptimizer) -> dict[str, int]:
    """Bytes of the storages behind each component's tensors."""
    return {
        name: sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
        for name, tensors in method.memory().items()
    }


@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
@pytest.mark.parametrize("name", [*NAMES, "mini"])
def test_five_updates_have_the_bits_of_a_plain_loop(name, max_grad_norm):
    values: dict[str, Any] = {"max_grad_norm": max_grad_norm}
    if name == "mini":
        values |= {"scale_type": "tensor", "scale": 128.0}
    config = configuration("apollo" if name == "mini" else name, **values)
    model, reference = small(), small()
    metrics = train(model, build(config, model), range(5))
    reference.requires_grad_(False)
    parameters = [parameter.requires_grad_(True) for parameter in matrices(reference)]
    optimizer = direct(config, parameters)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss_of(reference, tokens(4, 7, 17, seed=step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
        assert metrics[step]["gradient_norm"] == float(norm)
        assert (metrics[step]["clip_scale"] < 1) == (max_grad_norm is not None and float(norm) > max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs, start in zip(matrices(model), parameters, matrices(small()), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, start, atol=1e-3)
    assert all(0.5 < row["moved_share"] <= 1 for row in metrics)
    others = {key: value for key, value in small().state_dict().items() if key not in ("up.weight", "down.weight")}
    assert all(torch.equal(model.state_dict()[key], value) for key, value in others.items())


@pytest.mark.parametrize("name", NAMES)
def test_layerwise_is_the_packages_recipe_and_the_same_training(name):
    """One optimizer a matrix, stepped in a hook that frees the gradient; and the bits of the usual loop."""
    config = configuration(name, max_grad_norm=None, layerwise=True)
    model, plain, reference = small(), small(), small()
    method = build(config, model)
    assert method.in_backward and not method.splits
    metrics = train(model, method, range(5))
    expected = train(plain, build(replace(config, layerwise=False), plain), range(5))
    reference.requires_grad_(False)
    optimizers: list[torch.optim.Optimizer] = []

    def hook(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    for index, parameter in enumerate(matrices(reference)):
        optimizers.append(direct(config, [parameter.requires_grad_(True)], index))
        parameter.register_post_accumulate_grad_hook(hook(optimizers[-1]))
    for step in range(5):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate(step)
        loss_of(reference, tokens(4, 7, 17, seed=step)).backward()
    for ours, recipe, usual in zip(matrices(model), matrices(reference), matrices(plain), strict=True):
        assert torch.equal(ours, recipe) and torch.equal(ours, usual)
    for found, row in zip(metrics, expected, strict=True):
        assert found["moved_share"] == row["moved_share"]
        assert found["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=1e-6)


def test_layerwise_frees_each_gradient_in_backward_and_keeps_the_weights_until_then():
    model = small()
    method = build(configuration("galore", max_grad_norm=None, layerwise=True), model)
    loss = loss_of(model, tokens(4, 7, 17))
    before = [weight.detach().clone() for weight in matrices(model)]
    loss.backward()
    assert all(weight.grad is None for weight in matrices(model))
    after = [weight.detach().clone() for weight in matrices(model)]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    method.propose()
    method.apply(1.0)
    assert all(torch.equal(weight, new) for weight, new in zip(matrices(model), after, strict=True))


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_equal_to_the_bit(name, layerwise, tmp_path):
    """Three updates, a checkpoint file, three more in fresh objects; projections are redrawn on both sides of it."""
    config = configuration(name, max_grad_norm=None if layerwise else 0.5, layerwise=layerwise)
    model = small()
    method = build(config, model)
    train(model, method, range(3))
    state = {"update": 3, "weights": dict(model.state_dict()), "method": method.state_dict(), "batch": None}
    path = checkpoint.save(tmp_path, "run", state | {"wandb_id": None, "step": {}})
    bytes_held = held(method)
    expected = train(model, method, range(3, 6))
    loaded, again = checkpoint.load(path, "run"), small()
    method = build(config, again)
    again.load_state_dict(loaded["weights"])
    checkpoint.restore_method(method, checkpoint.own(loaded["method"], CPU))
    assert held(method) == bytes_held
    assert train(again, method, range(3, 6)) == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(matrices(again), matrices(model), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_draws_are_functions_of_the_seed_and_no_generator_is_touched(name):
    state = torch.get_rng_state()
    ends = []
    for seed in (0, 0, 1):
        model = small()
        train(model, build(configuration(name), model, seed), range(2))
        ends.append(model.up.weight.detach())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2]) == (name not in ("apollo", "flora"))


@pytest.mark.parametrize("name", NAMES)
def test_memory_names_what_there_is(name):
    """Elements by component: what the method's papers say, and what the packages hold besides."""
    model = small()
    method = build(configuration(name), model)
    loss_of(model, tokens(4, 7, 17)).backward()
    whole, small_side, large_side = 2 * 64 * 80, 64, 80
    before = {key: sum(t.numel() for t in tensors) for key, tensors in method.memory().items()}
    assert before == {"gradients": whole, "optimizer_state": 0, "projections": 0}
    method.propose()
    method.apply(1.0)
    memory = method.memory()
    after = {key: sum(t.numel() for t in tensors) for key, tensors in memory.items()}
    expected = {
        "galore": (2 * 2 * RANK * large_side, 2 * RANK * small_side),
        "apollo": (2 * (2 * RANK * large_side + 1), 2 * RANK * small_side),  # and the last update's norm
        "flora": (2 * (RANK * large_side + small_side + large_side + 1), 0),  # and the weights' root mean square
        "adafactor": (2 * (small_side + large_side + 1), 0),
        "adam8bit": (2 * (2 * 64 * 80 + 2 * 256 + 2 * 64 * 80 // 256), 0),  # with tables of 256, blocks of 256
    }[name]
    assert (after["optimizer_state"], after["projections"], after["gradients"]) == (*expected, 0)
    if name == "adam8bit":
        assert sum(t.nbytes for t in memory["optimizer_state"] if t.dtype == torch.uint8) == 2 * whole


def test_galores_basis_is_kept_without_the_other_singular_vectors():
    """The package's own projector, of float32 weights, keeps a view of them all."""
    from galore_torch.galore_projector import GaLoreProjector

    projector = GaLoreProjector(RANK)
    projector.project(torch.randn(80, 64), 0)
    assert projector.ortho_matrix.untyped_storage().nbytes() == 4 * 64 * 64
    for side in ("std", "right", "left", "full"):
        model = small()
        method = build(configuration("galore", side=side), model)
        train(model, method, range(1))
        for basis in method.memory()["projections"]:
            assert basis.untyped_storage().nbytes() == basis.nbytes == 4 * RANK * max(basis.shape)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = small()
    method = build(configuration("galore"), model)
    train(model, method, range(1))
    before, state = deepcopy(matrices(model)), deepcopy(method.state_dict())
    (loss_of(model, tokens(4, 7, 17)) * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="not finite .* no update was made"):
        method.propose()
    assert all(torch.equal(weight, old) for weight, old in zip(matrices(model), before, strict=True))
    for values, old in zip(method.state_dict()["state"], state["state"], strict=True):
        assert torch.equal(values["exp_avg"], old["exp_avg"]) and values["step"] == old["step"] == 1


def test_layerwise_a_gradient_that_is_not_finite_is_told_after_the_update():
    model = small()
    method = build(configuration("galore", layerwise=True, max_grad_norm=None), model)
    train(model, method, range(1))
    (loss_of(model, tokens(4, 7, 17)) * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="backward has used it"):
        method.propose()


def test_what_a_package_cannot_do_is_said():
    model = small()
    method = build(configuration("apollo"), model)
    for unknown in (method.tangents, method.displacement_norm):
        with pytest.raises(RuntimeError, match="method=apollo: the package makes its step in one piece"):
            unknown()
    with pytest.raises(ValueError, match="in full, got the step scale 0.5"):
        method.apply(0.5)


LAYERWISE = ["method.layerwise=true", "method.max_grad_norm=null"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["method=galore", "control=decay"], ["method=galore with control=decay", "Use control=none"]),
        (["method=flora", "control=fixed"], ["method=flora with control=fixed", "Use control=none"]),
        (
            ["method=galore", "control=none", "method.layerwise=true"],
            ["method.max_grad_norm=1 with method.layerwise=true", "Use method.max_grad_norm=null"],
        ),
        (
            ["method=adam8bit", "control=none", *LAYERWISE, "microbatch_responses=255"],
            ["microbatch_responses=255 with", "Use microbatch_responses=256"],
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(words, parts):
    with pytest.raises(cfg.ConfigError) as refused:
        composed(*words)
    assert all(part in str(refused.value) for part in parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["method=galore", "method.rank=65"], ["method.rank=65 is above the smaller side of", "64", "method.rank=16"]),
        (["method=lora", "method.rank=65"], ["method.rank=65 is above the smaller side of"]),
        (["method=apollo", *LAYERWISE, "model.targets=[lm_head]"], ["the output layer", "method.layerwise=false"]),
    ],
)
def test_what_the_model_does_not_allow_is_refused_before_it_is_read(words, parts, tmp_path):
    with pytest.raises(cfg.ConfigError) as refused:
        preflight([(composed("control=none", f"root={tmp_path}", *words), None)])
    assert all(part in str(refused.value) for part in parts)


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("lora", "peft"),
        ("galore", "galore_torch"),
        ("apollo", "apollo_torch"),
        ("flora", "flora_opt"),
        ("adam8bit", "bitsandbytes"),
    ],
)
def test_a_missing_package_is_told_with_what_to_type(method, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as Python has what cannot be imported
    config = composed(f"method={method}", "control=none").method
    with pytest.raises(cfg.ConfigError, match=rf"method={method} needs the package {package}.*\[peers\]"):
        methods.check_packages(config)


def test_one_factor_multiplies_every_methods_rate():
    for name in ("dense", "sketch", "lora", *NAMES):
        config = composed(f"method={name}", "control=none").method
        tripled = replace(config, rate_factor=3.0)
        assert methods.learning_rate(config, 50) == config.learning_rate
        for update in (1, 50):
            ratio = methods.learning_rate(tripled, update) / methods.learning_rate(config, update)
            assert ratio == pytest.approx(3)


def test_every_peer_trains_by_the_door(root):
    """All of `+ablation=peers`, a few updates each; layerwise the same numbers as else."""
    quiet = [f"root={root}", "wandb.mode=disabled", "updates=2", "export=none", "control.probe_every=1"]
    words = fast(*quiet, without="method.")
    ended = launch(*words, "+ablation=peers", "seed=0")
    assert ended.code == 0, ended.err
    found = {record(folder)["label"].split("-")[0]: folder for folder in run_folders(root)}
    assert set(found) == {"baseline", "none", "lora", *NAMES}
    for folder in found.values():
        assert record(folder)["status"] == "finished"
        assert all(row["control/realised_kl"] > 0 for row in rows(folder))
    plain, layerwise = (
        launch(*words, "method=galore", "control=none", "method.max_grad_norm=null", f"method.layerwise={value}")
        for value in ("false", "true")
    )
    assert plain.code == layerwise.code == 0, layerwise.err
    pair = [folder for folder in run_folders(root) if record(folder)["study"] == "main"]
    assert {config(folder)["method"]["layerwise"] for folder in pair} == {False, True}
    ours, other = (rows(folder) for folder in pair)
    for row, twin in zip(ours, other, strict=True):
        for key in row.keys() - {"memory/peak_bytes", "method/gradient_norm"}:
            assert row[key] == twin[key], key
