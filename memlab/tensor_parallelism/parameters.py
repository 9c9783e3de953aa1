"""Parameters of which a rank has a part, from the first moment on: the full tensor never exists on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.tensor_parallelism.cuts import Cut


def make_part(cut: Cut, device=None, dtype=None) -> nn.Parameter:
    """An uninitialised parameter of cut.part_shape, that knows its cut."""
    parameter = nn.Parameter(torch.empty(cut.part_shape, device=device, dtype=dtype))
    parameter._cut = cut
    return parameter


@torch.no_grad()
def draw_part_(part: Tensor, cut: Cut, draw: Callable[[Tensor], Tensor]) -> None:
    """Fill a part with its share of what `draw` would fill the full tensor with, a row at a time."""
    if part.is_meta:
        return
    rows = torch.empty(1, *cut.shape[1:], dtype=part.dtype)
    own = {}
    if cut.dim == 0:
        place = 0
        for start, stop in cut.ranges():
            own.update({row: place + row - start for row in range(start, stop)})
            place += stop - start
    for row in range(cut.shape[0]):
        numbers = draw(rows)[0]
        if cut.dim == 0:
            if row in own:
                part[own[row]] = numbers
        else:
            start, stop = cut.ranges()[0]
            part[row] = numbers[start:stop]
