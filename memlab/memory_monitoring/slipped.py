"""A dispatch mode that may be entered in one call and left in another, whatever was entered in between.

Modes stand on a stack, and leaving one takes off the top, whichever that is. So a mode that `step()` enters, inside a
reader's own `with mode:` around the step, would be taken off in the place of the reader's. This one is put *under* what
the reader entered after the monitor, and is taken out from wherever it stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import MethodType

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _push_mode


def modes_now() -> list[TorchDispatchMode]:
    """This thread's dispatch modes, the innermost last."""
    return _get_current_dispatch_mode_stack()


class Slipped(TorchDispatchMode):
    """Entered above the first of the modes `around` it that still stand, and below all others.

    Entering it raises RuntimeError below a mode that PyTorch keeps at the bottom, such as that of fake tensors.
    """

    around: Sequence[TorchDispatchMode] = ()

    def __enter__(self):
        stack = modes_now()
        place = next(
            (i for i, (a, b) in enumerate(zip(stack, self.around, strict=False)) if a is not b), len(self.around)
        )
        above = stack[place:]
        for mode in above:
            if mode.is_infra_mode():
                raise RuntimeError(
                    f"expected {type(mode).__name__} to be entered before the monitor, found it entered after: a meter "
                    "cannot be put under it; enter it around the monitor"
                )
        with _lifted(above):
            super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        stack = modes_now()
        places = [i for i, mode in enumerate(stack) if mode is self]
        if not places:  # it stands in another thread, and there it does nothing any longer
            self.__torch_dispatch__ = MethodType(_pass_on, self)
            _push_mode(self)  # to be taken off here: PyTorch's note that modes are on is the whole process's
            super().__exit__(*error)
            return
        with _lifted(stack[places[-1] + 1 :]):
            super().__exit__(*error)


@contextlib.contextmanager
def _lifted(above: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Modes are off the stack for a moment; what their own entering and leaving does besides is not done."""
    for mode in reversed(above):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in above:
            TorchDispatchMode.__enter__(mode)


def _pass_on(_mode, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))
