"""Stochastic rounding: up or down by chance, so that updates too small for BF16 arrive on average.

Between two neighbours a < x < b, x becomes b with probability (x − a) / (b − a), else a. The expected value is x
itself, whereas rounding to the nearest answers a every time, and a thousand updates of a thousandth of an ulp leave the
weight where it was. So a BF16 weight can train without an FP32 master: 2 bytes of weight, 2 of gradient, 8 of Adam's
moments. Noise is the price: each rounding adds a variance of (x − a)(b − x). Gupta et al. 2015, section 3.

A BF16 number is an FP32 number without its low 16 bits. So 16 random bits, added to those low bits, carry into the high
ones with exactly the right probability; then the low ones are cut off. The sign is a bit of its own and takes no part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.mixed_precision.master_weights import MasterWeights

LOW_BITS = 0xFFFF


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """x in BF16, each element rounded to one of its two neighbours, with x as expected value.

    x: FP32, of any shape → the same shape, without a gradient. What BF16 can hold stays as it is, inf and nan too.
    Beyond the largest finite BF16 number (3.39e38) the upper neighbour is inf. generator: of x's device.

    Raises TypeError for an x that is not FP32.
    """
    if x.dtype is not torch.float32:
        raise TypeError(f"expected x in torch.float32, found {x.dtype}; convert it with x.float()")
    x = x.detach()
    noise = torch.randint(LOW_BITS + 1, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    high_bits = noise.add_(x.view(torch.int32)).bitwise_and_(~LOW_BITS)
    return torch.where(x.isfinite(), high_bits.view(torch.float32), x).bfloat16()


class StochasticRounding(MasterWeights):
    """Any optimizer of torch.optim around BF16 weights, without masters: what it computes is rounded stochastically.

        optimizer = StochasticRounding(model.parameters(), torch.optim.AdamW, lr=3e-4)

    The step is that of `MasterWeights`, chunk by chunk in FP32 and with FP32 states, but a chunk's FP32 weights are
    copies that end with it: a chunk takes 4 bytes a parameter more, and rounding a tensor 11 for a moment.
    generator: a torch.Generator of the parameters' device; else one of its own, seeded alike everywhere, since DDP's
      replicas stay equal only if all round alike. Its state is in `state_dict()`, under "generator".

    Raises what MasterWeights raises, and ValueError for FP16 parameters.
    """

    _keeps_masters = False

    def __init__(
        self,
        params,
        optimizer_class: type[Optimizer],
        *,
        generator: torch.Generator | None = None,
        chunk_bytes: int | str | None = "auto",
        **defaults,
    ):
        super().__init__(params, optimizer_class, chunk_bytes=chunk_bytes, **defaults)
        first = next(p for group in self.param_groups for p in group["params"])
        self.generator = generator or torch.Generator(first.device).manual_seed(0)

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters, in BF16 or wider. Raises ValueError for FP16."""
        super().add_param_group(param_group)
        if any(p.dtype is torch.float16 for p in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError("expected parameters in BF16, found FP16, which is not rounded here; use MasterWeights")

    def _master(self, p: Tensor) -> Tensor:
        if p.dtype is torch.float16:
            raise ValueError("expected parameters in BF16, found one that has become FP16; use MasterWeights")
        return self._wide(p) if self._needs_master(p) else p

    def _round(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for p, m in pairs:
            p.copy_(round_stochastically(m, self.generator))

    def state_dict(self) -> dict:
        """Groups and states, as of any optimizer, and the generator's state: a run goes on with the same chances."""
        return super().state_dict() | {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from what `state_dict()` gave. Raises ValueError as MasterWeights does."""
        super().load_state_dict(state_dict)
        if "generator" in state_dict:
            self.generator.set_state(state_dict["generator"].cpu())

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"generator": self.generator}
