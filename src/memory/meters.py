"""What counts bytes: tensor storages as operators return them, and CUDA's allocator; caps, and what exceeds them."""

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import KeyedRef

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryCapExceeded(MemoryError):
    """The ledger's cap was passed: `wanted_bytes` more than the `live_bytes` of that moment."""

    def __init__(self, wanted: int, live: int, cap: int):
        super().__init__(
            f"memory.cap_bytes={cap} is exceeded: {wanted} bytes wanted beside {live} alive. Use a larger "
            "memory.cap_bytes; in training fewer microbatch_responses or model.gradient_checkpointing=true, in an "
            "evaluation a smaller evaluation.batch."
        )
        self.wanted_bytes, self.live_bytes, self.cap_bytes = wanted, live, cap
        self.components: dict[str, int] = {}  # of live_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Tell an out-of-memory of the ledger's cap, of CUDA's or of the CPU's allocator from other errors."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def wanted_bytes(error: BaseException) -> int | None:
    """Return how many bytes could not be had, as an out-of-memory says it; None if it does not."""
    if isinstance(error, MemoryCapExceeded):
        return error.wanted_bytes
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
    return found and round(float(found[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found[2]])


class _Event(NamedTuple):
    """A charge (or, negative, its end): when, of which storage, how much, and whether gradients were recorded."""

    time: float
    serial: int
    change: int
    recording: bool


class StorageMeter(TorchDispatchMode):
    """Bytes of the living tensor storages on one type of device, charged as operators return them.

    Args:
        cap: bytes beyond which a charge raises MemoryCapExceeded. The operator has had its memory by then.
    """

    includes = ("tensor storages returned by operators", "tracked tensors")

    def __init__(self, device: torch.device, cap: int | None = None) -> None:
        super().__init__()
        self.journal: list[_Event] = []  # what happened since `forget`
        self.before: dict[int, int] = {}  # bytes by serial number, as they were then
        self.components: dict[int, str] = {}  # of the storages that were tagged, by serial number
        self._device_type = device.type
        self._cap: float = float("inf") if cap is None else cap
        self.explain: Callable[[], dict[str, int]] = dict  # asked for the bytes by component when the cap is passed
        self._live = 0
        self._count = 0
        # By the id of the storage's Python object, which torch preserves for as long as the storage lives.
        self._sizes: dict[int, int] = {}
        self._serials: dict[int, int] = {}
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

    def track(self, tensors: Iterable[Any], component: str | None = None) -> None:
        """Charges the tensors among `tensors`, which may nest as an operator's return value does, and tags them."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.charge(tensor)
                if component is not None:
                    self._tag(tensor, component)
            elif isinstance(tensor, (tuple, list)):
                self.track(tensor, component)

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
        change = nbytes - known
        if self._live + change > self._cap:
            cap, self._cap = self._cap, float("inf")  # what is asked now may charge what it finds
            components = self.explain()
            self._cap = cap
            error = MemoryCapExceeded(change, self._live, int(cap))
            error.components = components
            raise error
        if not known:
            # The callback is no Python code: a Ctrl-C that is raised inside one would be swallowed.
            self._watches[key] = KeyedRef(storage, self._freed.append, key)
            self._serials[key] = self._count
            self._count += 1
        self._sizes[key] = nbytes
        self._live += change
        self.journal.append(_Event(time.perf_counter(), self._serials[key], change, torch.is_grad_enabled()))

    def _tag(self, tensor: Tensor, component: str) -> None:
        try:
            serial = self._serials.get(id(tensor.untyped_storage()))
        except NotImplementedError:
            return
        if serial is not None:
            self.components[serial] = component

    def _release(self) -> None:
        """Takes the charges of freed storages back: before the next charge, which is soon enough for every peak."""
        now = time.perf_counter()
        while self._freed:
            key = self._freed.pop().key
            del self._watches[key]
            nbytes = self._sizes.pop(key)
            self._live -= nbytes
            self.journal.append(_Event(now, self._serials.pop(key), -nbytes, False))

    def live(self) -> int:
        """Bytes alive now."""
        self._release()
        return self._live

    def alive(self) -> dict[int, int]:
        """Bytes alive now, by serial number."""
        self._release()
        return {self._serials[key]: nbytes for key, nbytes in self._sizes.items()}

    def forget(self) -> None:
        """Begin the journal anew from what is alive now."""
        self.before = self.alive()
        self.components = {serial: name for serial, name in self.components.items() if serial in self.before}
        self.journal = []


class AllocatorMeter:
    """The statistics of CUDA's caching allocator for one device, which is what counts there.

    `peak_allocated_bytes` are the blocks handed to tensors, rounded up by the allocator, and workspace of libraries
    that comes from it. `peak_reserved_bytes` is what the allocator held of the device, cache and fragmentation
    included; `nvidia-smi` shows still more (context, libraries). A phase's reserved peak contains what earlier phases
    left cached.
    """

    includes = ("allocated and reserved bytes of CUDA's caching allocator", "workspace inside operators")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Leave out what earlier work of the process left: garbage, cache and peaks; the allocator is the process's."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

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


@contextmanager
def capped(device: torch.device, cap: int | None) -> Iterator[None]:
    """On CUDA let the process have no more than `cap` bytes of the device, in the body; the ledger does it on a CPU.

    It bounds what the caching allocator reserves; the context and libraries that allocate by themselves are beside it.
    torch's own message goes on naming the whole card.
    """
    if device.type != "cuda" or cap is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
