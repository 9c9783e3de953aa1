"""Which line of the reader's code is responsible: climb the call stack past torch and past the meter.

Every op and every free asks this question, so the answer costs well under a microsecond: a file is judged once, by
its path, and an instruction becomes text once, however often it runs.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
from types import CodeType, FrameType

import torch
import torch.utils.checkpoint
from torch.autograd import graph as _graph

from memlab.memory_timeline.events import NOWHERE, Line

# Whose code a frame runs. 0 is the reader's own, where the climb ends; the others add up along the way.
READER, TORCH, OPTIMIZER, AUTOGRAD, METER = 0, 1, 2, 4, 8

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_AVERAGING = os.path.join(_OPTIM, "swa_utils.py")  # calls the model that it averages
_AUTOGRAD = os.path.join(_TORCH, "autograd", "__init__.py")
_METER = os.path.dirname(__file__) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep

# The Python frame from which the C++ engine is called: an op straight above it is part of a node's own formula.
ENGINE = _graph._engine_run_backward.__code__
# The Python functions around it, which hold the gradient that backward begins with until they return.
BACKWARD_CALLS = {f.__code__ for f in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)}
# Files whose functions, called by the engine, run a part of forward again.
RECOMPUTING = {torch.utils.checkpoint.__file__}


class Owners(dict):
    """filename → READER, or a sum of TORCH, OPTIMIZER, AUTOGRAD and METER; judged at the first question."""

    def __missing__(self, filename: str) -> int:
        if filename.startswith(_METER):
            owner = METER
        elif filename.startswith("<frozen ") or _is_pythons(filename):
            owner = TORCH
        elif not filename.startswith(_TORCH):
            owner = READER
        elif filename.startswith(_OPTIM) and filename != _AVERAGING:
            owner = TORCH | OPTIMIZER
        else:
            owner = TORCH | AUTOGRAD if filename == _AUTOGRAD else TORCH
        self[filename] = owner
        return owner

    def climb(self, frame: FrameType | None) -> tuple[FrameType | None, int]:
        """The first frame of the reader's code at or above `frame` (None: there is none), and the sum of all passed."""
        passed = 0
        while frame is not None:
            owner = self[frame.f_code.co_filename]
            if not owner:
                break
            passed |= owner
            frame = frame.f_back
        return frame, passed

    def climb_below_engine(self, frame: FrameType | None) -> FrameType | None:
        """The first frame of the reader's code that the engine called, such as a Function's backward; or None."""
        while frame is not None and frame.f_code is not ENGINE:
            if not self[frame.f_code.co_filename]:
                return frame
            frame = frame.f_back
        return None


def _is_pythons(filename: str) -> bool:
    """Whether a file is of Python's own library, such as copy.py, whose lines tell a reader nothing.

    What is installed may lie inside it, also where a virtual environment sees that of another Python.
    """
    inside = filename.removeprefix(_PYTHON)
    return inside != filename and not inside.startswith(("site-packages", "dist-packages"))


def recomputes(frame: FrameType | None) -> bool:
    """Whether the engine called code that runs forward again, told from the frames up to the engine's."""
    while frame is not None and frame.f_code is not ENGINE:
        if frame.f_code.co_filename in RECOMPUTING:
            return True
        frame = frame.f_back
    create_graph = frame is not None and any(frame.f_locals.get("args", ())[2:3])  # for which gradients are on, too
    return torch.is_grad_enabled() and not create_graph


class Lines:
    """Numbers for places in the code. Frames are never kept: they would keep tensors alive."""

    def __init__(self):
        self.numbers: dict[tuple[int, int], int] = {}  # (id of a code object, instruction) → number
        self._lines: list[Line] = []
        self._codes: list[CodeType] = []  # kept alive, so that no other code object can take over an id

    def number(self, frame: FrameType | None) -> int:
        """A number for the instruction that `frame` is at; -1 for no frame."""
        if frame is None:
            return -1
        code = frame.f_code
        key = id(code), frame.f_lasti
        number = self.numbers.get(key)
        if number is None:
            self.numbers[key] = number = len(self._lines)
            self._codes.append(code)
            source = linecache.getline(code.co_filename, frame.f_lineno or 0).strip()
            self._lines.append(Line(getattr(code, "co_qualname", code.co_name), source))
        return number

    def __getitem__(self, number: int) -> Line:
        return self._lines[number] if number >= 0 else NOWHERE
