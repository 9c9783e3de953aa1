"""Backward's clock: is a backward running, which one, what is called at its end; and what a compiler leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

backward_number = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; -1 outside. No other backward of the process has it."""

at_end_of_backward = Variable._execution_engine.queue_callback
"""Have a function called, without arguments, when the backward that runs has ended well. RuntimeError outside one."""

_frames = getattr(torch._C._dynamo, "eval_frame", None)


def uncompiled(function: Callable) -> Callable:
    """The function, which runs as it is, and so does all that it calls, also where torch.compile is on.

    torch.compile compiles every Python function that runs, a meter's too. PyTorch keeps it off by a wrapper that costs
    3 µs a call, and the seconds in which the compiler is imported. The mark on a function's code that is behind this
    wrapper costs neither. It does not keep a compiler from taking the function into a graph that it traces:
    `torch._disable_dynamo` does.
    """
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
