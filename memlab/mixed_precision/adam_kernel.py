"""Adam's step on masters as one GPU kernel, in Triton: it reads 16-bit gradients, and writes 16-bit weights.

PyTorch's fused Adam wants weights, gradients and moments of one type. Around it a step on masters passes the memory
three times: to widen gradients (2 bytes an element read, 4 written), to step (16 and 12), and to round masters to
weights (4 and 2), 40 in all. Here both casts happen in registers, on the way: 2 + 12 bytes read, 12 + 2 written, 28, as
many as a step in FP32 moves.

One launch steps many parameters: a table on the card tells the kernel where they are. It computes as PyTorch's kernel
does, in FP32, and of its options, too, it takes the nearest FP32 numbers: on an H200, with torch 2.11 and the default
options, to the same bits. With others last bits may differ, since compilers fuse products and sums in other places.

Triton is imported when the kernel is first asked for. Sources: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter
2019, algorithm 2; Tillet et al. 2019 (Triton).
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from memlab.memory_arithmetic.optimizers import TABLE_ROW

BLOCK = 1024
"""Elements of one parameter that a program of the kernel steps."""
WORD = 16
"""Where addresses in bytes and sizes in elements are multiples of it, a thread reads and writes 16 bytes at once."""
COLUMNS = TABLE_ROW // 8
"""Of the table, in int64: of each parameter five addresses, its elements, the first of its programs, its gradient's."""


class Launch:
    """A step of some parameters by one launch of the kernel, as often as it is asked for.

    weights: in 16 bits, of any shapes, all dense, of one type and on one device. masters, and both moments of each, m
    and v: in FP32, with the weights' strides. steps: of each how many there were, in FP32, ().
    """

    def __init__(self, weights, masters, m, v, steps):
        self._weights, self._steps = weights, steps
        numels = list(map(Tensor.numel, weights))
        firsts = [0, *accumulate(-(-numel // BLOCK) for numel in numels)]
        self.programs = firsts.pop()
        self._columns = array("q", addresses((*weights, *masters, *m, *v, *steps)))
        self._misaligned = functools.reduce(operator.or_, [*self._columns[: -len(steps)], *numels])
        self._columns.extend(numels + firsts)

    def run(self, options: dict, gradients: Sequence[Tensor], inverse_scale: Tensor | None) -> None:
        """Step: weights, masters, moments and counters, in place; torch's counters of versions need not know of it.

        options: of a group of torch.optim.Adam's or AdamW's. gradients: one of each parameter, with its strides, in 16
        bits or FP32, all of one type. inverse_scale: what they are multiplied by first, in FP32, of one element.
        """
        torch._foreach_add_(self._steps, 1)
        places = array("q", addresses(gradients))
        misaligned = functools.reduce(operator.or_, places, self._misaligned)
        device = gradients[0].device
        table = torch.frombuffer(self._columns + places, dtype=torch.int64).to(device, non_blocking=True)
        kernel, numbers = _compiled()
        with torch.cuda.device_of(table):  # where Triton launches
            kernel[(self.programs,)](
                *(table, len(gradients), table if inverse_scale is None else inverse_scale),
                *map(float, (options["lr"], options["weight_decay"], options["eps"], *options["betas"])),
                WEIGHT=numbers[self._weights[0].dtype],
                GRADIENT=numbers[gradients[0].dtype],
                DECAYS=options["weight_decay"] != 0,
                DECOUPLED=bool(options["decoupled_weight_decay"]),
                MAXIMIZE=bool(options["maximize"]),
                SCALED=inverse_scale is not None,
                ALIGNED=misaligned % WORD == 0,
                SIZE=BLOCK,
            )


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where their first elements are."""
    return list(map(Tensor.data_ptr, tensors))


def adam(
    table,
    count,
    inverse_scale,
    lr,
    decay,
    eps,
    beta1,
    beta2,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: SIZE elements of one of `count` parameters. table: (COLUMNS, count), see `Launch`."""
    program = tl.program_id(0)
    low, high = program * 0, program * 0 + count - 1
    while low < high:  # the last parameter whose first program is not behind this one
        middle = (low + high + 1) // 2
        behind = tl.load(table + 6 * count + middle) > program
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    row = table + low
    weights = tl.load(row).to(tl.pointer_type(WEIGHT))
    masters = tl.load(row + count).to(tl.pointer_type(tl.float32))
    ms = tl.load(row + 2 * count).to(tl.pointer_type(tl.float32))
    vs = tl.load(row + 3 * count).to(tl.pointer_type(tl.float32))
    steps = tl.load(row + 4 * count).to(tl.pointer_type(tl.float32))
    numel, first = tl.load(row + 5 * count), tl.load(row + 6 * count)
    gradients = tl.load(row + 7 * count).to(tl.pointer_type(GRADIENT))
    if ALIGNED:
        weights, gradients = tl.multiple_of(weights, 16), tl.multiple_of(gradients, 16)
        masters, ms, vs = tl.multiple_of(masters, 16), tl.multiple_of(ms, 16), tl.multiple_of(vs, 16)
        numel = tl.multiple_of(numel, 16)
    at = (program - first) * SIZE + tl.arange(0, SIZE)
    there = at < numel

    g = tl.load(gradients + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(masters + at, mask=there, other=0.0)
    m = tl.load(ms + at, mask=there, other=0.0)
    v = tl.load(vs + at, mask=there, other=0.0)
    if SCALED:
        g = g * tl.load(inverse_scale)
    if MAXIMIZE:
        g = -g
    lr, decay, eps = tl.cast(lr, tl.float32), tl.cast(decay, tl.float32), tl.cast(eps, tl.float32)
    beta1, beta2 = tl.cast(beta1, tl.float32), tl.cast(beta2, tl.float32)
    if DECAYS:
        if DECOUPLED:
            w = tl.fma(-(lr * decay), w, w)
        else:
            g = tl.fma(decay, w, g)
    m = tl.fma(beta1, m, (1 - beta1) * g)
    v = tl.fma(beta2, v, (1 - beta2) * (g * g))
    step = tl.load(steps).to(tl.float64)
    correction1 = 1 - tl.exp(step * tl.log(beta1.to(tl.float64))).to(tl.float32)
    correction2 = 1 - tl.exp(step * tl.log(beta2.to(tl.float64))).to(tl.float32)
    root = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(correction2))
    w = w - tl.div_rn(tl.div_rn(lr, correction1) * m, root + eps)

    tl.store(ms + at, m, mask=there)
    tl.store(vs + at, v, mask=there)
    tl.store(masters + at, w, mask=there)
    tl.store(weights + at, w.to(WEIGHT), mask=there)


tl = None  # triton.language, once the kernel was asked for


@functools.cache
def _compiled():
    """`adam` as Triton compiles it, at its first call, and Triton's names of numbers."""
    global tl
    import triton
    import triton.language as tl

    return triton.jit(adam), {
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float32: tl.float32,
    }
