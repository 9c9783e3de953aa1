"""A parameter larger than a chunk, stepped slice by slice: no more FP32 gradients exist than those of one slice.

An elementwise optimizer does the same to an element whether it sees the parameter or a slice of it. A slice that a
CPU's caches hold is widened, stepped and rounded there; each of these passes over a whole parameter, and each op of a
for-loop's step, would fetch it from memory anew. What the optimizer keeps between steps stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memlab.memory_arithmetic.optimizers import slice_elements
from memlab.mixed_precision.flat_group import where_it_is


def can_be_sliced(state: dict) -> bool:
    """Whether all that is kept of a parameter is a tensor like its master, or a single number.

    state: with "master", which is dense.
    """
    return all(_is_single(value) or _is_like(value, state["master"]) for value in state.values())


def in_slices(state: dict, others: list[Tensor], chunk_bytes: float) -> Iterator[tuple[dict, tuple[Tensor, ...]]]:
    """Slice by slice its state, to step on before the next is asked for, and its tensors: master and others, (n,) each.

    state: as `can_be_sliced` wants it; after the last slice it is as the optimizer left it, with whole tensors.
    others: like the master, in shape and strides. chunk_bytes: of FP32 gradients that may exist at once.
    """
    master = state["master"]
    each = slice_elements(master.numel(), chunk_bytes)
    cut = lambda tensor: tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).split(each)  # noqa: E731
    single = {name: value for name, value in state.items() if _is_single(value)}
    known = {name: cut(value) for name, value in state.items() if name not in single}
    made: dict[str, Tensor] = {}
    counted: dict[str, object] = {}

    def keep(i: int, is_last: bool, its: dict) -> None:
        for name in list(its):
            value = its.pop(name)  # so that it goes when its numbers are in the whole
            if _is_single(value):
                if is_last or name not in single:
                    counted.setdefault(name, value)  # each slice has counted to the same
            elif name not in known or value is not known[name][i]:
                if name not in made:
                    made[name] = torch.empty_like(master, dtype=value.dtype)
                cut(made[name])[i].copy_(value)

    slices = list(zip(known.pop("master"), *map(cut, others), strict=True))
    for i, tensors in enumerate(slices):
        is_last = i == len(slices) - 1
        its = {name: parts[i] for name, parts in known.items()}
        its |= {name: value if is_last else _copied(value) for name, value in single.items()}
        yield its, tensors
        left = its.keys() | {"master"}
        keep(i, is_last, its)
    for name in state.keys() - left:
        del state[name]
    state.update(counted | made)


def _is_single(value: object) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else type(value) in (type(None), bool, int, float)


def _is_like(value: object, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.stride() == master.stride()


def _copied(value: object) -> object:
    """A number of its own, for a slice that is not the last: all count from the same."""
    if not isinstance(value, Tensor):
        return value
    with where_it_is(value):
        return value.clone()
