"""What torch.compile must leave alone: while it is on, it compiles every Python function that runs, a meter's too.

PyTorch keeps it off a dispatch mode by a wrapper that costs 3 µs an op, and the seconds in which the compiler is
imported. The mark on a function's code that is behind this wrapper costs neither.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_frames = getattr(torch._C._dynamo, "eval_frame", None)


def uncompiled(function: Callable) -> Callable:
    """The function, which runs as it is, and so does all that it calls, also where torch.compile is on."""
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
