"""Adam's step on masters as one CPU kernel, in C: what `adam_kernel` is on a GPU, and moves as few bytes.

PyTorch's fused Adam for CPUs wants weights, gradients and moments of one type, too. `KERNEL` computes as it does, in
FP32, with the same roundings in the same places (a zero may have another sign): `works` compiles it, compares the bits
of both, and says no where they differ, as they may where PyTorch was compiled otherwise. So nobody has to choose
between the two. (After torch.set_flush_denormal(True) PyTorch's own bits depend on its threads, and ours may differ.)

It is tried on Linux, where there is a C compiler ($CC, cc, gcc or clang): half a second for each pair of types that a
process steps.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memlab.mixed_precision import adam_kernel
from memlab.mixed_precision.adam_kernel import BLOCK, addresses

NUMBERS = r"""
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

typedef float fp32;
typedef struct { uint16_t bits; } bf16;
typedef struct { uint16_t bits; } fp16;

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

static inline float widen_fp32(fp32 x) { return x; }

static inline float widen_bf16(bf16 x) { return of_bits((uint32_t)x.bits << 16); }

static inline bf16 round_to_bf16(float x) { /* to the nearest; of two as near, the even one */
    uint32_t bits = bits_of(x);
    return (bf16){x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16};
}

static inline float widen_fp16(fp16 x) { /* its exponent counts from 15, FP32's from 127 */
    uint32_t bits = (x.bits & 0x7fff) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16;
    uint32_t normal = bits + (112 << 23), infinite = bits + (224 << 23);
    uint32_t subnormal = bits_of(of_bits(bits + (113 << 23)) - of_bits(113 << 23));
    return of_bits(sign | (bits < 1 << 23 ? subnormal : bits < 31 << 23 ? normal : infinite));
}

static inline fp16 round_to_fp16(float x) {
    uint32_t bits = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    uint32_t normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(of_bits(bits) + 0.5f) - bits_of(0.5f); /* the sum rounds */
    uint32_t infinite = bits > 255u << 23 ? 0x7e00 : 0x7c00;
    return (fp16){sign | (bits < 113 << 23 ? subnormal : bits < 143 << 23 ? normal : infinite)};
}

#define JOINED(verb, type) verb##_##type
#define NAMED(verb, type) JOINED(verb, type)
#define widen NAMED(widen, GRADIENT)
#define round_to_weight NAMED(round_to, WEIGHT)
"""
"""Formats of numbers, from each to FP32 and back."""

KERNEL = r"""
/* Elements of `count` parameters: of the programs from begin to end, BLOCK elements each.
   table: (COLUMNS, count) of addresses and sizes. */
static void adam(const int64_t *table, int64_t count, int64_t begin, int64_t end,
                 float inverse_scale, double lr, double decay, double eps,
                 double beta1, double beta2, int decoupled, int maximize) {
    for (int64_t row = 0; row < count; row++) {
        int64_t numel = table[5 * count + row], first = table[6 * count + row];
        int64_t start = begin > first ? (begin - first) * BLOCK : 0;
        int64_t stop = (end - first) * BLOCK < numel ? (end - first) * BLOCK : numel;
        if (start >= stop)
            continue;
        WEIGHT *restrict weights = (WEIGHT *)table[row];
        float *restrict masters = (float *)table[count + row];
        float *restrict ms = (float *)table[2 * count + row];
        float *restrict vs = (float *)table[3 * count + row];
        double steps = *(float *)table[4 * count + row];
        const GRADIENT *restrict gradients = (const GRADIENT *)table[7 * count + row];

        int64_t whole = numel - numel % VECTOR; /* then PyTorch rounds the other product */
        float factor = maximize ? -inverse_scale : inverse_scale;
        float adds = !decoupled && decay != 0; /* a float: compilers make vectors of that */
        float keep = decoupled ? fma(-lr, decay, 1) : 1, added = decay;
        float m_share = 1 - beta1, v_keep = beta2, v_share = 1 - beta2, epsilon = eps;
        float step_size = lr / (1 - pow(beta1, steps)), correction = sqrt(1 - pow(beta2, steps));

        for (int64_t i = start; i < stop; i++) {
            float g = widen(gradients[i]) * factor;
            float w = masters[i];
            if (adds != 0)
                g = fmaf(w, added, g);
            float m = m_share < 0.5f ? fmaf(m_share, g - ms[i], ms[i])
                                     : fmaf(m_share - 1, g - ms[i], g);
            float v = i < whole ? fmaf(v_share * g, g, vs[i] * v_keep)
                                : fmaf(vs[i], v_keep, v_share * g * g);
            w = w * keep - step_size * m / (sqrtf(v) / correction + epsilon);
            ms[i] = m;
            vs[i] = v;
            masters[i] = w;
            weights[i] = round_to_weight(w);
        }
    }
}
"""
"""To the types WEIGHT and GRADIENT, the bits of PyTorch's step of VECTOR numbers at once, BLOCK a program."""

THREADS = r"""
struct work {
    const int64_t *table;
    int64_t count, programs, next; /* next: the first program that no thread has taken */
    float inverse_scale;
    double lr, decay, eps, beta1, beta2;
    int decoupled, maximize;
};

static void *take_shares(void *its) {
    struct work *w = its;
    for (int64_t begin; (begin = __atomic_fetch_add(&w->next, SHARE, __ATOMIC_RELAXED)) < w->programs;) {
        int64_t end = begin + SHARE < w->programs ? begin + SHARE : w->programs;
        adam(w->table, w->count, begin, end, w->inverse_scale, w->lr, w->decay, w->eps, w->beta1, w->beta2,
             w->decoupled, w->maximize);
    }
    return NULL;
}

void step(const int64_t *table, int64_t count, int64_t programs, int64_t threads, float inverse_scale, double lr,
          double decay, double eps, double beta1, double beta2, int decoupled, int maximize) {
    struct work work = {table, count, programs, 0, inverse_scale, lr, decay, eps, beta1, beta2, decoupled, maximize};
    pthread_t ids[threads];
    int64_t others = 0;
    for (int64_t row = 0; row < count; row++)
        *(float *)table[4 * count + row] += 1; /* the coming step */
    while (others < threads - 1 && pthread_create(&ids[others], NULL, take_shares, &work) == 0)
        others++;
    take_shares(&work); /* all of them, if no thread could be had */
    while (others > 0)
        pthread_join(ids[--others], NULL);
}
"""
"""Threads of this step, since none outlives a fork; and none of Python's, which a signal could leave running."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARE = 128
"""Programs that a thread takes at once, when it has time: a core may have other work."""
PATIENCE_SECONDS = 30
"""Of waiting for a compiler."""
VECTOR = {"AVX512": 16, "AVX2": 8, "SVE256": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
"""Numbers that PyTorch's kernel takes at once."""


class Launch(adam_kernel.Launch):
    """A step of some parameters by the kernel, by as many threads as torch has. All tensors are in main memory."""

    def run(self, options: dict, gradients: Sequence[Tensor], inverse_scale: Tensor | None) -> None:
        """As on a GPU."""
        step = _compiled(self._weights[0].dtype, gradients[0].dtype)
        table = self._columns + array("q", addresses(gradients))
        threads = max(1, min(torch.get_num_threads(), self.programs // SHARE))
        step(
            *(table.buffer_info()[0], len(gradients), self.programs, threads),
            1.0 if inverse_scale is None else inverse_scale.item(),
            *map(float, (options["lr"], options["weight_decay"], options["eps"], *options["betas"])),
            *(bool(options["decoupled_weight_decay"]), bool(options["maximize"])),
        )


@functools.cache
def works(weight: torch.dtype, gradient: torch.dtype) -> bool:
    """Whether the kernel for these types compiles here, and steps to the bits of PyTorch's."""
    try:
        _compiled(weight, gradient)
    except (OSError, subprocess.SubprocessError):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        ways = itertools.product((torch._fused_adamw_, torch._fused_adam_), (False, True))
        return all(_same_bits(theirs, weight, gradient, maximize) for theirs, maximize in ways)


def _same_bits(theirs: Callable, weight: torch.dtype, gradient: torch.dtype, maximize: bool) -> bool:
    """Whether three steps of some thousand numbers are those of a fused step of PyTorch.

    Its kernel uses no threads for 16 numbers of FP32, a line of a cache: after a fork it would wait for them forever.
    """
    chance = torch.Generator().manual_seed(0)
    sizes = [15, 16] * 128  # with and without numbers that fill no vector
    w, g = ([torch.randn(n, dtype=torch.float32, device="cpu", generator=chance) for n in sizes] for _ in range(2))
    g = [its.to(gradient) for its in g]
    numbers = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    options = numbers | {"betas": (0.9, 0.99), "maximize": maximize}
    options["decoupled_weight_decay"] = theirs is torch._fused_adamw_
    zeros = [torch.zeros_like(its) for its in w]
    ours, expected = ([[its.clone() for its in column] for column in (w, zeros, zeros)] for _ in range(2))
    narrow, steps = [its.to(weight) for its in w], [torch.zeros((), dtype=torch.float32, device="cpu") for _ in w]
    launch = Launch(narrow, *ours, steps)
    for _ in range(3):
        launch.run(options, g, None)
        lists = expected[0], [its.float() for its in g], *expected[1:], [], steps
        theirs(*lists, **numbers, beta1=0.9, beta2=0.99, amsgrad=False, maximize=maximize)
    expected.append([its.to(weight) for its in expected[0]])
    return all(all(map(torch.equal, *columns)) for columns in zip([*ours, narrow], expected, strict=True))


@functools.cache
def _compiled(weight: torch.dtype, gradient: torch.dtype):
    """The kernel for these types. Raises OSError or subprocess.SubprocessError where none of the compilers makes it."""
    if sys.platform != "linux":
        raise OSError(f"expected Linux, where this kernel was tried, found {sys.platform}")
    error: Exception = FileNotFoundError("expected a C compiler ($CC, cc, gcc or clang), found none")
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if (compiler := shutil.which(name)) is not None:
            try:
                return _compiled_by(compiler, weight, gradient)
            except (OSError, subprocess.SubprocessError) as its:
                error = its
    raise error


def _compiled_by(compiler: str, weight: torch.dtype, gradient: torch.dtype):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, library = Path(folder, "adam.c"), Path(folder, "adam.so")
        page.write_text(NUMBERS + KERNEL + THREADS)
        types = {"WEIGHT": NAMES[weight], "GRADIENT": NAMES[gradient]}
        names = types | {"BLOCK": BLOCK, "VECTOR": VECTOR, "SHARE": SHARE}
        defined = [f"-D{name}={its}" for name, its in names.items()]
        exact = "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"  # roundings where they stand, and vectors
        command = [compiler, "-O3", "-march=native", *exact, "-shared", "-fPIC", *defined, page, "-o", library]
        _run([*command, "-lm", "-pthread"])
        step = ctypes.CDLL(str(library)).step  # it stays when its file goes
    whole, real, yes = ctypes.c_int64, ctypes.c_double, ctypes.c_int
    step.argtypes = [ctypes.c_void_p, whole, whole, whole, ctypes.c_float, *[real] * 5, yes, yes]
    step.restype = None
    return step


def _run(command: list) -> None:
    """Run a compiler, without a word; whatever it started ends with it."""
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(command, **silent, start_new_session=True) as process:
        try:
            status = process.wait(PATIENCE_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)
