"""Checkpoints: whole or not there, never code, and what comes back has the bits of what was saved."""

import errno
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from src import checkpoint
from src.checkpoint import CheckpointError
from src.memory import StorageMeter
from src.methods.dense import DenseOptimizer
from src.sketch.layer import SketchedLayers
from src.sketch.optimizer import SketchOptimizer

RUN = "0123abcd-s0"
CPU = torch.device("cpu")


def state(update: int = 1, **changed: Any) -> dict[str, Any]:
    """What a run saves, small."""
    weights = {"layer.weight": torch.arange(6.0).view(2, 3)}
    method = {"state": {0: {"step": update}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"update": update, "weights": weights, "method": method, "batch": None, "wandb_id": None} | changed


def save(folder: Path, update: int = 1, **changed: Any) -> Path:
    return checkpoint.save(folder, RUN, state(update, **changed))


def vouched(folder: Path, content: bytes, update: int = 1) -> Path:
    """A file that somebody else made, under the name that a checkpoint of this content would have."""
    folder.mkdir(exist_ok=True)
    path = folder / f"update-{update:06d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


def saved_bytes(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same types, values and bits; strides apart."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def script(code: str, *arguments: object) -> dict[str, Any]:
    """What a fresh process prints, as JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


# What is written comes back


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    return {
        "whole": base,
        "0-d": base[1, 2].clone(),
        "empty": torch.empty(0, 3, dtype=dtype),
        "transposed": base.clone().T,
        "columns": base.clone()[:, ::3],
        "row": base.clone()[2],
        "nothing of much": base.clone()[3:3],
        "expanded": base[0, 0].clone().expand(4, 5),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = state(weights=tensors(dtype))
    loaded = checkpoint.load(checkpoint.save(tmp_path / "c", RUN, saved), RUN)
    assert same(saved, {key: loaded[key] for key in saved})
    assert loaded["weights"]["transposed"].stride() == saved["weights"]["transposed"].stride()


def test_odd_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1, -0x00400000], dtype=torch.int32)
    loaded = checkpoint.load(save(tmp_path / "c", weights={"odd": bits.view(torch.float32)}), RUN)
    assert torch.equal(loaded["weights"]["odd"].view(torch.int32), bits)


def test_plain_values_come_back(tmp_path: Path) -> None:
    method = {
        "numbers": [0, -1, 2**31, -(2**63), 2**128, 10**300, 0.1, -0.0, float("inf"), float("nan"), 5e-324, True],
        "texts": ("", "ünï\n\0", "\udc80", "x" * 100_000),
        "nested": ([], {}, (), [[()], ({"a": [None, False]},)]),
        "many": {index: {"step": index, "name": str(index)} for index in range(1000)},
        0: {None: 1, True: 2, 2.5: 3, "4": 5},
    }
    batch = {"verdicts": {"right": 3}, "rollout": {"tokens_BS": torch.arange(4)}}
    saved = state(method=method, batch=batch, wandb_id="a1b2")
    loaded = checkpoint.load(checkpoint.save(tmp_path / "ünï cødé", RUN, saved), RUN)
    assert same(saved, {key: loaded[key] for key in saved})


def test_a_module_s_state_may_stand_in_a_method_s(tmp_path: Path) -> None:
    value_head = nn.Linear(3, 1)
    loaded = checkpoint.load(save(tmp_path / "c", method=OrderedDict(head=value_head.state_dict())), RUN)
    assert type(loaded["method"]) is dict and type(loaded["method"]["head"]) is dict
    nn.Linear(3, 1).load_state_dict(loaded["method"]["head"])
    assert same(dict(value_head.state_dict()), loaded["method"]["head"])


# How it is written


def test_a_file_is_written_synced_renamed_and_its_name_vouches_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    steps: list[str] = []
    folder = tmp_path / "c"

    def watched(name: str) -> None:
        genuine = getattr(os, name)

        def call(*arguments: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[0]
            files = sorted(path.name for path in folder.iterdir())
            steps.append(f"{name} {Path(target).relative_to(tmp_path)} among {len(files)}")
            return genuine(*arguments)

        monkeypatch.setattr(os, name, call)

    watched("fsync")
    watched("replace")
    path = save(folder, 7)
    assert steps == ["fsync c/.checkpoint.tmp among 1", "replace c/.checkpoint.tmp among 1", "fsync c among 1"]
    assert [path] == list(folder.iterdir())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f"update-000007-{digest[:16]}.pt"
    assert save(folder, 1_234_567).name.startswith("update-1234567-")


def test_saving_changes_nothing_and_allocates_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    flat = torch.randn(1000)
    views = {"flat.head": flat[:400], "flat.tail": flat[400:].view(20, 30)}  # together they are the storage

    def content() -> dict[str, Any]:
        method = optimizer.state_dict()
        return {"update": 1, "weights": model.state_dict(), "method": method, "batch": views, "wandb_id": None}

    def all_tensors() -> list[Tensor]:
        moments = [value for row in optimizer.state.values() for value in row.values()]
        return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *moments, flat]

    def facts() -> list[Any]:
        tensors = all_tensors()
        versions = [(id(t), t._version, t.data_ptr(), t.requires_grad, t.is_leaf) for t in tensors]
        rng = [torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
        return [versions, [t.detach().clone() for t in tensors], rng]

    before = facts()
    with StorageMeter(CPU) as meter:
        meter.track(all_tensors())
        live = meter.live()
        meter.forget()
        checkpoint.save(tmp_path / "c", RUN, content())
        assert live == meter.live() > 0 and not meter.journal
    assert same(before, facts())


FRESH = """
import hashlib, json, resource, sys
from pathlib import Path
import torch

def digest(tensor):
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()

content = torch.load(sys.argv[1], weights_only=True)
content["weights"] = {name: digest(tensor) for name, tensor in content["weights"].items()}
assert "src" not in sys.modules

from src import checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def save(update, tensor):
    rest = {"method": {}, "batch": None, "wandb_id": None}
    return checkpoint.save(Path(sys.argv[2]), "r", {"update": update, "weights": {"w": tensor}} | rest)

checkpoint.load(save(1, torch.ones(3)), "r")
big = torch.ones(50 * 2**20)
peaks = [peak()]
whole = save(2, big)
peaks.append(peak())
loaded = checkpoint.load(whole, "r")["weights"]["w"]
last = loaded[-1].item()
peaks.append(peak())
row = save(3, big.view(100, -1)[7])
peaks.append(peak())
print(json.dumps([content, last, peaks, whole.stat().st_size, row.stat().st_size]))
"""


def test_a_fresh_process_loads_with_torch_alone_and_grows_neither_by_saving_nor_by_loading(tmp_path: Path) -> None:
    """200 MiB, of which a row is 2 MiB."""
    weights = tensors(torch.bfloat16) | {"float64": torch.randn(3, 3, dtype=torch.float64)}
    content, last, peaks, whole, row = script(FRESH, save(tmp_path / "c", weights=weights), tmp_path / "big")
    bits = {name: tensor.contiguous().reshape(-1).view(torch.uint8) for name, tensor in weights.items()}
    digests = {name: hashlib.sha256(bit.numpy().tobytes()).hexdigest() for name, bit in bits.items()}
    written = {"format": checkpoint.FORMAT, "run": RUN} | state(weights=digests)
    assert content == json.loads(json.dumps(written | {"method": content["method"]}))
    assert last == 1.0 and 200 * 2**20 < whole < 201 * 2**20 and 2 * 2**20 < row < 2.1 * 2**20
    assert peaks[0] > 200, "the peaks are not in MiB"
    assert peaks[-1] - peaks[0] < 20, peaks


def test_tied_weights_are_one_storage_in_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(100, 50), nn.Linear(50, 100, bias=False))
    model[1].weight = model[0].weight
    path = save(tmp_path / "c", weights=model.state_dict())
    weights = checkpoint.load(path, RUN)["weights"]
    assert 100 * 50 * 4 < path.stat().st_size < 1.3 * 100 * 50 * 4
    assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()


@pytest.mark.parametrize(
    ("view", "numbers"),
    [
        (lambda x: {"row": x[1]}, 1000),
        (lambda x: {"column": x[:, 1]}, 1000),
        (lambda x: {"nothing": x[5:5]}, 0),
        (lambda x: {"row": x[1], "again": x[1]}, 2000),
        (lambda x: {"head": x[:500], "tail": x[500:]}, 1_000_000),
        (lambda x: {"left": x[:, :100], "right": x[:, 100:]}, 1_000_000),
        (lambda x: {"all": x, "row": x[1]}, 1_000_000),
        (lambda x: {"expanded": x[1, 1].expand(1000)}, 1000),
    ],
)
def test_a_view_takes_no_more_than_it_shows(
    view: Callable[[Tensor], dict[str, Tensor]], numbers: int, tmp_path: Path
) -> None:
    saved = view(torch.arange(1_000_000.0).view(1000, 1000))
    path = save(tmp_path / "c", weights=saved)
    assert 4 * numbers < path.stat().st_size < 4 * numbers + 5000
    assert same(saved, checkpoint.load(path, RUN)["weights"])


def test_graph_and_attributes_of_a_tensor_stay_outside(tmp_path: Path) -> None:
    leaf = nn.Parameter(torch.ones(2))
    leaf.note = object()  # type: ignore[attr-defined]
    leaf.register_hook(print)
    loaded = checkpoint.load(save(tmp_path / "c", method={"leaf": leaf, "inner": leaf * 2}), RUN)["method"]
    assert same(loaded, {"leaf": torch.ones(2), "inner": torch.full((2,), 2.0)})
    assert type(loaded["leaf"]) is Tensor
    assert not loaded["leaf"].requires_grad and not hasattr(loaded["leaf"], "note")
    assert leaf.requires_grad and leaf.is_leaf


class Subclass(Tensor):
    """A tensor with a class of its own."""


Point = namedtuple("Point", "x y")

NOT_PLAIN = [
    (object(), "", "builtins.object"),
    ([0, np.float64(1.0)], "[1]", "numpy.float64"),
    (np.ones(2), "", "numpy.ndarray"),
    ({"f": (1, len)}, "['f'][1]", "builtins.builtin_function_or_method"),
    (lambda: 1, "", "builtins.function"),
    ({nn.Parameter(torch.ones(1)): 3}, "'s key", "torch.nn.parameter.Parameter"),
    (torch.ones(2).as_subclass(Subclass), "", "test_checkpoint.Subclass"),
    (torch.ones(2).to_sparse(), "", "torch.sparse_coo cpu tensor"),
    (torch.ones(2, device="meta"), "", "torch.strided meta tensor"),
    ({1}, "", "builtins.set"),
    (b"bytes", "", "builtins.bytes"),
    (1j, "", "builtins.complex"),
    (torch.float32, "", "torch.dtype"),
    (torch.Size([1]), "", "torch.Size"),
    (Point(1, 2), "", "test_checkpoint.Point"),
    (random.Random(0), "", "random.Random"),
    ({(1, 2): 3}, "'s key (1, 2)", "builtins.tuple"),
    ({np.int64(1): 3}, "'s key", "numpy.int64"),
    ([{torch.ones(1): 3}], "[0]'s key tensor([1.])", "torch.strided cpu tensor"),
]


@pytest.mark.parametrize(("value", "place", "kind"), NOT_PLAIN, ids=[kind for _, _, kind in NOT_PLAIN])
def test_what_is_not_plain_is_refused_with_its_place(value: Any, place: str, kind: str, tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    with pytest.raises(TypeError, match=re.escape(f"the state['method']['mine']{place}")) as caught:
        save(tmp_path / "c", 2, method={"mine": value})
    assert re.search(rf" is a (tests\.)?{re.escape(kind)}, which", str(caught.value))
    assert [update for update, _ in checkpoint.found(tmp_path / "c")] == [1] and len(
        list((tmp_path / "c").iterdir())
    ) == 1


@pytest.mark.parametrize(
    "changed",
    [{"method": [1]}, {"method": None}, {"weights": torch.ones(1)}, {"batch": 3}, {"update": "1"}, {"wandb_id": 1}],
    ids=str,
)
def test_a_state_from_which_no_run_goes_on_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    (name,) = changed
    with pytest.raises(TypeError, match=re.escape(f"the state[{name!r}] is")):
        save(tmp_path / "c", **changed)
    whole = state()
    del whole[name]
    with pytest.raises(TypeError, match=re.escape(f"the state[{name!r}] is missing")):
        checkpoint.save(tmp_path / "c", RUN, whole)
    assert not (tmp_path / "c").exists()


# A disk that does not take it


def test_a_full_disk_leaves_no_file_and_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    former = save(tmp_path / "c", 1)

    def full(path: Path, mode: str) -> Any:
        return open("/dev/full" if "x" in mode else path, mode.replace("x", "w"))

    monkeypatch.setattr(checkpoint, "open", full, raising=False)
    for size in (1, 10_000, 1_000_000):  # torch's writer finds out at other places
        with pytest.raises(
            OSError, match="the checkpoint after update 2 cannot be written to .*/c .No space"
        ) as caught:
            save(tmp_path / "c", 2, weights={"w": torch.ones(size)})
        assert caught.value.errno == errno.ENOSPC and "checkpoint.keep=0" in str(caught.value)
        assert list((tmp_path / "c").iterdir()) == [former]


def test_a_disk_that_fills_while_writing_leaves_no_file(tmp_path: Path) -> None:
    """Truly written, up to the size that a file may have here."""
    former = save(tmp_path / "c", 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size, limit in [(1000, 2000), (1_000_000, 2000), (1_000_000, 3_000_000), (1_000_000, 4_000_000)]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="cannot be written to") as caught:
                save(tmp_path / "c", 2, weights={"w": torch.ones(size)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert caught.value.errno == errno.EFBIG
        assert list((tmp_path / "c").iterdir()) == [former]
    checkpoint.load(former, RUN)
    checkpoint.load(save(tmp_path / "c", 2, weights={"w": torch.ones(size)}), RUN)


def test_a_file_in_the_folder_s_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    assert checkpoint.found(tmp_path / "c") == []
    with pytest.raises(FileExistsError, match=r"cannot be written to .*/c \(File exists\)"):
        save(tmp_path / "c")
    assert (tmp_path / "c").read_text() == ""


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"]
)
def test_an_interrupted_writing_leaves_no_file(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: Any
) -> None:
    former = save(tmp_path / "c", 1)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error), match="cannot be written" if isinstance(error, OSError) else None):
        save(tmp_path / "c", 2)
    assert list((tmp_path / "c").iterdir()) == [former]


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from src import checkpoint

folder, rng = Path(sys.argv[1]), random.Random(0)

def state(update):
    rest = {"method": {}, "batch": None, "wandb_id": None}
    return {"update": update, "weights": {"w": torch.full((250_000,), float(update))}} | rest

reached, left = [], 0
for kill in range(20):
    newest = reached[-1] if reached else 0
    if not (child := os.fork()):
        for update in range(newest + 1, 10**6):
            checkpoint.save(folder, "r", state(update))
            checkpoint.prune(folder, 2, {1: 0.5})
    while max((update for update, _ in checkpoint.found(folder)), default=0) <= newest:
        time.sleep(0.001)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
    time.sleep(rng.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left += (folder / ".checkpoint.tmp").exists()
    files = checkpoint.found(folder)
    for update, path in files:
        weights = checkpoint.load(path, "r")["weights"]["w"]
        assert torch.equal(weights, torch.full_like(weights, float(update)))
    updates = [update for update, _ in files]
    assert 1 in updates and len(updates) <= 4, updates
    reached.append(updates[0])
print(json.dumps([reached, left]))
"""


def test_twenty_kills_leave_checkpoints_that_load(tmp_path: Path) -> None:
    reached, left = script(KILLED, tmp_path / "c")
    assert len(reached) == 20 and reached == sorted(set(reached)), reached
    assert left >= 3, "too few of the kills came while a file was written"
    checkpoint.clear(tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


# Which are kept


@pytest.mark.parametrize(
    ("updates", "keep", "accuracies", "kept"),
    [
        ([1, 2, 3, 4, 5], 2, {}, [4, 5]),
        ([1, 2, 3, 4, 5], 1, {2: 0.5, 4: 0.25}, [2, 5]),
        ([1, 2, 3, 4, 5], 2, {1: 0.5, 2: 0.5, 3: 0.25}, [1, 4, 5]),
        ([1, 2, 3, 4, 5], 2, {3: 0.5, 5: 0.5}, [3, 4, 5]),
        ([1, 2, 3, 4, 5], 2, {2: 0.25, 5: 0.5}, [4, 5]),
        ([2, 3, 4], 1, {0: 0.9, 1: 0.9, 2: 0.1, 3: 0.0}, [2, 4]),
        ([999_999, 1_000_000, 1_000_001], 2, {}, [1_000_000, 1_000_001]),
        ([1, 2], 5, {1: 0.0}, [1, 2]),
        ([1, 2, 3], 0, {2: 0.1}, [2]),
        ([], 2, {1: 0.5}, []),
    ],
)
def test_the_last_and_the_best_are_kept(
    updates: list[int], keep: int, accuracies: dict[int, float], kept: list[int], tmp_path: Path
) -> None:
    for update in updates:
        vouched(tmp_path / "c", b"", update)
    checkpoint.prune(tmp_path / "c", keep, accuracies)
    assert [update for update, _ in checkpoint.found(tmp_path / "c")] == kept[::-1]
    assert len(list((tmp_path / "c").glob("*"))) == len(kept)


def test_the_best_is_the_earliest_of_those_that_are_there(tmp_path: Path) -> None:
    assert checkpoint.best_update(tmp_path / "c", {1: 1.0}) is None
    for update in (4, 2, 3):
        vouched(tmp_path / "c", b"", update)
    assert checkpoint.best_update(tmp_path / "c", {}) is None
    assert checkpoint.best_update(tmp_path / "c", {1: 1.0, 4: 0.5, 3: 0.5, 2: 0.25}) == 3


def test_only_checkpoints_are_found(tmp_path: Path) -> None:
    names = [
        "update-000001-0123456789abcdef.pt.refused",
        "update-000001-0123456789abcdef.pt\n",
        "update-00001-0123456789abcdef.pt",
        "update-0000001-0123456789abcdef.pt",
        "update-00000\u0661-0123456789abcdef.pt",
        "update-000001-0123456789ABCDEF.pt",
        "update-000001-0123456789abcde.pt",
        "update--00001-0123456789abcdef.pt",
        "Update-000001-0123456789abcdef.pt",
        "update-000001.pt",
        ".checkpoint.tmp",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match="no checkpoint's file"):
            checkpoint.load(tmp_path / name, RUN)
    assert checkpoint.found(tmp_path) == [] and checkpoint.found(tmp_path / "nowhere") == []
    checkpoint.prune(tmp_path, 0, {})
    assert len(list(tmp_path.iterdir())) == len(names)


# Damaged files


def test_one_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    whole = path.read_bytes()
    places = {*range(40), *range(40, len(whole) - 40, 9), *range(len(whole) - 40, len(whole))}  # header, middle, tail
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="not what its name vouches for"):
            checkpoint.load(path, RUN)
    path.write_bytes(whole)
    checkpoint.load(path, RUN)


@pytest.mark.parametrize("length", [0, 1, 4, 100, 0.25, 0.5, 0.75, -100, -22, -1])
def test_a_truncated_file_is_noticed(length: float, tmp_path: Path) -> None:
    path = save(tmp_path / "c", weights={"w": torch.ones(10_000)})
    whole = path.read_bytes()
    kept = whole[: int(length * len(whole))] if 0 < length < 1 else whole[: int(length)]
    path.write_bytes(kept)
    with pytest.raises(CheckpointError, match="not what its name vouches for"):
        checkpoint.load(path, RUN)
    with pytest.raises(CheckpointError, match=r"cannot be loaded safely"):
        checkpoint.load(vouched(tmp_path / "c", kept), RUN)


def test_more_bytes_another_name_and_another_run_are_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "c", 1)
    whole = path.read_bytes()
    for damaged in (whole + b"\0", b"\0" + whole, whole * 2):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not what its name vouches for"):
            checkpoint.load(path, RUN)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="another run's"):
        checkpoint.load(path, "0123abcd-s1")
    as_another = path.rename(path.with_name(path.name.replace("000001", "000002")))
    with pytest.raises(CheckpointError, match="another update's"):
        checkpoint.load(as_another, RUN)
    with pytest.raises(CheckpointError, match="not what its name vouches for"):
        checkpoint.load(as_another.rename(path.with_name("update-000001-0123456789abcdef.pt")), RUN)


GONE = "gone"
FAULTS = [
    *product(["run", *state()], [GONE, True, 1.0, b"1", [], torch.ones(2)]),
    *[
        ("format", GONE),
        ("format", torch.ones(2)),
        ("update", None),
        ("weights", None),
        ("method", None),
        ("batch", "x"),
        ("wandb_id", {}),
        ("format", 2),
    ],
]


@pytest.mark.parametrize(("name", "wrong"), FAULTS, ids=str)
def test_a_content_without_what_a_run_needs_is_refused(name: str, wrong: Any, tmp_path: Path) -> None:
    content = {"format": checkpoint.FORMAT, "run": RUN} | state()
    checkpoint.load(vouched(tmp_path / "c", saved_bytes(content)), RUN)
    if wrong is GONE:
        del content[name]
    else:
        content[name] = wrong
    with pytest.raises(CheckpointError):
        checkpoint.load(vouched(tmp_path / "c", saved_bytes(content)), RUN)


@pytest.mark.parametrize("content", [None, 1, "text", [1], torch.ones(2), {}, {"format": 1}], ids=str)
def test_a_content_of_another_shape_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of another|another run's"):
        checkpoint.load(vouched(tmp_path / "c", saved_bytes(content)), RUN)


# Foreign files


class Bomb:
    """Its pickle makes a file where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle", "deep", "persistent"])
def test_a_pickle_with_code_does_not_run(how: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = {"format": checkpoint.FORMAT, "run": RUN} | state(method={"state": Bomb(marker)})
    match how:
        case "zip":
            data = saved_bytes(content)
        case "legacy":
            data = saved_bytes(content, _use_new_zipfile_serialization=False)
        case "pickle":
            data = pickle.dumps(content)
        case "deep":
            data = saved_bytes(content | {"method": {"state": [[(Bomb(marker),)]] * 2, Bomb(marker): 1}})
        case "persistent":  # in the place where torch looks up a storage
            plain = saved_bytes(content | {"method": {}})
            pickled = pickle.dumps(Bomb(marker), 2)[2:-1]
            with zipfile.ZipFile(io.BytesIO(plain)) as archive:
                parts = {name: archive.read(name) for name in archive.namelist()}
            parts["archive/data.pkl"] = b"\x80\x02" + pickled + b"Q."
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                for name, part in parts.items():
                    archive.writestr(name, part)
            data = file.getvalue()
    path = vouched(tmp_path / "c", data)
    with pytest.raises(CheckpointError, match=r"cannot be loaded safely \(\w+\)$"):
        checkpoint.load(path, RUN)
    assert not marker.exists()
    with suppress(Exception):
        pickle.loads(data) if how == "pickle" else torch.load(path, weights_only=False)
    assert marker.exists(), "a bomb that never goes off proves nothing"


def plain_zip(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return file.getvalue()


FOREIGN: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"update 1\n",
    "safetensors": lambda: safetensors_bytes({"w": torch.ones(2)}),
    "zip": lambda: plain_zip("a.txt"),
    "empty zip": lambda: plain_zip(),
    "zip that leads out": lambda: plain_zip("../../out", "/tmp/out", "archive/data.pkl"),
    "zip with a broken pickle": lambda: plain_zip("archive/data.pkl", "archive/byteorder", "archive/version"),
    "legacy": lambda: saved_bytes({"format": 1, "run": RUN} | state(), _use_new_zipfile_serialization=False),
    "TorchScript": lambda: plain_zip("archive/constants.pkl", "archive/data.pkl", "archive/version"),
    "zeros": lambda: bytes(5000),
}


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")  # as in a run, where a warning stops nothing
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.load(vouched(tmp_path / "c", FOREIGN[kind]()), RUN)
    assert len(list(tmp_path.rglob("*"))) == 2


@pytest.mark.parametrize("name", ["../../out", "/tmp/out", "archive/../../out", "archive/data/../9"])
def test_a_name_that_leads_out_of_the_archive_is_refused(name: str, tmp_path: Path) -> None:
    data = io.BytesIO(save(tmp_path / "c").read_bytes())
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr(name, "x")
    with pytest.raises(CheckpointError, match="leads out"):
        checkpoint.load(vouched(tmp_path / "c", data.getvalue()), RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def in_the_way(path: Path, kind: str, genuine: Path) -> None:
    """Put something that is no file at a place."""
    match kind:
        case "link":
            path.symlink_to(genuine)
        case "link up":
            path.symlink_to(Path("..") / genuine.parent.name / genuine.name)
        case "dangling link":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()
            (path / "content").write_text("x")
        case "FIFO":
            os.mkfifo(path)


KINDS = ["link", "link up", "dangling link", "loop", "folder", "FIFO"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_and_stands_in_nobody_s_way(kind: str, tmp_path: Path) -> None:
    genuine = save(tmp_path / "elsewhere", 3)
    folder = tmp_path / "c"
    usable = save(folder, 2)
    path = folder / genuine.name
    in_the_way(path, kind, genuine)
    started = time.monotonic()
    assert [update for update, _ in checkpoint.found(folder)] == [3, 2]
    with pytest.raises(CheckpointError, match="no checkpoint's file"):
        checkpoint.load(path, RUN)
    assert time.monotonic() - started < 5, "it waited for a writer"
    checkpoint.refuse(path)
    assert checkpoint.found(folder) == [(2, usable)]
    (folder / f"{path.name}.refused").rename(path)
    newest = [save(folder, update) for update in (4, 5)]
    checkpoint.prune(folder, 2, {})
    assert [file for _, file in checkpoint.found(folder) if file != path] == newest[::-1]
    checkpoint.clear(folder)
    assert [file.name for file in folder.iterdir()] == ([path.name] if kind == "folder" else [])
    checkpoint.load(genuine, RUN)


@pytest.mark.parametrize("kind", [*KINDS, "file"])
def test_what_lies_in_the_temporary_s_place_is_not_written_through(kind: str, tmp_path: Path) -> None:
    genuine = save(tmp_path / "elsewhere", 3)
    folder = tmp_path / "c"
    former = save(folder, 1)
    temporary = folder / ".checkpoint.tmp"
    in_the_way(temporary, kind, genuine)
    if kind == "file":
        temporary.write_bytes(bytes(100_000))
    if kind == "folder":
        with pytest.raises(IsADirectoryError, match="cannot be written to"):
            save(folder, 2)
    else:
        path = save(folder, 2)
        assert not path.is_symlink() and path.stat().st_size < 10_000
        checkpoint.load(path, RUN)
        assert not os.path.lexists(temporary)
    checkpoint.load(genuine, RUN)
    checkpoint.load(former, RUN)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "no"), FileNotFoundError(errno.ENOENT, "gone")], ids=repr
)
def test_a_file_that_cannot_be_opened_is_refused(error: OSError, tmp_path: Path, monkeypatch: Any) -> None:
    path = save(tmp_path / "c")

    def refused(*_: object) -> Any:
        raise error

    monkeypatch.setattr(checkpoint, "open", refused, raising=False)
    with pytest.raises(CheckpointError, match=type(error).__name__):
        checkpoint.load(path, RUN)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    path.chmod(0)
    with pytest.raises(CheckpointError, match="PermissionError"):
        checkpoint.load(path, RUN)
    checkpoint.refuse(path)
    assert checkpoint.found(tmp_path / "c") == []


def test_a_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    ((_, listed),) = checkpoint.found(tmp_path / "c")
    path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint's file"):
        checkpoint.load(listed, RUN)
    checkpoint.refuse(listed)
    assert list((tmp_path / "c").iterdir()) == []
    for impossible in ("a\0b", "x" * 300):
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / impossible / path.name, RUN)


def test_a_refused_file_is_kept_and_the_one_before_is_used(tmp_path: Path) -> None:
    former, newest = save(tmp_path / "c", 1), save(tmp_path / "c", 2)
    newest.write_bytes(b"damaged")
    checkpoint.refuse(newest)
    assert checkpoint.found(tmp_path / "c") == [(1, former)]
    newest.write_bytes(b"again")
    checkpoint.refuse(newest)
    assert newest.with_name(f"{newest.name}.refused").read_bytes() == b"again"
    (tmp_path / "c" / ".checkpoint.tmp").write_bytes(b"what a kill left")
    checkpoint.clear(tmp_path / "c")
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".refused"]


# From a file to a run


def test_loaded_tensors_are_private_and_owned_ones_outlive_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "c", weights={"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    whole = path.read_bytes()
    loaded = checkpoint.load(path, RUN)
    owned = checkpoint.own(loaded, CPU)
    loaded["weights"]["a"].zero_()
    assert path.read_bytes() == whole
    assert same(owned["weights"], {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    path.unlink()
    assert loaded["weights"]["b"].sum() == 2
    assert checkpoint.own((1, [torch.ones(1)], {"x": None}), torch.device("meta"))[1][0].device.type == "meta"


@pytest.mark.gpu
def test_a_state_of_a_gpu_is_loaded_on_the_cpu_and_owned_by_the_gpu(tmp_path: Path) -> None:
    row = torch.randn(1000, 1000, device="cuda")[1]
    path = save(tmp_path / "c", weights={"row": row})
    loaded = checkpoint.load(path, RUN)
    assert loaded["weights"]["row"].device == CPU and path.stat().st_size < 10_000
    owned = checkpoint.own(loaded, row.device)["weights"]["row"]
    assert owned.device == row.device and torch.equal(owned, row)


class Master(torch.optim.Optimizer):
    """Keeps a float32 copy of bfloat16 weights, float32 moments, also inside a list, and a count on the whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                row, gradient = self.state[parameter], parameter.grad.float()
                if not row:
                    row |= {"step": torch.tensor(0.0), "master": parameter.float()}
                    row["moments"] = [torch.zeros_like(gradient), torch.zeros_like(gradient)]
                row["step"] += 1
                first, second = row["moments"]
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.01)
                row["master"].sub_(first / (second.sqrt() + 1e-8) * self.param_groups[0]["lr"])
                parameter.copy_(row["master"])


UPDATES = 5
Make = Callable[[nn.Module], Any]


def stepped(method: Any) -> None:
    if hasattr(method, "propose"):
        method.propose()
        method.apply(0.7)
    else:
        method.step()
        method.zero_grad()


def dense(**options: Any) -> Make:
    return lambda model: DenseOptimizer(model, targets(model), lr=0.01, weight_decay=0.1, max_grad_norm=0.1, **options)


def sketch(**options: Any) -> Make:
    def make(model: nn.Module) -> SketchOptimizer:
        return SketchOptimizer(SketchedLayers(model, targets(model), 3, seed=5), lr=0.01, weight_decay=0.1, **options)

    return make


def targets(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


METHODS: dict[str, Make] = {
    f"sketch-{refresh}-{direction}": sketch(refresh_every=refresh, direction=direction)
    for refresh, direction in product([1, 3, "never"], ["row_adam", "sgd"])
} | {
    "dense-adamw": dense(),
    "dense-sgd": dense(direction="sgd"),
    "dense-all": dense(train_all=True),
    "torch-adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "torch-sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "master": lambda model: Master(model.parameters()),
}


def made(make: Make, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    return model, make(model)


def go_on(model: nn.Module, method: Any, updates: range) -> None:
    dtype = next(model.parameters()).dtype
    for update in updates:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(update)).to(dtype)
        (model(x) - 1).square().mean().backward()
        method.param_groups[0]["lr"] = 0.01 / (1 + update)
        stepped(method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_fresh_model_and_method_go_on_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    undisturbed, method = made(METHODS[name], dtype, seed=0)
    go_on(undisturbed, method, range(UPDATES))
    expected = dict(undisturbed.state_dict()), method.state_dict()

    model, method = made(METHODS[name], dtype, seed=0)
    for update in range(UPDATES):
        go_on(model, method, range(update, update + 1))
        save(tmp_path / "c", update + 1, weights=model.state_dict(), method=method.state_dict())
    assert same(expected, (dict(model.state_dict()), method.state_dict())), "saving disturbed it"

    for update, path in checkpoint.found(tmp_path / "c"):
        model, method = made(METHODS[name], dtype, seed=1)
        loaded = checkpoint.load(path, RUN)
        model.load_state_dict(loaded["weights"])
        checkpoint.restore_method(method, checkpoint.own(loaded["method"], CPU))
        assert same(loaded["method"], method.state_dict())
        go_on(model, method, range(update, UPDATES))
        assert same(expected, (dict(model.state_dict()), method.state_dict())), update


def test_float32_moments_of_bfloat16_weights_stay_float32(tmp_path: Path) -> None:
    model, method = made(METHODS["master"], torch.bfloat16, seed=0)
    go_on(model, method, range(3))
    loaded = checkpoint.load(save(tmp_path / "c", method=method.state_dict()), RUN)["method"]
    lossy = made(METHODS["master"], torch.bfloat16, seed=0)[1]
    lossy.load_state_dict(checkpoint.own(loaded, CPU))
    assert lossy.state_dict()["state"][0]["master"].dtype == torch.bfloat16, "torch keeps the dtype now: simplify"
    restored = made(METHODS["master"], torch.bfloat16, seed=0)[1]
    checkpoint.restore_method(restored, checkpoint.own(loaded, CPU))
    for row in restored.state_dict()["state"].values():
        assert [row["master"].dtype, *(moment.dtype for moment in row["moments"])] == [torch.float32] * 3
    assert same(method.state_dict(), restored.state_dict())


class OwnState:
    """A method that is no torch optimizer; what it calls its state is none of torch's shape."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [torch.zeros(2)], "lr": 0.1}]
        self.moment = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"moment": self.moment}}, "param_groups": [{"params": [0]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment = state["state"][0]["moment"]


class OwnShape(torch.optim.Optimizer):
    """An optimizer with a state of its own shape."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(2)], {})
        self.moment = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"moment": self.moment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment = state["moment"]


@pytest.mark.parametrize("make", [OwnState, OwnShape])
def test_a_method_with_a_state_of_its_own_is_restored(make: Callable[[], Any], tmp_path: Path) -> None:
    method = make()
    method.moment += 1
    loaded = checkpoint.load(save(tmp_path / "c", method=method.state_dict()), RUN)["method"]
    restored = make()
    checkpoint.restore_method(restored, checkpoint.own(loaded, CPU))
    assert torch.equal(restored.moment, torch.ones(2))
