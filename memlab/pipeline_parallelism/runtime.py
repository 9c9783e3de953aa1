"""Real ranks that execute a schedule: each does its own list, and nothing else decides.

A receive begins where the list says so, and only the computation that needs it waits. What is sent is held until the rank's
next computation is through; by then it is usually gone, and nobody waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from memlab.pipeline_parallelism.checking import groups_of
from memlab.pipeline_parallelism.plan import PipelinePlan, split_batch
from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SENDS,
    Action,
)
from memlab.pipeline_parallelism.simulator import Span
from memlab.pipeline_parallelism.stage import StageRun, build_stage
from memlab.pipeline_parallelism.tied import TiedParameters
from memlab.ranks import place_in
from memlab.ranks.point_to_point import begin


class Pipeline:
    """This rank's stages of a model, trained by a schedule.

        plan = plan_pipeline(layers, one_forward_one_backward(2, 8), x)

        def train(rank, plan):
            pipeline = Pipeline(plan, loss_fn=F.cross_entropy)
            optimizer = torch.optim.AdamW(pipeline.parameters())
            for x, y in batches:
                loss = pipeline.step(x, y)
                optimizer.step()
                optimizer.zero_grad()

        run_ranks(train, 2, plan)

    plan: of `plan_pipeline`, the same on all ranks. loss_fn: (output, y) of a micro-batch → its mean loss.
    group: the pipeline's ranks, as many as the schedule has; all if None. checkpointed: keep only each stage's input.
    wrap: a function that wraps each stage's module, such as `DataParallel`; if it has `no_sync`, only the last micro-batch's
      backward runs outside of it.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        loss_fn: Callable[..., Tensor],
        *,
        group=None,
        checkpointed: bool = False,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.plan, self.loss_fn, self.group, self.device = plan, loss_fn, group, torch.device(device)
        self.rank, ranks = place_in(group)
        schedule = plan.schedule
        if ranks != schedule.ranks:
            raise ValueError(f"expected {schedule.ranks} ranks, as the schedule has, found {ranks}; launch as many")
        modules = {stage: build_stage(plan, stage).to(device) for stage in schedule.stages_of(self.rank)}
        self.tied = TiedParameters(plan, modules, group)
        self.modules = {stage: wrap(module) if wrap else module for stage, module in modules.items()}
        self.runs = {stage: StageRun(module, checkpointed) for stage, module in self.modules.items()}
        self.spans: list[Span] = []

    def parameters(self):
        """Of this rank's stages."""
        for module in self.modules.values():
            yield from module.parameters()

    def named_parameters(self):
        """Of this rank's stages, under the whole model's names."""
        for module in self.modules.values():
            yield from getattr(module, "module", module).named_parameters()

    def step(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor | None:
        """Forward and backward of a mini-batch: gradients are in `p.grad` afterwards, as of the whole batch's mean loss.

        x: (batch, …), read on the first stage's rank; y: (batch, …), on the last's. Returns the mean loss there, else None.
        """
        schedule = self.plan.schedule
        last = schedule.stages - 1
        xs = split_batch(x, schedule.micro_batches) if 0 in self.runs else ()
        ys = split_batch(y, schedule.micro_batches) if last in self.runs else ()
        here: dict[Action, tuple] = {}  # what has arrived, or begun to: tensors, and who waits for them
        leaving: list = []  # sends, each with its tensor
        losses, self.spans = [], []
        for actions in groups_of(schedule.actions[self.rank]):
            if actions[0].kind not in (FORWARD, BACKWARD):
                leaving += self._talk(actions, here)
                continue
            (action,) = actions
            before = time.perf_counter()
            if action.kind == FORWARD:
                made = self._forward(action, xs, ys, here, losses)
            else:
                made = self._backward(action, here, len(losses))
            self.spans.append(Span(self.rank, action, before, time.perf_counter()))
            for transfer in leaving:
                transfer.wait()
            leaving = []
            if made:
                here[action] = made
        for transfer in leaving:
            transfer.wait()
        self.tied.sum_gradients()
        return torch.stack(losses).sum() if losses else None

    def _talk(self, actions: list[Action], here: dict) -> list:
        """Begin all these messages at once."""
        transfers, receives, kept = [], [], []
        for action in actions:
            peer = self.plan.schedule.peer(action)
            if action.kind in SENDS:
                source = FORWARD if action.kind == SEND_ACTIVATION else BACKWARD
                tensors = here.pop(Action(source, action.stage, action.micro_batch))
                transfers += [("send", tensor, peer) for tensor in tensors]
            else:
                tensors = self._room(action)
                transfers += [("receive", tensor, peer) for tensor in tensors]
                receives.append((action, tensors))
        works = iter(begin(transfers, self.group))
        for action in actions:
            if action.kind in SENDS:
                kept += [next(works) for w in self._wires(action)]
            else:
                tensors = self._room_of(receives, action)
                here[action] = (tensors, [next(works) for _ in tensors])
        return kept

    @staticmethod
    def _room_of(receives, action):
        return next(tensors for one, tensors in receives if one == action)

    def _wires(self, action: Action) -> list:
        """What a message carries."""
        forward = action.kind in (SEND_ACTIVATION, RECEIVE_ACTIVATION)
        cut = min(action.stage, action.peer_stage)
        return [wire for wire in self.plan.wires[cut] if forward or wire.gradient]

    def _room(self, action: Action) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype, device=self.device) for wire in self._wires(action)]

    def _forward(self, action: Action, xs, ys, here: dict, losses: list) -> tuple[Tensor, ...]:
        stage, i = action.stage, action.micro_batch
        if stage == 0:
            inputs = (xs[i],)
        else:
            inputs = self._arrived(Action(RECEIVE_ACTIVATION, stage, i), Action(FORWARD, stage - 1, i), here)
            for tensor, wire in zip(inputs, self.plan.wires[stage - 1], strict=True):
                tensor.requires_grad_(wire.gradient)
        if stage < self.plan.schedule.stages - 1:
            return self.runs[stage].forward(i, inputs)
        scale = 1 / self.plan.schedule.micro_batches
        (loss,) = self.runs[stage].forward(i, inputs, lambda out: self.loss_fn(out, ys[i]) * scale)
        losses.append(loss)
        return ()

    def _backward(self, action: Action, here: dict, _: int) -> tuple[Tensor, ...]:
        stage, i = action.stage, action.micro_batch
        if stage == self.plan.schedule.stages - 1:
            gradients = [None]
        else:
            gradients = self._arrived(Action(RECEIVE_GRADIENT, stage, i), Action(BACKWARD, stage + 1, i), here)
        last = [a for a in self.plan.schedule.actions[self.rank] if a.kind == BACKWARD and a.stage == stage][-1]
        quiet = getattr(self.modules[stage], "no_sync", nullcontext) if action != last else nullcontext
        with quiet():
            return self.runs[stage].backward(i, gradients)

    @staticmethod
    def _arrived(message: Action, near: Action, here: dict):
        """The tensors of a message, once they are there; or what this rank itself has made."""
        if message in here:
            tensors, works = here.pop(message)
            for work in works:
                work.wait()
            return tensors
        return here.pop(near)
