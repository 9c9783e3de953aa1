"""A budget for imagined hardware: the allocation that exceeds it raises, and says who holds the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memlab.memory_timeline.history import History
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.ownership import Owned, gradients_of, owned_by_optimizer, owned_inputs
from memlab.memory_timeline.storages import Storages
from memlab.units import format_bytes

MOST_HOLDERS = 5


class OutOfMemory(torch.OutOfMemoryError):
    """An imagined card is full. The message names the request, the line, and who holds the rest."""


class _Bounded(Storages):
    """Storages that are checked whenever one is noted: `check` gets its number, and under what it was noted."""

    def __init__(self, check: Callable[[int, int, str, int], None], *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._check = check

    def note(self, storage, tensor, op: int, phase: str, line: int) -> int:
        number = super().note(storage, tensor, op, phase, line)
        self._check(number, op, phase, line)
        return number


class Budget(Meter):
    """A meter of everything in the block that raises at the allocation which exceeds the budget."""

    def __init__(self, card: str, budget_bytes: int):
        super().__init__()
        self._card, self._budget_bytes = card, budget_bytes
        self._owned: list[tuple[weakref.ref, str, str]] = []  # parameters and buffers, as modules register them
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def _set_up(self, stack: ExitStack) -> None:
        super()._set_up(stack)
        stack.callback(self._owned.clear)
        for category, watch in (
            ("parameter", nn_module.register_module_parameter_registration_hook),
            ("buffer", nn_module.register_module_buffer_registration_hook),
        ):
            stack.callback(watch(self._registered(category)).remove)
        stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.add(optimizer)).remove)

    def _registered(self, category: str):
        def hook(module: Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._owned.append((weakref.ref(tensor), category, f"{type(module).__name__}.{name}"))

        return hook

    def counts(self, batch: Iterable[Tensor]) -> None:
        """Hold tensors that come in from outside against the budget, as inputs."""
        self._recognition.adopt(owned_inputs(list(batch)))

    def _make_storages(self, history: History) -> Storages:
        return _Bounded(self._check, history, self._here, self._log, imagined=True)

    def _check(self, number: int, op: int, phase: str, line: int) -> None:
        if self._history.held > self._budget_bytes:
            raise OutOfMemory(self._explain(number, op, phase, line))

    def _explain(self, number: int, op: int, phase: str, line: int) -> str:
        for reference, category, name in self._owned:
            tensor = reference()
            if tensor is not None:
                self._recognition.recognise(
                    [Owned(tensor, category, name), *gradients_of([tensor], {id(tensor): name})]
                )
        for optimizer in self._optimizers:
            self._recognition.recognise(owned_by_optimizer(optimizer, {}))
        timeline = self.timeline.on(f"imagined {self._card}")  # main memory may hold more
        asked = self._history.sizes[number]
        groups: dict[tuple, list[int]] = {}
        for storage in timeline.alive(len(timeline)):
            if storage.id != number:
                # What backward will need is not known before it runs.
                known = storage.category if storage.category != "temporary" else f"made in {storage.phase}"
                groups.setdefault((known.replace("_", " "), str(storage.line)), []).append(storage.nbytes)
        holders = sorted(groups.items(), key=lambda group: -sum(group[1]))
        return "\n".join(
            [
                f"imagined {self._card} out of memory. "  # words by which tools know CUDA's error
                f"Expected at most {format_bytes(self._budget_bytes)} (the budget), "
                f"found {format_bytes(self._history.held - asked)} held and {format_bytes(asked)} more asked for by "
                f"{self._ops[op].name if op >= 0 else 'a batch'} in {phase}, at",
                f"    {self._lines[line]}",
                "The largest holders:",
                *(
                    f"    {format_bytes(sum(sizes)):>10}  {category}, {len(sizes)} × {where}"
                    for (category, where), sizes in holders[:MOST_HOLDERS]
                ),
                "Without budget_bytes the step runs to its end, and a Meter shows the whole of it.",
            ]
        )
