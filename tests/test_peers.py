"""Projections and moments against the packages of GaLore (arXiv 2403.03507) and Flora (arXiv 2402.03293)."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from src.sketch import SketchedLayers, SketchOptimizer, select_targets
from src.sketch.direction import transfer
from src.sketch.projection import gaussian, hash_key, signs
from tests.test_sketch import assert_all_close, dense_gradients, loss_of, sketches, weights
from tests.tinymodels import Mlp, mlp, tokens

galore = pytest.importorskip("galore_torch", reason="needs the extra peers: pip install -e '.[peers]'")
flora = pytest.importorskip("flora_opt.optimizers.torch.flora", reason="needs the extra peers")

TARGETS = ["up", "down"]  # (20, 12) and (12, 20)
RANK = 4


def sketched_with(model: Mlp, projections: dict[int, Tensor]) -> SketchedLayers:
    """Sketch with given projections, one for each input width; the signs of the groups cancel."""

    def family(rank: int, width: int, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        (columns,) = signs(width, [hash_key("projection", 0, 0, "signs", f":{width}")])
        return projections[width].to(dtype) * columns

    return SketchedLayers(model, select_targets(model, TARGETS), RANK, seed=0, projection=family)


def test_galore_s_projection_of_the_gradient_is_the_sketch_on_its_basis():
    """S = G P^T of a gradient that was never formed, and S P is GaLore's way back."""
    from galore_torch.galore_projector import GaLoreProjector

    model, batch = mlp(), tokens(4, 7, 17)
    projectors = {name: GaLoreProjector(RANK, proj_type="right") for name in TARGETS}
    gradients = dense_gradients(model, TARGETS, batch)
    expected = {name: projectors[name].project(gradient, 0) for name, gradient in gradients.items()}
    layers = sketched_with(model, {projectors[n].ortho_matrix.shape[1]: projectors[n].ortho_matrix for n in TARGETS})
    loss_of(model, batch).backward()
    found = sketches(layers)
    assert_all_close(found, expected, 1e-12)
    back = {name: found[name] @ layers.projection(name) for name in found}
    assert_all_close(back, {name: projectors[name].project_back(expected[name]) for name in expected}, 1e-12)


def test_adam_in_sketch_space_on_galore_s_basis_is_galore():
    """Five updates of GaLoreAdamW, its basis from the first gradient on, with weight decay apart."""
    model = mlp()
    reference = deepcopy(model).requires_grad_(False)
    modules = select_targets(reference, TARGETS)
    parameters = [module.weight.requires_grad_(True) for module in modules.values()]
    group = {"params": parameters, "rank": RANK, "update_proj_gap": 1000, "scale": 1.0, "proj_type": "right"}
    dense = galore.GaLoreAdamW([group], lr=0.01, betas=(0.9, 0.95), eps=1e-30, no_deprecation_warning=True)
    layers: Any = None
    for step in range(5):
        batch = tokens(4, 7, 17, seed=step)
        loss_of(reference, batch).backward()
        dense.step()
        dense.zero_grad()
        if layers is None:
            bases = [dense.state[parameter]["projector"].ortho_matrix for parameter in parameters]
            layers = sketched_with(model, {basis.shape[1]: basis for basis in bases})
            ours = SketchOptimizer(layers, 0.01, "adam", eps=1e-30, clip_norm="none", refresh_every="never")
            start = weights(layers)
        loss_of(model, batch).backward()
        ours.step()
    expected = {name: module.weight.detach() for name, module in modules.items()}
    assert_all_close(weights(layers), expected, 1e-10)
    assert all(float((weight - start[name]).norm()) > 0.1 for name, weight in expected.items())  # they did train


@pytest.fixture(scope="module")
def accelerator() -> Any:
    return flora.FloraAccelerator(accumulation_compression_rank=RANK, gradient_accumulation_steps=2, cpu=True)


def test_flora_s_accumulation_is_the_sketch_on_its_projection(accelerator):
    """Two microbatches compressed and added by Flora, and its way back, with Flora's own random numbers."""
    model, plain = mlp(), mlp()
    projection = flora.stable_randn((12, RANK), seed=7, dtype=torch.float64).T / RANK**0.5
    layers = sketched_with(model, {12: projection, 20: torch.zeros(RANK, 20)})
    pack: Any = 0.0
    for step in range(2):
        batch = tokens(4, 7, 17, seed=step)
        pack = accelerator._down_project(7, dense_gradients(plain, TARGETS, batch)["up"]) + pack
        loss_of(model, batch).backward()
    found = sketches(layers)["up"]
    torch.testing.assert_close(found, pack, rtol=1e-12, atol=1e-14)
    back = accelerator._up_project(7, model.up.weight, pack)
    torch.testing.assert_close(found @ layers.projection("up"), back, rtol=1e-12, atol=1e-14)


def test_flora_s_transfer_of_momentum_is_ours(accelerator):
    weight, first, second = torch.zeros(20, 12).double(), torch.randn(20, RANK).double(), torch.ones(20, RANK).double()
    expected = accelerator._down_project(2, accelerator._up_project(1, weight, first))
    old, new = (flora.stable_randn((12, RANK), seed=seed, dtype=torch.float64).T / RANK**0.5 for seed in (1, 2))
    transfer(first, second, old, new)
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)


def test_flora_s_random_numbers_and_ours_have_one_distribution():
    from scipy.stats import ks_2samp

    theirs = flora.stable_randn((400, 25), seed=3) / 25**0.5
    assert ks_2samp(theirs.flatten().numpy(), gaussian(25, 400, 3).flatten().numpy()).pvalue > 1e-3
