"""A training program with known faults, for every tool to look at: a peak, a leak, and growth that is no tensor.

A small GPT learns text. Three things are planted in it, each of so many bytes, at one line:

    the peak     a custom backward fills 32 MiB of scratch, for as long as it runs
    the leak     a second loss is kept each step, as a tensor. Its graph comes with it, and holds a log-softmax:
                 tokens × vocabulary × 4 bytes, which no variable names
    the growth   768 KiB of Python bytes are kept each step: main memory, but no tensor's

What is true of it is known without a tool: the planted bytes are in the source, the others in chapter 02's arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.workloads import GPT, text_batch
from memlab.memory_arithmetic import Transformer, training_step
from memlab.units import KiB, MiB

SIZES = {"layers": 2, "width": 64, "heads": 2, "context": 64, "vocabulary": 256}
BATCH, TOKENS = 16, 64
SCRATCH_BYTES, BYTES_KEPT = 32 * MiB, 768 * KiB
PEAK_LINE = "scratch = gradient.new_ones(SCRATCH_BYTES // 4)"
LEAK_LINE = "self.losses.append(F.cross_entropy(logits.flatten(0, 1), x.flatten()))"
GROWTH_LINE = 'self.seen.append(b"1" * BYTES_KEPT)'
LOG_SOFTMAX_BYTES = BATCH * TOKENS * SIZES["vocabulary"] * 4
LEAK_BYTES = LOG_SOFTMAX_BYTES + 4 + 4  # the loss, and the weight that a mean divides by


class Scratch(torch.autograd.Function):
    """Passes a scalar on, and its gradient, by way of 32 MiB."""

    @staticmethod
    def forward(ctx, loss: Tensor) -> Tensor:
        """loss: a scalar → the same."""
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """gradient: a scalar → the same."""
        scratch = gradient.new_ones(SCRATCH_BYTES // 4)
        return gradient * scratch[0]


class Planted:
    """The program. `for _ in program.run(steps): ...` trains; `slowdown` tells how long a step of the last run took.

    It has done some steps when it is made, so that the optimizer's states exist, and holds what one step leaves behind.
    """

    def __init__(self, device: str = "cpu"):
        torch.manual_seed(0)
        self.model = GPT(**SIZES).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = tuple(part.to(device) for part in text_batch(BATCH, TOKENS))
        self.losses: list[Tensor] = []
        self.seen: list[bytes] = []
        self.step()
        for _ in self.run(2):
            pass
        self._plain_seconds = self._step_seconds
        del self.losses[1:], self.seen[1:]

    def step(self) -> None:
        """One step of training, with its faults."""
        x, y = self.batch
        logits = self.model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.losses.append(F.cross_entropy(logits.flatten(0, 1), x.flatten()))
        self.seen.append(b"1" * BYTES_KEPT)
        Scratch.apply(loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> Iterator[int]:
        """Train; yields after each step, for a tool that wants to be called there. That counts as the step's time."""
        self._wait()
        start = time.perf_counter()
        for number in range(steps):
            self.step()
            yield number
        self._wait()
        self._step_seconds = (time.perf_counter() - start) / steps

    def _wait(self) -> None:
        """A GPU runs behind: let it finish, so that the clock tells its steps and not their launches."""
        if self.batch[0].is_cuda:
            torch.cuda.synchronize()

    @property
    def slowdown(self) -> float:
        """How long a step of the last run took, as a multiple of a step when nothing watched."""
        return self._step_seconds / self._plain_seconds


def before_bytes() -> int:
    """What tensors hold before the first watched step: weights, AdamW's states, the batch, and one step's leak."""
    step = _arithmetic()
    return step.parameters.nbytes + step.optimizer_states.nbytes + 2 * BATCH * TOKENS * 8 + LEAK_BYTES


def peak_bytes(steps: int) -> int:
    """The most that tensors hold in so many watched steps, in bytes, in closed form.

    In the backward of the last step: what is there before, the leak of each step, what the model's forward saved, the
    logits (a variable), the gradient that backward begins with, the scratch, and the gradient that comes of it.
    """
    saved = _arithmetic().activations.nbytes
    logits, scalars = LOG_SOFTMAX_BYTES, 4 + 4
    return before_bytes() + steps * LEAK_BYTES + saved + logits + scalars + SCRATCH_BYTES


def _arithmetic():
    return training_step(Transformer(**SIZES), batch=BATCH, tokens=TOKENS, hardware="cpu")
