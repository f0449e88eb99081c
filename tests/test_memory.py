"""The memory ledger counts what torch's profiler sees allocated, and carries nothing from job to job."""

import gc
import re
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from src.memory import COMPONENTS, Ledger

CPU = torch.device("cpu")
KIB = 1024


def kib(count: int) -> Tensor:
    """An uninitialised tensor of `count` KiB."""
    return torch.empty(count * KIB, dtype=torch.uint8)


# --- workloads: each builds its state and returns (tensors alive before, what to run) ---


def adamw_step(foreach: bool):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(mlp.parameters(), foreach=foreach)
    data = torch.randn(16, 32)

    def run():
        for _ in range(2):
            mlp(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    return [*mlp.parameters(), data], run


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config), torch.randint(3, 32, (8, 12))


def llama_forward_backward():
    model, tokens = tiny_llama()

    def run():
        loss = nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss

    return [*model.parameters(), *model.buffers(), tokens], run


def llama_generate():
    model, tokens = tiny_llama()
    mask = torch.ones_like(tokens)

    def run():
        return model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=6)

    return [*model.parameters(), *model.buffers(), tokens, mask], run


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def custom_autograd_function():
    x = torch.ones(100, 7, requires_grad=True)

    def run():
        Cube.apply(Cube.apply(x)).sum().backward()

    return [x], run


def checkpointed():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(8, 16, requires_grad=True)

    def run():
        y = checkpoint(mlp, x, use_reentrant=False, preserve_rng_state=False)
        checkpoint(mlp, y, use_reentrant=False, preserve_rng_state=False).square().sum().backward()

    return [*mlp.parameters(), x], run


def forward_mode():
    x, tangent, weight = torch.ones(20, 30), torch.ones(20, 30), torch.ones(30, 5)

    def run():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            primal, change = torch.autograd.forward_ad.unpack_dual((dual @ weight).sin())
            return primal + change

    return [x, tangent, weight], run


def functional_transforms():
    x = torch.ones(20, 30)

    def run():
        def f(v):
            return (v.sin() * v).sum()

        return torch.func.vmap(torch.func.grad(f))(x), torch.func.jvp(f, (x,), (x,))

    return [x], run


WORKLOADS = {
    "adamw": lambda: adamw_step(foreach=False),
    "adamw_foreach": lambda: adamw_step(foreach=True),
    "llama_forward_backward": llama_forward_backward,
    "llama_generate": llama_generate,
    "custom_autograd_function": custom_autograd_function,
    "checkpointed": checkpointed,
    "forward_mode": forward_mode,
    "functional_transforms": functional_transforms,
}


def allocator_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Highest and last sum of the CPU allocator's events while `run` runs and its result is alive."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sums = np.cumsum([0] + [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    del result
    return int(sums.max()), int(sums[-1])


def ledger_bytes(alive: Iterable[Tensor], run: Callable[[], object]) -> tuple[int, int]:
    """Peak and last bytes that the ledger gives to a phase around `run`, less those alive before."""
    gc.collect()
    with Ledger(CPU) as ledger:
        ledger.track(alive)
        before = ledger.live_bytes()
        with ledger.phase("work"):
            result = run()
        row, _ = ledger.close_update()
    del result
    return row["memory/work_peak_bytes"] - before, row["memory/work_end_bytes"] - before


# Workspace of an elementwise operator given a Python scalar: the scalar (8 bytes) and its cast (4).
WRAPPED_SCALAR_BYTES = 12


_SPLIT = re.compile(f".*byte_seconds|.*peak_({'|'.join(COMPONENTS)})_bytes|memory/ledger_gap_bytes")


def brief(row: dict[str, float]) -> dict[str, float]:
    """A memory row without the split by component and the time integrals."""
    return {key: value for key, value in row.items() if not _SPLIT.fullmatch(key)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_ledger_equals_the_allocator_to_the_byte(name):
    """M32, F28. The profiler runs without the ledger, so this also shows that measuring adds nothing."""
    _, warm_up = WORKLOADS[name]()
    warm_up()  # first calls fill caches that live on
    _, run = WORKLOADS[name]()
    allocator_peak, allocator_live = allocator_bytes(run)
    alive, run = WORKLOADS[name]()
    peak, live = ledger_bytes(alive, run)
    workspace = WRAPPED_SCALAR_BYTES if name.startswith("adamw") else 0
    assert peak > live >= 0
    assert live == allocator_live
    assert 0 <= allocator_peak - peak <= workspace


def test_blind_spot_is_the_workspace_inside_one_operator():
    """F28. logsumexp holds an input-sized temporary and never returns it: the ledger misses it."""
    x = torch.zeros(64, 1024)

    def run():
        return x.logsumexp(1)

    allocator_peak, _ = allocator_bytes(run)
    peak, _ = ledger_bytes([x], run)
    assert peak == 64 * 4
    assert allocator_peak >= peak + x.nbytes


def test_inference_mode_hides_the_intermediates_of_composite_operators():
    """The stated gap: only under no_grad does the ledger see the broadcast copies inside a matmul."""
    a, b = torch.ones(4, 1, 8, 8), torch.ones(1, 4, 8, 8)

    def no_grad():
        with torch.no_grad():
            return a @ b

    def inference():
        with torch.inference_mode():
            return a @ b

    returned = 4 * 4 * 8 * 8 * 4
    assert ledger_bytes([a, b], no_grad) == (3 * returned, returned)
    assert ledger_bytes([a, b], inference) == (returned, returned)


def test_views_and_in_place_operators_cost_nothing_and_frees_are_taken_back_at_once():
    with Ledger(CPU) as ledger:
        x = kib(4)
        assert ledger.live_bytes() == 4 * KIB
        view = x.view(2, -1)[1]
        parts = x.split(KIB)
        x.fill_(1).add_(1)
        x.detach()
        assert ledger.live_bytes() == 4 * KIB
        y = kib(2)
        del x
        assert ledger.live_bytes() == 6 * KIB  # the views hold the storage
        del view, parts
        assert ledger.live_bytes() == 2 * KIB
        del y
        assert ledger.live_bytes() == 0
        row, _ = ledger.close_update()
    assert brief(row) == {"memory/peak_bytes": 6 * KIB, "memory/live_bytes": 0}


def test_a_storage_that_an_operator_resizes_is_charged_its_new_size():
    with Ledger(CPU) as ledger:
        x = kib(1)
        x.resize_(3 * KIB)
        assert ledger.live_bytes() == 3 * KIB
        out = torch.empty(0)
        torch.add(torch.ones(256), 1, out=out)  # grows `out` to 1 KiB
        assert ledger.live_bytes() == 4 * KIB
        del x, out
        assert ledger.live_bytes() == 0


def test_tracked_tensors_are_charged_once_for_each_storage():
    tied = nn.Linear(16, 16, bias=False)
    with Ledger(CPU) as ledger:
        ledger.track([tied.weight, tied.weight.T, tied.weight[:2]])
        ledger.track(tied.parameters())
        assert ledger.live_bytes() == 16 * 16 * 4


def test_only_real_memory_on_the_ledgers_device_is_charged():
    lent = np.zeros(KIB, dtype=np.uint8)
    earlier = torch.from_numpy(np.zeros(2 * KIB, dtype=np.uint8))
    with Ledger(CPU) as ledger:
        torch.empty(KIB, device="meta").add(1)
        meta = torch.empty(KIB, device="meta")
        ledger.track([meta])
        with FakeTensorMode():
            fake = torch.empty(KIB) + 1
        zeros = torch._efficientzerotensor((KIB,))
        assert ledger.live_bytes() == 0
        shared = torch.from_numpy(lent)
        assert ledger.live_bytes() == KIB
        earlier.add_(1)
        assert ledger.live_bytes() == 3 * KIB
        dense = torch.eye(8)
        sparse = dense.to_sparse()  # has no storage of its own
        assert sparse.shape == dense.shape
        del shared, sparse, dense, fake, zeros, earlier
        assert ledger.live_bytes() == 0


def test_phase_rows_hold_peak_and_end_and_the_next_update_starts_from_what_is_alive():
    """M32, F40: a phase that comes back keeps its highest peak, not a mean, and its last end."""
    with Ledger(CPU) as ledger:
        with ledger.phase("rollout"):
            cache = kib(8)
        between = kib(32)
        del between
        for size in (4, 2):
            with ledger.phase("accumulate"):
                kib(size)
                grad = kib(1)
        first, _ = ledger.close_update()
        del cache
        second, _ = ledger.close_update()
        third, _ = ledger.close_update()
        del grad
    assert brief(first) == {
        "memory/peak_bytes": 40 * KIB,
        "memory/live_bytes": 9 * KIB,
        "memory/rollout_peak_bytes": 8 * KIB,
        "memory/rollout_end_bytes": 8 * KIB,
        "memory/accumulate_peak_bytes": 12 * KIB,
        "memory/accumulate_end_bytes": 9 * KIB,
    }
    assert brief(second) == {"memory/peak_bytes": 9 * KIB, "memory/live_bytes": KIB}
    assert brief(third) == {"memory/peak_bytes": KIB, "memory/live_bytes": KIB}


def test_an_exception_closes_its_phase_and_leaves_the_ledger_consistent():
    with Ledger(CPU) as ledger:
        with pytest.raises(RuntimeError, match="size of tensor"), ledger.phase("accumulate"):
            kib(4)
            torch.ones(2) + torch.ones(3)
        with ledger.phase("accumulate"):
            kib(2)
        row, seconds = ledger.close_update()
    assert row["memory/accumulate_peak_bytes"] == 4 * KIB
    assert row["memory/accumulate_end_bytes"] == row["memory/live_bytes"] == 0
    assert seconds["time/accumulate_seconds"] > 0


def test_what_is_apart_is_no_part_of_the_update_that_it_interrupts():
    """Evaluations and checkpoints: neither their bytes nor their seconds nor their phases; what they keep alive is."""
    with Ledger(CPU) as ledger:
        with ledger.phase("rollout"):
            kept = kib(10)
        with ledger.apart() as own:
            with ledger.phase("rollout"):
                big = kib(500)
            time.sleep(0.05)
            del big
            left = kib(7)
        with ledger.phase("step"):
            small = kib(20)
            del small
        memory, seconds = ledger.close_update()
        del kept, left
    assert own["peak_bytes"] == 510 * KIB and own["seconds"] >= 0.05
    assert memory["memory/peak_bytes"] == memory["memory/step_peak_bytes"] == 37 * KIB
    assert memory["memory/rollout_peak_bytes"] == 10 * KIB and memory["memory/live_bytes"] == 17 * KIB
    assert seconds["time/update_seconds"] < 0.05 and set(seconds) == {
        "time/update_seconds",
        "time/rollout_seconds",
        "time/step_seconds",
    }


def test_an_exception_apart_leaves_the_update_as_it_was():
    with Ledger(CPU) as ledger:
        with ledger.phase("rollout"):
            kept = kib(10)
        with pytest.raises(ValueError), ledger.apart():
            kib(500)
            raise ValueError
        with pytest.raises(RuntimeError, match="inside phase"), ledger.phase("step"), ledger.apart():
            pass
        assert ledger.close_update()[0]["memory/peak_bytes"] == 10 * KIB
        del kept


def test_phases_do_not_nest():
    with Ledger(CPU) as ledger:
        with ledger.phase("rollout"):
            with (
                pytest.raises(RuntimeError, match="'score' starts inside phase 'rollout'"),
                ledger.phase("score"),
            ):
                pass
            with pytest.raises(RuntimeError, match="closed inside phase 'rollout'"):
                ledger.close_update()
        with pytest.raises(ValueError, match="'update'"), ledger.phase("update"):
            pass
        row, _ = ledger.close_update()
    assert set(brief(row)) == {
        "memory/peak_bytes",
        "memory/live_bytes",
        "memory/rollout_peak_bytes",
        "memory/rollout_end_bytes",
    }


def job(name: str) -> list[dict[str, int]]:
    """The memory rows of two updates of one workload."""
    alive, run = WORKLOADS[name]()
    rows = []
    with Ledger(CPU) as ledger:
        ledger.track(alive)
        for _ in range(2):
            with ledger.phase("work"):
                run()
            rows.append({k: v for k, v in ledger.close_update()[0].items() if "seconds" not in k})
    return rows


def test_rows_do_not_depend_on_the_jobs_before():
    """M32: jobs of a multirun share a process; neither a repetition nor the order of two may matter."""
    names = ("adamw", "llama_forward_backward")
    forwards = {name: job(name) for name in names}
    backwards = {name: job(name) for name in reversed(names)}
    assert forwards == backwards
    assert forwards["adamw"] != forwards["llama_forward_backward"]


def test_a_tensor_of_an_earlier_ledger_is_not_charged_to_a_later_one():
    with Ledger(CPU):
        kept = kib(4)
    with Ledger(CPU) as ledger:
        fresh = kib(1)
        del kept
        assert ledger.live_bytes() == KIB
        del fresh


def test_measuring_changes_no_number_and_no_optimizer_state():
    """F22, F23: nothing is made early to be measured, so two steps leave the step counter at 2."""
    alive, run = adamw_step(foreach=False)
    expected = run().state_dict()["state"]
    measured_alive, run = adamw_step(foreach=False)
    with Ledger(CPU) as ledger:
        ledger.track(measured_alive)
        measured = run().state_dict()["state"]
    assert [float(state["step"]) for state in measured.values()] == [2.0] * 4
    for state, other in zip(expected.values(), measured.values(), strict=True):
        assert all(torch.equal(state[key], other[key]) for key in state)
    assert all(torch.equal(a, b) for a, b in zip(alive, measured_alive, strict=True))


def test_the_first_step_shows_the_optimizer_state_as_it_appears():
    """F22, M35: the state appears in the first apply, so the second accumulate carries it."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    rows = []
    with Ledger(CPU) as ledger:
        ledger.track(layer.parameters())
        for _ in range(2):
            with ledger.phase("accumulate"):
                layer(torch.ones(1, 16)).sum().backward()
            with ledger.phase("apply"):
                optimizer.step()
                optimizer.zero_grad()
            rows.append(ledger.close_update()[0])
    weight = layer.weight.nbytes
    state = 2 * weight + 4  # two moments and the step counter
    assert rows[0]["memory/accumulate_end_bytes"] == 2 * weight
    assert rows[0]["memory/live_bytes"] == rows[1]["memory/live_bytes"] == weight + state
    assert rows[1]["memory/accumulate_end_bytes"] == 2 * weight + state


def test_seconds_of_phases_are_disjoint_and_within_the_step():
    """F38 on a CPU: each phase pays for its own time, and what lies between belongs to the step alone."""
    wall = time.perf_counter()
    with Ledger(CPU) as ledger:
        for _ in range(2):
            with ledger.phase("rollout"):
                time.sleep(0.01)
        time.sleep(0.02)
        with ledger.phase("apply"):
            time.sleep(0.005)
        _, first = ledger.close_update()
        _, second = ledger.close_update()
    wall = time.perf_counter() - wall
    assert set(first) == {"time/update_seconds", "time/rollout_seconds", "time/apply_seconds"}
    assert first["time/rollout_seconds"] >= 0.02
    assert first["time/apply_seconds"] >= 0.005
    phases = first["time/rollout_seconds"] + first["time/apply_seconds"]
    assert phases + 0.02 <= first["time/update_seconds"] <= wall
    assert set(second) == {"time/update_seconds"}
    assert first["time/update_seconds"] + second["time/update_seconds"] <= wall


class FakeCuda:
    """What `torch.cuda` says of a device whose kernels run late and whose cache keeps what was freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.pending_seconds = 0.0
        for name, answer in {
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak_allocated,
            "max_memory_reserved": lambda device: self.peak_reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def synchronize(self, device: torch.device) -> None:
        time.sleep(self.pending_seconds)
        self.pending_seconds = 0.0

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset(self, device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


def test_cuda_peaks_are_per_phase_and_free_of_an_earlier_job(monkeypatch):
    """M32, F28: both counters, reset at each border; the earlier job's peak and cache do not count."""
    cuda = FakeCuda(monkeypatch)
    cuda.allocate(1000)
    cuda.allocate(-990)
    with Ledger(torch.device("cuda", 0)) as ledger:
        ledger.track([torch.ones(4)])
        with ledger.phase("rollout"):
            cuda.allocate(100)
            cuda.allocate(-60)
        with ledger.phase("apply"):
            cuda.allocate(5)
        memory, _ = ledger.close_update()
        following, _ = ledger.close_update()
    assert brief(memory) == {
        "memory/peak_bytes": 110,
        "memory/peak_allocated_bytes": 110,
        "memory/peak_reserved_bytes": 110,
        "memory/live_bytes": 55,
        "memory/rollout_peak_bytes": 110,
        "memory/rollout_peak_allocated_bytes": 110,
        "memory/rollout_peak_reserved_bytes": 110,
        "memory/rollout_end_bytes": 50,
        "memory/apply_peak_bytes": 55,
        "memory/apply_peak_allocated_bytes": 55,
        "memory/apply_peak_reserved_bytes": 110,
        "memory/apply_end_bytes": 55,
    }
    assert following["memory/peak_allocated_bytes"] == 55


def test_cuda_phases_pay_for_their_own_late_kernels(monkeypatch):
    """F38: a phase waits for what was launched in it, and not for what was launched before it."""
    cuda = FakeCuda(monkeypatch)
    with Ledger(torch.device("cuda")) as ledger:
        with ledger.phase("rollout"):
            cuda.pending_seconds = 0.03
        cuda.pending_seconds = 0.04
        with ledger.phase("apply"):
            pass
        _, seconds = ledger.close_update()
    assert seconds["time/rollout_seconds"] >= 0.03
    assert seconds["time/apply_seconds"] < 0.03
    assert seconds["time/update_seconds"] >= 0.07


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_on_a_device():
    """M32, F38 on a real allocator."""
    device = torch.device("cuda")
    with Ledger(device) as ledger:
        start = ledger.live_bytes()
        with ledger.phase("rollout"):
            kept = torch.empty(4 << 20, dtype=torch.uint8, device=device)
            torch.empty(8 << 20, dtype=torch.uint8, device=device)
        with ledger.phase("apply"):
            torch.empty(1 << 20, dtype=torch.uint8, device=device)
        row, seconds = ledger.close_update()
        del kept
    assert row["memory/rollout_peak_bytes"] - start == 12 << 20
    assert row["memory/rollout_end_bytes"] - start == 4 << 20
    assert row["memory/apply_peak_bytes"] - start == 5 << 20
    assert row["memory/peak_reserved_bytes"] >= row["memory/peak_allocated_bytes"]
    assert seconds["time/rollout_seconds"] + seconds["time/apply_seconds"] <= seconds["time/update_seconds"]
