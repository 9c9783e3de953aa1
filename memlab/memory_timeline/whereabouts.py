"""What the reader's code is doing: which phase of a step it is in, at which line, inside which module.

Phases are told from the call stack: below the engine's frame it is backward, or what a checkpoint runs again; in a file
of torch.optim it is the optimizer. Only two things do not show there, and come from hooks: which modules' forward runs,
and that an optimizer of the reader's own steps.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from types import CodeType, FrameType

import torch
from torch.nn.modules import module as nn_module

from memlab.backward import backward_number, uncompiled
from memlab.memory_timeline.history import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from memlab.memory_timeline.lines import AUTOGRAD, ENGINE, Lines, Owners, recomputes
from memlab.memory_timeline.lines import OPTIMIZER as OPTIMIZER_CODE


class Whereabouts:
    """Where the code of one thread is, the one that makes this. roots: each a prefix and a module, which give names.

    lines: where places in the code get their numbers.
    """

    def __init__(self, roots: Iterable[tuple[str, torch.nn.Module]], lines: Lines):
        self.owners, self.lines = Owners(), lines
        self.thread = threading.get_ident()
        self.modules = [""]  # names of the modules whose forward is running, outermost first
        self.stepping = False  # inside the step of the reader's own optimizer
        self.step_line: int | None = None  # inside the step of one of torch's: the line that called it
        self._own_step: CodeType | None = None
        self._called_model = False  # by the reader's own optimizer, in the closure of its step
        self._names: dict[int, tuple[weakref.ref, str]] = {}
        for prefix, root in roots:
            self.learn(root, prefix)

    def learn(self, root: torch.nn.Module, prefix: str = "", own: str = "") -> None:
        """The names of the modules in a model, and `own` for itself if it has none."""
        for name, module in root.named_modules(prefix=prefix):
            if self.name(module) is None:
                self._names[id(module)] = weakref.ref(module), name or own

    def name(self, module: torch.nn.Module) -> str | None:
        """A module's name; None for one that is not in the models. (An id alone is used again after a module's end.)"""
        known = self._names.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def watch(self, stack: ExitStack) -> None:
        """Notice each module's forward, until `stack` is closed."""
        stack.callback(nn_module.register_module_forward_pre_hook(self._enter_module).remove)
        stack.callback(nn_module.register_module_forward_hook(self._leave_module, always_call=True).remove)

    # ---- phase and line

    def phase(self, caller: FrameType | None, passed: int) -> str:
        """What the code is doing, from the frames that were passed on the way up to the reader's own."""
        if passed & OPTIMIZER_CODE:  # also when a hook steps it inside backward
            return OPTIMIZER
        if backward_number() != -1:
            in_formula = caller is None or caller.f_code is ENGINE
            return RECOMPUTE if not in_formula and recomputes(caller) else BACKWARD
        if self.stepping and self._steps(caller) and not (self._called_model and torch.is_grad_enabled()):
            return OPTIMIZER
        return BACKWARD if passed & AUTOGRAD else FORWARD

    def place(self, caller: FrameType | None) -> tuple[str, int]:
        """Phase and line of something that happens at `caller` without being an op."""
        frame, passed = self.owners.climb(caller)
        return self.phase(caller, passed), self.lines.number(frame)

    def in_torchs_step(self, caller: FrameType) -> bool:
        """Whether the step of one of torch's optimizers runs here; if not, and one was noted, it raised and is over."""
        return self.step_line is not None and bool(self.owners[caller.f_code.co_filename] & OPTIMIZER_CODE)

    def _steps(self, frame: FrameType | None) -> bool:
        """Whether the step of the reader's own optimizer still runs: one that raised never said that it had ended."""
        while frame is not None and frame.f_code is not self._own_step:
            frame = frame.f_back
        self.stepping = frame is not None
        return self.stepping

    # ---- steps and modules

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins."""
        if threading.get_ident() != self.thread:  # another meter's step, or one inside a GPU's backward
            return
        if self._is_torchs(optimizer):  # one line answers for all its ops
            self.step_line = self.lines.number(self.owners.climb(sys._getframe())[0])
        else:
            self.stepping, self._called_model = True, False
            self._own_step = inspect.unwrap(type(optimizer).step).__code__

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step is over."""
        if threading.get_ident() != self.thread:
            return
        if self._is_torchs(optimizer):
            self.step_line = None
        else:
            self._steps(sys._getframe())  # still so, if it was the step of a base class that has ended

    def _is_torchs(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(self.owners[inspect.unwrap(type(optimizer).step).__code__.co_filename])

    @uncompiled
    def _enter_module(self, module, _args) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere():  # what a compiler sees would be a part of the model
            return
        if backward_number() == -1:
            self.step_line = None  # a step that raised never said that it had ended
            self._called_model = self.stepping and self._steps(sys._getframe())
        name = self.name(module)
        if name:
            self.modules.append(name)

    @uncompiled
    def _leave_module(self, module, _args, _result) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere():
            return
        name = self.name(module)
        if name and name in self.modules:  # after an exception, inner modules may still be on the list
            while self.modules.pop() != name:
                pass

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, and none of autograd's in whose backward a forward runs again."""
        return threading.get_ident() != self.thread and backward_number() == -1
