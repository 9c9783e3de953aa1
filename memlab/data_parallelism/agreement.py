"""What ranks agree on, so that they compute one thing: the weights to begin with, what was used, how much there is.

A collective that one rank calls and another does not never ends. So whatever a rank decides by itself, and acts on in
company, is settled in company first.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from memlab.ranks import place_in


def told_by_all(mine: Any, group=None) -> list:
    """What every rank of the group says, by rank: objects that pickle takes. Imagined ranks say what this one does."""
    rank, ranks = place_in(group)
    every = [mine] * ranks
    if ranks > 1 and distributed.get_backend(group) != "fake":
        distributed.all_gather_object(every, mine, group=group)
        every[rank] = mine  # itself, and no copy: an error has its traceback
    return every


def raise_on_all(problem: Exception | None, group=None) -> None:
    """Raise on every rank what the first rank that has a problem found; without one on any, nothing.

    One that cannot travel is a RuntimeError in its words on all others.
    """
    for one in told_by_all(_that_travels(problem), group):
        if one is not None:
            raise one


def _that_travels(problem: Exception | None) -> Exception | None:
    """It, or if its class cannot be pickled, or made again from `args`, its words."""
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        words = RuntimeError(f"{type(problem).__name__}: {problem}")
        words.__cause__ = problem
        return words
    return problem


@torch.no_grad()
def start_equal(module: nn.Module, group=None, **settings) -> None:
    """Give every rank rank 0's parameters and buffers.

    Raises ValueError on all ranks, naming the first that differs from rank 0 in a name, shape, dtype or requires_grad,
    or in one of the settings; and for what `refuse_unfit` and `refuse_other_parts` refuse, TypeError for a sparse
    buffer.
    """
    refuse_unfit((*module.named_parameters(), *module.named_buffers()))
    refuse_other_models(module, group, **settings)
    refuse_other_parts(module.parameters(), group)
    fill_from_rank_0((*module.parameters(), *module.buffers()), group)


@torch.no_grad()
def fill_from_rank_0(tensors: Iterable[Tensor], group=None) -> None:
    """Give every rank rank 0's numbers in these tensors, of any strides and dtypes. Every rank calls it.

    A broadcast fills memory from end to end, whatever the strides say; and of bytes, since neither gloo nor NCCL knows
    int16, say. Raises TypeError for one that is not dense, whose numbers no other rank has a place for.
    """
    tensors = list(tensors)
    for t in tensors:
        if t.layout is not torch.strided:
            raise TypeError(
                f"expected dense tensors to fill with rank 0's, found one of {t.layout} and shape {tuple(t.shape)}; "
                "use to_dense(), or keep it in a plain attribute and make it on every rank"
            )
    tensors = [_unexpanded(t.detach()) for t in tensors if t.numel()]
    dense = [t.contiguous().resolve_conj().resolve_neg() for t in tensors]
    wires = [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in dense]
    for work in [distributed.broadcast(t, group=group, group_src=0, async_op=True) for t in wires]:
        work.wait()
    for t, received in zip(tensors, dense, strict=True):
        if received is not t:
            t.copy_(received)


def refuse_unfit(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError, naming it, for a tensor without memory, or whose gradients are to be of another dtype."""
    for name, t in named:
        if t.is_meta or nn.parameter.is_lazy(t):
            raise ValueError(f"expected parameters and buffers with memory, found none at {name}; initialise it first")
        wanted = getattr(t, "grad_dtype", t.dtype) if t.is_leaf else t.dtype  # torch 2.11 may have none
        if wanted not in (None, t.dtype):
            raise ValueError(
                f"expected gradients in the dtype of their parameters, found {name} of {t.dtype} with a grad_dtype of "
                f"{wanted}, in which nothing is averaged here; leave it, or keep the parameter itself in {wanted}"
            )


def refuse_extra_state(names: Iterable[str]) -> None:
    """Raise ValueError for what a module's `get_extra_state` returned: nobody knows which part of it a rank has."""
    for name in names:
        if name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            raise ValueError(
                f"expected parameters and buffers in a state dict, found {name}, a module's extra state; save it beside"
            )


def _unexpanded(t: Tensor) -> Tensor:
    """A view of each number once, where `expand` shows one memory several times."""
    return t[tuple(0 if stride == 0 else slice(None) for stride in t.stride())]


def refuse_other_models(module: nn.Module, group=None, **settings) -> None:
    """Raise ValueError, on every rank alike, if a rank's model is not of rank 0's names, shapes, dtypes, settings."""
    if distributed.get_backend(group) == "fake":  # imagined ranks have no models
        return
    mine = {name: str(value) for name, value in settings.items()}
    mine |= {name: f"{tuple(b.shape)} of {b.dtype}" for name, b in module.named_buffers()}
    mine |= {name: said(p) for name, p in module.named_parameters()}
    refuse_others(mine, group)


def refuse_other_parts(parameters: Iterable[Tensor], group=None) -> None:
    """Raise ValueError, on every rank alike, if ranks hold other parts of what chapter 14 has split.

    Parts have one shape, and are other numbers: one rank's would become everybody's. Of whole parameters nobody asks.
    """
    mine = sorted({(cut.rank, cut.ranks) for p in parameters if (cut := part_of(p)) is not None})
    for rank, theirs in enumerate(told_by_all(mine, group) if mine else ()):
        if theirs != mine:
            of = lambda parts: " and ".join(f"part {part} of {ranks}" for part, ranks in parts) or "whole ones"  # noqa: E731
            raise ValueError(
                f"expected ranks that hold the same parts of a split model, found {of(mine)} on rank "
                f"{place_in(group)[0]} and {of(theirs)} on rank {rank}; give the data ranks' group, as "
                "mesh(data=…, tensor=…) makes it"
            )


def part_of(p: Tensor) -> Any:
    """The cut by which a parameter is a rank's part of a split one (chapter 14's `cut_of`), or None."""
    return getattr(p, "_cut", None)


def said(p: Tensor) -> str:
    """What of a parameter has to be the same on all ranks."""
    what = "" if part_of(p) is None else "a part, "
    return f"{what}{tuple(p.shape)} of {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"


def refuse_others(mine: dict[str, str], group=None) -> None:
    """Raise ValueError, on every rank alike, if a rank has other things to say by name than rank 0."""
    models = told_by_all(mine, group)
    for rank, theirs in enumerate(models):
        for name in [*models[0], *theirs]:
            expected, found = models[0].get(name, "none"), theirs.get(name, "none")
            if expected != found:
                raise ValueError(
                    f"expected the same model on all ranks, found {name} on rank {rank}: {found}, on rank 0: "
                    f"{expected}; build it from the same configuration on each"
                )
        if list(theirs) != list(models[0]):
            raise ValueError(
                f"expected the same model on all ranks, found rank {rank}'s parameters in another order than rank 0's; "
                "build it in the same order on each"
            )


def mean_over_ranks(count: float | Tensor, group=None) -> Tensor:
    """The mean of all ranks' counts, such as numbers of rows or labels, 0-dim FP64: `accumulate(agree=...)` wants it.

    count: a number, or a tensor of one element, which stays on its device.
    """
    mean = torch.as_tensor(count, dtype=torch.float64).detach().clone().reshape(())
    if mean.is_cpu and distributed.get_backend(group) == "nccl":
        mean = mean.cuda()
    distributed.all_reduce(mean, group=group)
    return mean / distributed.get_world_size(group)
