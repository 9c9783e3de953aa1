"""Three ways to ask NVIDIA's driver about a GPU: its library NVML, CUDA in this process, and the command nvidia-smi.

*Used* is what nvidia-smi calls so since driver 510: without the bytes that the driver keeps for itself, which NVML's
second version tells apart ("reserved", which are not PyTorch's). Where only the first version is, used has them
inside. used + free is the total meant here, so a share of the total means the same each time.

Source: NVML API Reference, nvmlMemory_v2_t and nvmlReturn_t.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import weakref
from typing import NamedTuple

import torch

from memlab.memory_monitoring.sources import Gone
from memlab.memory_monitoring.visible import GPU, NoAnswer, visible_uuid
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


class NotThisTime(Exception):
    """The driver is too busy to answer; the next time it may."""


class Usage(NamedTuple):
    """A card's bytes, of all processes together: in use, and of how many."""

    used_bytes: int
    total_bytes: int


class NVML:
    """A GPU by NVML, through the package nvidia-ml-py. The library stays open as long as this object lives.

    gpu: PyTorch's index in this process, or a UUID. Raises NoAnswer where the way is not open, Gone where the driver is
    broken, ValueError for a GPU that is not there. `usage` and `share` raise Gone and NotThisTime.
    """

    def __init__(self, gpu: int | str):
        self._nvml = _opened()
        weakref.finalize(self, self._nvml.nvmlShutdown)
        self.uuid = visible_uuid(gpu, _nvml_list(self._nvml)) if isinstance(gpu, int) else gpu
        if not self.uuid:
            raise Gone(f"the driver lists {gpu}, which does not answer")
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", 0) in (2, 6):
                raise ValueError(f"expected a GPU that `nvidia-smi -L` lists, found {gpu!r}") from None
            raise _ours(error) from None

    def usage(self) -> Usage:
        """Bytes in use, by version 2 where there is one."""
        ask, handle = self._nvml.nvmlDeviceGetMemoryInfo, self._handle
        try:
            found = self._told(ask, handle, self._nvml.nvmlMemory_v2)
        except (NoAnswer, TypeError, AttributeError):  # a driver, or a package, from before it
            found = self._told(ask, handle)
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
        """All GPUs, and the parts (MIG) of each."""
        nvml = _opened()
        try:
            return _nvml_list(nvml)
        finally:
            nvml.nvmlShutdown()

    def _told(self, function, *arguments):
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise _ours(error) from None


class CUDA:
    """A GPU by `torch.cuda.mem_get_info`, where this process uses it already: it would make a context there otherwise.

    gpu: PyTorch's index. Raises NoAnswer where the way is not open, ValueError for a GPU that is not there. Shares are
    not told.
    """

    uuid = ""

    def __init__(self, gpu: int | str):
        if not isinstance(gpu, int):
            raise NoAnswer("knows GPUs by PyTorch's index alone")
        if not torch.cuda.is_initialized():
            raise NoAnswer("this process does not use CUDA yet; make a tensor on the GPU first")
        if not 0 <= gpu < torch.cuda.device_count():
            raise ValueError(f"expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, found cuda:{gpu}")
        in_use = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        if in_use is not None and not in_use(gpu):
            raise NoAnswer(f"this process does not use cuda:{gpu} yet; make a tensor on it first")
        self._gpu = gpu

    def usage(self) -> Usage:
        """Bytes in use, what the driver keeps for itself left out of both. Raises Gone where CUDA answers no more."""
        try:
            free, total = torch.cuda.mem_get_info(self._gpu)
        except RuntimeError as error:
            raise Gone(f"CUDA answers no more: {str(error).splitlines()[0]}") from None
        return Usage(total - free, total)

    def share(self, pid: int) -> None:
        """None: CUDA does not tell."""


class NvidiaSMI:
    """A GPU by the command `nvidia-smi`, a process per look; its figures are whole MiB. Errors as for NVML."""

    def __init__(self, gpu: int | str):
        self.uuid = visible_uuid(gpu, self.gpus()) if isinstance(gpu, int) else gpu

    def usage(self) -> Usage:
        """Bytes in use, as its table shows them. Raises Gone for a GPU it no longer lists, NoAnswer without figures."""
        rows = [row[1:] for row in _smi("--query-gpu=uuid,memory.used,memory.free") if row[0] == self.uuid]
        if not rows:
            raise Gone(f"nvidia-smi no longer lists {self.uuid}")
        if not all(field.isdigit() for field in rows[0]):
            raise NoAnswer(f"it tells no bytes of this GPU: {', '.join(rows[0])}")
        used, free = (int(field) * MiB for field in rows[0])
        return Usage(used, used + free)

    def share(self, pid: int) -> int | None:
        """The bytes of one process; None where they are not told."""
        rows = _smi("--query-compute-apps=gpu_uuid,pid,used_memory")
        shares = [row[2] for row in rows if row[:2] == [self.uuid, str(pid)] and row[2].isdigit()]
        return sum(map(int, shares)) * MiB if shares else None

    @staticmethod
    def gpus() -> list[GPU]:
        """All GPUs; their parts (MIG) are not told apart."""
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


def _nvml_list(nvml) -> list[GPU]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetName(handle))
            found.append(GPU(str(index), _text(nvml.nvmlDeviceGetUUID(handle)), name))
        except nvml.NVMLError as error:
            found.append(GPU(str(index), "", f"does not answer: {_ours(error)}"))
            continue
        for part in range(_told_or(0, nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)):
            handle_of_part = _told_or(None, nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, part)
            if handle_of_part is not None:
                found.append(GPU(f"{index}:{part}", _text(nvml.nvmlDeviceGetUUID(handle_of_part)), name))
    return found


def _told_or(otherwise, nvml, function: str, *arguments):
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return otherwise


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
