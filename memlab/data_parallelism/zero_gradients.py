"""Gradients for ZeRO: averaged over ranks bucket by bucket, each rank keeping the average of its own piece.

One reduce-scatter a bucket. Every gradient is copied into a flat buffer as it is used, divided by the number of ranks,
and let go of; the buffer goes when the piece has come. So at any time there are two buffers on their way at most and
those being filled, and what remains is

    bytes of gradients on each rank = Σ over buckets of ⌈elements / ranks⌉ · itemsize

At stage 1 this *round* of reduce-scatters runs after backward. At stage 2 it runs during backward: a hook takes each
gradient when it is complete, a bucket is sent when it is full, and the whole of the gradients never exists. Ranks may
complete buckets in different orders, and collectives must be in the same: so buckets are sent in reverse order of
registration, which is about the order of backward, and one that is full waits for its turn.

Source: Rajbhandari et al. 2020, section 5.2; Li et al. 2020 (PyTorch Distributed), section 3.2.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque

import torch
from torch import Tensor, distributed
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.backward import at_end_of_backward
from memlab.data_parallelism.buckets import take_over
from memlab.data_parallelism.zero_buckets import Filling, WeightBucket
from memlab.ranks import reduce_scatter


class ReducedGradients:
    """Averages gradients into the `.grad` of the buckets' parts. Gradients that are missing are zeros.

    during_backward: stage 2. Whoever took these parameters' gradients before is closed, with all hooks.
    """

    def __init__(self, buckets: list[WeightBucket], rank: int, ranks: int, group, during_backward: bool):
        self.buckets, self._rank, self._ranks, self._group = buckets, rank, ranks, group
        self._during_backward = during_backward
        self.syncing = True
        self.rounds = 0  # since the gradients were dropped
        self._hooks = WeakTensorKeyDictionary()
        self._remove_hooks = weakref.finalize(self, _remove, self._hooks)
        self._forget_round()
        params = [p for bucket in buckets for p in bucket.params]
        take_over(params, self, object if during_backward else ReducedGradients)
        for bucket in buckets if during_backward else ():
            for slot, p in enumerate(bucket.params):
                if p.requires_grad:
                    taking = functools.partial(_complete, weakref.ref(self), weakref.ref(bucket), slot)
                    taking.taker = weakref.ref(self)
                    self._hooks[p] = p.register_post_accumulate_grad_hook(taking)

    def _forget_round(self) -> None:
        self._begun = False  # during a backward
        self._filling: dict[WeightBucket, Filling] = {}
        self._sent: deque[tuple[WeightBucket, distributed.Work, Tensor, Tensor, bool]] = deque()
        self._next = 0  # whose turn it is

    def close(self) -> None:
        """Take the hooks off."""
        self._remove_hooks()

    @property
    def open(self) -> bool:
        """Whether `close` was not called."""
        return self._remove_hooks.alive

    @property
    def pending(self) -> bool:
        """Whether there are gradients that no round has taken."""
        return any(p.grad is not None for bucket in self.buckets for p in bucket.params)

    def drop(self, set_to_none: bool = True) -> None:
        """Forget all gradients: the parameters' and the parts'. Raises RuntimeError after a backward that raised."""
        self._check_ended()
        self.rounds = 0
        for bucket in self.buckets:
            for p in (*bucket.params, *bucket.parts):
                p.grad = None if set_to_none or p.grad is None else p.grad.detach().zero_()

    # ---- one round

    @torch.no_grad()
    def complete(self, bucket: WeightBucket, slot: int) -> None:
        """During backward: a parameter's gradient is complete. Send the buckets that are full and whose turn it is."""
        if not self.syncing:
            return
        if not self._begun:
            self._begun = True
            at_end_of_backward(self.end_round)
        if bucket.params[slot].grad is None:  # a hook before this one took it: as if it had not come
            return
        self._take(bucket, slot)
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.trained and not (bucket in self._filling and self._filling[bucket].full(bucket)):
                break
            self._send(bucket)

    @torch.no_grad()
    def end_round(self) -> None:
        """Send what has not been sent, zeros for gradients that are missing; wait for all; parts have gradients."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        while self._sent:
            self._land()
        self.rounds += 1
        self._forget_round()

    def reduce(self) -> None:
        """Run a round for the gradients that none has taken; at stage 1 also if this rank has none."""
        self._check_ended()
        if not self._during_backward or self.pending or not self.rounds:
            self.end_round()

    def settle(self) -> None:
        """Have all gradients in the parts: run the round, if none has run. Raises RuntimeError if some came after."""
        self._check_ended()
        if not self.rounds:
            self.end_round()
        elif self.pending:
            raise RuntimeError(
                "expected all gradients reduced, found some of a backward that ran after reduce_gradients() or in "
                "no_sync(); call reduce_gradients() when the last backward is through"
            )

    def _check_ended(self) -> None:
        if self._begun or self._filling or self._next:
            raise RuntimeError(
                "expected a backward that ended, found one that raised in the middle, and other ranks may wait for its "
                "gradients; let the launch end, or, where it raised on all ranks, make another ZeroOptimizer"
            )

    def _take(self, bucket: WeightBucket, slot: int) -> None:
        """Copy a parameter's gradient, divided by the number of ranks, into the bucket's buffer, and let go of it."""
        filling = self._filling.get(bucket)
        if filling is None and bucket not in self.buckets[: self._next]:
            filling = self._filling[bucket] = Filling(bucket)
        if filling is None or slot not in filling.missing:
            raise RuntimeError(
                f"expected one gradient of parameter {bucket.numbers[slot]} in a backward, found a second: after a "
                "backward that raised, make another ZeroOptimizer; and checkpoint with use_reentrant=False"
            )
        p = bucket.params[slot]
        if p.grad.layout is not torch.strided:
            raise TypeError(
                f"expected dense gradients, found one of layout {p.grad.layout} for parameter {bucket.numbers[slot]}, "
                "of which a collective can send no piece; use sparse=False"
            )
        torch.div(p.grad.detach(), self._ranks, out=filling.views[slot])
        p.grad = None
        filling.missing.discard(slot)

    def _send(self, bucket: WeightBucket) -> None:
        """A bucket's turn: begin its reduce-scatter, if it is not frozen."""
        if bucket.trained:
            self._reduce(bucket)
        self._next += 1

    def _reduce(self, bucket: WeightBucket) -> None:
        """Begin a bucket's reduce-scatter. What it lacks is zero."""
        for slot, p in enumerate(bucket.params):
            if p.grad is not None and (bucket not in self._filling or slot in self._filling[bucket].missing):
                self._take(bucket, slot)
        filling = self._filling.pop(bucket, None) or Filling(bucket)
        for slot in filling.missing:
            filling.views[slot].zero_()
        first = all(part.grad is None for part in bucket.parts)
        piece = torch.empty_like(bucket.own) if first else bucket.layout.own(filling.whole, self._rank)
        while len(self._sent) > 1:
            self._land()
        work = reduce_scatter(piece, filling.whole, self._group, async_op=True)
        self._sent.append((bucket, work, piece, filling.whole, first))

    def _land(self) -> None:
        """Wait for the piece that was sent for first; where the parts have gradients, add it."""
        bucket, work, piece, _, first = self._sent.popleft()
        work.wait()
        views = bucket.layout.part_views(piece, self._rank)
        for part, view in zip(bucket.parts, views, strict=True):
            if part.grad is not None:
                part.grad.add_(view)
            else:
                part.grad = view if first else view.clone()


def _complete(
    gradients: weakref.ref[ReducedGradients], bucket: weakref.ref[WeightBucket], slot: int, _: Tensor
) -> None:
    """The hook on a parameter whose gradient is complete."""
    if (alive := gradients()) is not None:
        alive.complete(bucket(), slot)


def _remove(hooks: WeakTensorKeyDictionary) -> None:
    """Take hooks off their parameters."""
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
