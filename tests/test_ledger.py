"""The split of the ledger's bytes by component, its time integrals, the cap, and which updates are measured."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from src.memory import COMPONENTS, Ledger, MemoryCapExceeded, is_out_of_memory, wanted_bytes
from tests.test_trainer import build, scored, setup

CPU = torch.device("cpu")
KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.ones(count * KIB // 4)


def split(row: dict[str, float], of: str = "") -> dict[str, float]:
    """The components at a peak that are not zero."""
    prefix = f"memory/{of}peak_"
    found = {name: row.get(f"{prefix}{name}_bytes", 0) for name in COMPONENTS}
    return {name: value for name, value in found.items() if value}


def test_a_tag_counts_from_a_storage_s_first_byte_on_whenever_it_is_given():
    """A gradient is known as one only when backward is over, and the peak was in its middle."""
    with Ledger(CPU) as ledger:
        state: dict[str, list[torch.Tensor]] = {}
        ledger.watch(lambda: state, after=("backward",))
        with ledger.phase("backward"):
            gradient, other = kib(4), kib(16)
            del other
            state["gradients"] = [gradient]
        row, _ = ledger.close_update()
        following, _ = ledger.close_update()
        del gradient
        state.clear()
    assert split(row) == split(row, "backward_") == {"gradients": 4 * KIB, "other": 16 * KIB}
    assert split(following) == {"gradients": 4 * KIB}  # what is alive keeps its name


def test_activations_are_what_recording_made_and_what_outlives_it():
    with Ledger(CPU) as ledger:
        with ledger.phase("forward", "activations"):
            x = torch.ones(KIB, requires_grad=True)
            y = x * 2 * 3  # the product in between is freed while gradients are recorded
            kept = y.exp()  # saves itself
            with torch.no_grad():
                apart = kib(3)
        with ledger.phase("backward", "activations"):
            peak = kib(64)
            del peak
        row, _ = ledger.close_update()
        del y, kept, apart, x
    assert split(row, "backward_") == {"activations": 12 * KIB, "other": 67 * KIB}


def test_recomputed_activations_are_activations_too():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
    x = torch.ones(512, 64, requires_grad=True)
    found = {}
    for again in (False, True):
        with Ledger(CPU) as ledger:
            ledger.watch(lambda: {"weights": layer.parameters()})
            with ledger.phase("forward", "activations"):
                y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
                loss = y.sum()
                del y
            with ledger.phase("backward", "activations"):
                loss.backward()
            row, _ = ledger.close_update()
            found[again] = split(row, "backward_")["activations"], split(row, "forward_").get("activations", 0)
            layer.zero_grad()
            x.grad = None
            del loss
    hidden = 512 * 256 * 4
    assert 2 * hidden <= found[False][1] < 2.5 * hidden and found[True][1] < 0.5 * hidden
    assert 2 * hidden <= found[True][0] < 2.5 * hidden


def test_a_phase_s_component_is_what_it_makes_unless_tagged():
    with Ledger(CPU) as ledger:
        with ledger.phase("probe", "probe"):
            dual, cache = kib(2), kib(5)
            ledger.track([cache], "kv_cache")
        row, _ = ledger.close_update()
        del dual, cache
    assert split(row) == {"probe": 2 * KIB, "kv_cache": 5 * KIB}


@pytest.mark.parametrize("method", ["sketch", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_components_of_an_update_add_up_and_are_those_of_the_shapes(method, dtype):
    """Weights, gradients or sketches, moments and masters by hand; the rest is there where it belongs."""
    if method == "dense" and dtype == torch.bfloat16:
        pytest.skip("dense has no master weights")
    config, policy, task = setup(f"method={method}", "control=none", dtype=dtype)
    batch = scored(config, policy, task)
    with Ledger(CPU) as ledger:
        ledger.watch(lambda: {"weights": [*policy.model.parameters(), *policy.model.buffers()]})
        optimizer = build(config, policy)
        ledger.watch(optimizer.memory, after=("backward", "step"))
        from src.probe import ControlledStep
        from src.trainer import accumulate

        step = ControlledStep(config, policy, optimizer, ledger.phase)
        rows = []
        for update in (1, 2):
            accumulate(config, policy, batch, None, ledger.phase)
            with ledger.phase("step"):
                optimizer.propose()
            step.make(batch, update)
            rows.append(ledger.close_update()[0])
    for row in rows:
        for of in ("", "forward_", "backward_", "step_"):
            assert sum(split(row, of).values()) == row[f"memory/{of}peak_bytes"]
    weights = sum(tensor.nbytes for tensor in (*policy.model.parameters(), *policy.model.buffers()))
    modules = [module for name, module in policy.model.named_modules() if name.endswith("_proj")]
    trained = sum(module.weight.numel() for module in modules)
    last = rows[1]
    found = split(last, "step_") | {"weights": split(last)["weights"]}
    assert found["weights"] == weights
    if method == "dense":
        assert found["gradients"] == 4 * trained and 8 * trained <= found["optimizer_state"] < 8.1 * trained
    else:
        assert found["sketches"] == 4 * sum(4 * module.out_features for module in modules)  # rank 4
        assert found["optimizer_state"] == 4 * sum(module.out_features for module in modules)
        assert found.get("master_weights", 0) == (4 * trained if dtype == torch.bfloat16 else 0)
        assert found["projections"] > 0 and "gradients" not in found
    assert split(last, "forward_")["activations"] > split(last, "forward_").get("other", 0)
    assert split(rows[0], "probe_")["probe"] > 0 and "memory/probe_peak_bytes" not in last  # every eighth update
    assert "optimizer_state" not in split(rows[0], "backward_")  # it is made in the first step


def test_the_time_integral_is_bytes_times_seconds():
    with Ledger(CPU) as ledger:
        with ledger.phase("rollout"):
            kept = kib(1000)
            time.sleep(0.05)
            more = kib(1000)
            time.sleep(0.05)
            del more
            fine = kib(1)
            time.sleep(0.1)
            del fine
        row, seconds = ledger.close_update()
        del kept
    expected = KIB * (1000 * 0.05 + 2000 * 0.05 + 1000 * 0.1)
    assert expected <= row["memory/rollout_byte_seconds"] <= 1.5 * expected
    mean = row["memory/rollout_byte_seconds"] / seconds["time/rollout_seconds"]
    assert 1000 * KIB < mean < row["memory/rollout_peak_bytes"]
    assert row["memory/rollout_byte_seconds"] <= row["memory/byte_seconds"]


def test_an_update_that_is_not_measured_has_times_alone_and_the_next_knows_what_lives():
    with Ledger(CPU) as ledger:
        held: list[torch.Tensor] = []
        ledger.watch(lambda: {"weights": held}, after=())
        with ledger.phase("step"):
            temporary = kib(8)
        ledger.close_update()
        ledger.measure(False)
        del temporary
        with ledger.phase("step"):
            held.append(kib(4))
            forgotten = kib(2)  # made while nobody looks, and not named by a source
        row, seconds = ledger.close_update()
        assert row == {} and seconds["time/step_seconds"] > 0
        with ledger.apart() as own:
            big = kib(50)
            del big
        assert own["peak_bytes"] == 54 * KIB and own["peak_weights_bytes"] == 4 * KIB  # measured all the same
        with ledger.phase("tracking"):
            pass
        ledger.measure(True)
        with ledger.phase("step"):
            more = kib(1)
        row, seconds = ledger.close_update()
        assert set(seconds) == {"time/update_seconds", "time/step_seconds", "time/tracking_seconds"}
        del more, forgotten
    assert row["memory/peak_bytes"] == 5 * KIB and split(row) == {"weights": 4 * KIB, "other": KIB}


def test_the_cap_stops_before_it_is_passed_and_says_what_was_alive():
    with Ledger(CPU, cap=10 * KIB) as ledger:
        weights = [kib(4)]
        ledger.watch(lambda: {"weights": weights})
        with ledger.phase("rollout"):
            fits = kib(6)
            del fits
        with pytest.raises(MemoryCapExceeded) as caught, ledger.phase("backward"):
            first = kib(5)
            kib(2)
        error: Any = caught.value
        assert (error.wanted_bytes, error.live_bytes, error.cap_bytes) == (2 * KIB, 9 * KIB, 10 * KIB)
        assert error.components == {"weights": 4 * KIB, "other": 5 * KIB}
        assert "memory.cap_bytes=10240" in str(error) and is_out_of_memory(error)
        assert wanted_bytes(error) == 2 * KIB
        del first, caught, error
        assert ledger.live_bytes() == 4 * KIB  # what could not be had is not charged
        weights.clear()


def test_what_was_alive_adds_up_when_the_first_tensor_is_too_large():
    """Asked what is alive, the sources name tensors that were not counted yet."""
    weights = [torch.zeros(KIB), torch.zeros(2 * KIB)]
    with pytest.raises(MemoryCapExceeded) as caught, Ledger(CPU, cap=1) as ledger:
        ledger.watch(lambda: {"weights": weights})
    assert sum(caught.value.components.values()) == caught.value.live_bytes == 12 * KIB


def test_the_cap_stops_inside_a_backward_pass_too():
    layer = nn.Linear(64, 64, bias=False)
    x = torch.ones(1024, 64, requires_grad=True)
    with Ledger(CPU, cap=600 * KIB) as ledger:
        ledger.watch(lambda: {"weights": layer.parameters()})
        with ledger.phase("forward"):
            loss = layer(x).square().sum()  # saves the output, 256 KiB
        with pytest.raises(MemoryCapExceeded), ledger.phase("backward"):
            loss.backward()  # whose gradient has as many
    assert x.grad is None


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
         "123456 bytes. Error code 12 (Cannot allocate memory)", 123456),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.8 GiB", 5 * 2**29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * 2**20),
        ("something else", None),
    ],
)  # fmt: skip
def test_what_allocators_say_that_they_could_not_give(message, wanted):
    assert wanted_bytes(RuntimeError(message)) == wanted


def test_the_cpu_allocator_s_own_out_of_memory_is_one():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and wanted_bytes(caught.value) == 2**60
    assert not is_out_of_memory(RuntimeError("size mismatch"))


RESIDENT = """
import re, resource, torch
from src.memory import Ledger
from tests.tinymodels import llama
torch.set_num_threads(1)
model = llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=64)
ids = torch.randint(0, 64, (32, 64))
model(input_ids=ids[:1], use_cache=False).logits.sum().backward()
model.zero_grad()
now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
with Ledger(torch.device("cpu")) as ledger:
    ledger.watch(lambda: {"weights": model.parameters()})
    weights = ledger.live_bytes()
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    peak = ledger.close_update()[0]["memory/peak_bytes"]
# Not ru_maxrss: a process starts with that of the one that it was forked from.
after = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(peak - weights, after - now)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_grows_by_what_the_ledger_says():
    """The resident size is pages, and counts what the allocator keeps: above the ledger, and not by much.

    Tensors get pages of their own here, which go back when they die; else the heap keeps what lies under a living one.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", RESIDENT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ledger, resident = map(int, done.stdout.split())
    assert ledger > 50 << 20
    assert 0.95 * ledger <= resident <= 1.35 * ledger
