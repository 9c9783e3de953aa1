"""The driver's level, asked of stand-ins for NVML and nvidia-smi; which card is whose; and GPUs that go away."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

import memlab.memory_monitoring.driver as driver_page
from memlab.memory_monitoring import Gone, GPUMemory, list_gpus
from memlab.units import GiB, MiB
from tests.harness import refused

A, B, C = "GPU-aaaa0001-0000", "GPU-bbbb0002-0000", "GPU-bbbb0003-0000"
TOTAL, KEPT = 80 * GiB, 600 * MiB


class NVMLError(Exception):
    def __init__(self, value: int):
        self.value = value
        super().__init__(f"NVML error {value}")


class StandInNVML(types.ModuleType):
    """What memlab calls of nvidia-ml-py, over cards that a test describes: uuid → used bytes."""

    def __init__(self, used: dict[str, int], names: tuple[str, ...] = (), parts: dict[str, str] | None = None):
        super().__init__("pynvml")
        self.NVMLError, self.nvmlMemory_v2 = NVMLError, 0x02000028
        self.used, self.names, self.parts = used, names or ("A GPU",) * len(used), parts or {}
        self.errors: dict[str, int] = {}  # uuid, or function → NVML's error
        self.processes: dict[str, list] = {}
        self.open, self.calls = 0, Counter()

    def _call(self, function: str, uuid: str | None = None) -> None:
        self.calls[function] += 1
        assert self.open > 0, f"{function} without nvmlInit"
        for key in (function, uuid):
            if key in self.errors:
                raise NVMLError(self.errors[key])

    def nvmlInit(self):
        if "nvmlInit" in self.errors:
            raise NVMLError(self.errors["nvmlInit"])
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        self._call("nvmlDeviceGetCount")
        return len(self.used) - len(self.parts)

    def nvmlDeviceGetHandleByIndex(self, index):
        uuid = [uuid for uuid in self.used if uuid not in self.parts][index]
        self._call("nvmlDeviceGetHandleByIndex", uuid)
        return uuid

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._call("nvmlDeviceGetHandleByUUID", uuid)
        if uuid not in self.used:
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle.encode()  # older packages answer in bytes

    def nvmlDeviceGetName(self, handle):
        return self.names[list(self.used).index(handle)]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self._call("nvmlDeviceGetMemoryInfo", handle)
        used = self.used[handle]
        if version is None:
            return types.SimpleNamespace(total=TOTAL, used=used + KEPT, free=TOTAL - used - KEPT)
        self._call("version 2")
        return types.SimpleNamespace(total=TOTAL, reserved=KEPT, used=used, free=TOTAL - used - KEPT)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._call("processes")
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.get(handle, [])]


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    """No NVML, no CUDA, no nvidia-smi, and nothing in the environment, but what a test puts there."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    for name in ("mem_get_info", "get_device_properties", "device_count", "is_available"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} without a GPU"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.fixture
def nvml(monkeypatch):
    """NVML with three cards."""
    cuda(monkeypatch, (A, B, C))
    library = StandInNVML({A: 1 * GiB, B: 2 * GiB, C: 3 * GiB})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def cuda(monkeypatch, uuids):
    """CUDA in use in this process, with these cards."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def properties(index):
        if not 0 <= index < len(uuids):
            raise AssertionError("Invalid device id")
        return types.SimpleNamespace(uuid=uuids[index].removeprefix("GPU-").removeprefix("MIG-"))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def smi(monkeypatch, tmp_path, body: str) -> Path:
    """A stand-in nvidia-smi, first on the PATH."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script


SMI = f"""
case "$1" in
--query-gpu=index,uuid,name) echo "0, {A}, NVIDIA H100"; echo "1, {B}, NVIDIA H100";;
--query-gpu=uuid,memory.used,memory.free) echo "{A}, 1024, 70000"; echo "{B}, 2048, 60000";;
--query-compute-apps=gpu_uuid,pid,used_memory) echo "{B}, 77, 1500"; echo "{A}, 77, 9"; echo "{B}, 78, [N/A]";;
*) echo "Field is not a valid field to query."; exit 2;;
esac
[ "$2" = --format=csv,noheader,nounits ] || exit 3
"""


def test_used_leaves_out_what_the_driver_keeps_for_itself_and_the_total_is_what_programs_can_have(nvml):
    source = GPUMemory(1)
    assert source.read() == {"driver": 2 * GiB}
    assert (source.total_bytes, source.uuid, source.way, source.name) == (TOTAL - KEPT, B, "nvml", "gpu 1")
    assert source.peaks() == {}


def test_this_processs_share_is_told_and_left_out_where_the_driver_hides_it(nvml):
    nvml.processes[A] = [(os.getpid(), 300 * MiB), (7, 40 * MiB), (7, 2 * MiB), (8, None)]
    assert GPUMemory(0).read() == {"driver": 1 * GiB, "driver_process": 300 * MiB}
    nvml.processes[A] = [(os.getpid(), None), (7, 40 * MiB)]
    assert GPUMemory(0).read() == {"driver": 1 * GiB}
    nvml.errors["processes"] = 3
    assert GPUMemory(0).read() == {"driver": 1 * GiB}


def test_nvidia_smi_is_asked_only_when_wished_and_answers_in_whole_mib(monkeypatch, tmp_path):
    cuda(monkeypatch, (A, B))
    smi(monkeypatch, tmp_path, SMI)
    refused(lambda: GPUMemory(0), RuntimeError, "pip install nvidia-ml-py")
    source = GPUMemory(1, ways=("nvml", "nvidia-smi"))
    assert source.read() == {"driver": 2048 * MiB}
    assert (source.total_bytes, source.uuid) == (62048 * MiB, B)
    assert GPUMemory(B, ways=["nvidia-smi"]).read() == {"driver": 2048 * MiB}
    assert [gpu.uuid for gpu in list_gpus()] == [A, B]
    smi(monkeypatch, tmp_path, "exec /bin/sleep 30")
    monkeypatch.setattr(driver_page, "PATIENCE_SECONDS", 0.05)
    assert source.read() == {}  # one that hangs leaves the figures out once
    monkeypatch.undo()
    smi(monkeypatch, tmp_path, f'echo "{A}, [N/A], [N/A]"')
    words = "nvidia-smi: it tells no bytes of this GPU: [N/A]"
    refused(lambda: GPUMemory(A, ways=["nvidia-smi"]), RuntimeError, words)
    smi(monkeypatch, tmp_path, "echo GPU is lost.; exit 15")
    with pytest.raises(Gone, match="gpu 1 is gone: nvidia-smi says: GPU is lost."):
        source.read()
    smi(monkeypatch, tmp_path, f"echo '{A}, 1, 2'")
    with pytest.raises(Gone, match="no longer lists"):
        source.read()
    words = "expected ways of nvml, nvidia-smi; found rocm"
    refused(lambda: GPUMemory(0, ways=("nvml", "rocm")), ValueError, words)
    refused(lambda: GPUMemory(0, ways=()), ValueError, "found none")


def test_which_card_has_an_index_is_asked_of_cuda_once_the_process_uses_it(nvml, monkeypatch):
    cuda(monkeypatch, (C, A))  # whatever the environment says
    assert [GPUMemory(0).uuid, GPUMemory(1).uuid, GPUMemory(B).uuid] == [C, A, B]
    refused(lambda: GPUMemory(2), ValueError, "expected a GPU that PyTorch has, found cuda:2")
    refused(lambda: GPUMemory(-1), ValueError, "expected a GPU")
    refused(lambda: GPUMemory("GPU-dddd"), ValueError, "`nvidia-smi -L` lists, found 'GPU-dddd'")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert GPUMemory(B).read() == {"driver": 2 * GiB}
    refused(lambda: GPUMemory(0), RuntimeError, "nvml: this process does not use CUDA yet; make a tensor on the GPU")


def test_a_gpu_or_driver_that_is_lost_is_gone_with_the_reason_and_a_trouble_that_passes_is_left_out_once(nvml):
    source = GPUMemory(0)
    for number, reason in driver_page.LOST.items():
        nvml.errors[A] = number
        with pytest.raises(Gone) as gone:
            source.read()
        assert str(gone.value).startswith("gpu 0 is gone: ") and reason in str(gone.value)
    for number in sorted(driver_page.PASSING):
        nvml.errors[A] = number
        assert source.read() == {}
    nvml.errors.clear()
    assert source.read() == {"driver": 1 * GiB}


def test_a_part_of_a_gpu_is_watched_by_its_own_name(nvml, monkeypatch):
    nvml.used["MIG-1111"], nvml.parts["MIG-1111"] = 10 * GiB, A
    assert [gpu.uuid for gpu in list_gpus()] == [A, B, C]
    assert GPUMemory("MIG-1111").read() == {"driver": 10 * GiB}
    cuda(monkeypatch, ("MIG-1111",))
    assert GPUMemory(0).uuid == "MIG-1111"


def test_a_broken_driver_says_so_at_once_with_every_ways_reason(nvml):
    nvml.errors["nvmlInit"] = 18
    with pytest.raises(
        RuntimeError, match=r"expected a driver that tells a GPU's bytes, found none; nvml: the driver was replaced"
    ):
        GPUMemory(0)
    with pytest.raises(RuntimeError, match=r"nvml: the driver was replaced.*; nvidia-smi: there is no such command"):
        list_gpus()


def test_nvml_is_shut_down_as_often_as_it_was_opened_and_a_look_makes_no_process(nvml, monkeypatch):
    source = GPUMemory(0)
    list_gpus()
    for wrong in (9, "GPU-dddd"):
        refused(lambda wrong=wrong: GPUMemory(wrong), ValueError, "expected a GPU")
    gc.collect()
    assert nvml.open == 1
    monkeypatch.setattr(driver_page.subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    nvml.calls.clear()
    source.read()
    assert nvml.calls == {"nvmlDeviceGetMemoryInfo": 1, "version 2": 1, "processes": 1}
    del source
    gc.collect()
    assert nvml.open == 0


def test_the_package_that_pip_installs_has_every_name_that_is_used(monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    pynvml = importlib.import_module("pynvml")
    used = set(re.findall(r"\bnvml[A-Z]\w+|NVMLError|nvmlMemory_v2", Path(driver_page.__file__).read_text()))
    missing = [name for name in used - {"nvmlMemory_v2_t", "nvmlReturn_t"} if not hasattr(pynvml, name)]
    assert len(used) > 10 and missing == []
    numbers = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert numbers > {*driver_page.LOST, *driver_page.PASSING}
