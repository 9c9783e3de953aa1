"""A stage: the layers that one rank computes, and what it keeps between a micro-batch's forward and its backward.

Backward needs what autograd saved, and where to begin: an edge of the graph, not the output itself. So the output's bytes are
free as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memlab.gradient_checkpointing import checkpoint
from memlab.pipeline_parallelism.plan import PipelinePlan, make_layer


def build_stage(plan: PipelinePlan, stage: int) -> nn.Sequential:
    """The layers of one stage, under their numbers in the whole model: "3.weight" is layer 3's.

    Every rank makes all layers, one after the other, and keeps its own: so with one seed on all ranks the weights are those that
    one process would draw, and no rank ever holds more than its stage and one layer.
    """
    kept = {}
    for number, layer in enumerate(plan.layers):
        if number in plan.parts[stage]:
            kept[str(number)] = make_layer(layer)
        elif not isinstance(layer, nn.Module):
            make_layer(layer)
    module = nn.Sequential()
    for name, layer in kept.items():
        module.add_module(name, layer)
    return module


class StageRun:
    """Runs a stage's forwards and backwards, in any order, and holds what is in flight."""

    def __init__(self, module: nn.Module, checkpointed: bool = False):
        self.module, self.checkpointed = module, checkpointed
        self.in_flight: dict[int, tuple[tuple[Tensor, ...], list[GradientEdge | None]]] = {}

    def forward(self, micro_batch: int, inputs: tuple[Tensor, ...], loss=None) -> tuple[Tensor, ...]:
        """Run the layers on what arrived. loss: a function of the output, on the last stage. Returns what is to be sent, detached."""
        run = self.module if loss is None else (lambda *stream: loss(self.module(*stream)))
        out = checkpoint(run, *inputs) if self.checkpointed else run(*inputs)
        outputs = out if isinstance(out, tuple) else (out,)
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
            self.in_flight[micro_batch] = (tuple(t for t in inputs if t.requires_grad), edges)
        return tuple(t.detach() for t in outputs)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Run backward from the outputs' gradients. Returns the gradients of the inputs that need one."""
        inputs, edges = self.in_flight.pop(micro_batch)
        roots = [edge for edge in edges if edge is not None]
        torch.autograd.backward(roots, list(gradients))
        made = tuple(t.grad for t in inputs)
        for t in inputs:
            t.grad = None
        return made
