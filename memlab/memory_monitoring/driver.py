"""The driver's level: bytes in use on a whole GPU, by every process, and this process's share where the driver tells.

What `nvidia-smi` shows is PyTorch's *reserved* bytes, CUDA's context, and all that other programs hold. It is what the
card runs out of. Here it is a source like the others:

    with Monitor(sources=[CUDAMemory(), GPUMemory()]) as monitor: ...

There are two ways to ask: the driver's library NVML, and the command nvidia-smi, a process a look. *Used* is what
nvidia-smi calls so since driver 510, which is asked for: without the bytes that the driver keeps for itself, which NVML
tells apart ("reserved", which are not PyTorch's). used + free is the total meant here.

PyTorch counts the GPUs that CUDA shows a process; the driver counts all, in its own order. So a card is named by its
UUID, and which one is `cuda:0` CUDA itself is asked, once this process uses it.

Source: NVML API Reference, nvmlMemory_v2_t and nvmlReturn_t.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from memlab.memory_monitoring.sources import Gone
from memlab.units import MiB

PATIENCE_SECONDS = 20
LOST = {
    1: "NVML was shut down",
    6: "the GPU is no longer found",
    9: "the driver is not loaded",
    15: "the GPU has fallen off the bus; a reboot brings it back",
    16: "the GPU must be reset before it can be used",
    18: "the driver was replaced while it ran, and no longer fits its library; reboot",
    28: "the GPU is no longer found",
    999: "the driver gives no reason; in a container its devices may have been taken away: start the container again",
}
PASSING = {10, 17, 19, 20, 22, 29}  # a timeout, the operating system, in use, no main memory, no resources, a state


class NoAnswer(Exception):
    """A way of asking the driver is not open here."""


class NotThisTime(Exception):
    """The driver is too busy to answer; the next time it may."""


class GPU(NamedTuple):
    """A GPU as the driver lists it: its index, its UUID and its name."""

    index: str
    uuid: str
    name: str


class Usage(NamedTuple):
    """A card's bytes, of all processes together: in use, and of how many."""

    used_bytes: int
    total_bytes: int


class GPUMemory:
    """A source: `driver`, the used bytes of a whole GPU, and `driver_process`, this process's, where the driver tells.

    gpu: the index that PyTorch gives it in this process, which uses CUDA already, or its UUID ("GPU-…", "MIG-…"), as
    `nvidia-smi -L` lists it. In containers the driver often hides a process's share, and on Windows it does not know:
    then the figure is left out. ways: "nvml", "nvidia-smi" or both, to be tried in order; the second starts a process
    for every look, so it is for terminals, and does not ask for shares.

    `way` is the one that answered; `uuid` says which card it is; `total_bytes` is what programs can have together.
    Raises RuntimeError with every way's reason where nobody answers, and ValueError for a GPU that is not there or a
    way that does not exist.
    """

    def __init__(self, gpu: int | str = 0, *, ways: Sequence[str] = ("nvml",), name: str | None = None):
        self.name = f"gpu {gpu}" if name is None else name

        def ask(way: str) -> tuple:
            asked = WAYS[way](_uuids(gpu) if isinstance(gpu, int) else (gpu,))
            return asked, asked.usage()

        self.way, (self._asked, usage) = _first(ways, ask)
        self.uuid, self.total_bytes = self._asked.uuid, usage.total_bytes

    def read(self) -> dict[str, int]:
        """`driver`, and `driver_process` where it is told; {} where the driver is too busy to answer this time.

        Raises Gone when the GPU, or its driver, is no longer there.
        """
        try:
            figures = {"driver": self._asked.usage().used_bytes}
            share = self._asked.share(os.getpid())
        except NotThisTime:
            return {}
        except (Gone, NoAnswer) as gone:
            raise Gone(f"{self.name} is gone: {gone}") from None
        return figures if share is None else figures | {"driver_process": share}

    def peaks(self) -> dict[str, int]:
        """{}: the driver keeps no high-water mark, so of this level only what was looked at is known."""
        return {}


def list_gpus(ways: Sequence[str] = ("nvml", "nvidia-smi")) -> list[GPU]:
    """Every GPU that the driver has, in its order, whatever CUDA_VISIBLE_DEVICES says; parts of one (MIG) are not told.

    Raises RuntimeError with every way's reason where nobody answers.
    """
    return _first(ways, lambda way: WAYS[way].gpus())[1]


def _first(ways: Sequence[str], ask) -> tuple:
    """(way, what it answered) of the first that does."""
    unknown = [way for way in ways if way not in WAYS]
    if unknown or not ways:
        raise ValueError(f"expected ways of {', '.join(WAYS)}; found {', '.join(unknown) or 'none'}")
    reasons = []
    for way in ways:
        try:
            return way, ask(way)
        except (NoAnswer, NotThisTime, Gone) as reason:
            reasons.append(f"{way}: {reason}")
    raise RuntimeError(f"expected a driver that tells a GPU's bytes, found none; {'; '.join(reasons)}")


def _uuids(index: int) -> tuple[str, str]:
    """The driver's name of `cuda:{index}`, as a whole GPU and as a part of one."""
    if not torch.cuda.is_initialized():  # it must not be started for this
        raise NoAnswer("this process does not use CUDA yet; make a tensor on the GPU first, or give the GPU's UUID")
    try:
        uuid = torch.cuda.get_device_properties(index).uuid
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"expected a GPU that PyTorch has, found cuda:{index}: {error}") from None
    except AttributeError:
        raise NoAnswer("this build of PyTorch does not tell UUIDs; give the GPU's UUID") from None
    return f"GPU-{uuid}", f"MIG-{uuid}"


class NVML:
    """A GPU by NVML, through the package nvidia-ml-py. The library stays open as long as this object lives.

    names: the GPU's UUID, or several, of which one is. Raises NoAnswer where the way is not open, Gone where the driver
    is broken, ValueError for a GPU that is not there. `usage` and `share` raise Gone and NotThisTime.
    """

    def __init__(self, names: tuple[str, ...]):
        self._nvml = _opened()
        weakref.finalize(self, self._nvml.nvmlShutdown)
        for self.uuid in names:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)
                return
            except self._nvml.NVMLError as error:
                if getattr(error, "value", 0) not in (2, 6):
                    raise _ours(error) from None
        raise ValueError(f"expected a GPU that `nvidia-smi -L` lists, found {names[0]!r}")

    def usage(self) -> Usage:
        """Bytes in use."""
        found = self._told(self._nvml.nvmlDeviceGetMemoryInfo, self._handle, self._nvml.nvmlMemory_v2)
        return Usage(int(found.used), int(found.used + found.free))

    def share(self, pid: int) -> int | None:
        """The bytes of one process, its context included; None where the driver does not tell."""
        try:
            found = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        except NoAnswer:
            return None
        shares = [one.usedGpuMemory for one in found if one.pid == pid and one.usedGpuMemory is not None]
        return sum(shares) if shares else None

    @staticmethod
    def gpus() -> list[GPU]:
        """All GPUs."""
        nvml, found = _opened(), []
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    GPU(str(index), _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)))
                )
        except nvml.NVMLError as error:
            raise _ours(error) from None
        finally:
            nvml.nvmlShutdown()
        return found

    def _told(self, function, *arguments):
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise _ours(error) from None


class NvidiaSMI:
    """A GPU by the command `nvidia-smi`, a process per look; its figures are whole MiB. Errors as for NVML."""

    def __init__(self, names: tuple[str, ...]):
        listed = {gpu.uuid for gpu in self.gpus()}
        self.uuid = next((name for name in names if name in listed), names[0])

    def usage(self) -> Usage:
        """Bytes in use, as its table shows them. Raises Gone for a GPU it no longer lists, NoAnswer without figures."""
        rows = [row[1:] for row in _smi("--query-gpu=uuid,memory.used,memory.free") if row[0] == self.uuid]
        if not rows:
            raise Gone(f"nvidia-smi no longer lists {self.uuid}")
        if not all(field.isdigit() for field in rows[0]):
            raise NoAnswer(f"it tells no bytes of this GPU: {', '.join(rows[0])}")
        used, free = (int(field) * MiB for field in rows[0])
        return Usage(used, used + free)

    def share(self, pid: int) -> None:
        """None: that would be another process a look."""

    @staticmethod
    def gpus() -> list[GPU]:
        """All GPUs."""
        return [GPU(*row) for row in _smi("--query-gpu=index,uuid,name")]


def _opened():
    """NVML's Python face, initialised. Raises NoAnswer, or Gone with the reason, where it cannot be."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except (ImportError, AttributeError):
        raise NoAnswer("not installed: pip install nvidia-ml-py") from None
    except nvml.NVMLError as error:
        raise _ours(error) from None
    return nvml


WAYS = {"nvml": NVML, "nvidia-smi": NvidiaSMI}


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told


def _ours(error: Exception) -> Exception:
    """NVML's error as one of ours."""
    number = getattr(error, "value", 999)
    if number in PASSING:
        return NotThisTime(str(error))
    return Gone(f"{LOST[number]} ({error})") if number in LOST else NoAnswer(str(error))


def _smi(*query: str) -> list[list[str]]:
    """The rows of a query. Raises NoAnswer where there is no such command, Gone with what it says when it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise NoAnswer("there is no such command here")
    try:
        done = subprocess.run(
            [command, *query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except OSError as error:
        raise NoAnswer(str(error)) from None
    except subprocess.TimeoutExpired:
        raise NotThisTime(f"nvidia-smi took more than {PATIENCE_SECONDS} seconds") from None
    if done.returncode:
        said = " ".join((done.stdout + " " + done.stderr).split())
        raise Gone(f"nvidia-smi says: {said or f'nothing, and ends with status {done.returncode}'}")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
