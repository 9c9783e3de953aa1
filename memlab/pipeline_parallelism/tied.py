"""One parameter on several stages, such as the token embedding that is also the head: copies that stay equal.

Each stage computes the gradient of its own use; their sum is the parameter's. All holders step on the same sum, from
the same beginning, so the copies stay equal to the bit. The price, for n bytes on h ranks: n bytes of weights,
gradients and states on each, and (h − 1) · n bytes sent by each in a step; for two ranks that is an all-reduce's.

Holders send to each other in the pipeline's group, and have none of their own. (Where each rank has a GPU assigned,
PyTorch splits a group off NCCL's, for which it needs every rank: made by its members alone, it waits for the others.)

Summing over the tie and averaging over data are both linear, so either may come first. With `DataParallel` and
`fully_shard` the tie's sum is last, and the copies stay equal. With ZeroOptimizer's stage 1 the average is, in other
buckets on each stage: from three data ranks on copies may differ in their last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memlab.data_parallelism.agreement import told_by_all
from memlab.ranks import begin, place_in, receive, send
from memlab.tensor_parallelism.cuts import cut_of

if TYPE_CHECKING:
    from memlab.pipeline_parallelism.plan import PipelinePlan

SCRATCH_BYTES = 2**22
"""Gradients are summed in pieces of so many bytes, for each of which there is room for the others'."""


def tied_names(tied: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Names of parameters that are one, each name once: pairs that share a name become three.

    >>> tied_names([("0.weight", "2.weight"), ("2.weight", "4.weight")])
    [('0.weight', '2.weight', '4.weight')]
    """
    found: list[tuple[str, ...]] = []
    for names in tied:
        same = [other for other in found if not set(other).isdisjoint(names)]
        merged = dict.fromkeys(name for some in (*same, names) for name in some)
        found = [other for other in found if other not in same] + [tuple(merged)]
    return found


def check_tied(layers: Sequence[nn.Module], tied: Iterable[Sequence[str]]) -> None:
    """Raise ValueError for names "<layer>.<name>" of no parameter, for tied ones that are not alike, and for one
    parameter that two groups name, each by another of its names.

    layers: all of the model's, made; imagined will do.
    """
    group_of: dict[int, tuple[str, ...]] = {}
    for names in tied_names(tied):
        like: dict[str, tuple] = {}
        for name in names:
            number, _, rest = name.partition(".")
            inside = number.isdigit() and int(number) < len(layers)
            parameters = dict(layers[int(number)].named_parameters(remove_duplicate=False)) if inside else {}
            if rest not in parameters:
                known = [f"{number}.{own}" for own in parameters]
                hint = f"; layer {number} has {', '.join(known[:8])}" if inside else f"; there are {len(layers)} layers"
                raise ValueError(f'expected names of parameters, "<layer>.<name>", as tied; found {name!r}{hint}')
            like[name] = _kind(parameters[rest])
            other = group_of.setdefault(id(parameters[rest]), names)
            if other != names:
                raise ValueError(
                    f"expected parameters of one tied group each, found that {name!r} is a parameter of "
                    f"({', '.join(other)}), too; make one group of {other + names}"
                )
        _check_alike(like)


def put_in_place(old: nn.Parameter, new: nn.Parameter, stage: nn.Module) -> None:
    """Let a parameter stand wherever another stands in a stage, under each of its names."""
    for part in stage.modules():
        for name in [name for name, p in part._parameters.items() if p is old]:
            setattr(part, name, new)


class Tie:
    """A parameter that this rank has a copy of; or several, one for each of its wrapped stages.

    slots: where this rank's copies are, as (module, attribute). ranks: all holders, in the order of the names; the
    first gives the values. counts: whether this rank's first copy is the first of all.
    """

    def __init__(self, names, slots: list[tuple[nn.Module, str]], ranks: list[int], counts: bool):
        self.names, self.slots, self.ranks, self.counts = names, slots, ranks, counts
        self.copies: list[nn.Parameter] = [getattr(module, name) for module, name in slots]
        self.trained = _trained(self.copies[0])
        self.arrived: set[int] = set()  # which copies had a gradient in this step


class TiedParameters:
    """The tied parameters that this rank has copies of. Every rank of the pipeline makes it, before stages are wrapped.

    modules: this rank's stages, each layer under its number. The first name's values become all copies'. Names in one
    stage become one Parameter, and so do those in several stages of one rank; unless these are wrapped, since two
    wrappers would both average it: then each keeps a copy.

    A copy that was not used counts as 0, and has the sum as its gradient. Gradients from earlier steps, which zero_grad
    did not clear, are counted once.

    Raises ValueError, on every rank, for copies of other shapes, dtypes, parts or frozenness.
    """

    def __init__(self, plan: PipelinePlan, modules: dict[int, nn.Module], group=None, wrapped: bool = False):
        self.group = group
        self.rank, _ = place_in(group)
        self.ties: list[Tie] = []
        self._begun = False
        self._sets = tied_names(plan.tied)
        own = {name: p for m in modules.values() for name, p in m.named_parameters(remove_duplicate=False)}
        self._check({(names, name): _kind(own[name]) for names in self._sets for name in names if name in own})
        for names in self._sets:
            stages = [plan.stage_of(name) for name in names]
            holders = [plan.schedule.ranks_of_stages[stage] for stage in stages]
            slots: dict[int, tuple[nn.Module, str]] = {}
            for name, stage in zip(names, stages, strict=True):
                if stage in modules:
                    path, _, leaf = name.rpartition(".")
                    module = modules[stage].get_submodule(path)
                    holder, attribute = slots.setdefault(stage if wrapped else -1, (module, leaf))
                    put_in_place(getattr(module, leaf), getattr(holder, attribute), modules[stage])
            if slots:
                ranks = list(dict.fromkeys(holders))
                self._make(Tie(names, list(slots.values()), ranks, self.rank == holders[0]))

    @torch.no_grad()
    def _make(self, tie: Tie) -> None:
        """Give all copies the first one's values, and see which have gradients."""
        first, *others = tie.copies
        if tie.counts:
            for rank in tie.ranks[1:]:
                send(first.detach(), rank, self.group)
        else:
            receive(first.detach(), tie.ranks[0], self.group)
        for other in others:
            other.copy_(first)
        if len(tie.ranks) + len(tie.copies) > 2:
            for number, p in enumerate(tie.copies):
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(functools.partial(_arrive, tie.arrived, number))
            self.ties.append(tie)

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Copies that are not the first of all, for whoever counts every parameter once."""
        return [p for tie in self.ties for p in (tie.copies[1:] if tie.counts else tie.copies)]

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before a step: what is summed already stays in the first copy, and the others begin with zero.

        So the sum after the step counts it once. All ranks call it. The first time it raises ValueError, on every rank,
        if wrappers have cut the copies in different ways, or some are frozen since they were made; each time, on a rank
        whose copy another parameter has replaced, or that has been frozen or unfrozen.
        """
        if not self._begun:
            own = ((t.names, tuple(p.shape), _trained(p)) for t in self.ties for p in t.copies)
            self._check({(names, f"{names[0]} on rank {self.rank}"): tuple(kind) for names, *kind in own})
            self._begun = True
        for tie in self.ties:
            tie.arrived.clear()
            if any(getattr(module, name) is not p for (module, name), p in zip(tie.slots, tie.copies, strict=True)):
                raise ValueError(
                    f"expected {tie.names[0]} and what is tied to it to stay the same Parameter objects, found another "
                    "in a stage; wrap stages with DataParallel or memlab's fully_shard"
                )
            if any(_trained(p) != tie.trained for p in tie.copies):
                raise ValueError(
                    f"expected {tie.names[0]} and what is tied to it to stay {tie.trained}, found a copy that is not; "
                    "who waits for whose gradient was agreed on when the pipeline was made: freeze or unfreeze it on "
                    "all ranks, then plan and make another"
                )
        for p in self.counted_elsewhere():
            if p.grad is not None:
                p.grad.zero_()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After a step's last backward: give all copies the sum of all copies' gradients, in the memory they have.

        Sparse ones become dense, as where a sparse and a dense one meet in one process.
        Raises RuntimeError for a gradient that was used up during backward, as ZeroOptimizer's stage 2 does.
        """
        for tie in self.ties:
            trained = [p for p in tie.copies if p.requires_grad]
            for number, p in enumerate(tie.copies):
                if p.grad is None and number in tie.arrived:
                    raise RuntimeError(
                        f"expected the gradient of {tie.names[0]}, which is tied to {', '.join(tie.names[1:])}, after "
                        "the step, found that something used it up during backward; with ties take ZeroOptimizer's "
                        "stage 1, and step the optimizer afterwards"
                    )
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
                elif p.grad is not None and p.grad.layout != torch.strided:
                    p.grad = p.grad.to_dense()
            for p in trained[1:]:
                trained[0].grad.add_(p.grad)
            if trained and len(tie.ranks) > 1:
                self._sum(trained[0].grad, tie.ranks)
            for p in trained[1:]:
                p.grad.copy_(trained[0].grad)

    def _sum(self, gradient: Tensor, ranks: list[int]) -> None:
        """Replace it by the sum over these ranks, added in their order on each: equal to the bit."""
        flat = gradient.reshape(-1)
        for piece in flat.split(max(1, SCRATCH_BYTES // flat.element_size())):
            parts = {rank: piece if rank == self.rank else torch.empty_like(piece) for rank in ranks}
            others = [rank for rank in ranks if rank != self.rank]
            messages = [("send", piece, rank) for rank in others]
            messages += [("receive", parts[rank], rank) for rank in others]
            for transfer in begin(messages, self.group):
                transfer.wait()
            first, second, *more = parts.values()
            total = torch.add(first, second, out=piece) if not more else first + second
            for part in more:
                total = total.add_(part)
            if total is not piece:
                piece.copy_(total)
        if not gradient.is_contiguous():
            gradient.copy_(flat.view_as(gradient))

    def _check(self, own: dict[tuple[tuple[str, ...], str], tuple]) -> None:
        """Raise on every rank if tied parameters are not alike. own: what this rank knows of its copies."""
        every = told_by_all(own, self.group) if self._sets else [own]
        known = {key: kind for found in every for key, kind in found.items()}
        for names in self._sets:
            _check_alike({name: kind for (of, name), kind in known.items() if of == names})


def _kind(p: Tensor) -> tuple:
    """What must be the same of all copies, in words that can be printed."""
    cut = cut_of(p)
    return tuple(p.shape), p.dtype, _trained(p), *([] if cut is None else [cut])


def _trained(p: Tensor) -> str:
    return "trained" if p.requires_grad else "frozen"


def _check_alike(kinds: dict[str, tuple]) -> None:
    (first, expected), *others = [*kinds.items()] or [("", ())]
    for name, found in others:
        if found != expected:
            raise ValueError(
                f"expected {name} as {first}, which it is tied to, {_said(expected)}, found {_said(found)}; "
                "tie parameters that are alike, and wrap them alike (for fully_shard: each in a unit of its own)"
            )


def _said(kind: tuple) -> str:
    return " ".join(str(word) for word in kind)


def _arrive(arrived: set[int], number: int, _: Tensor) -> None:
    arrived.add(number)
