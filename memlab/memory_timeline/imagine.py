"""Hardware that isn't there: run a training step on a GPU that you do not have, and meter every byte of it.

    with imagine("H100-80GB") as gpu:
        model = GPT(layers=96, width=12288, heads=96)
        ...
        with Meter(model, optimizer, inputs=(x, y)) as meter:
            model(x, y).backward()
            optimizer.step()
    plot(meter.timeline, budget=gpu.capacity_bytes)

Tensors made in the block are PyTorch's fake tensors: each has a shape, a dtype, a storage of so many bytes, and no
values. The code is the real code, autograd is the real autograd, so births and deaths are real; only arithmetic is
left out. A model of 70 billion parameters fits a laptop. Ops that a GPU does differently are done its way
(gpu_ops.py).

What it cannot know, because no kernel runs: what kernels take for themselves (cuBLAS's workspace, cuDNN's reserve),
how the allocator rounds and splits, what the driver's context takes (some 0.5 GiB), and anything that depends on
values. Its figures are at the *storages* level, a lower bound of what the card's own tools will show.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
import weakref
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import Module
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils as foreach
from torch.utils._pytree import tree_map_only

from memlab.memory_timeline.gpu_ops import as_cuda_returns, choose_as_cuda_does, replaced
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.ownership import Owned, gradients_of
from memlab.units import format_bytes, parse_bytes


class Card(NamedTuple):
    """A GPU: what PyTorch reports as its total capacity, and its architecture (CUDA's compute capability)."""

    capacity: str
    architecture: tuple[int, int]


# Capacities as PyTorch's own out-of-memory messages print them; another driver moves them by up to 1 %.
CARDS = {
    "T4-16GB": Card("14.75 GiB", (7, 5)),
    "V100-16GB": Card("15.77 GiB", (7, 0)),
    "RTX4090-24GB": Card("23.64 GiB", (8, 9)),
    "A100-40GB": Card("39.50 GiB", (8, 0)),
    "A100-80GB": Card("79.25 GiB", (8, 0)),
    "H100-80GB": Card("79.11 GiB", (9, 0)),
    "H200-141GB": Card("139.80 GiB", (9, 0)),
}


MOST_HOLDERS = 5
MASKS, PACKING = "transformers.masking_utils", "find_packed_sequence_indices"
DEVICE_OF = torch.ops.prim.device.default


class OutOfMemory(torch.OutOfMemoryError):
    """An imagined card is full. The message names the request, the line, and who holds the rest."""


def imagine(card: str, budget_bytes: int | str | None = None) -> ImaginedHardware:
    """A context in which tensors are imagined on `card`: "H100-80GB" and others in CARDS, or "cpu" for this machine.

    budget_bytes: an int or text such as "16 GiB"; from that many bytes on, the allocation that exceeds it raises
    OutOfMemory. Without one, a step larger than the card runs on, and shows how large it is.

    The block's value has `capacity_bytes` (None for "cpu") and `imagined(batch)`, which brings real tensors in.
    Raises ValueError for an unknown card, or a budget of 0; in the block, RuntimeError where code asks for values.
    """
    if card != "cpu" and card not in CARDS:
        near = difflib.get_close_matches(card, CARDS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of {', '.join(CARDS)} or 'cpu', found {card!r}{hint}")
    return ImaginedHardware(card, None if budget_bytes is None else parse_bytes(budget_bytes))


class ImaginedHardware:
    """What `imagine` returns: a context manager that can be entered again, one block at a time."""

    def __init__(self, card: str, budget_bytes: int | None):
        if budget_bytes == 0:
            raise ValueError("expected a budget of more than 0 bytes, such as '16 GiB', or None for no limit; found 0")
        self.card, self.budget_bytes = card, budget_bytes
        self.capacity_bytes = parse_bytes(CARDS[card].capacity) if card in CARDS else None
        self._undo: ExitStack | None = None

    def __enter__(self) -> ImaginedHardware:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            raise RuntimeError("expected one imagined machine at a time, found another block of fake tensors around it")
        with ExitStack() as stack:
            for supported in (optim._foreach_supported_types, foreach._foreach_supported_types):
                if FakeTensor not in supported:
                    supported.append(FakeTensor)
                    stack.callback(supported.remove, FakeTensor)
            stack.enter_context(replaced(Module, "_apply", _apply))
            stack.enter_context(_unpacked())
            if self.card in CARDS:
                choose_as_cuda_does(stack, CARDS[self.card].architecture)
            stack.enter_context(_Imagination(self.card))
            if self.budget_bytes is not None:
                stack.enter_context(_Budget(self))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def imagined(self, batch):
        """Imagined tensors of the same shapes and dtypes. batch: a real tensor, or tuples, lists, dicts of them."""
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if not isinstance(mode, _Imagination):
            raise RuntimeError("expected to be inside `with imagine(...) as gpu`, found no imagined hardware")
        return tree_map_only(Tensor, mode.from_tensor, batch)

    def __repr__(self) -> str:
        capacity = "no limit" if self.capacity_bytes is None else format_bytes(self.capacity_bytes)
        budget = "" if self.budget_bytes is None else f", budget {format_bytes(self.budget_bytes)}"
        return f"imagined {self.card} ({capacity}{budget})"


class _Imagination(FakeTensorMode):
    """Fake tensors that say whose they are, so that a Meter counts them, and what to do where they have no answer."""

    def __init__(self, card: str):
        super().__init__()
        self.imagines = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares 3 µs an op
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:
            return args[0].fake_device
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # the imagined card is the only one there is
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise RuntimeError(
                f"expected code that needs no values, found {func}: imagined tensors have shapes and no values, so "
                ".item(), .tolist(), bool(...), print of a number, nonzero and masks as an index have no answer; make "
                "batches before the block, and log the loss outside it"
            ) from None
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            raise RuntimeError(
                f"expected imagined tensors, found a real one in {func}: build the model inside the block, and bring a "
                "batch in with gpu.imagined(batch)"
            ) from None
        return as_cuda_returns(func, result) if self.imagines in CARDS else result


def _apply(module: Module, fn, recurse: bool = True) -> Module:
    """What `module.to(dtype)`, `.half()` and the like do to fake parameters, which PyTorch's own `_apply` refuses."""
    for each in module.modules() if recurse else [module]:
        for parameter in each._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter.data)
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    return module


@contextlib.contextmanager
def _unpacked():
    """Transformers asks a batch's values whether it is packed, and where there are none it assumes so: no is said."""
    masks = sys.modules.get(MASKS)
    if masks is not None and hasattr(masks, PACKING):
        with replaced(masks, PACKING, lambda position_ids: None):
            yield
    else:
        yield
        if masks is None and MASKS in sys.modules:
            warnings.warn(
                "Transformers was imported inside this block, too late for it to learn that its batch is not packed: "
                "its attention may have been masked, and not fused. Import it before `with imagine(...)`.",
                stacklevel=4,
            )


# ---- a budget


class _Budget(Meter):
    """A meter of everything in the block that raises at the allocation which exceeds the budget."""

    def __init__(self, hardware: ImaginedHardware):
        super().__init__()
        self._hardware = hardware
        self._owned: list[tuple[weakref.ref, str, str]] = []  # parameters and buffers, as modules register them

    def _set_up(self, stack: ExitStack) -> None:
        super()._set_up(stack)
        stack.callback(self._owned.clear)
        for category, watch in (
            ("parameter", nn_module.register_module_parameter_registration_hook),
            ("buffer", nn_module.register_module_buffer_registration_hook),
        ):
            stack.callback(watch(self._registered(category)).remove)

    def _registered(self, category: str):
        def hook(module: Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._owned.append((weakref.ref(tensor), category, f"{type(module).__name__}.{name}"))

        return hook

    def _note_storage(self, storage, tensor, op: int, phase: str, line: int) -> int:
        number = super()._note_storage(storage, tensor, op, phase, line)
        if self._history.held > self._hardware.budget_bytes:
            raise OutOfMemory(self._explain(number, op, line))
        return number

    def _explain(self, number: int, op: int, line: int) -> str:
        for reference, category, name in self._owned:
            tensor = reference()
            if tensor is not None:
                self._recognise([Owned(tensor, category, name), *gradients_of([tensor], {id(tensor): name})])
        timeline, asked = self.timeline, self._history.sizes[number]
        groups: dict[tuple, list[int]] = {}
        for storage in timeline.alive(len(timeline)):
            if storage.id != number:
                # What backward will need is not known before it runs.
                known = storage.category if storage.category != "temporary" else f"made in {storage.phase}"
                groups.setdefault((known.replace("_", " "), str(storage.line)), []).append(storage.nbytes)
        holders = sorted(groups.items(), key=lambda group: -sum(group[1]))
        hardware = self._hardware
        return "\n".join(
            [
                f"imagined {hardware.card}: expected at most {format_bytes(hardware.budget_bytes)} (the budget), "
                f"found {format_bytes(self._history.held - asked)} held and {format_bytes(asked)} more asked for by "
                f"{self._ops[op].name} in {self._ops[op].phase}, at",
                f"    {self._lines[line]}",
                "The largest holders:",
                *(
                    f"    {format_bytes(sum(sizes)):>10}  {category}, {len(sizes)} × {where}"
                    for (category, where), sizes in holders[:MOST_HOLDERS]
                ),
                "Without budget_bytes the step runs to its end, and a Meter shows the whole of it.",
            ]
        )
