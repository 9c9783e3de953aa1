"""Adam's step on masters as one CPU kernel, in C: what `adam_kernel` is on a GPU, and moves as few bytes.

PyTorch's fused Adam for CPUs wants weights, gradients and moments of one type, too. `KERNEL` computes as it does, in
FP32, with the same roundings in the same places: `works` compiles it, compares the bits of both, and says no where they
differ, as they may where PyTorch's compiler was another. So nobody has to choose between the two.

It is tried on Linux, where there is a C compiler ($CC, cc, gcc or clang): a fraction of a second, once in a process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memlab.mixed_precision import adam_kernel
from memlab.mixed_precision.adam_kernel import BLOCK, addresses

NUMBERS = r"""
#include <math.h>
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
void adam(const int64_t *table, int64_t count, int64_t begin, int64_t end,
          float inverse_scale, double lr, double decay, double eps,
          double beta1, double beta2, int decoupled, int maximize) {
    for (int64_t row = 0; row < count; row++) {
        int64_t numel = table[5 * count + row], first = table[6 * count + row];
        int64_t start = begin > first ? (begin - first) * BLOCK : 0;
        int64_t stop = (end - first) * BLOCK < numel ? (end - first) * BLOCK : numel;
        WEIGHT *restrict weights = (WEIGHT *)table[row];
        float *restrict masters = (float *)table[count + row];
        float *restrict ms = (float *)table[2 * count + row];
        float *restrict vs = (float *)table[3 * count + row];
        double steps = *(float *)table[4 * count + row];
        const GRADIENT *restrict gradients = (const GRADIENT *)table[7 * count + row];

        int64_t whole = numel - numel % VECTOR; /* then PyTorch rounds the other product */
        float factor = maximize ? -inverse_scale : inverse_scale;
        float keep = decoupled ? 1 - lr * decay : 1, added = decoupled ? 0 : decay;
        float m_share = 1 - beta1, v_keep = beta2, v_share = 1 - beta2, epsilon = eps;
        float step_size = lr / (1 - pow(beta1, steps)), correction = sqrt(1 - pow(beta2, steps));

        for (int64_t i = start; i < stop; i++) {
            float g = widen(gradients[i]) * factor;
            float w = masters[i];
            if (added != 0)
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

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARE = 128
"""Programs that are worth a thread."""
VECTOR = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
"""Numbers that PyTorch's kernel takes at once."""


class Launch(adam_kernel.Launch):
    """A step of some parameters by the kernel, by as many threads as torch has. All tensors are in main memory."""

    def run(self, options: dict, gradients: Sequence[Tensor], inverse_scale: Tensor | None) -> None:
        """As on a GPU."""
        kernel = _compiled(self._weights[0].dtype, gradients[0].dtype)
        table = self._columns + array("q", addresses(gradients))
        factor = 1.0 if inverse_scale is None else inverse_scale.item()
        numbers = (*map(float, (options["lr"], options["weight_decay"], options["eps"], *options["betas"])),)
        ways = bool(options["decoupled_weight_decay"]), bool(options["maximize"])

        def share(begin: int, end: int) -> None:
            kernel(table.buffer_info()[0], len(gradients), begin, end, factor, *numbers, *ways)

        shares = max(1, min(torch.get_num_threads(), self.programs // SHARE))
        bounds = [self.programs * i // shares for i in range(shares + 1)]
        if shares == 1:
            share(*bounds)
        else:
            with ThreadPoolExecutor(shares) as threads:  # of this step, since none outlives a fork
                list(threads.map(share, bounds, bounds[1:]))


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
    """Whether steps of 4,103 numbers, the last of which fill no vector, are those of a fused step of PyTorch."""
    chance = torch.Generator().manual_seed(0)
    w, g = (torch.randn(4103, dtype=torch.float32, device="cpu", generator=chance) for _ in range(2))
    g = g.to(gradient)
    numbers = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    options = numbers | {"betas": (0.9, 0.99), "maximize": maximize}
    options["decoupled_weight_decay"] = theirs is torch._fused_adamw_
    ours, expected = ([w.clone(), torch.zeros_like(w), torch.zeros_like(w)] for _ in range(2))
    narrow, steps = w.to(weight), torch.zeros((), dtype=torch.float32, device="cpu")
    launch = Launch([narrow], *([tensor] for tensor in (*ours, steps)))
    for _ in range(3):
        steps += 1
        launch.run(options, [g], None)
        lists = [[tensor] for tensor in (expected[0], g.float(), *expected[1:])]
        theirs(*lists, [], [steps], **numbers, beta1=0.9, beta2=0.99, amsgrad=False, maximize=maximize)
    return all(map(torch.equal, [*ours, narrow], [*expected, expected[0].to(weight)]))


@functools.cache
def _compiled(weight: torch.dtype, gradient: torch.dtype):
    """The kernel for these types. Raises OSError or subprocess.SubprocessError where it does not compile."""
    named = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    compiler = next(filter(None, map(shutil.which, named)), None)
    if compiler is None or sys.platform != "linux":
        raise FileNotFoundError("expected a C compiler on Linux ($CC, cc, gcc or clang), found none")
    with tempfile.TemporaryDirectory() as folder:
        page, library = Path(folder, "adam.c"), Path(folder, "adam.so")
        page.write_text(NUMBERS + KERNEL)
        types = f"-DWEIGHT={NAMES[weight]}", f"-DGRADIENT={NAMES[gradient]}", f"-DBLOCK={BLOCK}", f"-DVECTOR={VECTOR}"
        exact = "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"  # roundings where they stand, and vectors
        command = [compiler, "-O3", "-march=native", *exact, "-shared", "-fPIC", *types, page, "-o", library, "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        kernel = ctypes.CDLL(str(library)).adam  # it stays when its file goes
    whole, real, yes = ctypes.c_int64, ctypes.c_double, ctypes.c_int
    kernel.argtypes = [ctypes.c_void_p, whole, whole, whole, ctypes.c_float, *[real] * 5, yes, yes]
    kernel.restype = None
    return kernel
