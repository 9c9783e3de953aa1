"""Exercise 6 of chapter 05: a thread that samples, and is gone when its block is left, however it is left."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise

_PATIENCE = 3.0  # seconds
_LONG, _SOON = 3.0, 1.5  # a pause, and how long leaving may take in spite of it
_SLOW = 0.15  # a read that takes its time


_ERRORS = OSError("for example: the file is gone"), KeyError("for example"), RuntimeError("for example: no answer")


class _Figure:
    """What a look returns: something that can be seen to be let go."""

    def __init__(self, number: int):
        self.number = number

    def __repr__(self) -> str:
        return f"figure {self.number}"


class _Source:
    """`read()` counts its calls and notes who calls; every `fails`-th raises; each takes `seconds`."""

    def __init__(self, fails: int = 0, seconds: float = 0):
        self.fails, self.seconds = fails, seconds
        self.calls = self.failed = self.inside = 0
        self.threads: set[int] = set()
        self.alive: weakref.WeakSet[_Figure] = weakref.WeakSet()
        self.over = False

    def read(self) -> _Figure:
        """The next figure. When the check is over, end the thread that still asks."""
        if self.over:
            raise SystemExit
        self.inside += 1
        try:
            self.calls += 1
            self.threads.add(threading.get_ident())
            if self.seconds:
                time.sleep(self.seconds)
            if self.fails and self.calls % self.fails == 0:
                self.failed += 1
                raise _ERRORS[self.failed % len(_ERRORS)]
            figure = _Figure(self.calls)
            self.alive.add(figure)
            return figure
        finally:
            self.inside -= 1


@contextmanager
def _source(**how) -> Iterator[_Source]:
    source = _Source(**how)
    try:
        yield source
    finally:
        source.over = True


@exercise
def sampler(answer: object) -> str:
    """Exercise 6: Sampler(read, every, most), a context manager whose thread samples until the block is left."""
    make = a_function(answer, "Sampler(read, every, most)")
    with _quietly():
        for tried in (_samples, _goes_on, _block_that_raises, _long_pause, _slow_read, _two_at_once):
            tried(make)
    return "It samples, forgets, survives what goes wrong, and nothing is left of it."


@contextmanager
def _quietly() -> Iterator[None]:
    """No tracebacks of threads that die; what is said of an answer is said by Wrong."""
    threads, said = set(threading.enumerate()), threading.excepthook
    threading.excepthook = lambda died: None
    try:
        yield
    finally:
        for thread in set(threading.enumerate()) - threads:
            with suppress(RuntimeError):  # one that is just being started cannot be waited for
                thread.join(0.1)  # one that never was told to stop ends at its next look
        threading.excepthook = said


def _until(done: Callable[[], bool], what: str, others: set[threading.Thread]) -> None:
    """Wait until it is so. Raises Wrong if that never happens, at once if no thread but the others is left."""
    end = time.monotonic() + _PATIENCE
    while not done():
        if set(threading.enumerate()) <= others and not done():
            raise Wrong(f"{what} No thread of yours is running in the block.")
        if time.monotonic() > end:
            raise Wrong(what)
        time.sleep(0.002)


def _gone(before: set[threading.Thread], when: str) -> None:
    left = [thread for thread in threading.enumerate() if thread not in before]
    if left:
        raise Wrong(f"{when}, a thread is still running. Tell it to stop, and wait for it: join().")


def _samples(make: Callable) -> None:
    threads = set(threading.enumerate())
    with _source() as source:
        sampler = make(source.read, 0.02, 8)
        if set(threading.enumerate()) != threads:
            raise Wrong("Sampler(…) has started a thread; only entering the block may.")
        for name in ("__enter__", "__exit__"):
            a_method(sampler, name, "Sampler(…)")
        begun = time.monotonic()
        with sampler as entered:
            if entered is not sampler:
                raise Wrong(f"`with Sampler(…) as s`: s is {type(entered).__name__}; __enter__ returns self.")
            _until(lambda: source.calls >= 3, "every = 0.02: read was not even called three times.", threads)
        took = time.monotonic() - begun
        if source.calls > took / 0.02 + 2:
            raise Wrong(f"every = 0.02: read was called {source.calls} times in {took:.2f} s. It pauses in between.")
        if threading.get_ident() in source.threads:
            raise Wrong("read is called in the thread of the block, which has other work to do.")
        _gone(threads, "when the block is left")
    with _source() as source:
        with make(source.read, 0.002, 5) as sampler:
            _until(lambda: source.calls >= 40, "every = 0.002: read was not even called 40 times.", threads)
        _kept(sampler, source, 5)
        calls = source.calls
        time.sleep(0.02)
        if source.calls != calls:
            raise Wrong("read is still called when the block was left.")


def _kept(sampler: object, source: _Source, most: int) -> None:
    """Raise Wrong unless it has the last figures, in order, and nobody has any others."""
    numbers = [getattr(figure, "number", None) for figure in sampler.samples]
    if len(numbers) > most:
        raise Wrong(f"most = {most}: {len(numbers)} samples are kept after {source.calls} calls: a leak of its own.")
    due = list(range(source.calls - most + 1, source.calls + 1))
    if numbers != due:
        raise Wrong(f"samples: expected what read returned last, {due}, oldest first, found {str(numbers)[:60]}.")
    gc.collect()
    if len(source.alive) > most:
        raise Wrong(f"most = {most}: samples has {most}, but {len(source.alive)} figures are alive. Who keeps them?")


def _goes_on(make: Callable) -> None:
    threads = set(threading.enumerate())
    with _source(fails=3) as source:
        with make(source.read, 0.002, 100) as sampler:
            _until(
                lambda: source.failed >= 4,
                "read raised an OSError, a KeyError or a RuntimeError, and was then called no more.",
                threads,
            )
        if type(sampler.errors) is not int or sampler.errors != source.failed:
            raise Wrong(f"errors: read raised {source.failed} times, found {sampler.errors!r}.")
        numbers = [getattr(figure, "number", None) for figure in sampler.samples]
        if numbers != [n for n in range(1, source.calls + 1) if n % 3]:
            raise Wrong(f"every third call raised; expected the others' figures in samples, found {str(numbers)[:60]}.")
        _gone(threads, "when read has raised and the block is left")


def _block_that_raises(make: Callable) -> None:
    threads = set(threading.enumerate())
    for error in (ValueError("the training's own"), KeyboardInterrupt()):
        with _source() as source:
            try:
                with make(source.read, 0.002, 5):
                    _until(lambda: source.calls >= 2, "a second Sampler does not sample.", threads)
                    raise error
            except (Exception, KeyboardInterrupt) as found:
                if isinstance(found, Wrong):
                    raise
                if found is not error:
                    raise Wrong(f"the block raised {error!r}, and {found!r} came out.") from None
            else:
                raise Wrong(
                    f"the block raised {type(error).__name__}, and nobody heard of it. What does __exit__ return?"
                )
            _gone(threads, f"when the block has raised {type(error).__name__}")


def _long_pause(make: Callable) -> None:
    threads = set(threading.enumerate())
    with _source() as source:
        begun = time.monotonic()
        with make(source.read, _LONG, 5):
            entered = time.monotonic() - begun
        if entered > _SOON:
            raise Wrong(f"every = {_LONG:g}: it took {entered:.1f} s to enter the block.")
        if (took := time.monotonic() - begun) > _SOON:
            raise Wrong(f"every = {_LONG:g}: it took {took:.1f} s to leave the block. Wait for an Event, not by sleep.")
        _gone(threads, "when a block with a long pause is left")


def _slow_read(make: Callable) -> None:
    threads = set(threading.enumerate())
    with _source(seconds=_SLOW) as source, _joins_within(_SLOW / 10):
        with make(source.read, 0.002, 5):
            _until(lambda: source.inside > 0, "a Sampler with a slow read does not sample.", threads)
        if source.inside:
            raise Wrong(
                "the block is left, and a read is still running: wait for the thread, join(). With a timeout, join "
                "returns when that is over, also from a thread that runs on; a read may take longer than any."
            )


@contextmanager
def _joins_within(seconds: float) -> Iterator[None]:
    """Let a join with a timeout wait no longer than this, as if the read took longer than whatever timeout it has."""
    join = threading.Thread.join
    threading.Thread.join = lambda thread, timeout=None: join(thread, timeout and min(timeout, seconds))
    try:
        yield
    finally:
        threading.Thread.join = join


def _two_at_once(make: Callable) -> None:
    threads = set(threading.enumerate())
    with _source() as one, _source() as other:
        with make(one.read, 0.002, 500) as a, make(other.read, 0.002, 500) as b:
            _until(lambda: min(one.calls, other.calls) >= 3, "of two Samplers at once, one does not sample.", threads)
        for sampler, source in ((a, one), (b, other)):
            if [figure.number for figure in sampler.samples] != list(range(1, source.calls + 1)):
                raise Wrong("two Samplers at once: the samples of one are with the other's. Are they the class's own?")
