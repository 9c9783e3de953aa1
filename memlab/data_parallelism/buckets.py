"""Buckets: gradients that lie side by side in one buffer, because one long message is faster than many short ones.

Each message costs a fixed time beside that of its bytes. So gradients travel together, as many as fit into 25 MiB or
so. They are put together in the order in which backward makes them, which is about the reverse of the order in which
the model registered its parameters: then the first bucket is full, and on its way, while the rest is still computed.

Copied together, gradients would exist twice: in the bucket and in `p.grad`. So each `p.grad` *is* its place in the
bucket, a view.   Source: Li et al. 2020 (PyTorch Distributed), section 3.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from memlab.data_parallelism.flat import FlatLayout


class GradientBucket:
    """Parameters of one dtype and device, and one flat buffer in which their gradients lie.

    flat: (padded,), or None while no parameter has a gradient. views: the place of each gradient in it, in the
    parameter's shape and, where it is dense, its strides.
    """

    def __init__(self, params: list[nn.Parameter], ranks: int):
        self.params, self.layout = params, FlatLayout([p.shape for p in params], ranks)
        self.nbytes = self.layout.padded * params[0].itemsize
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []

    def fill(self) -> None:
        """Have a buffer. Its values are any but for the padding, which is 0."""
        if self.flat is None or self.flat.dtype is not self.params[0].dtype:  # as after `model.double()`
            self.flat = self.params[0].detach().new_empty(self.layout.padded)
            self.flat[self.layout.numel :].zero_()
            places = self.flat[: self.layout.numel].split(self.layout.numels)
            self.views = [_shaped(place, p) for place, p in zip(places, self.params, strict=True)]

    def empty(self) -> None:
        """Give the buffer up, if no gradient lies in it, as after zero_grad(set_to_none=True)."""
        if self.flat is not None and not any(_lies_in(p.grad, self.flat) for p in self.params):
            self.flat, self.views = None, []

    def place(self, number: int, factor: float) -> None:
        """Have a parameter's gradient, times a factor, in its place, and nowhere else. Without one, zeros."""
        p, view = self.params[number], self.views[number]
        if p.grad is None:
            view.zero_()
        elif not _same_memory(p.grad, view):
            torch.mul(p.grad, factor, out=view)
        elif factor != 1:
            view.mul_(factor)
        p.grad = view.detach()  # not the view itself, which `p.grad.data = …` would lead out of the bucket


def bucketed(params: Sequence[Tensor], keys: Sequence[Hashable], bucket_bytes: int) -> list[list[int]]:
    """Which parameters share a bucket: the numbers of those of the same key, as many as bucket_bytes allows.

    params: in order of registration. Backward makes the last ones' gradients first, so buckets begin with them, and
    are in the order in which they will be full. A parameter larger than bucket_bytes has a bucket to itself.

    >>> bucketed([torch.empty(2) for _ in range(5)], "aabaa", bucket_bytes=16)
    [[4, 3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}  # bytes that are left in each that is being filled
    for number in reversed(range(len(params))):
        key, nbytes = keys[number], params[number].nbytes
        if key not in filling or nbytes > room[key]:
            filling[key], room[key] = [], bucket_bytes
            buckets.append(filling[key])
        filling[key].append(number)
        room[key] -= nbytes
    return sorted(buckets, key=lambda bucket: -bucket[-1])


def plan_buckets(params: Iterable[nn.Parameter], bucket_bytes: int, ranks: int) -> list[GradientBucket]:
    """Buckets of parameters of one dtype and device each, as `bucketed` puts them together."""
    params = list(params)
    numbers = bucketed(params, [(p.dtype, p.device) for p in params], bucket_bytes)
    return [GradientBucket([params[n] for n in group], ranks) for group in numbers]


def take_over(params: Iterable[Tensor], taker: object, kind: type = object) -> None:
    """Close what takes these parameters' gradients already, for of two each would make something else of them.

    A hook says whose it is: its attribute `taker` is a weak reference to what has a `close()`. kind: close only these.
    """
    for p in params:
        for hook in tuple((p._post_accumulate_grad_hooks or {}).values()):
            other = getattr(hook, "taker", lambda: None)()
            if other is not taker and isinstance(other, kind) and other is not None:
                other.close()


def _lies_in(gradient: Tensor | None, flat: Tensor) -> bool:
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage()._cdata == flat.untyped_storage()._cdata


def _same_memory(gradient: Tensor, view: Tensor) -> bool:
    """Whether a gradient lies in its place, and not where `p.grad.data = …` or `model.double()` put it."""
    ours, theirs = ((t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (view, gradient))
    return ours == theirs


def _shaped(place: Tensor, p: Tensor) -> Tensor:
    """A place of (numel,) as a gradient of p, with its strides, which fused optimizers ask for."""
    if torch.ops.aten.is_non_overlapping_and_dense(p):
        return place.as_strided(p.shape, p.stride())
    return place.view(p.shape)
