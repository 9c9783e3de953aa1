"""Gradients for ZeRO: averaged over ranks bucket by bucket, each rank keeping the average of its own piece.

One reduce-scatter a bucket. Every gradient is copied into a flat buffer as it is used, divided by the number of ranks,
and let go of; the buffer goes when the piece has come. So at any time there are two buffers on their way at most and
those being filled, and what remains is

    bytes of gradients on each rank = Σ over buckets of ⌈elements / ranks⌉ · itemsize

At stage 1 this *round* of reduce-scatters runs after backward. At stage 2 it runs during backward: a hook takes each
gradient when it is complete, a bucket is sent when it is full, and the whole of the gradients never exists. Ranks may
complete buckets in different orders, and collectives must be in the same: a bucket waits for its turn. The turns are
in reverse order of registration in the first round, and after that in the order in which rank 0 completed them then.

Source: Rajbhandari et al. 2020, section 5.2; Li et al. 2020 (PyTorch Distributed), section 3.2.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.backward import at_end_of_backward
from memlab.data_parallelism.agreement import on_any_rank
from memlab.data_parallelism.buckets import take_over
from memlab.data_parallelism.zero_buckets import Filling, WeightBucket
from memlab.ranks import reduce_scatter


class ReducedGradients:
    """Averages gradients into the `.grad` of the buckets' parts.

    during_backward: stage 2. find_unused: agree with the other ranks on which parameters had a gradient on any rank;
    the parts of the others get none, and are not stepped. Without, gradients that are missing are zeros.
    """

    def __init__(self, rank: int, ranks: int, group, during_backward: bool, find_unused: bool):
        self._rank, self._ranks, self._group = rank, ranks, group
        self._during_backward, self._find_unused = during_backward, find_unused
        self.buckets: list[WeightBucket] = []
        self.syncing = True
        self.rounds = 0  # since the gradients were dropped
        self.reduced: set[WeightBucket] = set()  # since then, too
        self._trained: set[int] = set()  # the parameters that were not frozen at some time when `watch` looked
        self._turns: list[WeightBucket] = []
        self._turns_known = not during_backward
        self._hooks = WeakTensorKeyDictionary()
        self._remove_hooks = weakref.finalize(self, _remove, self._hooks)
        self._forget_round()

    def _forget_round(self) -> None:
        self._begun = False  # during a backward
        self._filling: dict[WeightBucket, Filling] = {}
        self._completed: list[WeightBucket] = []
        self._sent: deque[tuple[WeightBucket, distributed.Work, Tensor, Tensor, bool]] = deque()
        self._next = 0  # whose turn it is
        self._arrived: list[tuple[int, Tensor, Tensor]] = []  # a parameter's number, its part, the part's gradient
        self._used: set[int] = set()

    def add(self, buckets: list[WeightBucket]) -> None:
        """Take care of these buckets, too. Whoever took their gradients before is closed, with all hooks."""
        params = [p for bucket in buckets for p in bucket.params]
        take_over(params, self, object if self._during_backward else ReducedGradients)
        self.buckets += buckets
        self._turns, self._turns_known = list(self.buckets), not self._during_backward
        self.watch()

    def watch(self) -> None:
        """Have a hook on every parameter that may have a gradient; one may have been frozen until now."""
        self._trained |= {number for number, p in self._numbered() if p.requires_grad}
        for bucket in self.buckets if self._during_backward and self.open else ():
            for slot, p in enumerate(bucket.params):
                if p.requires_grad and p not in self._hooks:
                    taking = functools.partial(_complete, weakref.ref(self), weakref.ref(bucket), slot)
                    taking.taker = weakref.ref(self)
                    self._hooks[p] = p.register_post_accumulate_grad_hook(taking)

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
        """Forget all gradients: the parameters', the parts', and those of a round that a backward has not ended.

        That round is ended, with zeros for what is missing, since other ranks may be in it.
        """
        if self._unended:
            for _, p in self._numbered():
                p.grad = None
            with contextlib.suppress(RuntimeError):  # where the other ranks are gone
                self.end_round()
        self._forget_round()
        self.rounds = 0
        self.reduced.clear()
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
        filling = self._take(bucket, slot)
        if filling.full(bucket):
            self._completed.append(bucket)
        while self._next < len(self._turns):
            bucket = self._turns[self._next]
            if bucket.trained and not (bucket in self._filling and self._filling[bucket].full(bucket)):
                break
            self._send(bucket)

    @torch.no_grad()
    def end_round(self) -> None:
        """Send what has not been sent, zeros for gradients that are missing; wait for all; parts have gradients."""
        while self._next < len(self._turns):
            self._send(self._turns[self._next])
        late = self._frozen_late()
        for bucket in self.buckets:
            if not bucket.trained and not late.isdisjoint(bucket.numbers):
                self._filling[bucket] = Filling(bucket)
                self._reduce(bucket)
        while self._sent:
            self._land()
        used = self._used_anywhere() | late
        for number, part, gradient in self._arrived:
            if number in used:
                part.grad = gradient
        if not self._turns_known:
            self._agree_on_turns()
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

    @property
    def _unended(self) -> bool:
        return bool(self._begun or self._filling or self._next)

    def _check_ended(self) -> None:
        if self._unended:
            raise RuntimeError(
                "expected a backward that ended, found one that raised in the middle; call zero_grad(), which ends it "
                "for the other ranks, and have all ranks drop this step"
            )

    def _take(self, bucket: WeightBucket, slot: int) -> Filling:
        """Copy a parameter's gradient, divided by the number of ranks, into the bucket's buffer, and let go of it."""
        filling = self._filling.get(bucket)
        if filling is None and bucket not in self._turns[: self._next]:
            filling = self._filling[bucket] = Filling(bucket)
        if filling is None or slot not in filling.missing:
            raise RuntimeError(
                f"expected one gradient of parameter {bucket.numbers[slot]} in a backward, found a second: after a "
                "backward that raised, call zero_grad(); and checkpoint with use_reentrant=False"
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
        self._used.add(bucket.numbers[slot])
        return filling

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
        self.reduced.add(bucket)
        for slot in filling.missing:
            filling.views[slot].zero_()
        if bucket not in self._completed:
            self._completed.append(bucket)
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
        for number, part, view in zip(bucket.numbers, bucket.parts, views, strict=True):
            if part.grad is not None:
                part.grad.add_(view)
            else:
                self._arrived.append((number, part, view if first else view.clone()))

    def _numbered(self) -> Iterator[tuple[int, Tensor]]:
        for bucket in self.buckets:
            yield from zip(bucket.numbers, bucket.params, strict=True)

    # ---- what ranks must agree on

    def _used_anywhere(self) -> set[int]:
        """The numbers of the parameters that had a gradient on any rank: one byte for each is all-reduced."""
        params = dict(self._numbered())
        if not self._find_unused:
            return {n for n, p in params.items() if p.requires_grad}
        used = on_any_rank([n in self._used for n in range(len(params))], self.buckets[0].flat.device, self._group)
        return {n for n, by_any in enumerate(used) if by_any}

    def _frozen_late(self) -> set[int]:
        """The numbers of parameters that are frozen, and were not when their gradients came, on any rank.

        They are stepped, as by any optimizer. Asked are those that were trained at some time, which all ranks know.
        """
        frozen = [(n, p) for n, p in self._numbered() if not p.requires_grad]
        for n, p in frozen:
            if p.grad is not None and n not in self._trained:
                raise RuntimeError(
                    f"expected no gradient of parameter {n}, frozen when ZeroOptimizer was made and after each step, "
                    "found one; freeze it again after step(), or set its grad to None"
                )
        asked = [(n, p) for n, p in frozen if n in self._trained]
        if not asked:
            return set()
        came = [n in self._used or p.grad is not None for n, p in asked]
        by_any = on_any_rank(came, self.buckets[0].flat.device, self._group)
        return {n for (n, _), had in zip(asked, by_any, strict=True) if had}

    def _agree_on_turns(self) -> None:
        """Take turns from the next round on in the order in which rank 0 completed its buckets in this one."""
        places = {bucket: place for place, bucket in enumerate(self._turns)}
        order = self._completed + [bucket for bucket in self._turns if bucket not in self._completed]
        turns = torch.tensor([places[bucket] for bucket in order], device=self.buckets[0].flat.device)
        if len(order) > 1:
            distributed.broadcast(turns, group=self._group, group_src=0)
        if not isinstance(turns, FakeTensor):
            order = [self._turns[place] for place in turns.tolist()]
        self._turns, self._turns_known = order, True


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
