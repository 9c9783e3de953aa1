"""A unit of `fully_shard`: parameters that are gathered together, used together and freed together.

Of each dtype a unit has one flat buffer. Between uses a rank holds its piece of it, whose 1-dimensional parts the
parameters are. For use the piece of every rank is gathered into the buffer, whose views the whole parameters are:
nothing is copied out of it. Freed, the buffer keeps its storage with no bytes in it (`resize_(0)`), so what autograd
saved of a weight (itself, a transpose) is right again once the storage is filled for backward.

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

from memlab.data_parallelism.flat import FlatLayout
from memlab.ranks import all_gather, reduce_scatter


def divisors(dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """By what to divide gradients before their sum over ranks is taken, and by what after it, for their mean.

    FP16 ends at 65504, so half of the way is gone before: by the power of two next to √ranks.

    >>> divisors(torch.float32, 8), divisors(torch.float16, 8)
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
        self.rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
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
            distributed.broadcast(whole, group=self.group, group_src=0)
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
        self.gathered = all_gather(self.flat, mine, self.group, async_op=True) if self.layout.padded else True

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
        """Move a whole parameter's gradient into the flat buffer of gradients, and free it."""
        gradient, self.full[number].grad = self.full[number].grad, None
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise TypeError(f"expected a dense gradient, found {gradient.layout}; give the layer sparse=False")
        if self.gradients is None:
            self.gradients = torch.empty(self.layout.padded, dtype=self.reduce_dtype, device=self.flat.device)
        at, n = self.layout.starts[number], self.layout.numels[number]
        view = self.gradients[at : at + n].view(self.layout.shapes[number])
        if number in self.arrived:
            view.add_(gradient.detach())
        else:
            view.copy_(gradient.detach())
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
        for number, (at, n) in enumerate(zip(self.layout.starts, self.layout.numels, strict=True)):
            if number not in arrived:
                flat[at : at + n].zero_()
        flat[self.layout.numel :].zero_()
        before, _ = divisors(flat.dtype, self.layout.ranks)
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
        _, after = divisors(piece.dtype, self.layout.ranks)
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
    """Whether a parameter that this rank did not use has a gradient from another. Not one of shapes only."""
    return bool(gradient.numel()) and not isinstance(gradient, FakeTensor) and bool(gradient.any())


class Unit:
    """A module's parameters that are in no other unit, by dtype and by whether they are trained."""

    def __init__(self, module: nn.Module, shards: list[FlatShard], reshard_after_forward: bool | None, prefetch: int):
        self.module, self.shards = module, shards
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # (module, name, part, whole)
        self.owners: list[Unit] = []  # other units that hold parameters which this one's module uses too
        self.running = 0  # forwards of it that are running
        self.expected = False  # gathered ahead, and not needed yet
        self.shown = False  # whether the modules hold whole parameters

    @property
    def gathered(self) -> bool:
        """Whether its buffers have bytes, be they filled or on the way."""
        return any(shard.gathered is not None for shard in self.shards)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of its buffers when it is gathered."""
        return sum(shard.flat_bytes for shard in self.shards)

    def begin_gathering(self) -> None:
        """Have it gathered, if it is not."""
        for shard in self.shards:
            if shard.gathered is None:
                shard.begin_gathering()

    def show(self) -> None:
        """Wait until it is gathered, and let the modules see whole parameters."""
        for shard in self.shards:
            shard.wait()
        if not self.shown:
            for module, name, part, full in self.slots:
                if module._parameters.get(name) is not part or part.numel() and not self._holds(part):
                    raise RuntimeError(
                        f"expected {name} of {type(module).__name__} as fully_shard left it, found another parameter "
                        "or other memory; change weights in place (copy_), or replace them before fully_shard"
                    )
                if full.requires_grad != part.requires_grad:
                    full.requires_grad_(part.requires_grad)
            self._put(whole=True)
            self.shown = True

    def hide(self) -> None:
        """Let the modules see this rank's parts."""
        if self.shown:
            self._put(whole=False)
            self.shown = False

    def free(self) -> None:
        """Give the buffers' bytes back."""
        self.hide()
        self.expected = False
        for shard in self.shards:
            shard.free()

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced, of a backward that failed."""
        for shard in self.shards:
            shard.gradients, shard.arrived = None, set()
            for p in shard.full:
                p.grad = None

    def _holds(self, part: nn.Parameter) -> bool:
        storage = part.untyped_storage()._cdata
        return any(storage == shard.piece.untyped_storage()._cdata for shard in self.shards)

    def _put(self, whole: bool) -> None:
        for module, name, part, full in self.slots:
            p = full if whole else part
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = p
            else:
                setattr(module, name, p)  # an LSTM keeps a list of its weights up to date there
