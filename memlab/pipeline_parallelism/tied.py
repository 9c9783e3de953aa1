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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memlab.data_parallelism.agreement import told_by_all
from memlab.ranks import begin, place_in, receive, send
from memlab.tensor_parallelism.cuts import cut_of

if TYPE_CHECKING:
    from memlab.pipeline_parallelism.plan import PipelinePlan


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


@dataclass(eq=False)
class Tie:
    """A parameter that this rank and others have a copy of.

    module, attribute: where this rank's copy is. ranks: all holders. first: whether this one gives the values.
    arrived: whether a gradient of the copy came in this step.
    """

    names: tuple[str, ...]
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    ranks: list[int]
    first: bool
    trained: str
    arrived: bool = False


class TiedParameters:
    """The tied parameters that this rank has copies of. Every rank of the pipeline makes it, before stages are wrapped.

    modules: this rank's stages, each layer under its number. The first name's values become all copies'. Names on one
    rank become one Parameter.

    A copy that was not used counts as 0, and has the sum as its gradient. Gradients from earlier steps, which zero_grad
    did not clear, are counted once.

    Raises ValueError, on every rank, where stages are wrapped and one rank has several that share a parameter: each
    wrapper would average it.
    """

    def __init__(self, plan: PipelinePlan, modules: dict[int, nn.Module], group=None, wrapped: bool = False):
        self.group, (self.rank, _) = group, place_in(group)
        self.ties: list[Tie] = []
        self._begun, self._sets = False, tied_names(plan.tied)
        own = {name: p for m in modules.values() for name, p in m.named_parameters(remove_duplicate=False)}
        for names in self._sets:
            stages = dict.fromkeys(plan.stage_of(name) for name in names)
            ranks = list(dict.fromkeys(plan.schedule.ranks_of_stages[stage] for stage in stages))
            if wrapped and len(ranks) < len(stages):
                raise ValueError(
                    f"expected tied parameters in one stage of each rank where stages are wrapped, found {names[0]} in "
                    f"stages {', '.join(map(str, stages))} on ranks {', '.join(map(str, ranks))}; leave out wrap, or "
                    "take a schedule with fewer stages a rank"
                )
            here = [name for name in names if name in own]
            for name in here[1:]:
                put_in_place(own[name], own[here[0]], modules[plan.stage_of(name)])
            if here and len(ranks) > 1:
                path, _, attribute = here[0].rpartition(".")
                module, p = modules[plan.stage_of(here[0])].get_submodule(path), own[here[0]]
                self.ties.append(Tie(names, module, attribute, p, ranks, self.rank == ranks[0], _trained(p)))
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(functools.partial(_arrive, self.ties[-1]))
                if self.rank != ranks[0]:
                    receive(p.detach(), ranks[0], group)
                for rank in ranks[1:] if self.rank == ranks[0] else ():
                    send(p.detach(), rank, group)

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Copies that are not the first of all, for whoever counts every parameter once."""
        return [tie.parameter for tie in self.ties if not tie.first]

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before a step: what is summed already stays in the first copy, and the others begin with zero.

        So the sum after the step counts it once. All ranks call it. The first time it raises ValueError, on every rank,
        if wrappers have cut the copies in different ways, or some are frozen since they were made; each time, on a rank
        whose copy another parameter has replaced, or that has been frozen or unfrozen.
        """
        if self._sets and not self._begun:
            every = told_by_all({tie.names: _kind(tie.parameter) for tie in self.ties}, self.group)
            for names in self._sets:
                here = {f"{names[0]} on rank {rank}": own[names] for rank, own in enumerate(every) if names in own}
                _check_alike(here)
            self._begun = True
        for tie in self.ties:
            tie.arrived, p = False, tie.parameter
            if getattr(tie.module, tie.attribute) is not p or _trained(p) != tie.trained:
                raise ValueError(
                    f"expected {tie.names[0]} and what is tied to it to stay the same Parameter objects, and "
                    f"{tie.trained}, found a change; wrap stages with DataParallel or memlab's fully_shard, and freeze "
                    "or unfreeze before the pipeline is made"
                )
            if not tie.first and p.grad is not None:
                p.grad.zero_()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After a step's last backward: give all copies the sum of all copies' gradients, in the memory they have.

        Sparse ones become dense, as where a sparse and a dense one meet in one process.
        Raises RuntimeError for a gradient that was used up during backward, as ZeroOptimizer's stage 2 does.
        """
        for tie in self.ties:
            p = tie.parameter
            if not p.requires_grad:
                continue
            if p.grad is None and tie.arrived:
                raise RuntimeError(
                    f"expected the gradient of {tie.names[0]}, which is tied to {', '.join(tie.names[1:])}, after the "
                    "step, found that something used it up during backward; with ties take ZeroOptimizer's stage 1, "
                    "and step the optimizer afterwards"
                )
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.layout != torch.strided:
                p.grad = p.grad.to_dense()
            self._sum(p.grad, tie.ranks)

    def _sum(self, gradient: Tensor, ranks: list[int]) -> None:
        """Replace it by the sum over these ranks, added in their order on each: equal to the bit."""
        dense = gradient.contiguous()
        parts = {rank: dense if rank == self.rank else torch.empty_like(dense) for rank in ranks}
        others = [rank for rank in ranks if rank != self.rank]
        messages = [("send", dense, rank) for rank in others] + [("receive", parts[rank], rank) for rank in others]
        for transfer in begin(messages, self.group):
            transfer.wait()
        gradient.copy_(functools.reduce(torch.add, parts.values()))


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
                f"expected {name} as {first}, which it is tied to, {' '.join(map(str, expected))}, found "
                f"{' '.join(map(str, found))}; tie what is alike, and wrap it alike (fully_shard: in a unit of its own)"
            )


def _arrive(tie: Tie, _: Tensor) -> None:
    tie.arrived = True
