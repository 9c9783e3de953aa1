"""Which card is `cuda:0`? PyTorch counts the GPUs that CUDA shows a process; the driver counts all, in its own order.

CUDA_VISIBLE_DEVICES chooses and sorts: "2,0" makes the driver's GPU 2 PyTorch's cuda:0. It also takes UUIDs, which may
be cut short ("GPU-8932f9"), and parts of a GPU ("MIG-…"). And without it CUDA's order need not be the driver's: CUDA
puts the fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. So a UUID is what names a card, here and for NVML.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch


class NoAnswer(Exception):
    """A way of asking the driver is not open here."""


class GPU(NamedTuple):
    """A GPU as the driver lists it: its index, "0:1" for a part (MIG) of one, its UUID and its name."""

    index: str
    uuid: str
    name: str


def visible_uuid(index: int, listed: Sequence[GPU]) -> str:
    """The UUID of the GPU that is `cuda:{index}` in this process; `listed`: all that the driver has, in its order.

    Where CUDA runs in this process already, it is asked, and the answer is sure. Elsewhere it must not be started for
    this, and the environment is read as CUDA would.

    Raises ValueError for an index that this process does not see, NoAnswer where only CUDA itself could tell.
    """
    if torch.cuda.is_initialized():
        return _told_by_cuda(index, listed)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    whole = [gpu for gpu in listed if ":" not in gpu.index]
    if chosen is None:
        uuids = [gpu.uuid for gpu in _in_cudas_order(whole)]
    elif chosen.startswith(("GPU-", "MIG-")):
        uuids = _by_uuid(chosen, [gpu.uuid for gpu in listed])
    else:
        places = _by_place(chosen)
        seen = next((i for i, place in enumerate(places) if place >= len(whole)), len(places))
        uuids = [_in_cudas_order(whole)[place].uuid for place in places[:seen]]
    if not 0 <= index < len(uuids):
        raise ValueError(
            f"expected a GPU that this process sees, cuda:0 to cuda:{len(uuids) - 1}, found cuda:{index}; "
            f"CUDA_VISIBLE_DEVICES is {chosen!r} and the driver has {len(whole)}"
            if uuids
            else f"expected a GPU, found none that this process sees: CUDA_VISIBLE_DEVICES is {chosen!r}"
        )
    parts = [gpu for gpu in listed if ":" in gpu.index and gpu.index.split(":")[0] == _index_of(uuids[index], listed)]
    if parts:
        raise NoAnswer(f"cuda:{index} is cut in parts (MIG), and CUDA picks one; name it: {parts[0].uuid!r}, …")
    return uuids[index]


def _told_by_cuda(index: int, listed: Sequence[GPU]) -> str:
    try:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"expected a GPU that PyTorch has, found cuda:{index}: {error}") from None
    except AttributeError:
        raise NoAnswer("this build of PyTorch does not tell UUIDs") from None
    known = {gpu.uuid for gpu in listed}
    return next((name for name in (f"MIG-{uuid}", f"GPU-{uuid}") if name in known), f"GPU-{uuid}")


def _in_cudas_order(whole: list[GPU]) -> list[GPU]:
    """The GPUs as CUDA counts them. Raises NoAnswer where different ones are sorted by speed."""
    if len({gpu.name for gpu in whole if gpu.uuid}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise NoAnswer(
            "the GPUs here differ, and CUDA counts the fastest first, the driver does not; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or give the UUID that `nvidia-smi -L` shows"
        )
    return whole


def _by_uuid(chosen: str, uuids: list[str]) -> list[str]:
    """UUIDs from their beginnings. One that is no GPU's, or several's, ends the list; a repeated one empties it."""
    found: list[str] = []
    for beginning in chosen.split(","):
        fits = [uuid for uuid in uuids if uuid.startswith(beginning.strip())]
        if beginning.startswith("MIG-GPU-") and not fits:
            fits = [beginning.strip()]  # an older driver's name for a part, which NVML reads as it is
        if len(fits) != 1:
            break
        if fits[0] in found:
            return []
        found += fits
    return found


def _by_place(chosen: str) -> list[int]:
    """Indices as CUDA reads them: "1gpu" is 1; what is no number ends the list, and a repeated one empties it."""
    places: list[int] = []
    for part in chosen.split(","):
        number = re.match(r"\s*\+?(\d+)", part)
        if number is None:
            break
        if int(number[1]) in places:
            return []
        places.append(int(number[1]))
    return places


def _index_of(uuid: str, listed: Sequence[GPU]) -> str:
    return next((gpu.index for gpu in listed if gpu.uuid == uuid), "")
