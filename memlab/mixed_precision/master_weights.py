"""Master weights: the model computes in 16 bits, the optimizer steps on an FP32 copy of every weight.

A weight of 1.0 in BF16 has no neighbour nearer than 1/256 below and 1/128 above. An update below half of that rounds to
nothing, and at a learning rate of 1e-3 nearly all of Adam's updates are smaller. So the update is added to an FP32
copy, the *master*. There small steps add up. The 16-bit weight is the master, rounded.

    bytes a parameter, with Adam      weight 2 + gradient 2 + master 4 + moments 8 = 16     (FP32: 4 + 4 + 8 = 16)

The optimizer needs gradients of the masters' type, so 16-bit gradients are widened. All of them at once would be 4
bytes a parameter more. So the step goes *chunk by chunk*: it widens the gradients of some parameters, steps these,
rounds their masters to the weights, and frees the widened gradients before the next chunk.

Source: Micikevicius et al. 2018, section 3.1.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.memory_arithmetic.optimizers import chunk_limit, chunks
from memlab.memory_timeline import in_main_memory
from memlab.mixed_precision import edges
from memlab.mixed_precision.writes import Writes

Chunk = list[tuple[dict, Tensor]]  # parameters that are stepped together, each with its group of options


class MasterWeights(edges.AroundOptimizer):
    """Any optimizer of torch.optim around 16-bit weights: it steps on FP32 masters, and its states are FP32.

        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

    params: parameters of any shape, or groups of them. FP16 and BF16 parameters get a master, all others are their own.
    optimizer_class, **defaults: whose `step` it is, and what it is made with. It must update each parameter from that
      parameter's gradient and keep its counts in that parameter's state, as nearly all do. An optimizer that looks at
      all parameters together, such as at the norm of all gradients, needs chunk_bytes=None.
    chunk_bytes: how many bytes of FP32 gradients may exist at once, as an int or such as "16 MiB", or those of one
      parameter, if it has more. None: no limit. "auto": 64 MiB on a GPU, where each chunk costs launches; 2 MiB on a
      CPU, whose caches keep the widened gradients until they are used.

    `param_groups` hold the model's own parameters, so schedulers, `zero_grad` and clipping find what they expect.
    `state[p]` holds the master, under "master", and the optimizer's states. Both are made at a parameter's first step.
    A weight that somebody writes to between steps, such as `model.load_state_dict`, is taken over, if `Writes` sees it.
    With a loss scaler, the scale is divided out here, in FP32; the 16-bit gradients stay scaled. Before the scaler's
    `unscale_`, call `widen_gradients`.

    Raises TypeError or ValueError for an optimizer instead of its class, one whose step calls a closure several times
    (LBFGS) or is differentiable, a chunk_bytes below 1, and parameters of which none has 16 bits, or two lie in the
    same memory. Not here: FSDP2's DTensors, and a run that goes on after a step that raised. Load a state dict first.
    """

    _step_supports_amp_scaling = True  # tells a loss scaler: hand over `grad_scale` and `found_inf`, do not unscale
    _keeps_masters = _refuses_wide = True

    def __init__(self, params, optimizer_class: type[Optimizer], *, chunk_bytes: int | str | None = "auto", **defaults):
        edges.refuse_class(optimizer_class)
        chunk_limit(chunk_bytes, "cpu")  # refuses what is none
        self.chunk_bytes = chunk_bytes
        self._make = functools.partial(optimizer_class, **defaults)
        self._inner = self._make(params)
        self._inner.state.clear()
        self._writes = Writes()  # to weights, since they were rounded
        super().__init__(self._inner.param_groups, self._inner.defaults)
        edges.refuse_wide(self)

    @torch._disable_dynamo  # as in torch.optim; traced, every parameter would get the last one's gradient
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None):
        """One step of every parameter that has a gradient; of none, if a scaler found inf or nan. Returns the loss."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if not getattr(self, "found_inf", False):
            self._step_chunks(list(self._chunks()))
        return loss

    def _chunks(self) -> Iterator[Chunk]:
        """Parameters with gradients, in order, as many at a time as chunk_bytes allow, and of one device."""
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if self._has_gradient(p)]
        for _, run in itertools.groupby(pairs, lambda pair: pair[1].device):
            run = list(run)
            limit = chunk_limit(self.chunk_bytes, "cpu" if in_main_memory(run[0][1]) else "gpu")
            for start, stop in chunks([p.numel() for _, p in run], limit):
                yield run[start:stop]

    def _step_chunks(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._step_chunk(chunk, alone=len(chunks) == 1)

    def _step_chunk(self, chunk: Chunk, *, alone: bool) -> None:
        """Widen the gradients of these parameters, step their masters, and round those to the weights.

        alone: whether no other chunk belongs to this step.
        """
        inner, params = self._inner, [p for _, p in chunk]
        masters, gradients = [self._master(p) for p in params], [p.grad for p in params]
        groups = {id(group): group | {"params": []} for group, _ in chunk}
        for (group, p), m in zip(chunk, masters, strict=True):
            groups[id(group)]["params"].append(m)
            inner.state[m] = edges.own_states(self, group, p, m)
        try:
            for p, m in zip(params, masters, strict=True):
                m.grad = edges.widened(self._gradient(p), m, self._factor())
            inner.param_groups = list(groups.values())
            edges.step_without_hooks(inner, alone=alone)
        finally:  # of a step that raised, too, masters and weights go together
            for p, m, gradient in zip(params, masters, gradients, strict=True):
                kept = {"master": m} if m is self.state[p].get("master") else {}
                self.state[p] = kept | inner.state[m]
                m.grad, p.grad = None, gradient
            self._round([(p, m) for p, m in zip(params, masters, strict=True) if m is not p])
            for p in params:
                self._writes.note(p)
            inner.state, inner.param_groups = defaultdict(dict), self.param_groups
        for group, _ in chunk:
            group.update(groups[id(group)] | {"params": group["params"]})

    def _master(self, p: Tensor) -> Tensor:
        """The FP32 copy of a parameter, up to date with what others wrote to the weight; made, where it is missing."""
        if not self._needs_master(p):
            return p
        state = self.state[p]
        if "master" not in state:
            state["master"] = self._wide(p)
        elif not self._writes.unchanged(p):
            weight, m = p.detach().to(state["master"].device), state["master"]
            m.copy_(torch.where(weight == m.to(p.dtype), m, weight))  # elements that are the master rounded keep it
        return state["master"]

    # ---- what an optimizer with its masters elsewhere does otherwise

    def _needs_master(self, p: Tensor) -> bool:
        """Whether the optimizer steps on a copy of this parameter."""
        return p.dtype in edges.HALVES

    def _wide(self, p: Tensor) -> Tensor:
        """A parameter's weights in FP32, where its master is to be."""
        return p.detach().float()

    def _has_gradient(self, p: Tensor) -> bool:
        """Whether there is a gradient to step with."""
        return p.grad is not None

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient of a parameter that has one."""
        return p.grad

    def _factor(self) -> Tensor | None:
        """What all gradients are multiplied by, (); None: nothing."""
        return edges.unscaling(self)

    def _round(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Masters → weights, to the nearest. pairs: of a weight and its master."""
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
