"""A full checkpoint as one file, which ranks write and read in pieces: nobody ever has the full model in memory.

A file that torch.save wrote is a table of contents and a range of bytes for each tensor. So rank 0 writes the table and
leaves the ranges empty; every rank maps the file into its address space, where a full tensor is a view of the file, and
copies its pieces to where they belong. Reading is the same the other way. What is mapped is the kernel's page cache: it
may be dropped at any time, and ranks on one machine share it.

All ranks must call each of these, and see the same disk. What fails on one is raised on all.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.data_parallelism.agreement import raise_on_all, refuse_other_models, told_by_all
from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_of
from memlab.tensor_parallelism.state import load_full_state_dict, slots_of


def load_full(model: nn.Module, path: str | os.PathLike, group=None) -> None:
    """Load a full model's state dict that lies in a file into this rank's parts, of which it reads only the pieces.

    path: of what torch.save wrote of a plain model's state_dict(), or `save_full` on any number of ranks.
    Raises what torch.load and `load_full_state_dict` raise.
    """
    state = _on_all(lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=True), group)
    load_full_state_dict(model, state, group)


def save_full(model: nn.Module, path: str | os.PathLike, group=None) -> None:
    """Write the full model's state dict into a file, each rank its pieces.

    torch.load reads it, as a plain model's; tied parameters are written once. It stands at `path` when all is written,
    in place of one that was there before; a failure leaves that as it was. Of groups that save to one path at a time,
    such as replicas of one model, each writes a whole file, and the last one stays: let one save. The file's checksums
    are those of empty tensors: torch.load does not look at them, but unzip would complain. Not on Windows.

    Raises OSError where a rank cannot write, also for want of room; ValueError where ranks have different models.
    """
    slots = slots_of(model, group)
    cuts = {f"the cut of {name}": (cut.shape, cut.sections) for name, p in slots.items() if (cut := cut_of(p))}
    refuse_other_models(model, group, **cuts)
    path, first = Path(path), place_in(group)[0] == 0
    token = told_by_all(secrets.token_hex(4), group)[0]  # a name that these ranks know, and no other group
    unfinished = path.with_name(f"{path.name}.{token}.unfinished")
    try:
        _on_all(lambda: first and _write_outline(slots, unfinished), group)
        _on_all(lambda: _write_pieces(slots, unfinished, first), group)
        _on_all(lambda: first and unfinished.replace(path), group)
    finally:
        if first:
            unfinished.unlink(missing_ok=True)


def _on_all(step: Callable[[], Any], group) -> Any:
    """Do a step and return what it gives; raise on every rank if it fails on one."""
    result, problem = None, None
    try:
        result = step()
    except Exception as error:
        problem = error
    raise_on_all(problem, group)
    return result


def _write_outline(slots: Mapping, path: Path) -> None:
    """A file with room for every tensor, and nothing in it."""
    full: dict[int, Tensor] = {}  # a tied parameter once

    def room(t: Tensor) -> Tensor:
        shape = t.shape if (cut := cut_of(t)) is None else cut.shape
        return full.setdefault(id(t), torch.empty(shape, dtype=t.dtype, device="cpu"))

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save({name: room(t) for name, t in slots.items()}, path)
        except RuntimeError as error:  # a missing folder, a full disk
            raise OSError(f"expected a file that can be written, found {path.name} cannot: {error}") from error
    if hasattr(os, "posix_fallocate"):  # a full disk is told of here; later, writing to the map would kill the process
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


@torch.no_grad()
def _write_pieces(slots: Mapping, path: Path, first_rank: bool) -> None:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # what is written there is written to the file
        file = torch.load(path, mmap=True, weights_only=True)
    for name, mine in slots.items():
        if (cut := cut_of(mine)) is not None:
            cut.write(mine, file[name])
        elif first_rank:
            file[name].copy_(mine)
    with open(path, "rb+") as written:
        os.fsync(written.fileno())
