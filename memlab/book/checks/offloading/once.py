"""Exercise 4 of chapter 09: each storage is sent once, and no gradient is wrong."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.gradient_checkpointing.witness import hooks_come_off, same
from memlab.book.checks.offloading.host import Host
from memlab.memory_timeline import Meter, Timeline

_SPARE = 64  # bytes: one or the other scalar


def _transposed(x: Tensor) -> Tensor:
    y = x * 2
    return (y @ y.T)[0].sum()


def _thirds(x: Tensor) -> Tensor:
    q, k, v = torch.cat([x, x + 1, x - 1], dim=1).chunk(3, dim=1)
    return (q * k * v + q.sin() * v.cos()).sum()


def _often(x: Tensor) -> Tensor:
    y = x + 1
    return (y.sin() + y.cos() * y.square() + y.exp()).sum()


def _written_to(x: Tensor) -> Tensor:
    y = x.exp()
    return y.add_(1).square().sum()


def _written_to_twice(x: Tensor) -> Tensor:
    y = x.sin()
    total = y.square().sum()
    for _ in range(3):
        y.mul_(0.5)
        total = total + (y.square() * y[0]).sum()
    return total


def _chain(x: Tensor) -> Tensor:
    for _ in range(24):  # what was saved of one is gone when the next is made, and its address is free
        x = x.sin() + 1
    return x.sum()


def _stretched(x: Tensor) -> Tensor:
    return (x[0].mul(3).expand(len(x), -1) * x.cos()).sum()


_APART = {  # as it would be with a tensor of its own for each value
    _written_to: lambda x: (x.exp() + 1).square().sum(),
    _written_to_twice: lambda x: (
        x.sin().square().sum() + sum((y.square() * y[0]).sum() for y in (x.sin() / 2, x.sin() / 4, x.sin() / 8))
    ),
}
_TASKS = {
    "a product with the own transpose": _transposed,
    "three thirds of one storage": _thirds,
    "a tensor that five ops save": _often,
    "a long chain": _chain,
    "written to after it was saved": _written_to,
    "written to three times": _written_to_twice,
    "one row, expanded": _stretched,
}


def _right(host: Host) -> saved_tensors_hooks:
    sent: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def pack(tensor: Tensor) -> tuple:
        storage, version = tensor.untyped_storage(), tensor._version
        parcels = sent.setdefault(storage, {})
        if version not in parcels:
            parcels[version] = host.send(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
        return parcels[version], tensor.shape, tensor.stride(), tensor.storage_offset()

    return saved_tensors_hooks(pack, lambda handle: host.fetch(handle[0]).as_strided(*handle[1:]))


@dataclass
class _Run:
    gradients: list[Tensor]
    moved_bytes: int
    left_bytes: int
    turn: int
    timeline: Timeline


def _run(swap: Callable, function: Callable) -> _Run:
    torch.manual_seed(0)
    x, host = torch.rand(24, 24, requires_grad=True), Host()
    with Meter(None, inputs=x) as meter:
        with hooks_come_off():
            context = swap(host)
            if not hasattr(context, "__enter__"):
                raise Wrong(f"expected a context, such as saved_tensors_hooks(…); found {type(context).__name__}.")
            with context:
                loss = function(x)
        turn, moved = len(meter.timeline), host.moved_bytes
        gradients = [torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, False)]
    timeline = meter.timeline
    del loss, context
    if host.held_bytes:
        gc.collect()
    return _Run(gradients, moved, host.held_bytes, turn, timeline)


def _knows_the_new_from_the_old(swap: Callable) -> bool:
    """Whether the gradient is right where many storages go at once, so that some id of theirs is sure to come again.

    No meter is there, whose own objects would take those ids."""

    def many(x: Tensor) -> Tensor:
        total = x.sum()
        for begin in (0, 100, 200):
            together = [x + (begin + i) for i in range(32)]
            total = total + sum(y.sin().sum() for y in together)
            del together
        return total

    x = torch.rand(2, 2, requires_grad=True)
    context = swap(Host())
    if not hasattr(context, "__enter__"):
        return True  # the first task says so
    with hooks_come_off(), context:
        loss = many(x)
    return _close(*(torch.autograd.grad(found, x)[0] for found in (loss, many(x))))


@functools.cache
def _reference(name: str) -> tuple[Tensor, _Run, int]:
    """The right gradient, a right run, and the bytes that are held where nothing is sent."""
    function = _TASKS[name]
    torch.manual_seed(0)
    x = torch.rand(24, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(_APART.get(function, function)(x), x)
    return gradient, _run(_right, function), _unsent(function)


def _unsent(function: Callable) -> int:
    x = torch.rand(24, 24, requires_grad=True)
    with Meter(None, inputs=x) as meter:
        loss = function(x)
        held = meter.timeline.totals[-1]
        del loss
    return held


@exercise
def swap_once(answer: object) -> str:
    """Exercise 4: host → a context in which each storage and version is sent once."""
    with hooks_come_off():
        _check(a_function(answer, "swap_once(host)"))
    often = _reference("a tensor that five ops save")[1]
    each = _run(lambda host: saved_tensors_hooks(host.send, host.fetch), _often).moved_bytes
    return (
        f"{each:,} B became {often.moved_bytes:,} B where one tensor is saved by several ops, and no gradient is wrong."
    )


def _check(swap: Callable) -> None:
    if not _knows_the_new_from_the_old(swap):
        raise Wrong(f"many at once, and then many others: the gradient is wrong.{_look(_chain)}")
    for name, function in _TASKS.items():
        gradient, right, unsent = _reference(name)
        found = _run(swap, function)
        for number, mine in enumerate(found.gradients):
            if not _close(mine, gradient) or not same(mine, right.gradients[number]):
                raise Wrong(f"{name}: the gradient{' of a second backward' * number} is wrong.{_look(function)}")
        if (more := found.timeline.totals[found.turn] - right.timeline.totals[right.turn]) > _SPARE:
            nothing = found.timeline.totals[found.turn] >= unsent
            look = " Nothing has left." if nothing else " Who holds it: a handle, a dictionary, its key?"
            raise Wrong(
                f"{name}: the gradient is right, and {more:,} B more are on the device at the turn than need be.{look}"
            )
        if found.moved_bytes != right.moved_bytes:
            many = "more" if found.moved_bytes > right.moved_bytes else "less"
            look = " A storage that was sent, and not written to since, need not be sent again." * (many == "more")
            look = look or " Is the whole storage sent, whichever view of it is saved first?"
            raise Wrong(
                f"{name}: the gradient is right, and {found.moved_bytes:,} B were sent, "
                f"{abs(found.moved_bytes - right.moved_bytes):,} {many} than each storage once, whole.{look}"
            )
        if (more := found.timeline.totals[-1] - right.timeline.totals[-1]) > _SPARE:
            raise Wrong(f"{name}: the gradient is right, and {more:,} B too many are alive when backward has ended.")
        if found.left_bytes:
            raise Wrong(
                f"{name}: the gradient is right, and the host still holds {found.left_bytes:,} B when graph and "
                "context have gone. What outlives them and has parcels?"
            )


def _close(mine: Tensor, right: Tensor) -> bool:
    return isinstance(mine, Tensor) and mine.shape == right.shape and torch.allclose(mine, right, rtol=1e-4, atol=1e-5)


def _look(function: Callable) -> str:
    return {
        _transposed: " A tensor and its transpose have one storage, and each is another view of it.",
        _thirds: " Three views of one storage begin at three places of it.",
        _chain: " When a storage has gone, another one may come to lie at its address, or its object at the same id.",
        _written_to: " What was sent before the tensor was written to has other values.",
        _written_to_twice: " What was sent before the tensor was written to has other values.",
        _stretched: " An expanded row is many rows by its shape, and one by its strides.",
    }.get(function, "")
