"""ZeRO 1 and 2: every rank has the whole model, and steps only its own N-th of it.

Plain data parallelism keeps the same optimizer states on every rank: of 16 bytes a parameter in mixed precision, 12.
Here each rank keeps those of its own piece, steps that, and sends it to the others. The gradients of the other pieces
are of no use to it: so an all-reduce is not needed, its first half, the reduce-scatter, is enough; and its second half,
the all-gather, carries weights instead of gradients. The traffic is the same:

    a rank sends  (N−1)/N · Ψ  gradients and  (N−1)/N · Ψ  weights a step

    bytes of a rank, K bytes of states an element:    stage 1: (2 + 2 + K/N) Ψ,    stage 2: (2 + (2 + K)/N) Ψ

Source: Rajbhandari et al. 2020 (ZeRO), sections 5.1, 5.2 and 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.optim import LBFGS, Adafactor, Optimizer

from memlab.data_parallelism.agreement import refuse_other_parts, refuse_others, said
from memlab.data_parallelism.buckets import bucketed
from memlab.data_parallelism.flat import on_the_wire
from memlab.data_parallelism.norms import clip_parts_
from memlab.data_parallelism.states import HeldParts, cut_state, gathered_states
from memlab.data_parallelism.zero_buckets import WeightBucket, as_groups, check_params
from memlab.data_parallelism.zero_gradients import ReducedGradients
from memlab.mixed_precision.edges import refuse_class
from memlab.ranks import place_in
from memlab.units import parse_bytes


class ZeroOptimizer(Optimizer):
    """An optimizer whose states, and at stage 2 gradients, are spread over ranks.

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=3e-4)
        model(x, y).backward()  # on every rank, as often as on the others
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    params: parameters or groups of them, all on one device. They become views of flat buckets, with rank 0's values,
      contiguous; buffers, such as BatchNorm's, are left alone. Give it the plain model: where DataParallel or DDP has
      averaged gradients, stage 1 averages averages, the same numbers for twice the traffic.
    optimizer_class, **defaults: what steps this rank's parts: torch.optim's class, or a function such as
      `lambda parts, **options: MasterWeights(parts, torch.optim.AdamW, **options)`. It must be elementwise: a part is
      1-dimensional, may be empty, and knows nothing of its parameter's shape. One that looks at rows, columns or norms
      of a parameter (Adafactor, Muon, LAMB, Shampoo) would do something else on parts, which cannot be seen from here.
    stage: 1 reduces gradients at the step, 2 during backward, bucket by bucket, and keeps no others.
    bucket_bytes: how many bytes of parameters make a bucket, unless a single one is larger.

    A gradient that is missing on a rank is zero there; so are all of a parameter that no rank used, and weight decay
    still shrinks it: freeze it before ZeroOptimizer is made to leave it alone.
    `param_groups` hold the parts, as `optimizer_class` has them: schedulers and loss scalers work on those. The parts
    have gradients after `reduce_gradients()`, which step and clip_grad_norm_ call if nobody has; the parameters then
    have none. `step` uses them up. Clear gradients with `zero_grad()`; the model's cannot reach the parts.
    Accumulation: at stage 1 it is local. At stage 2 each backward is reduced, and added up in the parts: k backwards
    and the weights cost (k + 1)/2 of the traffic; in `no_sync()` gradients are kept whole.
    A rank without data must run backward all the same where others do so during backward (stage 2): on an empty batch,
    with a loss that is a sum, as the mean of nothing is nan.
    With a loss scaler ranks must skip together: `LossScaler(agree=...)`, for an inf reaches only the rank whose piece
    it is in. torch.amp.GradScaler cannot agree, and one rank would wait for another that skips.
    After a backward that raised (stage 2) it is refused, since the other ranks are out of step.
    A new ZeroOptimizer closes an older one of the same parameters, as when a cell runs twice.
    Not here: groups that are added later, closures, and parameters that are frozen or thawed later.

    Raises ValueError for another stage, parameters on several devices, without memory, in memory they share or given
    twice, with gradients of another dtype, unlike rank 0's or other parts than rank 0's, and an optimizer that is known
    not to be elementwise; RuntimeError without a process group, and where a parameter was moved, frozen or thawed
    afterwards; TypeError for a set of parameters, and for sparse gradients.
    """

    def __init__(
        self,
        params,
        optimizer_class: Callable[..., Optimizer],
        stage: int = 1,
        *,
        bucket_bytes: int | str = "25 MiB",
        group: distributed.ProcessGroup | None = None,
        **defaults,
    ):
        if stage not in (1, 2):
            raise ValueError(
                f"expected stage=1 or 2, found {stage!r}; stage 3 spreads the parameters too, which changes the model "
                "and not the optimizer: use fully_shard(module)"
            )
        self._group, self._bucket_bytes, self.stage = group, parse_bytes(bucket_bytes), stage
        self._rank, self._ranks = place_in(group)
        self._inner = optimizer_class(self._sharded(as_groups(params)), **defaults)
        for kind, what in ((Adafactor, "a parameter's rows and columns"), (LBFGS, "all parameters at once")):
            if isinstance(self._inner, kind):
                raise ValueError(
                    f"expected an elementwise optimizer, found {type(self._inner).__name__}, which looks at {what} and "
                    "would be wrong on parts; use AdamW"
                )
        refuse_class(type(self._inner))
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._gradients = ReducedGradients(self._buckets, self._rank, self._ranks, group, stage == 2)

    def add_param_group(self, param_group: dict) -> None:
        """Raise RuntimeError: all groups are given when it is made."""
        if not any(param_group is known for known in self._inner.param_groups):  # those while Optimizer.__init__ runs
            raise RuntimeError(
                "expected all parameters when ZeroOptimizer is made, found another group; make one of all groups"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def _sharded(self, groups: list[dict]) -> list[dict]:
        """The groups with this rank's parts in place of the parameters, which move into buckets."""
        entries = [(number, entry) for number, group in enumerate(groups) for entry in group["params"]]
        params = [entry[1] if isinstance(entry, tuple) else entry for _, entry in entries]  # some come with names
        check_params(params)
        mine = {"bucket_bytes": str(self._bucket_bytes), "stage": str(self.stage)}
        for n, (p, (number, _)) in enumerate(zip(params, entries, strict=True)):
            mine[f"parameter {n}"] = f"{said(p)}, in group {number}"
        refuse_others(mine, self._group)
        refuse_other_parts(params, self._group)
        keys = [(p.dtype, number, p.requires_grad) for p, (number, _) in zip(params, entries, strict=True)]
        self._buckets = [
            WeightBucket([params[n] for n in numbers], numbers, self._rank, self._ranks)
            for numbers in bucketed(params, keys, self._bucket_bytes)
        ]
        for bucket in self._buckets:
            if bucket.layout.numel:
                distributed.broadcast(on_the_wire(bucket.flat), group=self._group, group_src=0)
        parts = {n: part for bucket in self._buckets for n, part in zip(bucket.numbers, bucket.parts, strict=True)}
        sharded = [group | {"params": []} for group in groups]
        for n, (number, entry) in enumerate(entries):
            sharded[number]["params"].append((entry[0], parts[n]) if isinstance(entry, tuple) else parts[n])
        return sharded

    # ---- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """At stage 2, keep gradients whole in this block, and send nothing. Backward after it reduces the sum."""
        before, self._gradients.syncing = self._gradients.syncing, False
        try:
            yield
        finally:
            self._gradients.syncing = before

    def reduce_gradients(self) -> None:
        """Average the gradients over ranks, each rank's parts getting theirs, and free them.

        At stage 2 backward has done it, but for what was left by `no_sync()`.
        """
        self._check_usable()
        self._gradients.reduce()

    def widen_gradients(self) -> None:
        """What a LossScaler asks for before it looks at gradients: have them in the parts; in FP32, if they can be."""
        self._settle()
        if hasattr(self._inner, "widen_gradients"):
            self._inner.widen_gradients()

    def _check_usable(self) -> None:
        if not self._gradients.open:
            raise RuntimeError("expected an optimizer to use, found one that was closed; make another")
        for bucket in self._buckets:
            bucket.check_unchanged()

    def _settle(self) -> None:
        self._check_usable()
        self._gradients.settle()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ on the whole gradients. Returns their norm, () of FP64, on every rank.

        The norm is of this optimizer's parameters over its group: of one stage, or of tensor ranks' parts, it is not
        the model's, and chapters 14 and 15's clip_grad_norm_ do not see the parts.

        Raises ValueError for a norm_type that is not above 0; RuntimeError for a norm of inf or nan, if told to.
        """
        self._settle()
        parts = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        device = self._buckets[0].flat.device
        return clip_parts_(parts, max_norm, norm_type, error_if_nonfinite, device=device, group=self._group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: whole ones and parts. Raises RuntimeError after a backward that raised."""
        self._gradients.drop(set_to_none)

    # ---- the step

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's parts, and fill the buckets with every rank's. Every rank calls it. Uses gradients up."""
        self._settle()
        for bucket in self._buckets:
            bucket.notice_writes()
        changed = [bucket for bucket in self._buckets if bucket.trained]
        step = type(self._inner).step
        getattr(step, "__wrapped__", step)(self._inner)  # without the hooks: they are for the whole step, and run there
        for work in [bucket.gather(self._group) for bucket in changed]:
            work.wait()
        for bucket in changed:
            bucket.written()
        self._gradients.drop()

    def close(self) -> None:
        """Take the hooks off. It cannot step afterwards; the model is whole on every rank, and can be used."""
        self._gradients.close()
        if hasattr(self._inner, "close"):
            self._inner.close()

    # ---- saving, loading

    def state_dict(self, to: int | None = None) -> dict:
        """The whole optimizer's, as if it were not spread, in main memory. Every rank calls it.

        to: the rank of the group that gets it; the others get {}. None: all do, N times the bytes on one machine.
        Its hooks are called as torch's are: register_state_dict_post_hook's where it is whole.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        packed, keep = self._inner.state_dict(), to in (None, self._rank)
        held = [HeldParts(each.layout, each.parts, each.numbers, self._rank, self._group) for each in self._buckets]
        states = gathered_states(packed["state"], held, keep)
        if not keep:
            return {}
        whole = packed | {"state": states}
        for hook in self._optimizer_state_dict_post_hooks.values():
            if (changed := hook(self, whole)) is not None:
                whole = changed
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from a whole state dict, from here with any number of ranks, or of `optimizer_class` itself.

        Each rank calls it and keeps a copy of its own part. Raises ValueError for one of other parameters.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := hook(self, state_dict)) is not None:
                state_dict = changed
        self._inner.load_state_dict(cut_state(state_dict, self._buckets, self._rank))
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict:
        raise TypeError("expected state_dict() to save a ZeroOptimizer, found pickle or deepcopy; save that instead")
