"""A full checkpoint, read and written by ranks that hold a part each: no rank ever has the full model in its memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, distributed, nn

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_of


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load this rank's parts out of a full model's state dict, best one that lies in a file (torch.load(mmap=True))."""
    for name, p in model.state_dict(keep_vars=True).items():
        cut = cut_of(p)
        if cut is None:
            p.copy_(state[name])
            continue
        start = 0
        for piece in cut.pieces_of(state[name]):
            length = piece.shape[cut.dim]
            p.narrow(cut.dim, start, length).copy_(piece)
            start += length


@torch.no_grad()
def full_state_dict(model: nn.Module, group=None) -> dict[str, Tensor]:
    """The full model's state dict, in main memory on rank 0; {} on the others. All ranks must call it."""
    rank, ranks = place_in(group)
    full = {}
    for name, p in model.state_dict(keep_vars=True).items():
        cut = cut_of(p)
        parts = [torch.empty_like(p) for _ in range(ranks)] if rank == 0 else None
        if cut is None:
            full[name] = p.detach().cpu().clone()
            continue
        distributed.gather(p.detach().contiguous(), parts, group=group, group_dst=0)
        if rank == 0:
            sections = []
            for number, (size, pieces) in enumerate(cut.sections):
                length = size // pieces
                offset = sum(s // n for s, n in cut.sections[:number])
                sections += [part.narrow(cut.dim, offset, length) for part in parts[:: ranks // pieces]]
            full[name] = torch.cat(sections, cut.dim).cpu()
    return full if rank == 0 else {}
