"""The driver's level: bytes in use on a whole GPU, by every process, and one process's share where the driver tells.

What `nvidia-smi` shows is PyTorch's *reserved* bytes, CUDA's context, and all that other programs hold. It is what the
card runs out of. Here it is a source like the others:

    with Monitor(sources=[CUDAMemory(), GPUMemory()]) as monitor: ...

No way of asking changes a setting, and a GPU that is cut in parts (MIG) is looked at as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from memlab.memory_monitoring.driver import CUDA, NVML, NotThisTime, NvidiaSMI
from memlab.memory_monitoring.sources import Gone
from memlab.memory_monitoring.visible import GPU, NoAnswer

WAYS = {"nvml": NVML, "cuda": CUDA, "nvidia-smi": NvidiaSMI}


class GPUMemory:
    """A source: `driver`, the used bytes of a whole GPU, and `driver_process`, one process's, where the driver tells.

    gpu: the index that PyTorch gives it in this process, or its UUID ("GPU-…", "MIG-…"), as `nvidia-smi -L` lists it.
    pid: whose share `driver_process` is; None: this process's. In containers the driver often hides it, and on Windows
    it does not know: then the figure is left out. ways: of WAYS, those to try, in order; "nvidia-smi" starts a process
    for every look, so it is for terminals.

    `way` is the one that answered; `uuid` says which card it is, "" where CUDA was asked; `total_bytes` is what
    programs can have together. Raises RuntimeError with every way's reason where nobody answers, and ValueError for a
    GPU that is not there or a way that does not exist.
    """

    def __init__(self, gpu: int | str = 0, pid: int | None = None, *, ways: Sequence[str] = ("nvml", "cuda")):
        self.pid = os.getpid() if pid is None else pid
        self.name = f"gpu {gpu}"
        self.way, self._asked, usage = _first(ways, lambda way: _looked(WAYS[way](gpu)))
        self.uuid, self.total_bytes = self._asked.uuid, usage.total_bytes

    def read(self) -> dict[str, int]:
        """`driver`, and `driver_process` where it is told; {} where the driver is too busy to answer this time.

        Raises Gone when the GPU, or its driver, is no longer there.
        """
        try:
            figures = {"driver": self._asked.usage().used_bytes}
            share = self._asked.share(self.pid)
        except NotThisTime:
            return {}
        except (Gone, NoAnswer) as gone:
            raise Gone(f"{self.name} is gone: {gone}") from None
        return figures if share is None else figures | {"driver_process": share}

    def peaks(self) -> dict[str, int]:
        """{}: the driver keeps no high-water mark, so of this level only what was looked at is known."""
        return {}


def list_gpus(ways: Sequence[str] = ("nvml", "nvidia-smi")) -> list[GPU]:
    """Every GPU that the driver has, in its order, whatever CUDA_VISIBLE_DEVICES says; parts of one (MIG) follow it.

    Raises RuntimeError with every way's reason where nobody answers.
    """
    return _first(ways, lambda way: (WAYS[way].gpus(),))[1]


def _looked(asked: NVML | CUDA | NvidiaSMI) -> tuple:
    return asked, asked.usage()


def _first(ways: Sequence[str], ask) -> tuple:
    """(way, what it answered …) of the first that does."""
    unknown = [way for way in ways if way not in WAYS]
    if unknown or not ways:
        raise ValueError(f"expected ways of {', '.join(WAYS)}; found {', '.join(unknown) or 'none'}")
    reasons = []
    for way in ways:
        try:
            return way, *ask(way)
        except (NoAnswer, NotThisTime, Gone) as reason:
            reasons.append(f"{way}: {reason}")
    raise RuntimeError(f"expected a driver that tells a GPU's bytes, found none; {'; '.join(reasons)}")
