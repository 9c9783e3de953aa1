"""Data parallelism: each rank has a replica of the model, and other data; before the step they average their gradients.

    ∇ mean over all ranks' rows = 1/N · Σ over ranks of ∇ mean over its own rows        (as many rows on each)

Replicas that begin equal and step on equal gradients stay equal: so nothing but gradients ever travels. And they travel
while backward still runs: as soon as a bucket is full its all-reduce begins, and the end of backward waits for what is
left. The price is bytes: every rank holds the whole model, all gradients and all the optimizer's states.

Source: Li et al. 2020 (PyTorch Distributed), section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memlab.backward import backward_number
from memlab.data_parallelism.agreement import start_equal
from memlab.data_parallelism.averaging import Averaging
from memlab.data_parallelism.buckets import plan_buckets
from memlab.ranks import place_in
from memlab.units import parse_bytes


class DataParallel(nn.Module):
    """A model whose backward leaves the average of all ranks' gradients in `p.grad`.

        model = DataParallel(model)
        loss(model(rows_of_this_rank)).backward()
        optimizer.step()

    module: a model in the memory of this rank's device. Its parameters and buffers become rank 0's.
    bucket_bytes: how many bytes of gradients travel together, an int or text; a larger one travels alone.
    group: the ranks, all if None.

    Every rank calls backward equally often. A parameter that a rank did not use counts as 0 there, whichever it is. One
    that no rank used has a gradient of zeros, by which weight decay still shrinks it: freeze it to leave it alone.
    Averages are of *ranks*: where they have unequal numbers of rows, sum the losses and divide by `mean_over_ranks` of
    the numbers (chapter 07's `accumulate(..., agree=mean_over_ranks)`). A rank without rows is then one with sum 0.

    Gradients lie in the buckets, and nowhere else: `p.grad` is a view of one. A bucket's bytes are there from its first
    gradient until, after zero_grad(), the next forward. A gradient that you keep beyond zero_grad() stays what it was;
    clone one that you keep while others of its bucket go on. Non-finite gradients of one rank are then all ranks'.
    Buffers are each rank's own once training begins: BatchNorm's statistics are of its own rows (DDP takes rank 0's
    before every forward). Save the state dict of its `.module`: this one's names begin with "module.", as DDP's do.

    After a backward that raised in the model, the next forward is refused, since the other ranks are out of step. Of
    one that raised before, in a loss outside, nothing is known here: run it again. Checkpoint without reentrance:
    with it every segment is a backward of its own, after which all buckets travel. Wrapped again, as when a cell runs
    twice, a model is the new wrapper's: the old one, or any other that takes its parameters' gradients, is closed.

    Raises ValueError if the ranks' models differ, naming rank and parameter, or are other parts of a split one, if
    nothing is to be trained, or for a parameter without memory or with gradients of another dtype, TypeError for a
    sparse buffer; in forward, RuntimeError if it was closed, after a backward that raised, or if a parameter is trained
    that was frozen or not there at the beginning; in backward, TypeError for a sparse gradient, RuntimeError for
    create_graph=True; to pickle and deepcopy, TypeError.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: int | str = "25 MiB",
        group=None,
    ):
        super().__init__()
        self.module, self.group = module, group
        _, self.ranks = place_in(group)
        self._frozen = {p for p in module.parameters() if not p.requires_grad}
        limit = parse_bytes(bucket_bytes)
        start_equal(module, group, bucket_bytes=limit)
        trained = [p for p in module.parameters() if p.requires_grad]  # a tied one comes once
        if not trained:
            raise ValueError("expected a model with parameters to train, found none; call a frozen model as it is")
        self._trained = set(trained)
        self.buckets = plan_buckets(trained, limit, self.ranks)
        self._averaging = Averaging(self.buckets, group)
        self._take_off = weakref.finalize(self, self._averaging.close)

    def forward(self, *args, **kwargs):
        """The model's own. Raises RuntimeError if this was closed, or a parameter is trained that was not before."""
        if self._averaging.closed:
            raise RuntimeError(
                "expected a DataParallel that is open, found a closed one (by close(), or by a newer wrapper of its "
                "parameters); call its .module, or wrap it"
            )
        outside, recorded = backward_number() == -1, torch.is_grad_enabled()
        if outside:
            if recorded:
                self._refuse_others()
            self._averaging.begin_step(recorded)
        outputs = self.module(*args, **kwargs)
        if outside and recorded and not torch.compiler.is_compiling():
            self._averaging.watch(outputs)
        return outputs

    def _refuse_others(self) -> None:
        """What is trained, and has no hook, every rank would step by its own gradient."""
        for name, p in self.module.named_parameters():
            if p.requires_grad and p not in self._trained:
                if p in self._frozen:
                    expected, found = "frozen, as when it was wrapped", "it to be trained"
                else:
                    expected, found = "as when it was wrapped", "another parameter"
                raise RuntimeError(f"expected {name} {expected}, found {found}; close() this, and wrap again")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in this block adds gradients up on this rank; the next one outside averages the whole.

        What counts is where backward runs; DDP asks where forward ran.
        """
        before, self._averaging.syncing = self._averaging.syncing, False
        try:
            yield
        finally:
            self._averaging.syncing = before

    def close(self) -> None:
        """Take the hooks off; gradients stay. Also the end of a `with` block, and of the wrapper."""
        self._take_off()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __getstate__(self) -> dict:
        raise TypeError(
            "expected its .module, or that one's state_dict(), to save or copy, found pickle or deepcopy of a whole "
            "DataParallel, whose hooks stay behind; wrap the copy"
        )
