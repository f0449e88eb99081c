"""The optimizer is a torch.optim.Optimizer to schedulers, scalers, clipping, saving, accelerate; and in a `with`."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from src.sketch import sketching
from src.sketch.layer import select_targets
from src.sketch.optimizer import SketchOptimizer
from tests.test_sketch import (
    assert_all_close,
    build,
    dense_gradients,
    leaves,
    loss_of,
    orthogonal,
    sketched,
    sketches,
    square_llama,
    weights,
)
from tests.tinymodels import tokens


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def made(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, SketchOptimizer]:
    model, patterns, _ = build("mlp", dtype)
    co_rank = options.pop("co_rank", None)
    return model, SketchOptimizer(sketched(model, patterns, co_rank=co_rank), **({"lr": 0.01} | options))


def backward(model: nn.Module, seed: int = 0) -> None:
    loss_of(model, tokens(4, 7, 17, seed=seed)).backward()


# --- groups and schedulers ---


def test_groups_have_values_of_their_own():
    """The change of each layer is -lr c S A - lr wd W with its group's lr and wd; the clip is common."""
    groups = [{"targets": ["up"], "lr": 0.2, "weight_decay": 0.5, "name": "early"}]
    model, optimizer = made(direction="sgd", weight_decay=0.1, groups=groups, max_grad_norm=1.0)
    first, last = optimizer.param_groups
    assert first["name"] == "early" and "name" not in last
    assert (first["param_names"], last["param_names"]) == (["up"], ["down"])
    assert first["params"][0] is optimizer.layers.parameters["up"]
    before = weights(optimizer.layers)
    backward(model)
    parts = sketches(optimizer.layers)
    clip = optimizer.propose()["clip_scale"]
    assert clip < 0.5
    a = {name: optimizer.layers.projection(name) for name in parts}
    optimizer.apply(1.0)
    expected = {
        name: before[name] * (1 - lr * decay) - lr * clip * parts[name] @ a[name]
        for name, lr, decay in (("up", 0.2, 0.5), ("down", 0.01, 0.1))
    }
    assert_all_close(weights(optimizer.layers), expected, 1e-12)


def test_the_groups_of_a_two_sided_sketch_hold_both_parameters():
    _, optimizer = made(direction="sgd", co_rank=6, groups=[{"targets": ["down"], "lr": 0.2}])
    assert [group["param_names"] for group in optimizer.param_groups] == [["down", "down:co"], ["up", "up:co"]]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([{"targets": ["up"]}, {"targets": ["*"]}], "up is in two groups"),
        ([{"targets": ["head"]}], "'head' matches none of the sketched layers"),
        ([{"targets": ["up"], "weight_decy": 0.1}], "weight_decy"),
        ([{"targets": ["up"], "lr": -0.1}], "lr must be at least 0"),
        ([{"targets": ["up"], "beta2": 1.0}], "beta2 must be at least 0 and below 1"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, reason):
    with pytest.raises(ValueError, match=reason):
        made(groups=groups)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("direction", "rowadam"),
        ("clip_norm", "l2"),
        ("moments", "keep"),
        ("lr_is", "size"),
        ("storage", "masters"),
        ("unreached", "ignore"),
        ("refresh_every", 0),
        ("max_grad_norm", -1.0),
        ("lr", -0.1),
        ("beta2", 1.5),
    ],
)
def test_values_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        made(**{option: value})


def test_a_groups_beta1_is_looked_at_where_moments_are_transferred():
    made(direction="adam", moments="transfer", beta1=0.1)
    with pytest.raises(ValueError, match="beta1=0.99"):
        made(direction="adam", moments="transfer", beta1=0.1, groups=[{"targets": ["up"], "beta1": 0.99}])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.2, 0.05], total_steps=8, cycle_momentum=False),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=1e-4),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=[0.01, 0.001]),
}


@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_schedulers_drive_each_group_as_they_drive_torchs_sgd(kind):
    """The rates are those of torch.optim.SGD's groups, and each merge is made with them; the scheduler can be saved."""
    model, optimizer = made(direction="sgd", clip_norm="none", groups=[{"targets": ["up"], "lr": 0.1}])
    twin = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": group["lr"]} for group in optimizer.param_groups])
    scheduler, reference = SCHEDULERS[kind](optimizer), SCHEDULERS[kind](twin)
    seen = set()
    for step, metric in enumerate([3.0, 2.0, 2.5, 2.6, 2.7, 1.0]):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [group["lr"] for group in twin.param_groups]
        seen.add(tuple(rates))
        backward(model, step)
        estimates = {n: s @ optimizer.layers.projection(n) for n, s in sketches(optimizer.layers).items()}
        before = weights(optimizer.layers)
        optimizer.step()
        twin.step()
        change = {name: weight - before[name] for name, weight in weights(optimizer.layers).items()}
        expected = {"up": -rates[0] * estimates["up"], "down": -rates[1] * estimates["down"]}
        assert_all_close(change, expected, 1e-10)
        for one in (scheduler, reference):
            one.step(*([metric] if kind == "plateau" else []))
        if step == 2:  # saved and loaded on the way
            state = deepcopy(scheduler.state_dict())
            scheduler = SCHEDULERS[kind](optimizer) if kind == "plateau" else scheduler
            scheduler.load_state_dict(state)
    assert len(seen) >= 3


# --- gradient scaler, clipping from outside ---


def test_a_gradient_scaler_skips_an_infinite_step_and_the_next_one_is_right():
    """CPU, float32, a power of two: the run is the one without a scaler, with one update skipped."""
    model, optimizer = made(torch.float32, max_grad_norm=0.5)
    plain_model, plain = made(torch.float32, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaler.scale(loss_of(model, tokens(4, 7, 17, seed=step))).backward()
        if step == 1:
            optimizer.layers.parameters["up"].grad[0, 0] = float("inf")  # type: ignore[index]
            before, state = weights(optimizer.layers), deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert same(weights(optimizer.layers), before) and optimizer.layers.draw == optimizer.updates == 1
            assert str(optimizer.state_dict()) == str(state)
            assert scaler.get_scale() == 512.0
            optimizer.zero_grad()
            assert sketches(optimizer.layers) == {}
        else:
            backward(plain_model, step)
            plain.step()
    assert plain.updates == optimizer.updates == 3
    start = weights(made(torch.float32)[1].layers)
    change, expected = (
        {name: weight - start[name] for name, weight in weights(one.layers).items()} for one in (optimizer, plain)
    )
    assert_all_close(change, expected, 1e-4)


@pytest.mark.parametrize("max_norm", [0.02, 1e9])
def test_one_clip_over_sketches_and_ordinary_parameters(max_norm):
    """Targets by sketched SGD, norms and embeddings by AdamW, one clip_grad_norm_: the dense run, at full rank."""
    model, patterns = square_llama()
    reference = deepcopy(model)
    targets = select_targets(reference, patterns)
    ids = {id(module.weight) for module in targets.values()}
    dense = torch.optim.SGD([module.weight for module in targets.values()], 0.05, weight_decay=0.1)
    dense_rest = torch.optim.AdamW([p for p in reference.parameters() if id(p) not in ids], 1e-3)
    layers = sketched(model, patterns, rank=24, projection=orthogonal, freeze="targets")
    optimizer = SketchOptimizer(layers, 0.05, "sgd", weight_decay=0.1, clip_norm="none")
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = torch.optim.AdamW(rest, 1e-3)
    assert len(rest) == len(list(model.parameters())) - len(layers.modules)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for update in range(3):
        batch = tokens(4, 7, 29, seed=update)
        for one in (model, reference):
            (loss_of(one, batch) / batch.numel()).backward()
        norm = torch.nn.utils.clip_grad_norm_([*rest, *layers.sketch_parameters()], max_norm)
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-6)
        for one in (optimizer, others, dense, dense_rest):
            one.step()
            one.zero_grad()
    change = {name: parameter.detach() - start[name] for name, parameter in model.named_parameters()}
    expected = {name: parameter.detach() - start[name] for name, parameter in reference.named_parameters()}
    assert_all_close(change, expected, 1e-6)


def test_foreign_parameters_are_refused():
    model, optimizer = made()
    with pytest.raises(ValueError, match="sketched layers only"):
        optimizer.add_param_group({"params": [model.head.weight]})
    assert len(optimizer.param_groups) == 1


# --- state ---


def trained(device: str = "cpu", steps: int = 3, **options: Any) -> tuple[nn.Module, SketchOptimizer]:
    groups = [{"targets": ["up"], "lr": 0.02, "name": "early"}]
    model, patterns, _ = build("mlp", torch.bfloat16)
    options = {"direction": "adam", "refresh_every": 2, "weight_decay": 0.1, "groups": groups} | options
    optimizer = SketchOptimizer(sketched(model.to(device), patterns), 0.01, **options)
    for step in range(steps):
        loss_of(model, tokens(4, 7, 17, seed=step).to(device)).backward()
        optimizer.step()
    return model, optimizer


def through_a_file(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@pytest.mark.parametrize("way", ["file", "deepcopy", "pickle"])
def test_the_state_survives_copies_and_the_run_goes_on(way):
    """Groups with names, Adam's moments, masters: plain types; two more updates give the same bits."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert {type(leaf) for leaf in leaves(state["optimizer"])} <= {Tensor, int, float, str, bool, type(None)}
    match way:
        case "file":
            state = through_a_file(state, map_location="cpu")
        case "deepcopy":
            state = deepcopy(state)
        case "pickle":
            state = pickle.loads(pickle.dumps(state))
    other_model, other = trained(steps=0)
    other_model.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert other.layers.draw == 1 and other.updates == 3
    assert [group["lr"] for group in other.param_groups] == [0.02, 0.01]
    for step in range(3, 5):
        for one_model, one in ((model, optimizer), (other_model, other)):
            loss_of(one_model, tokens(4, 7, 17, seed=step)).backward()
            one.step()
    assert same(weights(optimizer.layers), weights(other.layers))


@pytest.mark.gpu
def test_the_state_of_one_device_loads_on_another():
    """Saved on the CPU, loaded to the GPU and back: moments and masters follow the sketches."""
    model, optimizer = trained()
    there_model, there = trained("cuda", steps=0)
    there_model.load_state_dict(model.state_dict())
    there.load_state_dict(through_a_file(optimizer.state_dict()))
    tensors = [value for state in there.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert tensors and all(tensor.is_cuda for tensor in tensors)
    loss_of(there_model, tokens(4, 7, 17, seed=3).cuda()).backward()
    there.step()
    back_model, back = trained(steps=0)
    back_model.load_state_dict(there_model.state_dict())
    back.load_state_dict(through_a_file(there.state_dict(), map_location="cpu"))
    loss_of(back_model, tokens(4, 7, 17, seed=4)).backward()
    back.step()
    assert back.updates == 5


def test_a_load_forgets_what_was_proposed():
    model, optimizer = made()
    state = deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.propose()
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="propose"):
        optimizer.apply(1.0)
    assert optimizer.updates == 0 and optimizer.layers.draw == 0


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("seed", 9, "seed=3"),
        ("rank", 5, "rank=4"),
        ("projection", "gaussian", "family=rademacher"),
        ("co_rank", 6, "co"),
    ],
)
def test_a_state_of_other_projections_is_refused(option, value, reason):
    """Its moments would belong to another A; nothing of it has been loaded then."""
    model, optimizer = made()
    backward(model)
    optimizer.step()
    other_model, patterns, _ = build("mlp")
    other = SketchOptimizer(sketched(other_model, patterns, **{option: value}), 0.01)
    with pytest.raises(ValueError, match=reason):
        other.load_state_dict(optimizer.state_dict())
    assert other.updates == 0 and not other.state


def test_a_state_of_other_groups_is_refused():
    """Equal shapes and numbers of parameters in another order: positions alone would mix the layers up."""
    _, one = made(groups=[{"targets": ["up"]}])
    _, two = made(groups=[{"targets": ["down"]}])
    with pytest.raises(ValueError, match="another order"):
        two.load_state_dict(one.state_dict())


# --- what is frozen, unreached, zero or not finite ---


class Experts(nn.Module):
    """Two experts, of which a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(12, 5, bias=False) for _ in range(2)).double()

    def forward(self, chosen: tuple[int, ...]) -> Tensor:
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return sum((self.experts[i](x).square().sum() for i in chosen), torch.zeros((), dtype=torch.float64))


def test_an_expert_that_was_not_chosen_is_a_mistake_or_left_alone():
    model = Experts()
    optimizer = SketchOptimizer(sketched(model, ["experts.*"]), 0.1, weight_decay=0.5)
    before = weights(optimizer.layers)
    model((0,)).backward()
    with pytest.raises(RuntimeError, match=r"no gradient reached experts.1 \(1 of 2 targets\)"):
        optimizer.step()
    assert same(weights(optimizer.layers), before) and optimizer.updates == 0 and not optimizer.state

    model = Experts()
    optimizer = SketchOptimizer(sketched(model, ["experts.*"]), 0.1, weight_decay=0.5, unreached="skip")
    for chosen in ((0,), (0,), (0, 1)):
        before = weights(optimizer.layers)
        model(chosen).backward()
        optimizer.step()
        moved = {n for n, weight in weights(optimizer.layers).items() if not torch.equal(weight, before[n])}
        assert moved == {f"experts.{i}" for i in chosen}
    steps = [optimizer.state[p]["step"] for p in optimizer.layers.parameters.values()]
    assert steps == [3, 1] and optimizer.layers.draw == 3


@pytest.mark.parametrize(
    ("direction", "co_rank"), [("sgd", None), ("row_adam", None), ("adam", None), ("sgd", 6), ("row_adam", 6)]
)
def test_a_sketch_of_zeros_is_an_update_that_changes_no_bit(direction, co_rank):
    model, optimizer = made(torch.float32, direction=direction, co_rank=co_rank)
    before = weights(optimizer.layers)
    (loss_of(model, tokens(4, 7, 17)) * 0.0).backward()
    optimizer.step()
    assert same(weights(optimizer.layers), before)
    assert optimizer.updates == 1 and optimizer.metrics["moved_share"] == 0.0
    backward(model)
    optimizer.step()
    assert not same(weights(optimizer.layers), before)


def test_adams_momentum_goes_on_over_gradients_of_zeros_as_torchs_does():
    """W0 + B A, B trained by torch.optim.Adam from 0 on the same sketches, of which two are zeros."""
    model, optimizer = made(direction="adam", beta1=0.8, clip_norm="none", refresh_every="never", eps=1e-6)
    layers, before = optimizer.layers, weights(optimizer.layers)
    factors = {name: torch.zeros_like(parameter) for name, parameter in layers.parameters.items()}
    twin = torch.optim.Adam(factors.values(), 0.01, (0.8, 0.95), 1e-6)
    for step in range(4):
        backward(model, step)
        for name, parameter in layers.parameters.items():
            assert parameter.grad is not None
            if step in (1, 2):
                parameter.grad.zero_()
            factors[name].grad = parameter.grad.clone()
        last = weights(layers)
        optimizer.step()
        twin.step()
        assert not same(weights(layers), last)
    expected = {name: before[name] + factor @ layers.projection(name) for name, factor in factors.items()}
    assert_all_close(weights(layers), expected, 1e-13)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["sketch", "co_sketch"])
def test_what_is_not_finite_in_either_sketch_changes_nothing(where, bad):
    model, optimizer = made(co_rank=6, weight_decay=0.1)
    backward(model)
    optimizer.step()
    before, state = weights(optimizer.layers), deepcopy(optimizer.state_dict())
    backward(model, 1)
    held = optimizer.layers.parameters if where == "sketch" else optimizer.layers.co_parameters
    held["down"].grad[1, 1] = bad  # type: ignore[index]
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert same(weights(optimizer.layers), before) and optimizer.updates == optimizer.layers.draw == 1
    assert str(optimizer.state_dict()) == str(state)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()


# --- several optimizers; `with`; other devices; accelerate ---


def test_two_optimizers_on_disjoint_targets_of_one_model():
    """Each redraws by itself, and neither is disturbed by the other's hooks."""
    model, _, _ = build("mlp")
    reference = deepcopy(model)
    one = SketchOptimizer(sketched(model, ["up"], seed=1), 0.1, "sgd", clip_norm="none")
    two = SketchOptimizer(sketched(model, ["down"], seed=2), 0.1, "sgd", clip_norm="none", refresh_every=2)
    for step in range(3):
        batch = tokens(4, 7, 17, seed=step)
        reference.load_state_dict(model.state_dict())
        gradients = dense_gradients(reference, ["up", "down"], batch)
        backward(model, step)
        for optimizer, name in ((one, "up"), (two, "down")):
            a = optimizer.layers.projection(name)
            before = weights(optimizer.layers)
            expected = {name: before[name] - 0.1 * gradients[name] @ a.T @ a}
            optimizer.step()
            assert_all_close(weights(optimizer.layers), expected, 1e-12)
    assert (one.layers.draw, two.layers.draw) == (3, 1)


@pytest.mark.parametrize("end", ["usual", "exception", "bad option", "no step"])
def test_sketching_leaves_the_model_as_it_found_it(end):
    """No hook remains and what was frozen, and only that, is frozen again; whatever ended it."""
    model, patterns, batch = build("mlp")
    model.embed.requires_grad_(False)
    required = [parameter.requires_grad for parameter in model.parameters()]
    start = model.up.weight.detach().clone()

    def use() -> None:
        options: dict[str, Any] = {"storage": "nonsense"} if end == "bad option" else {}
        with sketching(model, patterns, rank=4, lr=0.01, **options) as optimizer:
            assert not any(parameter.requires_grad for parameter in model.parameters())
            backward(model)
            if end != "no step":
                optimizer.step()
            if end == "exception":
                raise KeyError("mine")

    if end == "usual":
        use()
    else:
        kinds = {"exception": KeyError, "bad option": ValueError, "no step": RuntimeError}
        with pytest.raises(kinds[end], match={"exception": "mine", "bad option": "storage"}.get(end, "call optimizer")):
            use()
    assert [parameter.requires_grad for parameter in model.parameters()] == required
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model.up.weight, start) == (end in ("bad option", "no step"))
    loss_of(model, batch).backward()
    assert model.up.weight.grad is not None and model.embed.weight.grad is None


def test_a_model_that_moved_after_sketching_is_refused_by_name():
    model, patterns, batch = build("mlp")
    sketched(model, patterns)
    with pytest.raises(RuntimeError, match="up was sketched on cpu and runs on meta. Move the model"):
        loss_of(model.to("meta"), batch.to("meta"))


def test_accelerate_prepares_steps_and_saves_it():
    """accelerate moves the state at once and wraps step and zero_grad; the run is the one without it."""
    accelerate = pytest.importorskip("accelerate")
    plain_model, plain = made(torch.float32, direction="adam", refresh_every=2)
    model, optimizer = made(torch.float32, direction="adam", refresh_every=2)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    for step in range(3):
        accelerator.backward(loss_of(model, tokens(4, 7, 17, seed=step)))
        prepared.step()
        prepared.zero_grad()
        backward(plain_model, step)
        plain.step()
    assert same(weights(optimizer.layers), weights(plain.layers))
    _, other = made(torch.float32, direction="adam", refresh_every=2)
    accelerator.prepare(other).load_state_dict(through_a_file(prepared.state_dict()))
    assert other.updates == 3 and other.layers.draw == 1
