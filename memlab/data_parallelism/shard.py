"""Parameters of which a rank holds a piece: gathered into one buffer for use, and their gradients reduced out of one.

Between uses a rank holds its piece of the flat buffer, whose 1-dimensional parts the parameters are. For use the piece
of every rank is gathered into the buffer, whose views the whole parameters are: nothing is copied out of it. Freed, the
buffer keeps its storage with no bytes in it (`resize_(0)`), so what autograd saved of a weight (itself, a transpose) is
right again once the storage is filled for backward.

    elements between uses = piece        while used: + padded        in its backward: + Σ numel, of the gradients
    when that is through, and the weights are freed: + padded, into which the gradients move one by one

Source: Zhao et al. 2023 (FSDP), sections 3.2 and 4.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.data_parallelism.flat import FlatLayout, on_the_wire
from memlab.ranks import all_gather, place_in, reduce_scatter


def divide_factors(dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """By what to divide gradients before their sum over ranks is taken, and by what after it, for their mean.

    FP16 ends at 65504, so half of the way is gone before: by the power of two next to √ranks.

    >>> divide_factors(torch.float32, 8), divide_factors(torch.float16, 8)
    ((1, 8), (4, 2))
    """
    before = 1
    while dtype is torch.float16 and ranks % (2 * before) == 0 and before * before < ranks:
        before *= 2
    return before, ranks // before


@dataclass
class Reduction:
    """A reduce-scatter that is under way: of the flat gradients, into this rank's piece of them."""

    work: object
    flat: Tensor | None  # (padded,), None once it is done
    piece: Tensor  # (piece,)
    arrived: set[int]  # the parameters that had a gradient on this rank


class FlatShard:
    """Parameters of one dtype: this rank's piece, the gathered buffer, and the gradients on their way out."""

    def __init__(self, parameters: list[nn.Parameter], group, param_dtype, reduce_dtype):
        self.parts, self.group = parameters, group
        self.rank, ranks = place_in(group)
        self.layout = FlatLayout([p.shape for p in parameters], ranks)
        self.gathered: object = None  # the Work that gathers, or True; None: no bytes
        self.gradients: Tensor | None = None  # (padded,)
        self.arrived: set[int] = set()
        self._take_over(param_dtype if parameters[0].is_floating_point() else None)
        self.reduce_dtype = reduce_dtype or self.flat.dtype

    @torch.no_grad()
    def _take_over(self, param_dtype: torch.dtype | None) -> None:
        """Rank 0's values are everybody's, and of these each rank keeps its piece. The transient is the whole, once."""
        layout, some = self.layout, self.parts[0]
        whole = torch.empty(layout.padded, dtype=some.dtype, device=some.device)
        whole[layout.numel :].zero_()
        for p, view in zip(self.parts, layout.views(whole), strict=True):
            view.copy_(p)
            p.data = p.data.new_empty(0)  # frees the parameter before the next one is copied
        if layout.padded:
            distributed.broadcast(on_the_wire(whole), group=self.group, group_src=0)
        self.piece = layout.own(whole, self.rank).clone()
        for p, part in zip(self.parts, layout.part_views(self.piece, self.rank), strict=True):
            p.data = part
        if param_dtype not in (None, some.dtype):
            whole = torch.empty(0)  # freed before the other is asked for
            whole = torch.empty(layout.padded, dtype=param_dtype, device=some.device)
        self.flat = whole
        # Of the same storage, and safe to read whether that has bytes or not.
        self.marker = nn.Parameter(whole[:0], requires_grad=False)
        self.full = [nn.Parameter(whole.new_empty(0), p.requires_grad) for p in self.parts]
        for p, view in zip(self.full, layout.views(whole), strict=True):
            p.data = view  # shares the storage, and not the count of writes, which a gather is none of
        whole.untyped_storage().resize_(0)
        self.watched: set[int] = set()

    @property
    def flat_bytes(self) -> int:
        """Bytes of the gathered buffer, padding included."""
        return self.layout.padded * self.flat.itemsize

    # ---- gathering

    @torch.no_grad()
    def begin_gathering(self) -> None:
        """Take the buffer's bytes, and have every rank's piece brought there."""
        self.flat.untyped_storage().resize_(self.flat_bytes)
        mine = self.piece
        if mine.dtype is not self.flat.dtype:
            mine = self.layout.own(self.flat, self.rank).copy_(self.piece)
        self.gathered = True
        if self.layout.padded:
            self.gathered = all_gather(on_the_wire(self.flat), on_the_wire(mine), self.group, async_op=True)

    def wait(self) -> None:
        """Until the buffer is filled."""
        if self.gathered not in (None, True):
            work, self.gathered = self.gathered, True
            work.wait()

    def free(self) -> None:
        """Give the buffer's bytes back."""
        if self.gathered is not None:
            self.wait()
            self.gathered = None
            self.flat.untyped_storage().resize_(0)

    def version_of(self, saved: Tensor) -> int:
        """How often the part of the parameter that a saved tensor lies in had been written to."""
        return self.parts[bisect_right(self.layout.starts, saved.storage_offset()) - 1]._version

    # ---- gradients

    def take(self, number: int) -> None:
        """Move a whole parameter's gradient into the flat buffer of gradients, and free it.

        Raises TypeError for a sparse one.
        """
        gradient, self.full[number].grad = self.full[number].grad, None
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise TypeError(f"expected a dense gradient, found {gradient.layout}; give the layer sparse=False")
        if self.gradients is None:
            self.gradients = torch.empty(self.layout.padded, dtype=self.reduce_dtype, device=self.flat.device)
        view = self.layout.view(self.gradients, number)
        if number in self.arrived:
            view.add_(gradient.detach())
        else:  # adding 0.0 is a copy without negative zeros, which are for gradients that there are none of
            torch.add(gradient.detach(), 0.0, out=view)
        self.arrived.add(number)

    @torch.no_grad()
    def begin_reducing(self) -> Reduction | None:
        """Have the mean over ranks of the gradients taken. None if no parameter is trained."""
        if not any(p.requires_grad for p in self.parts) or not self.layout.padded:
            return None
        if self.gradients is None:
            self.gradients = torch.zeros(self.layout.padded, dtype=self.reduce_dtype, device=self.flat.device)
        flat, arrived = self.gradients, self.arrived
        self.gradients, self.arrived = None, set()
        for number in set(range(len(self.parts))) - arrived:
            self.layout.view(flat, number).fill_(-0.0)
        flat[self.layout.numel :].zero_()
        before, _ = divide_factors(flat.dtype, self.layout.ranks)
        if before > 1:
            flat.div_(before)
        piece = torch.empty(self.layout.piece, dtype=flat.dtype, device=flat.device)
        return Reduction(reduce_scatter(piece, flat, self.group, async_op=True), flat, piece, arrived)

    @torch.no_grad()
    def finish_reducing(self, reduction: Reduction) -> None:
        """Add this rank's piece of the mean to its parts' gradients, and free the whole gradients."""
        reduction.flat = None  # before the wait, in which gloo unpacks a copy of its own: what reads it holds it
        reduction.work.wait()
        piece = reduction.piece
        _, after = divide_factors(piece.dtype, self.layout.ranks)
        if after > 1:
            piece.div_(after)
        piece = piece.to(self.piece.dtype)
        for number, (p, view) in enumerate(zip(self.parts, self.layout.part_views(piece, self.rank), strict=True)):
            if not p.requires_grad or (number not in reduction.arrived and not _used_elsewhere(view)):
                continue
            if p.grad is None:
                p.grad = view
            else:
                p.grad.add_(view)
            for hook in tuple((p._post_accumulate_grad_hooks or {}).values()):  # an optimizer in backward, a meter
                hook(p)


def _used_elsewhere(gradient: Tensor) -> bool:
    """Whether a parameter that this rank did not use has a gradient from another. Not one of shapes only.

    A rank without a gradient sends -0.0, and a sum of zeros is -0.0 only if all of them are: so a gradient that is zero
    here, as of rows of an embedding that nobody looked up, is told from none.
    """
    if not gradient.numel() or isinstance(gradient, FakeTensor):
        return False
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return not bool((gradient.signbit() & (gradient == 0)).all())
