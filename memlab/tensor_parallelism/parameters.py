"""Parameters of which a rank has a part, from the first moment on: the full tensor never exists on it.

A plain layer draws its initial weights one after the other from the generator. For ranks to begin with what it would
have begun with, each rank draws all of these numbers, a chunk at a time, and keeps its own. That takes one chunk's
bytes and, once, the time of drawing the whole model, however many ranks there are. Drawing only its own, from a
generator of its own, a rank would need a fraction of it, and the weights would depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.tensor_parallelism.cuts import Cut, cut_of

CHUNK_BYTES = 2**20
"""How much of a full tensor is drawn at a time (and up to 15 numbers more)."""

_TOGETHER = 16  # normal_ makes as many normal numbers at once out of as many uniform ones


class SplitLayer(nn.Module):
    """A layer some of whose parameters are parts. It remembers their cuts, for whatever takes a parameter's place.

    So after `to_empty`, `load_state_dict(assign=True)`, a deep copy or a pickle `cut_of(layer.weight)` is what it was.
    Groups cannot be copied, so a deep copy of a layer with one of its own is `deepcopy(layer, {id(group): group})`.

    What weight_norm, pruning and the like make in a part's place has no cut, and is of the part: weight_norm of a row
    parallel layer norms pieces of rows. `full_state_dict` refuses it; `clip_grad_norm_`, which sees no layers, cannot.
    """

    def __init__(self):
        super().__init__()
        self.cuts: dict[str, Cut] = {}

    def make_part(self, name: str, cut: Cut, device=None, dtype=None) -> None:
        """Give the layer an uninitialised parameter of cut.part_shape."""
        self.cuts[name] = cut
        setattr(self, name, nn.Parameter(torch.empty(cut.part_shape, device=device, dtype=dtype)))

    def __setattr__(self, name: str, value) -> None:
        cut = self.__dict__.get("cuts", {}).get(name)
        if cut is not None and isinstance(value, nn.Parameter):
            own = cut_of(value) == cut  # fully_shard puts the layer's own parameter back, of which it kept a piece
            if tuple(value.shape) != cut.part_shape and not own:
                raise ValueError(
                    f"expected this rank's part as {name}, {cut.part_shape}, found {tuple(value.shape)}; "
                    "give it cut_of(layer.weight).part_of(full)"
                )
            value._cut = cut
        super().__setattr__(name, value)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        return self._mark()

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self._mark()

    def _mark(self) -> SplitLayer:
        for name, cut in self.cuts.items():
            if (p := self._parameters.get(name)) is not None:  # a parametrized weight is no parameter
                p._cut = cut
        return self


@torch.no_grad()
def draw_part_(part: Tensor, cut: Cut | None, draw: Callable[[Tensor], object]) -> None:
    """Fill a part with its share of what `draw` would fill the full tensor with, bit for bit.

    part: of cut.part_shape and any floating dtype and device; with cut=None it is the full tensor.
    draw: fills a tensor (n,) in place from the CPU's generator, as `lambda numbers: numbers.normal_()`. It is
      called for one chunk after the other, so it may look at nothing but their number.

    The generator is left where the plain layer's drawing on a CPU would have left it, on every rank. A part that is
    elsewhere is filled through main memory. A meta or fake tensor stays without values, and nothing is drawn.
    """
    if part.is_meta or isinstance(part, FakeTensor):
        return
    total = part.numel() if cut is None else math.prod(cut.shape)
    own = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
    flat, done = own.view(-1), 0
    chunk = max(_TOGETHER, CHUNK_BYTES // part.element_size() // _TOGETHER * _TOGETHER)
    buffer = torch.empty(min(total, chunk + _TOGETHER - 1), dtype=part.dtype, device="cpu")
    spans = iter([(0, total)] if cut is None else _spans(cut))
    start, stop = next(spans, (total, total))
    for begin, end in _chunks(total, chunk):
        numbers = buffer[: end - begin]
        draw(numbers)
        while start < end:
            here = numbers[start - begin : min(stop, end) - begin]
            flat[done : done + len(here)] = here
            done, start = done + len(here), start + len(here)
            if start == stop:
                start, stop = next(spans, (total, total))
    if own is not part:
        part.copy_(own)


def _spans(cut: Cut) -> Iterator[tuple[int, int]]:
    """From where to where this rank's numbers go in the full tensor, flattened, in the order of its part."""
    inner = math.prod(cut.shape[cut.dim + 1 :])
    row = cut.shape[cut.dim] * inner
    for begin in range(0, math.prod(cut.shape), row or 1):
        for start, stop in cut.ranges():
            if start < stop and inner:
                yield begin + start * inner, begin + stop * inner


def _chunks(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """From where to where each chunk goes.

    normal_ makes 16 numbers at a time, and begins its last 16 anew if they are not full. So chunks are multiples of 16,
    and the last has at least 16: of fewer numbers, each would be drawn by itself, in another way.
    """
    begin = 0
    while begin < total:
        end = begin + chunk
        if total - end < _TOGETHER:
            end = total
        yield begin, end
        begin = end
