"""Ctrl-C at the wrong moment: while a meter is put on, notes something, or is taken off.

Python raises KeyboardInterrupt between any two instructions, also between those of an `__exit__`, and what was still to
be undone there would stay for good. So while a meter runs, the handler of SIGINT first asks where the code is: inside
the meter the interrupt waits until that is done, at most until the next op. And Python drops whatever a weak
reference's callback raises: of a KeyboardInterrupt that falls into one, notice is taken.

Meters may end in any order: a hook that another lies on only stops watching, and goes with that one.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from signal import SIGINT
from types import FrameType

from memlab.memory_timeline.lines import METER, Owners

_ONE_AT_A_TIME = threading.Lock()  # for what any thread changes, and only while no Ctrl-C can fall into holding it


@contextmanager
def noticing_interrupts(notice: Callable[[], bool], callback: object) -> Iterator[None]:
    """In the block, `notice` is called for a Ctrl-C inside the meter, or lost in a weak reference's `callback`.

    It returns whether that Ctrl-C waits. Everywhere else one does what it did before; only the main thread is sent any.
    """
    owners = Owners()

    def dropped(unraisable) -> None:
        if dropped.watching and unraisable.exc_type is KeyboardInterrupt and unraisable.object == callback:
            notice()
        else:
            dropped.below(unraisable)

    def handler(number: int, frame: FrameType | None) -> None:
        if not (handler.watching and _is_inside(frame, owners) and notice()):
            handler.below(number, frame)

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread() and callable(_handler_of_sigint()):
            # the outer one: until the other is off, no Ctrl-C is to fall between
            stack.enter_context(_laid_over(handler, _handler_of_sigint, _handle_sigint, nullcontext()))
        with _laid_over(dropped, lambda: sys.unraisablehook, _handle_unraisable, _ONE_AT_A_TIME):
            yield


def _handler_of_sigint():
    return signal.getsignal(SIGINT)


def _handle_sigint(hook: Callable) -> None:
    signal.signal(SIGINT, hook)


def _handle_unraisable(hook: Callable) -> None:
    sys.unraisablehook = hook


def _is_inside(frame: FrameType | None, owners: Owners) -> bool:
    while frame is not None:
        if owners[frame.f_code.co_filename] == METER:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _laid_over(hook, get: Callable, put: Callable, one_at_a_time: AbstractContextManager) -> Iterator[None]:
    with one_at_a_time:
        hook.watching, hook.below = True, get()
        put(hook)
    try:
        yield
    finally:
        with one_at_a_time:
            below = hook.below
            while not getattr(below, "watching", True):
                below = below.below
            if get() is hook:
                put(below)
            else:
                hook.watching = False
