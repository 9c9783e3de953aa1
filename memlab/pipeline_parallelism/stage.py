"""A stage: the layers that one rank computes, and what it keeps between a micro-batch's forward and its backward.

Backward needs what autograd saved and, at both ends, a place in the graph: the node where it begins, and the one that
takes the gradients to be sent back. Neither is a tensor. So the output's bytes are free as soon as they are sent, and
the input's unless an op has saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memlab.gradient_checkpointing import checkpoint
from memlab.pipeline_parallelism.imagined_layers import make_layer
from memlab.pipeline_parallelism.plan import PipelinePlan
from memlab.pipeline_parallelism.promises import check_output
from memlab.pipeline_parallelism.rehearsal import Wire


def build_stages(plan: PipelinePlan, stages: Sequence[int]) -> dict[int, nn.Sequential]:
    """The layers of some stages, under their numbers in the whole model: "3.weight" is layer 3's.

    Every rank makes all layers once, one after the other, and keeps its own: so with one seed on all ranks the weights
    are those that one process would draw, and no rank ever holds more than its stages and one layer.
    """
    modules = {stage: nn.Sequential() for stage in stages}
    for stage, part in enumerate(plan.parts):
        for number in part:
            layer = plan.layers[number]
            if stage in modules:
                modules[stage].add_module(str(number), make_layer(layer))
            elif not isinstance(layer, nn.Module):
                make_layer(layer)
    return modules


class InFlight(NamedTuple):
    """A micro-batch between its forward and its backward: places in the graph, and no tensor."""

    begins: list[GradientEdge | None]  # where backward begins, for each output
    gradients: list[Tensor | None]  # where it ends: backward fills it, for each input that requires a gradient
    like: list[tuple]  # shape, dtype and device of those inputs


class StageRun:
    """Runs a stage's forwards and backwards, in any order of micro-batches, and holds what is in flight.

    module: the stage's layers; it takes a tensor, or a tuple of several.   checkpointed: keep the inputs only, and
    compute the rest again in backward.   stage: its number, for errors.   planned: what it returns for every
    micro-batch, which is checked; None: anything.
    """

    def __init__(
        self, module: nn.Module, checkpointed: bool = False, *, stage: int = 0, planned: Sequence[Wire] | None = None
    ):
        self.module, self.checkpointed, self.stage, self.planned = module, checkpointed, stage, planned
        self.in_flight: dict[int, InFlight] = {}

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Callable[..., Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Run the layers on what arrived, and return what is to be sent: detached and contiguous.

        inputs: of any shapes; those that require a gradient get one in backward.   loss: on the last stage, a function
        of what the layers return; it runs as one more layer.

        Raises ValueError or TypeError where the layers return something else than planned.
        """
        gradients: list[Tensor | None] = []
        wanted = [t for t in inputs if t.requires_grad] if torch.is_grad_enabled() else []
        if wanted:
            entered = iter(_Enter.apply(torch.empty(0, requires_grad=True), gradients, *(t.detach() for t in wanted)))
            inputs = [next(entered) if t.requires_grad else t for t in inputs]

        def run(*stream: Tensor):
            out = self.module(stream[0] if len(stream) == 1 else stream)
            return out if loss is None else loss(out)

        out = checkpoint(run, *inputs) if self.checkpointed else run(*inputs)
        outputs = out if isinstance(out, tuple) else (out,)
        if self.planned is not None:
            check_output(outputs, self.planned, self.stage, micro_batch)
        if torch.is_grad_enabled():
            begins = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
            like = [(t.shape, t.dtype, t.device) for t in wanted]
            self.in_flight[micro_batch] = InFlight(begins, gradients, like)
        return tuple(map(self._to_send, outputs))

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Run backward, and return the gradients of the inputs that require one; of one that nothing used, zeros.

        gradients: of each output that requires one; of a loss, None.
        """
        begins, made, like = self.in_flight.pop(micro_batch)
        begins = [place for place in begins if place is not None]
        if begins:
            torch.autograd.backward(begins, list(gradients))
        made += [None] * (len(like) - len(made))  # where no gradient came so far
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient.contiguous()
            for gradient, (shape, dtype, device) in zip(made, like, strict=True)
        )

    def _to_send(self, output: Tensor) -> Tensor:
        """Without its graph, and contiguous. What a layer keeps is copied: the next micro-batch may write to it before
        this one's is gone. Whether it is kept is not asked of what an op has just made.
        """
        made = output if output._base is None else output._base
        if made.grad_fn is None or made._version:
            for part in self.module.modules():
                for kept in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                    if isinstance(kept, Tensor) and _memory(kept) == _memory(output):
                        return output.detach().clone(memory_format=torch.contiguous_format)
        return output.detach().contiguous()


def _memory(tensor: Tensor) -> int | None:
    """Tells the storages of dense tensors that are alive from each other."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


class _Enter(torch.autograd.Function):
    """Where a stage's graph ends: hands on what arrived, and puts the gradients that come back into a list.

    A leaf with `.grad` would do, too, and its node would keep the tensor until backward, whoever needs it. This one
    keeps nothing, and the layers may write in place to what it returns.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, gradients: list, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients.extend(gradients)
        return (None,) * (2 + len(gradients))
