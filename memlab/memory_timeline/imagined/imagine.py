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
(gpu_ops.py, gpu_results.py).

What it cannot know, because no kernel runs: what kernels take for themselves (cuBLAS's workspace, cuDNN's reserve, and
on a CPU what oneDNN keeps for an LSTM's backward), how the allocator rounds and splits, what the driver's context takes
(some 0.5 GiB), and anything that depends on values, as the bytes of a sparse tensor do. Its figures are at the
*storages* level, a lower bound of what the card's own tools will show.
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
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
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from memlab.memory_timeline.imagined.budget import Budget
from memlab.memory_timeline.imagined.fake_tensors import usable_fake_tensors
from memlab.memory_timeline.imagined.gpu_ops import choose_as_cuda_does, imagining
from memlab.memory_timeline.imagined.gpu_results import as_cuda_returns
from memlab.memory_timeline.meter import DEVICE_OF, Meter
from memlab.units import format_bytes, parse_bytes


class Card(NamedTuple):
    """A GPU: what PyTorch reports as its total capacity, and its architecture (CUDA's compute capability)."""

    capacity: str
    architecture: tuple[int, int]


# Capacities as PyTorch's own out-of-memory messages print them; another driver moves them by up to 1 %.
CARDS = {
    "T4-16GB": Card("14.75 GiB", (7, 5)),
    "V100-16GB": Card("15.78 GiB", (7, 0)),
    "RTX4090-24GB": Card("23.64 GiB", (8, 9)),
    "A100-40GB": Card("39.50 GiB", (8, 0)),
    "A100-80GB": Card("79.25 GiB", (8, 0)),
    "H100-80GB": Card("79.11 GiB", (9, 0)),
    "H200-141GB": Card("139.80 GiB", (9, 0)),
}
"""The cards that can be imagined: name → capacity and compute capability."""

aten = torch.ops.aten
_METER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_READ_VALUES = ("optim", ""), ("nn", "init.py"), ("nn", "functional.py"), ("amp", "")
_READ_VALUES = tuple(os.path.join(_TORCH, *parts) for parts in _READ_VALUES)
_CHECK_VALUES = (os.path.join(_TORCH, "distributions", ""),)
_ONE_AT_A_TIME = threading.Lock()  # what is replaced is the process's, so two machines would undo each other


def imagine(card: str, budget_bytes: int | str | None = None) -> ImaginedHardware:
    """A context in which tensors are imagined on `card`: "H100-80GB" and others in CARDS, or "cpu" for this machine.

    budget_bytes: an int or text such as "16 GiB"; from that many bytes on, the allocation that exceeds it raises
    OutOfMemory. Without one, a step larger than the card runs on, and shows how large it is.

    Every tensor made in the block is on the card, whatever device is asked for; `.cpu()`, pinned memory and
    `main_memory()` are what is beside it (places.py).

    The block's value has `capacity_bytes` (None for "cpu") and `imagined(batch)`, which brings real tensors in.
    Raises ValueError for an unknown card, or a budget of 0; in the block, RuntimeError where code asks for values, and
    NotImplementedError where a tensor is sparse.
    """
    if card != "cpu" and card not in CARDS:
        names = {name.lower(): name for name in CARDS}
        near = [names[low] for low in difflib.get_close_matches(str(card).lower(), names, n=1, cutoff=0.3)]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of {', '.join(CARDS)} or 'cpu', found {card!r}{hint}")
    return ImaginedHardware(card, None if budget_bytes is None else parse_bytes(budget_bytes))


class ImaginedHardware:
    """What `imagine` returns: a context manager that can be entered again, one block at a time.

    Entering it raises RuntimeError inside a Meter's block or autocast's, which would see nothing, and while another
    machine is imagined.
    """

    def __init__(self, card: str, budget_bytes: int | None):
        if budget_bytes == 0:
            raise ValueError("expected a budget of more than 0 bytes, such as '16 GiB', or None for no limit; found 0")
        self.card, self.budget_bytes = card, budget_bytes
        self.capacity_bytes = parse_bytes(CARDS[card].capacity) if card in CARDS else None
        self._undo: ExitStack | None = None

    def __enter__(self) -> ImaginedHardware:
        if any(isinstance(mode, Meter) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError(
                "expected the Meter inside the imagined block, found one around it, which would see nothing"
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise RuntimeError("expected autocast inside the imagined block, found it around the block")
        if imagining() or not _ONE_AT_A_TIME.acquire(blocking=False):
            raise RuntimeError("expected one imagined machine at a time, found another that is still on")
        with ExitStack() as stack:
            stack.callback(_ONE_AT_A_TIME.release)
            stack.enter_context(usable_fake_tensors())
            if self.card in CARDS:
                choose_as_cuda_does(stack, CARDS[self.card].architecture)
            stack.enter_context(_Imagination(self.card))
            self._budget = (
                None if self.budget_bytes is None else stack.enter_context(Budget(self.card, self.budget_bytes))
            )
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def imagined(self, batch):
        """Imagined tensors of the same shapes and dtypes. batch: a real tensor, or tuples, lists, dicts of them.

        A slice comes to a card as what it shows, not with all the memory behind it; what stands twice comes once. What
        an op made comes as a leaf.
        Raises RuntimeError outside the block.
        """
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if not isinstance(mode, _Imagination):
            raise RuntimeError("expected to be inside `with imagine(...) as gpu`, found no imagined hardware")
        real = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
        fakes = {id(tensor): self._brought_in(mode, tensor) for tensor in real}
        if self._budget is not None:
            self._budget.counts(fakes.values())
        return tree_map_only(Tensor, lambda tensor: fakes.get(id(tensor), tensor), batch)

    def _brought_in(self, mode: _Imagination, real: Tensor) -> Tensor:
        with _disable_current_modes():
            _must_be_dense(real)
            shown = mode.from_tensor(real.detach() if real.grad_fn is not None else real)
            if self.card not in CARDS:
                return shown.requires_grad_(real.requires_grad)
            with mode:
                return torch.empty_like(shown).requires_grad_(real.requires_grad)

    def __repr__(self) -> str:
        capacity = "no limit" if self.capacity_bytes is None else format_bytes(self.capacity_bytes)
        budget = "" if self.budget_bytes is None else f", budget {format_bytes(self.budget_bytes)}"
        return f"imagined {self.card} ({capacity}{budget})"


class _Imagination(FakeTensorMode):
    """Fake tensors that say whose they are, so that a Meter counts them, and what to do where they have no answer."""

    def __init__(self, card: str):
        super().__init__()
        self.imagines = card
        self.beside_card = False  # whether what is made lies in the host's main memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares 3 µs an op
        return False

    def __deepcopy__(self, memo: dict) -> _Imagination:
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:
            return args[0].fake_device
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # the imagined card is the only one there is
        if func._schema.is_mutable and len(args) > 1:
            _must_fit_in_place(func, args)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if func is aten._local_scalar_dense.default and _asked_in(_READ_VALUES):
                return args[0].dtype is not torch.bool  # 1, or no: which ends every loop that asks "is there any left?"
            if func is aten._local_scalar_dense.default and _asked_in(_CHECK_VALUES):
                return True  # 1, or yes: every parameter of a distribution is valid
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
        _must_be_dense(result)
        if func in REDUCED and _reduces(*args[3 if func is BINARY_CROSS_ENTROPY else 2 :][:1], **kwargs):
            result = _in_place_of_all(result, *args[:2])
        if func is aten.lift_fresh.default and self.imagines in CARDS and _asked_in(_READ_VALUES):
            result.untyped_storage().in_main_memory = True  # an optimizer's number, which is on no GPU either
        if self.beside_card or (kwargs.get("pin_memory") and self.imagines in CARDS):
            before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(result):  # a view, or what was written to, stays where it was
                if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in before:
                    leaf.untyped_storage().in_main_memory = True
        return as_cuda_returns(func, args, result) if self.imagines in CARDS else result


BINARY_CROSS_ENTROPY = aten.binary_cross_entropy.default
REDUCED = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, BINARY_CROSS_ENTROPY,
})  # fmt: skip
"""Losses whose kernels write every element's loss and then the mean, or the sum, over the first of them."""


def _reduces(reduction: int = 1, **_: object) -> bool:
    """Whether a loss is a mean or a sum, and not one for each element (PyTorch's Reduction: 0 none, 1 mean, 2 sum)."""
    return reduction != 0


def _in_place_of_all(result: Tensor, input: Tensor, target: Tensor) -> Tensor:
    """A reduced loss in the storage of the unreduced: a number that holds as many bytes as its input."""
    return result.new_empty(torch.broadcast_shapes(input.shape, target.shape)).as_strided((), ())


def _must_fit_in_place(func, args: tuple) -> None:
    """Refuses what would make the tensor that is changed larger: a real one is not, and a fake one would be."""
    changed = func._schema.arguments[0].alias_info
    in_place = changed is not None and changed.is_write
    if in_place and (torch.Tag.pointwise in func.tags or func._schema.arguments[1].name == "other"):
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        if len(shapes) > 1 and (found := torch.broadcast_shapes(*shapes)) != shapes[0]:
            raise RuntimeError(
                f"expected operands that broadcast to the shape of the tensor that {func} changes in place, "
                f"{tuple(shapes[0])}, found some that broadcast to {tuple(found)}"
            )


def _must_be_dense(made) -> None:
    if isinstance(made, Tensor) and made.layout is not torch.strided:
        raise NotImplementedError(
            f"expected dense tensors, found one of layout {made.layout} and shape {tuple(made.shape)}: its bytes are "
            "those of its values, and imagined tensors have none; use sparse=False, or meter it for real"
        )


def _asked_in(files: tuple[str, ...]) -> bool:
    """Whether a value is read by these of torch's own files, which no reader can change."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _METER)):
        if frame.f_code.co_filename.startswith(files):
            return True
        frame = frame.f_back
    return False
