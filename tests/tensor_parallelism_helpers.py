"""What tests of parts on ranks have in common."""

from __future__ import annotations

import torch
from torch import distributed, nn

from memlab.ranks import place_in
from memlab.tensor_parallelism import cut_of


def groups() -> list:
    """A group of one, of two and of all four ranks, with this rank in each."""
    rank, ranks = place_in()
    found = []
    for size in (1, 2, 4):
        made = [distributed.new_group(list(range(start, start + size))) for start in range(0, ranks, size)]
        found.append(made[rank // size])
    return found


def part_of(whole: nn.Module, kind: type[nn.Module], *sizes, **options) -> nn.Module:
    """This rank's part of a layer that exists whole."""
    layer = kind(*sizes, **{"dtype": whole.weight.dtype, **options})
    with torch.no_grad():
        for name, p in layer.named_parameters():
            full = whole.get_parameter(name)
            p.copy_(full if cut_of(p) is None else cut_of(p).part_of(full))
    return layer


def raised(call) -> str:
    """The error that a call ends with: its type and words, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
