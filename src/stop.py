"""Stopping in good order: a signal or the clock asks, and the work stops at the next place where nothing is lost."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Of a stop by the clock; a stop by a signal ends with 128 and its number, as shells have it.
CLOCK_CODE = 124
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The work stops here because it was asked to; no `except Exception` on the way must hold it up."""


class Stop:
    """Whether the process was asked to stop, by whom, and with which exit code it then ends.

    Asked inside `deferred` it stops at that block's end, anywhere else at once, by raising `Stopped`. A second signal
    ends the process at once everywhere.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.code = 0
        self._start = time.monotonic()
        self._deferred = False
        self._signals = 0
        self._timer: threading.Timer | None = None
        self._expired = False
        self._taken: list[signal.Signals] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over, save those that the process ignores (nohup's), until the block ends."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
        self._take()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number in self._taken:
                signal.signal(number, before[number])
            self._taken = []

    def after(self, max_seconds: float) -> None:
        """Ask when `max_seconds` have passed since this object was made."""
        left = max(0.0, self._start + max_seconds - time.monotonic())
        self._timer = threading.Timer(left, self._expire, (f"max_seconds={max_seconds:g}",))
        self._timer.daemon = True
        self._timer.start()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a stop that is asked for inside back to the block's end."""
        self._take()  # a user's own task may have taken them meanwhile
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a stop was asked for."""
        if self.reason is not None:
            raise Stopped(self.reason)

    def _take(self) -> None:
        for number in self._taken:
            if signal.getsignal(number) != self._on_signal:
                signal.signal(number, self._on_signal)

    def _expire(self, reason: str) -> None:
        if self.reason is None:
            self._expired, self.reason, self.code = True, reason, CLOCK_CODE
            os.kill(os.getpid(), signal.SIGTERM)  # signals reach the main thread wherever it is

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._expired:  # the clock's own
            self._expired = False
        else:
            self._signals += 1
            if self._signals > 1:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            if self.reason is None:
                self.reason, self.code = signal.Signals(number).name, 128 + number
        if not self._deferred:
            self.check()
        # Not print: the signal may have interrupted one.
        once_more = "" if self._signals == 0 else "; a second signal ends it now"
        os.write(2, f"\n{self.reason}: stops after this update{once_more}\n".encode())
