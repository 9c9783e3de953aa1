"""Whose each storage is: what was there before is somebody's by name, and what was born turns out to be.

A gradient is known when it has come to its parameter, an optimizer's states when its step has ended: so both are asked
at these moments, through PyTorch's hooks, and never on the way.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab.backward import uncompiled
from memlab.memory_timeline.history import BEFORE, OUTSIDE
from memlab.memory_timeline.ownership import (
    Members,
    Owned,
    ParameterNames,
    gradients_of,
    named_roots,
    owned_by_optimizer,
    storages_of,
)
from memlab.memory_timeline.storages import Storages


class Recognition:
    """Notes in the history whose the storages are. modules: the models that give names, as `modules_of` has them.

    imagined: the hardware that the tensors are on, by name, or None.
    """

    def __init__(self, modules: list[torch.nn.Module], storages: Storages, *, imagined: str | None):
        self._modules, self._storages, self._here, self._imagined = modules, storages, storages.here, imagined
        self._live, self._owners = storages.live, storages.history.owners
        self._strangers: set[int] = set()  # ids of parameters that optimizers have, and the models have not
        self.names = ParameterNames()

    def watch(self, parameters: Iterable[Tensor], stack: ExitStack) -> None:
        """Look whenever an optimizer steps, or one of these parameters has its gradient, until `stack` is closed."""
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                stack.callback(parameter.register_post_accumulate_grad_hook(self._accumulated).remove)

    def forget(self) -> None:
        """Let the models go, and their names."""
        self._modules = []
        self.names.forget()

    # ---- saying whose they are

    def adopt(self, owned: Iterable[Owned]) -> None:
        """Note tensors that exist already, and whose they are."""
        for tensor, category, name in owned:
            for storage in storages_of(tensor):
                if (number := self._storages.note(storage, tensor, -1, BEFORE, -1)) >= 0:
                    self._owners.setdefault(number, (category, name))

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The same of an optimizer's states."""
        self.adopt(owned_by_optimizer(optimizer, self.names))
        self._place_counters(optimizer)

    def recognise(self, owned: Iterable[Owned]) -> None:
        """Storages seen being born turn out to belong to somebody: say to whom."""
        for tensor, category, name in owned:
            for storage in storages_of(tensor):
                number = self._live.get(storage._cdata)
                if number is not None and self._owners.get(number, OUTSIDE) == OUTSIDE:
                    self._owners[number] = (category, name)

    def recognise_model(self) -> None:
        """Parameters, gradients and buffers, as they are now."""
        self.recognise(Members.of(named_roots(self._modules)).owned())

    # ---- gradients and steps

    @uncompiled
    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided:  # nearly all: `recognise`, written out
            number = self._live.get(gradient.untyped_storage()._cdata)
            if number is not None and self._owners.get(number, OUTSIDE) == OUTSIDE:
                self._owners[number] = ("gradient", self.names.get(id(parameter), "a parameter"))
        else:
            self.recognise(gradients_of([parameter], self.names))

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        # An optimizer that steps inside backward frees a gradient before the meter's own hook comes to see it.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = {id(p) for p in parameters if self.names.get(id(p)) is None}
        if not unknown <= self._strangers:  # are they new in the model?
            self.names.learn_again()
            self._strangers |= unknown
        names = [(p, self.names.get(id(p))) for p in parameters if not is_lazy(p)]
        self.recognise(Owned(p, "parameter", name) for p, name in names if name is not None)  # for a conversion's end
        self.recognise(gradients_of(parameters, self.names))
        self._here.begin_step(optimizer)
        if threading.get_ident() == self._here.thread:  # another thread's step is another meter's
            self.meet_held(parameters, optimizer)

    def meet_held(self, parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer holds from before, and nobody named to the meter, is there when its first step begins."""
        outside = (Owned(parameter, *OUTSIDE) for parameter in parameters)
        states = owned_by_optimizer(optimizer, self.names)
        held = itertools.chain(outside, gradients_of(parameters, self.names), states)
        met = [(s, owned) for owned in held for s in storages_of(owned.tensor) if s._cdata not in self._live]
        if met:
            place = self._storages.op_before(sys._getframe(), "step")
            for storage, (tensor, *whose) in met:
                if (number := self._storages.note(storage, tensor, *place)) >= 0:
                    self._owners.setdefault(number, tuple(whose))

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self.recognise(owned_by_optimizer(optimizer, self.names))
        self._place_counters(optimizer)
        self._here.end_step(optimizer)

    def _place_counters(self, optimizer: torch.optim.Optimizer) -> None:
        """On a GPU torch's optimizers keep step counters in main memory, unless fused, and but for ASGD's: so here."""
        if self._imagined in (None, "cpu") or isinstance(optimizer, torch.optim.ASGD):
            return
        kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
        if not any(kind.__module__.startswith("torch.optim.") for kind in kinds):
            return
        for group in optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                for parameter in group["params"]:
                    step = optimizer.state.get(parameter, {}).get("step")
                    counts = isinstance(step, Tensor) and step.numel() == 1
                    number = self._live.get(step.untyped_storage()._cdata) if counts else None
                    if number is not None:  # else it is from before, of an optimizer that the meter was not given
                        self._storages.history.moved(number, "cpu")
