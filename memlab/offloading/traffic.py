"""Traffic: what moves once a parameter and step, weights or gradients and states, and how many tokens hide it.

**Weights**, streamed layer by layer: 2 bytes a parameter, for 2 FLOPs a parameter and token in forward. The width
cancels, and what counts is how many tokens a batch has:

    2·tokens / F >= 2 / B             tokens >= F / B

**Optimizer states** on the host: 2 bytes of gradient down and 2 of weight up, and between the two the host's own memory
is read and written, 28 bytes a parameter (see `HOST_BYTES`). Ren et al. 2021 (ZeRO-Offload), sections 3 and 4.

Rates are those that are reached, as in `overlap`.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.checking import above_0, positive
from memlab.offloading.overlap import transfer_seconds

HOST_BYTES = 28
"""Adam on the host, a parameter: master weight, m and v in FP32 are read and written (24), a gradient of 16 bits is
read (2), a weight of 16 bits is written (2). What the link itself reads and writes there, 4 more, is not in it."""


def hidden_tokens(
    flops_per_second: float, bytes_per_second: float, bytes_per_parameter: float = 2, flops_per_parameter: float = 2
) -> float:
    """How many tokens a batch needs until moving so many bytes for each parameter is free.

    flops_per_parameter: for each token, of the arithmetic that runs meanwhile: 2 in forward, 4 in backward, 6 in both.
    To lose at most a part p of that arithmetic, with nothing hidden at all, takes 1 / p times as many.
    Raises ValueError for what is not above 0.

    Weights streamed through a forward, and again through a backward; Adam in 200 GB/s of host memory beside both:

    >>> round(hidden_tokens(400e12, 55e9)), round(hidden_tokens(400e12, 55e9, 2, 4))
    (7273, 3636)
    >>> round(hidden_tokens(400e12, 200e9, HOST_BYTES, 6))
    9333
    """
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    above_0(bytes_per_parameter=bytes_per_parameter, flops_per_parameter=flops_per_parameter)
    return bytes_per_parameter * flops_per_second / (flops_per_parameter * bytes_per_second)


class HostStep(NamedTuple):
    """A training step whose optimizer works on the host: the seconds of each part, alone."""

    forward_seconds: float
    backward_seconds: float
    gradients_seconds: float
    """The gradients' way to the host, beside backward."""
    update_seconds: float
    """Adam in the host's memory."""
    weights_seconds: float
    """The weights' way back, beside the update, layer by layer."""

    @property
    def exposed_seconds(self) -> float:
        """What the device waits: for gradients that backward did not hide, and for the update, which nothing hides."""
        late = max(0.0, self.gradients_seconds - self.backward_seconds)
        return late + max(self.update_seconds, self.weights_seconds)

    @property
    def delayed_exposed_seconds(self) -> float:
        """The same with weights that are one step old: the update runs beside the next step's arithmetic.

        Ren et al. 2021, section 5.2, "one-step delayed parameter update". Other weights, so other values.
        """
        late = max(0.0, self.gradients_seconds - self.backward_seconds)
        arithmetic = self.forward_seconds + self.backward_seconds
        return late + max(0.0, max(self.update_seconds, self.weights_seconds) - arithmetic)

    @property
    def overhead(self) -> float:
        """What the device waits, as a part of its arithmetic."""
        return self.exposed_seconds / (self.forward_seconds + self.backward_seconds)


def host_step(
    parameters: int, tokens: int, flops_per_second: float, bytes_per_second: float, host_bytes_per_second: float
) -> HostStep:
    """A step of so many parameters on a batch of so many tokens, weights and gradients in 16 bits, Adam on the host.

    bytes_per_second: of the link, one way. host_bytes_per_second: of the host's memory, reading and writing together.
    Raises TypeError or ValueError for counts below 1 and rates that are not above 0.

    A billion parameters: the update alone takes as long as the arithmetic on 9,333 tokens.

    >>> step = host_step(10**9, 9_333, 400e12, 55e9, 200e9)
    >>> round(step.update_seconds, 3), round(step.gradients_seconds, 3), round(step.overhead, 3)
    (0.14, 0.036, 1.0)
    """
    positive("parameters", parameters)
    positive("tokens", tokens)
    above_0(flops_per_second=flops_per_second, host_bytes_per_second=host_bytes_per_second)
    forward = 2 * parameters * tokens / flops_per_second
    one_way = transfer_seconds(2 * parameters, bytes_per_second)
    return HostStep(forward, 2 * forward, one_way, HOST_BYTES * parameters / host_bytes_per_second, one_way)
