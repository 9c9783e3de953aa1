"""Looking into what an op reads and makes: which of its arguments hold numbers, and whether these are finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from memlab.memory_timeline.ownership import storages_of


class Seen(NamedTuple):
    """What one tensor or scalar holds: any nan, +inf, -inf; and its largest finite |number|."""

    nan: bool
    plus: bool
    minus: bool
    largest: float

    @property
    def finite(self) -> bool:
        """Whether it holds no inf and no nan."""
        return not (self.nan or self.plus or self.minus)


def look(value: Tensor | complex) -> Seen:
    """Read a floating-point tensor of any shape, once if it is finite; or a scalar, which Python keeps in FP64."""
    if isinstance(value, Tensor):
        if value._is_zerotensor():  # such as the gradient of sgn: zeros without memory
            return Seen(False, False, False, 0.0)
        numbers = numbers_of(value)
    else:
        numbers = torch.tensor([value.real, value.imag], dtype=torch.float64, device="cpu")
    low, high = torch.stack(numbers.aminmax()).tolist() if numbers.numel() else (0.0, 0.0)
    if math.isfinite(low) and math.isfinite(high):
        return Seen(False, False, False, max(abs(low), abs(high)))
    largest = numbers.nan_to_num(0, 0, 0).abs().max().item()
    return Seen(*(bool(test(numbers).any()) for test in (torch.isnan, torch.isposinf, torch.isneginf)), largest)


def numbers_of(tensor: Tensor) -> Tensor:
    """A tensor's numbers as a real, strided tensor of 2 bytes a number or more."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.itemsize == 1 else tensor


def floats_in(values: object) -> Iterator[Tensor | complex]:
    """The floating-point tensors and scalars among an op's arguments or results, lists opened.

    Raises NotImplementedError for a nested tensor.
    """
    if isinstance(values, Tensor):
        if values.is_nested:
            raise NotImplementedError(
                "expected tensors whose numbers can be read, found a nested one; if nn.TransformerEncoder made it, "
                "call torch.backends.mha.set_fastpath_enabled(False) before"
            )
        if (values.is_floating_point() or values.is_complex()) and not values.is_meta and not values.is_mkldnn:
            yield values
    elif isinstance(values, (float, complex)):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from floats_in(value)


def bytes_of(tensor: Tensor) -> UntypedStorage:
    """The storage that holds a tensor's numbers; of a sparse one's, the last."""
    *_, storage = storages_of(tensor)
    return storage


def name_of(op: torch._ops.OpOverload) -> str:
    """An op's name without its library's and its overload's: "addmm_"."""
    return op._schema.name.partition("::")[2]


@functools.cache
def writes(op: torch._ops.OpOverload) -> tuple[set[str | int], set[str | int]] | None:
    """The arguments an op writes to, by place or name, and those it doesn't read (or not first); None: pass it over."""
    name = name_of(op)
    written, blind = set(), set()
    for place, argument in enumerate(op._schema.arguments):
        if argument.name in ("running_mean", "running_var") and name.endswith("batch_norm_backward"):
            blind.add(place)  # it has what forward saved
        if argument.alias_info is not None and argument.alias_info.is_write:
            key = argument.name if argument.kwarg_only else place
            written.add(key)
            if argument.is_out or name.removeprefix("_foreach_") in ("copy_", "fill_", "zero_"):
                blind.add(key)
    view = not written and any(result.alias_info is not None for result in op._schema.returns)
    reads_no_number = name.startswith(("empty", "new_", "resize")) or name.endswith("_like")
    return None if view or reads_no_number else (written, blind)
