"""What happens to a gradient on its way: into its bucket, around the ranks, and back as the average.

    backward        gradients of bucket 0 ── of bucket 1 ── of bucket 2 ── wait
    all-reduce                               bucket 0 ───── bucket 1 ───── bucket 2

A hook on each parameter is told when its gradient is complete. A bucket is sent when it is full and all before it are
sent: so all ranks send in one order, whatever the order in which their gradients come; and what never comes is sent as
zeros when backward is through. Each rank multiplies by 1/N before the sum, as DDP does: so a sum in 16 bits does not
overflow where the average would fit.

A rank that averages an average leaves it as it is. That is why gradients that were averaged before, or come twice, are
right: averages of equals plus the average of what was added.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from memlab.backward import at_end_of_backward
from memlab.data_parallelism.buckets import GradientBucket, take_over


class Averaging:
    """Hooks on the parameters of these buckets. They know nothing of the model's wrapper, so it can die before them."""

    def __init__(self, buckets: list[GradientBucket], group):
        self.buckets, self.group = buckets, group
        self.factor = 1 / distributed.get_world_size(group)
        self.syncing = True
        self.running = self.reached = self.closed = False
        self.arrived: list[set[int]] = [set() for _ in buckets]
        self.sent: list[distributed.Work] = []  # of each bucket that is on its way
        take_over((p for bucket in buckets for p in bucket.params), self)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(at, number))
            for at, bucket in enumerate(buckets)
            for number, p in enumerate(bucket.params)
        ]

    def _hook(self, at: int, number: int) -> Callable[[Tensor], None]:
        hook = functools.partial(_arrive, self, at, number)
        hook.taker = weakref.ref(self)
        hook.averages_ranks = self.factor < 1  # for those who take gradients away: this one needs them
        return hook

    @torch.no_grad()
    def arrive(self, at: int, number: int) -> None:
        """A gradient is complete. at: its bucket; number: its place there.

        Raises TypeError for a sparse one, RuntimeError for one with a graph, and for a second of one parameter in a
        backward.
        """
        bucket = self.buckets[at]
        p = bucket.params[number]
        if p.grad is not None and p.grad.is_sparse:
            raise TypeError(f"expected dense gradients, found a sparse one of {tuple(p.shape)}; use sparse=False")
        if p.grad is not None and p.grad.requires_grad:
            raise RuntimeError(
                f"expected gradients without a graph, found one with, of a parameter of shape {tuple(p.shape)}: what "
                "p.grad becomes, an average over ranks, has none, so backward(create_graph=True) would penalise "
                "nothing; use torch.autograd.grad(..., create_graph=True), and backward of the whole loss"
            )
        if self.running and number in self.arrived[at]:
            raise RuntimeError(
                f"expected one gradient of a parameter of shape {tuple(p.shape)} in a backward, found a second: after "
                "a backward that raised, run a forward first; and checkpoint with use_reentrant=False"
            )
        if not self.arrived[at]:
            bucket.empty()  # of the backward before, whose gradients somebody may have kept through zero_grad()
        bucket.fill()
        if not self.syncing:
            if p.grad is not None:
                bucket.place(number, 1)
            return
        if not self.running:
            self.running = True
            at_end_of_backward(self.finish)
        if p.grad is None:  # a hook before this one took it: as if it had not come
            return
        bucket.place(number, self.factor)
        self.arrived[at].add(number)
        while len(self.sent) < len(self.buckets) and self.full(len(self.sent)):
            self.send()

    def watch(self, outputs: object) -> None:
        """See to it that a backward is known from the moment that it comes to these outputs of the model."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(functools.partial(_reach, weakref.ref(self)))

    def reach(self) -> None:
        """A backward has come to the model, or torch.autograd.grad, of which no gradient will arrive."""
        if self.syncing and not self.reached:
            self.reached = True
            at_end_of_backward(self.passed)

    def passed(self) -> None:
        """It did not raise."""
        self.reached = False

    def full(self, at: int) -> bool:
        """Whether all gradients of a bucket have arrived."""
        return len(self.arrived[at]) == len(self.buckets[at].params)

    def send(self) -> None:
        """Begin to sum the next bucket over ranks."""
        flat = self.buckets[len(self.sent)].flat
        self.sent.append(distributed.all_reduce(flat, group=self.group, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is through: what is missing counts as 0; send the rest, and wait for all."""
        if not self.running:
            return
        try:
            without = self.fill_up()
            for work in self.sent:
                work.wait()
            for p in without:
                if not p.requires_grad:  # frozen since
                    p.grad = None
        finally:
            self.forget()

    def fill_up(self) -> list[nn.Parameter]:
        """Send the buckets that never became full. Returns the parameters without a gradient on this rank."""
        without = []
        for at, bucket in enumerate(self.buckets):
            if not self.arrived[at]:
                bucket.empty()
            bucket.fill()
            for number, p in enumerate(bucket.params):
                if number not in self.arrived[at]:
                    if p.grad is None:
                        without.append(p)
                    bucket.place(number, self.factor)
            if at == len(self.sent):
                self.send()
        return without

    def begin_step(self, recorded: bool) -> None:
        """A forward begins. recorded: for a backward, by which ranks have to be in step.

        Raises RuntimeError after a backward that raised: the others wait for its gradients, and would take the next's.
        """
        if recorded and (self.running or self.reached):
            raise RuntimeError(
                "expected every backward to end, found that the last one raised, and other ranks may wait for its "
                "gradients; let the launch end, or, where it raised on all ranks, close() this and wrap the model again"
            )
        for bucket in self.buckets if not self.running else ():
            bucket.empty()

    def forget(self) -> None:
        """Nothing is on its way."""
        self.running = self.reached = False
        self.sent.clear()
        for arrived in self.arrived:
            arrived.clear()

    def close(self) -> None:
        """Take the hooks off."""
        self.closed = True
        for hook in self._hooks:
            hook.remove()


def _arrive(averaging: Averaging, at: int, number: int, _: Tensor) -> None:
    """The hook on a parameter whose gradient is complete."""
    averaging.arrive(at, number)


def _reach(averaging: weakref.ref[Averaging], _: tuple) -> None:
    """The hook on a node of an output: it must not keep what the wrapper's end takes down."""
    if (alive := averaging()) is not None:
        alive.reach()
