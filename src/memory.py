"""Memory ledger: exact live and peak bytes, and the seconds, of each phase of an update.

On a CPU the ledger follows tensor storages. A `TorchDispatchMode` looks at what every operator returns and
charges each storage once; a weak reference takes the charge back at the instant the storage is freed. Views
and in-place operators cost nothing, and a storage that an operator resizes is charged its new size. The
ledger keeps no tensor alive, creates none, and never touches an optimizer: it does not change what it
measures. On CUDA the caching allocator counts; its peaks are reset at every phase border.

What the bytes on a CPU leave out:

- Blind spot: workspace that an operator allocates and frees inside itself is never returned, so never seen.
  logsumexp, multinomial and SVD hold about their input once more, QR and fused attention some per cent;
  matrix products, softmax and optimizer steps nothing or a wrapped scalar (12 bytes).
- Under `torch.inference_mode` composite operators (linear, matmul, reshape) reach the ledger whole, so their
  intermediates join the blind spot. `torch.no_grad` does not have this gap.
- Tensors that no operator returned: those made before the ledger (hand them to `track`, or the first view of
  them is taken for an allocation), a generator's state (5 kB), and what `UntypedStorage.resize_` adds. Memory
  lent by NumPy is charged although it is NumPy's.
- Tensors without a storage (sparse, MKL-DNN), other threads' operators (autograd's excepted), and whatever is
  not a tensor: Python, libraries, the allocator's own overhead. The process that `top` shows is larger.

The price on a CPU is about ten microseconds an operator, most of it torch's own way into a Python mode.
"""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import KeyedRef

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StorageMeter(TorchDispatchMode):
    """Bytes of the living tensor storages on one type of device, charged as operators return them."""

    includes = ("tensor storages returned by operators", "tracked tensors")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._live = 0
        self._peak = 0
        # By the id of the storage's Python object, which torch preserves for as long as the storage lives.
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, KeyedRef] = {}
        self._freed: list[KeyedRef] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Does without torch's wrapper around __torch_dispatch__: it costs as much as the ledger's own work
        # and matters under torch.compile only. A torch that does not know this switch ignores it.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        # Thousands of calls an update: no tree_map, and one look-up where there is nothing to charge.
        if isinstance(out, Tensor):
            self.charge(out)
        elif isinstance(out, (tuple, list)):
            self.track(out)
        return out

    def track(self, tensors: Iterable[Any]) -> None:
        """Charges the tensors among `tensors`, which may nest as an operator's return value does."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.charge(tensor)
            elif isinstance(tensor, (tuple, list)):
                self.track(tensor)

    def charge(self, tensor: Tensor) -> None:
        """Charges the storage of `tensor`, or the change of its size if it is charged already."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and opaque layouts
            return
        if self._freed:
            self._release()
        key = id(storage)
        nbytes = storage.nbytes()
        known = self._sizes.get(key)
        if known == nbytes:
            return
        if known is None:
            # Asked of the storage: a fake tensor names the device that it imitates, its storage is on meta.
            # Autograd's symbolic zeros have a size but no memory.
            if storage.device.type != self._device_type or tensor._is_zerotensor():
                return
            known = 0
            # The callback is no Python code: a Ctrl-C that is raised inside one would be swallowed.
            self._watches[key] = KeyedRef(storage, self._freed.append, key)
        self._sizes[key] = nbytes
        # A cap on memory belongs here, before the bytes are added.
        change = nbytes - known
        self._live += change
        if self._live > self._peak:
            self._peak = self._live

    def _release(self) -> None:
        """Takes the charges of freed storages back: before the next charge, which is soon enough for every peak."""
        while self._freed:
            key = self._freed.pop().key
            del self._watches[key]
            self._live -= self._sizes.pop(key)

    def live(self) -> int:
        """Bytes alive now."""
        self._release()
        return self._live

    def lap(self) -> dict[str, int]:
        """Peaks in bytes since the last lap; the next lap starts from what is alive now."""
        peak, self._peak = self._peak, self.live()
        return {"peak_bytes": peak}

    def synchronize(self) -> None:
        """Nothing to wait for: operators have finished when they return."""


class AllocatorMeter:
    """The statistics of CUDA's caching allocator for one device.

    `peak_bytes` is the allocated counter, given again under its full name, `peak_allocated_bytes`.
    `peak_reserved_bytes` is what the allocator held of the device, cache and fragmentation included;
    `nvidia-smi` shows still more (context, libraries). A phase's reserved peak contains what earlier phases
    left cached."""

    includes = ("allocated and reserved bytes of CUDA's caching allocator", "workspace inside operators")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "AllocatorMeter":
        # The allocator is the process's: an earlier job's garbage, cache and peaks must not count here.
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    def track(self, tensors: Iterable[Any]) -> None:
        """Nothing to do: the allocator has counted them."""

    def live(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def lap(self) -> dict[str, int]:
        """Peaks in bytes since the last lap; the next lap starts from what is allocated now."""
        allocated = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {"peak_bytes": allocated, "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}

    def synchronize(self) -> None:
        """Waits for the device, so that each phase pays for its own work."""
        torch.cuda.synchronize(self._device)


class Ledger:
    """Live and peak bytes, and seconds, of the phases of each update on `device`.

        with Ledger(device) as ledger:
            ledger.track(model.parameters())
            for _ in range(updates):
                with ledger.phase("rollout"):
                    ...
                memory_row, time_row = ledger.close_update()

    All state is this object's: the next ledger in the process starts from zero. `includes` says in words what
    the bytes contain.
    """

    def __init__(self, device: torch.device) -> None:
        self._meter: StorageMeter | AllocatorMeter
        self._meter = AllocatorMeter(device) if device.type == "cuda" else StorageMeter(device)
        self.includes = self._meter.includes
        self._open_phase: str | None = None
        self._update_peaks: dict[str, int] = {}
        self._phase_bytes: dict[str, int] = {}
        self._phase_seconds: dict[str, float] = {}
        self._update_start = 0.0

    def __enter__(self) -> "Ledger":
        self._meter.__enter__()
        self._update_start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Charges tensors made before the ledger; a storage counts once, however often it is handed over."""
        self._meter.track(tensors)

    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._meter.live()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books the bytes and seconds of its body to `name`.

        A phase may come back within an update: its seconds add up, its peak is the highest, its end the last.
        An exception closes it too. Phases are disjoint: one inside another raises RuntimeError. ValueError
        for the name "update", which stands for the whole update.
        """
        if self._open_phase is not None:
            raise RuntimeError(
                f"phase {name!r} starts inside phase {self._open_phase!r}, but phases are disjoint: "
                f"leave {self._open_phase!r} first"
            )
        if name == "update":
            raise ValueError("a phase is named 'update', which stands for the whole update: name it otherwise")
        self._meter.synchronize()
        _raise_to(self._update_peaks, self._meter.lap())
        self._open_phase = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self._open_phase = None
            self._meter.synchronize()
            seconds = time.perf_counter() - start
            self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + seconds
            peaks = self._meter.lap()
            _raise_to(self._update_peaks, peaks)
            _raise_to(self._phase_bytes, {f"{name}_{key}": peak for key, peak in peaks.items()})
            self._phase_bytes[f"{name}_end_bytes"] = self._meter.live()

    @contextmanager
    def apart(self) -> Iterator[dict[str, Any]]:
        """Keep the body out of the update that it interrupts: its seconds, its bytes, its phases are no update's.

        Yields a dict which holds, after the body, its own peak_bytes and seconds. RuntimeError inside a phase.
        """
        if self._open_phase is not None:
            raise RuntimeError(
                f"something apart starts inside phase {self._open_phase!r}: leave {self._open_phase!r} first"
            )
        self._meter.synchronize()
        _raise_to(self._update_peaks, self._meter.lap())
        update = self._update_peaks, self._phase_bytes, self._phase_seconds
        self._update_peaks, self._phase_bytes, self._phase_seconds = {}, {}, {}
        start = time.perf_counter()
        own: dict[str, Any] = {}
        try:
            yield own
        finally:
            self._meter.synchronize()
            _raise_to(self._update_peaks, self._meter.lap())
            own |= {"peak_bytes": self._update_peaks["peak_bytes"], "seconds": time.perf_counter() - start}
            self._update_peaks, self._phase_bytes, self._phase_seconds = update
            self._update_start += own["seconds"]

    def close_update(self) -> tuple[dict[str, int], dict[str, float]]:
        """Returns the memory row and the time row of the update that ends here, and starts the next.

        Bytes: memory/peak_bytes (inside phases or between), memory/live_bytes (now), and of each phase that
        ran memory/PHASE_peak_bytes and memory/PHASE_end_bytes; on CUDA peak_allocated_bytes and
        peak_reserved_bytes stand beside each peak_bytes. Seconds: time/update_seconds (since the last close, or
        the start) and time/PHASE_seconds; phases are disjoint, so they add up to at most the step.
        RuntimeError inside a phase."""
        if self._open_phase is not None:
            raise RuntimeError(
                f"the update is closed inside phase {self._open_phase!r}, whose peak is not known yet: "
                f"leave {self._open_phase!r} first"
            )
        self._meter.synchronize()
        now = time.perf_counter()
        _raise_to(self._update_peaks, self._meter.lap())
        sizes = self._update_peaks | {"live_bytes": self._meter.live()} | self._phase_bytes
        seconds = {"update": now - self._update_start} | self._phase_seconds
        self._update_peaks, self._phase_bytes, self._phase_seconds, self._update_start = {}, {}, {}, now
        return (
            {f"memory/{key}": value for key, value in sizes.items()},
            {f"time/{name}_seconds": value for name, value in seconds.items()},
        )


def _raise_to(row: dict[str, int], peaks: dict[str, int]) -> None:
    """Keeps in `row` the higher of each peak."""
    for key, peak in peaks.items():
        row[key] = max(peak, row.get(key, 0))
