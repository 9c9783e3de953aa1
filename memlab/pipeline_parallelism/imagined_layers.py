"""Imagined copies of layers: made without memory, run without values, and without a trace.

A layer that is a function is called, and makes imagined weights. A module is copied first: its weights, buffers,
counters and its mode stay as they are, and so does the state of PyTorch's random numbers. What layers would send each
other is not sent. Hooks are part of a forward, since they may change what it returns: they run,
and see imagined tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Layer = nn.Module | Callable[[], nn.Module]


def make_layer(layer: Layer) -> nn.Module:
    """The module itself, or what the function makes."""
    return layer if isinstance(layer, nn.Module) else layer()


def imagined_copies(layers: Sequence[Layer], device: torch.device) -> list[nn.Module]:
    """The layers, imagined on this device, to be used inside `nobody_else`. What two modules share, their copies share.

    Raises TypeError for a function that makes no module, ValueError for lazy layers.
    """
    memo: dict = {}
    return [_made(number, layer, device, memo) for number, layer in enumerate(layers)]


@contextlib.contextmanager
def nobody_else(device: torch.device) -> Iterator[None]:
    """Tensors are imagined, and nobody else's: no Meter sees them, no card's budget counts them, nothing is sent."""
    gpus = [device] if device.type == "cuda" else []
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback for what is refused below
    before, log.disabled = log.disabled, True
    imagined = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.random.fork_rng(devices=gpus), _disable_current_modes(), imagined, _Silent():
            yield
    finally:
        log.disabled = before


class _Silent(TorchDispatchMode):
    """Answers collectives, sends and receives at once, with what they were given.

    PyTorch 2.13 does the same for fake tensors; nothing documents it, and a rank that waits in vain says nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        returns = len(func._schema.returns)
        if returns == 0:
            return None
        from torch._C._distributed_c10d import FakeWork

        work = FakeWork().boxed()
        return work if returns == 1 else (args[0], work)


def _made(number: int, layer: Layer, device: torch.device, memo: dict) -> nn.Module:
    """An imagined layer on this device."""
    made = make_layer(layer)
    if not isinstance(made, nn.Module):
        raise TypeError(f"expected layer {number} to make a module, found that it makes {type(made).__name__}")
    tensors = [*made.parameters(), *made.buffers()]
    if any(map(is_lazy, tensors)):
        raise ValueError(f"expected layers that know their sizes, found layer {number}, {made}, lazy; say its sizes")
    elsewhere = any(t.device != device for t in tensors)
    return _imagined_copy(made, device, memo) if isinstance(layer, nn.Module) or elsewhere else made


def _imagined_copy(module: nn.Module, device: torch.device, memo: dict) -> nn.Module:
    """A copy with imagined weights on this device. What cannot be copied, such as a process group, is shared."""
    for each in module.modules():
        own = {k: v for k, v in vars(each).items() if k not in ("_modules", "_parameters", "_buffers")}
        for t in (*each._parameters.values(), *each._buffers.values(), *own.values()):
            if isinstance(t, Tensor) and id(t) not in memo:
                memo[id(t)] = _like(t, device)
        for value in own.values():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """An imagined tensor of this one's shape, dtype and notes."""
    imagined = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        imagined = nn.Parameter(imagined, tensor.requires_grad)
    known = vars(torch.empty(0)).keys() if isinstance(tensor, FakeTensor) else ()
    vars(imagined).update({k: v for k, v in vars(tensor).items() if k not in known and k not in vars(imagined)})
    return imagined
