"""An allocator of your own under PyTorch, on a GPU: thirty lines of C++ that take segments and count them.

Two ways in, with different reach:

    torch.cuda.MemPool(allocator.allocator()), used in `with torch.cuda.use_mem_pool(pool):`
        a pool of the caching allocator that gets its *segments* from yours: blocks are cut, cached and reused as ever.
        It holds for this thread alone; backward runs in others.
    torch.cuda.memory.change_current_allocator(allocator)
        every request of the process goes to yours, rounded by nobody, cached by nobody. Before the first one only.

Both take `torch.cuda.memory.CUDAPluggableAllocator(path, "name of malloc", "name of free")`, a shared library with

    void* malloc(ssize_t bytes, int device, cudaStream_t stream)                 nullptr: out of memory
    void free(void* address, size_t bytes, int device, cudaStream_t stream)

Source: torch/cuda/memory.py, PyTorch 2.11 to 2.15 (whose docstring leaves out the device of free).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = """\
#include <atomic>
#include <cstddef>
#include <sys/types.h>

// Declared here, so that no CUDA headers are needed: a stream is a pointer, an error a number, 0 is success.
extern "C" int cudaSetDevice(int device);
extern "C" int cudaMalloc(void** address, size_t bytes);
extern "C" int cudaFree(void* address);

static std::atomic<long long> mallocs{0}, frees{0}, held{0}, peak{0};

extern "C" void* counted_malloc(ssize_t bytes, int device, void* stream) {
  void* address = nullptr;
  if (cudaSetDevice(device) != 0 || cudaMalloc(&address, static_cast<size_t>(bytes)) != 0) return nullptr;
  ++mallocs;
  long long now = held += bytes, before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {}
  return address;
}

extern "C" void counted_free(void* address, size_t bytes, int device, void* stream) {
  if (address == nullptr || cudaSetDevice(device) != 0 || cudaFree(address) != 0) return;
  ++frees;
  held -= static_cast<long long>(bytes);
}

extern "C" void counts(long long* out) { out[0] = mallocs; out[1] = frees; out[2] = held; out[3] = peak; }
"""


class Counts(NamedTuple):
    """What went through the allocator so far: calls that succeeded, and bytes."""

    mallocs: int
    frees: int
    held_bytes: int
    peak_bytes: int


class PooledRun(NamedTuple):
    """What a step returned that ran in a pool of counted segments, and what it took."""

    result: object
    counts: Counts


def build(folder: str | Path, *, cudart: str | Path | None = None) -> Path:
    """Compile SOURCE in `folder` into a shared library, with the machine's C++ compiler; its path.

    cudart: CUDA's runtime library; None: the one that PyTorch brought, or the system's.

    Raises RuntimeError where there is no compiler or no such library, or the compiler fails, and says which.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("expected a C++ compiler, g++ or clang++, to build the allocator; found none")
    cudart = Path(cudart or _find_cudart())
    folder = Path(folder)
    source, library = folder / "counted.cpp", folder / "libcounted.so"
    source.write_text(SOURCE, encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-O2", "-std=c++17", "-o", str(library), str(source)]
    done = subprocess.run(
        [*command, str(cudart), f"-Wl,-rpath,{cudart.resolve().parent}"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"expected {compiler} to build {source}; it said: {done.stderr.strip()[-500:]}")
    return library


def _find_cudart() -> str:
    beside_torch = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libcudart.so*"))
    found = str(beside_torch[-1]) if beside_torch else find_library("cudart")
    if not found:
        raise RuntimeError(
            "expected CUDA's runtime library, libcudart, which a PyTorch for CUDA brings; found none. "
            "An allocator under PyTorch needs a GPU; on this machine, read SOURCE"
        )
    return found


def counts(library: str | Path) -> Counts:
    """What went through the allocator of a library, in this process."""
    out = (ctypes.c_longlong * 4)()
    ctypes.CDLL(str(library)).counts(out)
    return Counts(*out)


def run_pooled(step: Callable[[], object], library: str | Path) -> PooledRun:
    """Run `step()` with every request of this thread served from a pool whose segments `library` takes.

    Raises RuntimeError without a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA GPU to run a step in a memory pool on; found none")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "counted_malloc", "counted_free")
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        result = step()
    torch.cuda.synchronize()
    return PooledRun(result, counts(library))
