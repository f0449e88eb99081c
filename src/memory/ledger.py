"""Phases of an update, their seconds and bytes, and what the bytes turned out to be."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.memory.meters import AllocatorMeter, StorageMeter, is_out_of_memory
from src.records import COMPONENTS

Source = Callable[[], Mapping[str, Iterable[Tensor]]]


class _Segment(NamedTuple):
    """A stretch of the journal: a phase, or what lies between two (name None). `apart`: of no update."""

    name: str | None
    component: str | None
    start: int
    end: int
    start_time: float
    end_time: float
    apart: bool


_BETWEEN = (None, None)  # phases


class Ledger:
    """Live and peak bytes by component, and seconds, of the phases of each update on `device`.

        with Ledger(device) as ledger:
            ledger.watch(lambda: {"weights": model.parameters()})
            for _ in range(updates):
                with ledger.phase("rollout"):
                    ...
                memory_row, time_row = ledger.close_update()

    All state is this object's: the next ledger in the process starts from zero. `includes` says in words what
    the bytes contain.

    Args:
        cap: bytes at which MemoryCapExceeded is raised, on a CPU; for CUDA see `capped`.
    """

    def __init__(self, device: torch.device, cap: int | None = None) -> None:
        self._allocator = AllocatorMeter(device) if device.type == "cuda" else None
        self._meter = StorageMeter(device, None if self._allocator else cap)
        self._meter.explain = self.split
        self.includes = (self._allocator or self._meter).includes
        self._measuring = False
        self._apart = False
        self._sources: list[tuple[Source, tuple[str, ...]]] = []
        self._open_phase: tuple[str | None, str | None] = _BETWEEN
        self._segments: list[_Segment] = []
        self._mark: tuple[int, float] = (0, 0.0)  # where the stretch between phases began
        self._allocated: dict[str, int] = {}
        self._phase_allocated: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._update_start = 0.0

    def __enter__(self) -> "Ledger":
        if self._allocator:
            self._allocator.start()
        self.measure(True)
        self._update_start = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._explain(error)
        self.measure(False)

    def measure(self, on: bool) -> None:
        """Follow storages from here on, or not; phases are timed in any case. To be called between two updates.

        What the sources of `watch` name is charged again when it goes on.
        """
        if on and not self._measuring:
            self._meter.__enter__()
            self._measuring = True
            for source, _ in self._sources:
                self._ask(source)
            self._meter.forget()
            self._segments, self._mark = [], (0, time.perf_counter())
        elif not on and self._measuring:
            self._meter.__exit__(None, None, None)
            self._measuring = False

    def track(self, tensors: Iterable[Tensor], component: str | None = "weights") -> None:
        """Charges tensors made before the ledger; a storage counts once, however often it is handed over."""
        if self._measuring:
            self._meter.track(tensors, component)

    def watch(self, source: Source, after: tuple[str, ...] = ()) -> None:
        """Ask `source` for tensors by component: now, when measuring goes on, and at the end of the phases `after`.

        A tensor that it names then counts as that component for its whole life.
        """
        self._sources.append((source, after))
        if self._measuring:
            self._ask(source)

    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._allocator.live() if self._allocator else self._meter.live()

    def split(self) -> dict[str, int]:
        """Return the bytes alive now by component, those that are not zero; as far as the ledger follows them."""
        for source, _ in self._sources:
            self._ask(source)
        alive = self._meter.alive()
        (start, start_time), end = self._mark, len(self._meter.journal)
        open_phase = _Segment(*self._open_phase, start, end, start_time, start_time, self._apart)
        names = component_names(self._meter, [*self._segments, open_phase])
        found = dict.fromkeys(COMPONENTS, 0)
        for serial, nbytes in alive.items():
            found[names[serial]] += nbytes
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    @contextmanager
    def phase(self, name: str, component: str | None = None) -> Iterator[None]:
        """Books the bytes and seconds of its body to `name`.

        A phase may come back within an update: its seconds add up, its peak is the highest, its end the last.
        An exception closes it too; an out-of-memory gets the bytes alive by component, as `error.components`. Phases
        are disjoint: one inside another raises RuntimeError. ValueError for the name "update", the whole update's.

        Args:
            component: what untagged storages that the body makes count as. "activations" are those alone that are
                made while gradients are recorded and outlive that; all else is other.
        """
        if self._open_phase != _BETWEEN:
            raise RuntimeError(
                f"phase {name!r} starts inside phase {self._open_phase[0]!r}, but phases are disjoint: "
                f"leave {self._open_phase[0]!r} first"
            )
        if name == "update":
            raise ValueError("a phase is named 'update', which stands for the whole update: name it otherwise")
        self._border()
        self._open_phase = name, component
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._explain(error)
            raise
        finally:
            peaks = self._border()
            self._open_phase = _BETWEEN
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            _raise_to(self._phase_allocated, {f"{name}_{key}": peak for key, peak in peaks.items()})
            if self._measuring or self._allocator:
                self._ends[f"{name}_end_bytes"] = self.live_bytes()
            for source, after in self._sources:
                if name in after:
                    self._ask(source)

    @contextmanager
    def apart(self) -> Iterator[dict[str, Any]]:
        """Keep the body out of the update that it interrupts: its seconds, its bytes, its phases are no update's.

        Yields a dict which holds, after the body, its own seconds and, measured in any case, peak_bytes and
        peak_COMPONENT_bytes. RuntimeError inside a phase.
        """
        if self._open_phase != _BETWEEN:
            raise RuntimeError(
                f"something apart starts inside phase {self._open_phase[0]!r}: leave {self._open_phase[0]!r} first"
            )
        measuring = self._measuring
        self._border()
        self.measure(True)
        kept = self._allocated, self._phase_allocated, self._ends, self._seconds
        self._allocated, self._phase_allocated, self._ends, self._seconds = {}, {}, {}, {}
        first, start = len(self._segments), time.perf_counter()
        self._apart = True
        own: dict[str, Any] = {}
        try:
            yield own
        finally:
            self._border()
            own |= self._sizes(self._segments[first:], phases=False) | {"seconds": time.perf_counter() - start}
            self._apart = False
            self._allocated, self._phase_allocated, self._ends, self._seconds = kept
            self._update_start += own["seconds"]
            if not measuring:
                self.measure(False)

    def close_update(self) -> tuple[dict[str, int | float], dict[str, float]]:
        """Returns the memory row and the time row of the update that ends here, and starts the next.

        Bytes: memory/peak_bytes (inside phases or between), memory/live_bytes (now), memory/peak_COMPONENT_bytes, which
        add up to the peak, memory/byte_seconds, the time integral of the bytes alive; and of each phase that ran
        memory/PHASE_peak_bytes, PHASE_end_bytes, PHASE_byte_seconds, and those of PHASE_peak_COMPONENT_bytes that are
        not zero. On CUDA peak_allocated_bytes and peak_reserved_bytes stand beside each peak_bytes, and
        memory/ledger_gap_bytes is what the allocator's peak has beyond the ledger's. Of an update that is not measured
        there is nothing but the allocator's. Seconds: time/update_seconds (since the last close, or the start) and
        time/PHASE_seconds; phases are disjoint, so they add up to at most the update. RuntimeError inside a phase."""
        if self._open_phase != _BETWEEN:
            raise RuntimeError(
                f"the update is closed inside phase {self._open_phase[0]!r}, whose peak is not known yet: "
                f"leave {self._open_phase[0]!r} first"
            )
        self._border()
        now = time.perf_counter()
        sizes = self._sizes([s for s in self._segments if not s.apart], phases=True)
        if sizes:
            sizes = sizes | {"live_bytes": self.live_bytes()} | self._ends
        seconds = {"update": now - self._update_start} | self._seconds
        self._allocated, self._phase_allocated, self._ends, self._seconds = {}, {}, {}, {}
        self._meter.forget()
        self._segments, self._mark, self._update_start = [], (0, now), now
        return (
            {f"memory/{key}": value for key, value in sizes.items()},
            {f"time/{name}_seconds": value for name, value in seconds.items()},
        )

    def _ask(self, source: Source) -> None:
        for component, tensors in source().items():
            self.track(tensors, component)

    def _explain(self, error: BaseException | None) -> None:
        """Put the bytes alive by component on an out-of-memory, where they are still alive."""
        if error is not None and is_out_of_memory(error) and not hasattr(error, "components"):
            error.components = self.split()  # type: ignore[attr-defined]

    def _border(self) -> dict[str, int]:
        """End the stretch since the last border; return what the allocator says of it."""
        if self._allocator:
            self._allocator.synchronize()
        now = time.perf_counter()
        self._meter.live()
        start, start_time = self._mark
        end = len(self._meter.journal)
        self._segments.append(_Segment(*self._open_phase, start, end, start_time, now, self._apart))
        self._mark = (end, now)
        peaks = self._allocator.lap() if self._allocator else {}
        _raise_to(self._allocated, peaks)
        return peaks

    def _sizes(self, segments: list[_Segment], phases: bool) -> dict[str, int | float]:
        """Return the bytes of some stretches together and, with `phases`, of each phase among them."""
        if not self._measuring:
            return dict(self._allocated | self._phase_allocated)
        replay = _Replay(self._meter, self._segments)
        stretches = {"": segments}
        if phases:
            for segment in segments:
                if segment.name:
                    stretches.setdefault(f"{segment.name}_", []).append(segment)
        allocated = self._allocated | self._phase_allocated
        found: dict[str, int | float] = {}
        for prefix, own in stretches.items():
            peak = replay.highest(own)
            ledger_peak = sum(peak.values())
            gap = allocated.get(f"{prefix}peak_bytes", ledger_peak) - ledger_peak
            peak["other"] += gap
            found |= {f"{prefix}peak_{part}_bytes": nbytes for part, nbytes in peak.items() if nbytes or not prefix}
            found |= {f"{prefix}peak_bytes": ledger_peak + gap, f"{prefix}byte_seconds": replay.byte_seconds(own)}
            if self._allocator and not prefix:
                found["ledger_gap_bytes"] = gap
        return found | allocated


class _Replay:
    """The bytes by component at every event of a journal (components, events + 1), with what is known at its end."""

    def __init__(self, meter: StorageMeter, segments: list[_Segment]):
        journal = meter.journal
        self._times = np.array([event.time for event in journal])
        changes = np.array([event.change for event in journal], dtype=np.int64)
        names = component_names(meter, segments)
        index = {name: number for number, name in enumerate(COMPONENTS)}
        kinds = np.array([index[names[event.serial]] for event in journal], dtype=np.int64)
        self._bytes = np.zeros((len(COMPONENTS), len(journal) + 1), dtype=np.int64)
        self._bytes[kinds, np.arange(1, len(journal) + 1)] = changes
        for serial, nbytes in meter.before.items():
            self._bytes[index[names[serial]], 0] += nbytes
        np.cumsum(self._bytes, axis=1, out=self._bytes)
        self._total = self._bytes.sum(0)

    def highest(self, segments: list[_Segment]) -> dict[str, int]:
        """Return the bytes by component where their sum is largest; the first such moment."""
        places = [s.start + int(self._total[s.start : s.end + 1].argmax()) for s in segments]
        place = max(places, key=lambda at: self._total[at])
        return dict(zip(COMPONENTS, self._bytes[:, place].tolist(), strict=True))

    def byte_seconds(self, segments: list[_Segment]) -> float:
        """Return the time integral of all bytes over stretches; a storage's end is seen at the next operator."""
        whole = 0.0
        for s in segments:
            times = np.concatenate([[s.start_time], self._times[s.start : s.end], [s.end_time]])
            whole += float((self._total[s.start : s.end + 1] * np.diff(times)).sum())
        return whole


def component_names(meter: StorageMeter, segments: list[_Segment]) -> dict[int, str]:
    """Return the component of every storage of a journal: its tag, or its phase's, or what its life tells."""
    names = {serial: meter.components.get(serial, "other") for serial in meter.before}
    # The last event of each stretch in which gradients are recorded: what it makes and what outlives it is kept.
    kept: dict[int, int] = {}
    ends: dict[int, int] = {}
    for segment in segments:
        span_end = segment.end
        for place in range(segment.end - 1, segment.start - 1, -1):
            _, serial, change, recording = meter.journal[place]
            if change < 0:
                ends[serial] = place
            elif not recording:
                span_end = place
            if serial in names or change < 0:
                continue
            kept[serial] = span_end if recording else -1
            names[serial] = meter.components.get(serial) or segment.component or "other"
    for serial, end in kept.items():
        if names[serial] == "activations" and not 0 <= end <= ends.get(serial, len(meter.journal)):
            names[serial] = "other"
    return names


@contextmanager
def saved_for_backward(model: torch.nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets the bytes saved for backward, storages that are not the model's, whenever they grow."""
    sizes = [0]
    alive: dict[int, int] = {}
    counts: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    class Kept:
        """Counts its tensor's storage for as long as the graph holds it."""

        def __init__(self, tensor: Tensor):
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            counts[self.key] = counts.get(self.key, 0) + 1
            if self.key not in own:
                alive[self.key] = tensor.untyped_storage().nbytes()
                sizes.append(sum(alive.values()))

        def __del__(self) -> None:
            counts[self.key] -= 1
            if not counts[self.key]:
                alive.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        yield sizes


def _raise_to(row: dict[str, int], peaks: dict[str, int]) -> None:
    """Keeps in `row` the higher of each peak."""
    for key, peak in peaks.items():
        row[key] = max(peak, row.get(key, 0))
