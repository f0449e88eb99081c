"""LoRA against peft and torch's AdamW used directly, and against the sketch that it equals when A is frozen."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from src import checkpoint
from src.methods.lora import LoraOptimizer, merged
from src.sketch import SketchOptimizer, select_targets
from tests.launching import fast, launch, record, rows, run_folders
from tests.test_dense import build, loss_of
from tests.test_peers import sketched_with
from tests.tinymodels import PROJECTIONS, llama, mlp, tokens

peft = pytest.importorskip("peft", reason="needs the extra peers: pip install -e '.[peers]'")


def lora(model: nn.Module, patterns: list[str], lr: float = 1e-2, seed: int = 0, **options: Any) -> LoraOptimizer:
    return LoraOptimizer(model, select_targets(model, patterns), rank=4, alpha=6.0, seed=seed, **({"lr": lr} | options))


def train(model: nn.Module, optimizer: LoraOptimizer, vocabulary: int, steps: range) -> None:
    for step in steps:
        loss_of(model, tokens(4, 7, vocabulary, seed=step)).backward()
        optimizer.step()


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if ".lora_" in name}


# get_peft_model asks transformers for it; adapters that are injected do not.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("freeze_a", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mlp"])
def test_training_has_the_bits_of_peft_and_torch(kind, freeze_a):
    """Five updates with clipping and decay of a model that `get_peft_model` wraps, from the same A."""
    model, patterns, vocabulary = build(kind)
    reference = peft.get_peft_model(
        deepcopy(model), peft.LoraConfig(r=4, lora_alpha=6, target_modules=patterns, lora_dropout=0.0)
    ).eval()
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = lora(model, patterns, max_grad_norm=0.3, freeze_a=freeze_a, **options)
    theirs = {name.replace("base_model.model.", ""): p for name, p in reference.named_parameters() if ".lora_" in name}
    start = {name: value.clone() for name, value in adapters(model).items()}
    assert set(start) == set(theirs)
    for name, parameter in theirs.items():
        parameter.data.copy_(start[name])
        parameter.requires_grad_(not (freeze_a and ".lora_A" in name))
    # In the order of the optimizer's: a norm's last bit depends on it.
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [theirs[named[id(parameter)]] for parameter in optimizer.param_groups[0]["params"]]
    torch_adamw = torch.optim.AdamW(trained, foreach=False, **options)
    for step in range(5):
        loss_of(reference, tokens(4, 7, vocabulary, seed=step)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.3)
        torch_adamw.step()
        torch_adamw.zero_grad()
    train(model, optimizer, vocabulary, range(5))
    for name, value in adapters(model).items():
        assert torch.equal(value, theirs[name])
        assert torch.equal(value, start[name]) == (freeze_a and ".lora_A" in name)


def test_a_frozen_a_is_a_sketch_that_is_never_redrawn():
    """dL/dB is the sketch on A times alpha / R, which Adam does not see: the merged weights are the sketch's."""
    model = mlp()
    reference = deepcopy(model)
    optimizer = lora(model, ["up", "down"], freeze_a=True, eps=1e-30, betas=(0.9, 0.95))
    a = {name: getattr(model, name).lora_A["default"].weight.detach().clone() for name in ("up", "down")}
    layers = sketched_with(reference, {projection.shape[1]: projection for projection in a.values()})
    sketch = SketchOptimizer(
        layers, 1e-2 * 6 / 4, "adam", beta1=0.9, beta2=0.95, eps=1e-30, clip_norm="none", refresh_every="never"
    )
    for step in range(5):
        loss_of(reference, tokens(4, 7, 17, seed=step)).backward()
        sketch.step()
    train(model, optimizer, 17, range(5))
    plain, start = merged(model), mlp().requires_grad_(False)
    for name in ("up", "down"):
        trained = getattr(plain, name).weight.detach()
        torch.testing.assert_close(trained, getattr(reference, name).weight, rtol=1e-10, atol=1e-12)
        assert float((trained - getattr(start, name).weight).norm()) > 0.1


@pytest.mark.parametrize(
    "patterns", [PROJECTIONS, ["q_proj", "down_proj"], ["*.layers.1.*_proj", "lm_head"], ["*.2.self_attn.v_proj"]]
)
def test_the_targets_and_nothing_else_have_adapters(patterns):
    """Also where they are more than the 20 names that peft takes as they are."""
    model = llama(num_hidden_layers=4)
    targets = set(select_targets(model, patterns))
    lora(model, patterns)
    adapted = {name.partition(".lora_")[0] for name in adapters(model)}
    assert adapted == targets
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(adapters(model))


def test_tangents_are_the_derivative_along_the_step():
    """Of the logits, against a difference quotient; the proposal moves A and B."""
    model = mlp()
    optimizer = lora(model, ["up", "down"], weight_decay=0.3)
    train(model, optimizer, 17, range(2))
    loss_of(model, tokens(4, 7, 17, seed=2)).backward()
    optimizer.propose()
    batch = tokens(3, 6, 17, seed=9)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with fwad.dual_level(), optimizer.tangents():
            before, tangent = (part.clone() for part in fwad.unpack_dual(model(batch)))
        optimizer.apply(1e-6)
        quotient = (model(batch) - before) / 1e-6
    torch.testing.assert_close(tangent, quotient, rtol=1e-4, atol=1e-7)
    assert float(tangent.norm()) > 0.1


def test_merged_is_a_plain_model_that_computes_the_same():
    model = llama()
    names = list(model.state_dict())
    optimizer = lora(model, PROJECTIONS)
    train(model, optimizer, 29, range(3))
    state = deepcopy(model.state_dict())
    plain, batch = merged(model), tokens(3, 6, 29)
    assert list(plain.state_dict()) == names
    with torch.no_grad():
        logits, untrained = plain(batch).logits, llama()(batch).logits
        torch.testing.assert_close(logits, model(batch).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert float((logits - untrained).abs().max()) > 0.1
    assert merged(plain) is plain


def test_adapters_of_bfloat16_weights_are_float32():
    model = llama(torch.bfloat16)
    optimizer = lora(model, PROJECTIONS, lr=1e-5)
    before = deepcopy(adapters(model))
    train(model, optimizer, 29, range(2))
    assert {value.dtype for value in adapters(model).values()} == {torch.float32}
    assert any(not torch.equal(value, before[name]) for name, value in adapters(model).items())
    assert {parameter.dtype for parameter in merged(model).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("initialisation", ["kaiming", "gaussian"])
def test_a_is_a_function_of_the_seed_and_no_generator_is_touched(initialisation):
    state = torch.get_rng_state()
    drawn = []
    for seed in (0, 0, 1):
        model = mlp()
        lora(model, ["up", "down"], seed=seed, initialisation=initialisation)
        drawn.append(model.up.lora_A["default"].weight.detach())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    if initialisation == "gaussian":
        assert 0.5 < float(drawn[0].std() * 4) < 2  # 1 / rank


def test_memory_names_what_there_is():
    model = mlp()
    optimizer = lora(model, ["up", "down"], freeze_a=True)
    loss_of(model, tokens(4, 7, 17)).backward()
    sizes = {
        key: sum(t.numel() for t in tensors) for key, tensors in optimizer.memory().items() if key != "master_weights"
    }
    assert sizes == {"weights": 4 * (12 + 20) * 2, "gradients": 4 * (20 + 12), "optimizer_state": 0}
    optimizer.step()
    sizes = {
        key: sum(t.numel() for t in tensors) for key, tensors in optimizer.memory().items() if key != "master_weights"
    }
    assert sizes == {"weights": 4 * (12 + 20) * 2, "gradients": 0, "optimizer_state": 2 * 4 * (20 + 12)}


def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    model = mlp(torch.float32)
    optimizer = lora(model, ["up", "down"], max_grad_norm=1.0)
    train(model, optimizer, 17, range(3))
    state = {"update": 3, "weights": dict(model.state_dict()), "method": optimizer.state_dict(), "batch": None}
    path = checkpoint.save(tmp_path, "run", state | {"wandb_id": None, "step": {}})
    train(model, optimizer, 17, range(3, 6))
    loaded = checkpoint.load(path, "run")
    again = mlp(torch.float32)
    optimizer = lora(again, ["up", "down"], seed=5, max_grad_norm=1.0)  # whose adapters the state replaces
    again.load_state_dict(loaded["weights"])
    checkpoint.restore_method(optimizer, checkpoint.own(loaded["method"], torch.device("cpu")))
    train(again, optimizer, 17, range(3, 6))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_a_run_under_control_is_killed_resumed_and_exported_without_peft(root):
    """The same rows as an undisturbed run; the policy is plain; an export asked for later merges too."""
    from transformers import AutoModelForCausalLM

    words = fast(
        "method=lora", "control=decay", f"root={root}", "updates=4", "checkpoint.every=1", "wandb.mode=disabled"
    )
    assert launch(*words, "study=straight").code == 0
    assert launch(*words, "study=cut", "max_seconds=0.01").code == 124
    assert launch(*words, "study=cut", "export=none").code == 0
    cut, straight = run_folders(root)
    assert record(cut)["study"] == "cut" and not (cut / "policy").exists()
    assert rows(cut) == rows(straight) and rows(cut, "evals") == rows(straight, "evals")
    assert launch(*words, "study=cut").code == 0  # exports what is finished
    policies = [AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict() for folder in (cut, straight)]
    assert not any("lora" in name for name in policies[0])
    assert all(torch.equal(value, policies[1][name]) for name, value in policies[0].items())
    assert "LoRA adapters" in Path(cut / "policy" / "README.md").read_text()
