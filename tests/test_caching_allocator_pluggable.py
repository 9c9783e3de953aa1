"""The allocator in C++: it compiles, takes and counts what a runtime gives, and says what it lacks."""

import ctypes
import os
import shutil
import subprocess

import pytest
import torch

from memlab.caching_allocator import pluggable
from memlab.caching_allocator.pluggable import Counts, build, counts, run_pooled

compiler = shutil.which("g++")
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C++ compiler")

RUNTIME = """\
#include <stdlib.h>
static size_t room = 1000;
static int device = -1;
extern "C" int cudaSetDevice(int number) { device = number; return number > 7; }
extern "C" int cudaMalloc(void** address, size_t bytes) {
  if (bytes > room) return 2;
  room -= bytes;
  *address = malloc(bytes);
  return 0;
}
extern "C" int cudaFree(void* address) { free(address); return 0; }
extern "C" int current() { return device; }
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """A runtime of 1000 bytes in all."""
    folder = tmp_path_factory.mktemp("a runtime")
    (folder / "runtime.cpp").write_text(RUNTIME)
    library = folder / "libcudart.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "runtime.cpp"], check=True)
    return library


@pytest.fixture(scope="module")
def library(runtime, tmp_path_factory):
    return build(tmp_path_factory.mktemp("an allocator"), cudart=runtime)


@needs_compiler
def test_it_takes_gives_back_counts_and_tells_when_there_is_no_more(library, runtime):
    own_first = getattr(os, "RTLD_DEEPBIND", 0)  # a torch built for CUDA has brought a cudaMalloc before
    code = ctypes.CDLL(str(library), mode=own_first)
    malloc, free = code.counted_malloc, code.counted_free
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    first, second = malloc(300, 1, None), malloc(500, 3, None)
    assert first and second and first != second
    assert ctypes.CDLL(str(runtime)).current() == 3
    assert counts(library) == Counts(2, 0, 800, 800)
    assert malloc(201, 0, None) is None and malloc(5, 9, None) is None
    assert counts(library) == Counts(2, 0, 800, 800)
    free(first, 300, 1, None)
    free(None, 0, 0, None)
    assert counts(library) == Counts(2, 1, 500, 800)
    free(second, 500, 3, None)
    assert counts(library) == Counts(2, 2, 0, 800)


@needs_compiler
def test_a_compilers_complaint_is_passed_on(tmp_path, monkeypatch, runtime):
    monkeypatch.setattr(pluggable, "SOURCE", "this is no C++")
    with pytest.raises(RuntimeError, match="it said: .*this"):
        build(tmp_path, cudart=runtime)


def test_without_a_compiler_a_runtime_or_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="expected a C\\+\\+ compiler"):
        build(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    monkeypatch.setattr(pluggable, "find_library", lambda name: None)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(RuntimeError, match="expected CUDA's runtime library"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a CUDA GPU"):
        run_pooled(lambda: pytest.fail("it ran"), "nowhere.so")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or compiler is None, reason="needs a GPU and a compiler")
def test_on_a_gpu_a_step_takes_its_segments_from_it(tmp_path):
    library = build(tmp_path)
    run = run_pooled(lambda: torch.ones(3 * 2**20, device="cuda").sum().item(), library)
    assert run.result == 3 * 2**20
    assert run.counts.mallocs >= 1 and run.counts.peak_bytes >= 12 * 2**20
