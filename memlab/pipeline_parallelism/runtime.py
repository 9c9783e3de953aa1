"""Real ranks that execute a schedule: each does its own list, from top to bottom, and nothing else decides.

    forward        wait for what the stage before has sent · run the layers · keep what backward needs
    backward       wait for the gradient that the stage after has sent · run backward
    send, receive  begin it, and go on

So a rank idles only where it waits for a neighbour: the bubble. Gradients add up over the micro-batches (chapter 07).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from memlab.pipeline_parallelism.checking import groups_of
from memlab.pipeline_parallelism.line import gone_before
from memlab.pipeline_parallelism.messages import Messages
from memlab.pipeline_parallelism.orders import forwards_of
from memlab.pipeline_parallelism.plan import PipelinePlan
from memlab.pipeline_parallelism.promises import planned_micro_batches, refuse_after_failure, scalar_loss
from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    Action,
)
from memlab.pipeline_parallelism.simulator import Span
from memlab.pipeline_parallelism.stage import StageRun, build_stages
from memlab.pipeline_parallelism.tied import TiedParameters
from memlab.ranks import place_in


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

    plan: of `plan_pipeline`, the same on all ranks.   loss_fn: (output, y) of a micro-batch → its mean loss, a scalar.
      Its own parameters, if it has any, are not in `parameters()`: let the last layer have them.
    group: the pipeline's ranks, as many as the schedule has; all if None.   device: where this rank computes.
    checkpointed: keep only each stage's input, and compute the rest again in backward.
    wrap: a function that wraps each stage with parameters to train, such as `DataParallel`. If the result has
      `no_sync`, every backward but the stage's last runs in it.
    after: called with each action when it is done: a computation when what was sent before it is gone; messages that
      stand side by side when all of them have begun.

    `spans` are the last step's forwards and backwards, by `time.perf_counter`, without the wait for what they need:
    1 − busy time / (ranks · whole time) is the bubble. (On a GPU: when work was handed over, which says little.)

    A step that raises leaves nothing in flight, and the others in mid-step, where they wait for this rank. So no other
    step or evaluation can follow it, but in a pipeline of one rank: let the launch end.

    Ranks that are seeded alike draw the same masks for dropout on every stage. With dropout, give them seeds of their
    own once the pipeline is made: torch.manual_seed(seed + plan.schedule.stages_of(rank)[0]).

    With a scaler, scale within loss_fn: the loss comes back scaled. An infinite gradient may be on one stage only, so
    all must skip: `LossScaler(agree=…)` over this group. Ranks that seed or fill tied copies by hand must do it alike.

    Raises ValueError for a group of another number of ranks, TypeError for PyTorch's DistributedDataParallel as wrap:
    after several forwards it averages the first backward only, and replicas drift apart.
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
        after: Callable[[Action], None] | None = None,
    ):
        self.plan, self.loss_fn, self.group, self.after = plan, loss_fn, group, after
        self.device, (self.rank, ranks) = torch.device(device), place_in(group)
        schedule, self.last_stage = plan.schedule, plan.schedule.stages - 1
        if ranks != schedule.ranks:
            raise ValueError(f"expected {schedule.ranks} ranks, as the schedule has, found {ranks}; launch as many")
        modules = {s: m.to(device) for s, m in build_stages(plan, schedule.stages_of(self.rank)).items()}
        self.tied = TiedParameters(plan, modules, group, wrapped=wrap is not None)
        self.layers = modules
        self.modules = {s: wrap(m) if wrap and _trains(m) else m for s, m in modules.items()}
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in self.modules.values()):
            raise TypeError(
                "expected a wrapper that averages where backward runs, found DistributedDataParallel, which expects "
                "one backward after each forward; take memlab.data_parallelism.DataParallel"
            )
        wires = (*plan.wires, None)
        self.runs = {s: StageRun(m, checkpointed, stage=s, planned=wires[s]) for s, m in self.modules.items()}
        self.messages = Messages(plan, group, self.device)
        self.spans: list[Span] = []
        self._training = groups_of(schedule.actions[self.rank])
        self._evaluation = groups_of(forwards_of(schedule).actions[self.rank])
        self._last_backward = {a.stage: a for a in schedule.actions[self.rank] if a.kind == BACKWARD}
        self._failed = False  # in mid-step, where other ranks wait

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages, each once."""
        yield from dict.fromkeys(p for module in self.modules.values() for p in module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, each once, under the whole model's names: a tied one's is its first."""
        seen: set[nn.Parameter] = set()
        for layers in self.layers.values():
            for name, p in layers.named_parameters():
                if p not in seen:
                    seen.add(p)
                    yield name, p

    def step(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor | None:
        """Forward and backward of a mini-batch; afterwards `p.grad` has the gradient of its loss added.

        x: (batch, …), read on the first stage's rank; y: (batch, …), on the last's. Elsewhere they may be None.
        The loss is the mean over micro-batches, whose own losses are means.

        Returns it on the last stage's rank, detached, 0-dim; None elsewhere. Raises ValueError for a batch or a stage's
        output that is not as planned, and an x that needs a gradient (what makes it is a layer, too); TypeError for a
        loss that is no scalar; RuntimeError for gradients that are off, and after a step that raised.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("expected gradients on, found them off; call evaluate")
        shares = self.plan.schedule.micro_batches
        head = lambda out, i, ys: scalar_loss(self.loss_fn(out, ys[i])) / shares  # noqa: E731
        losses = self._play(self._training, x, y, head)
        self.tied.sum_gradients()
        return torch.stack([loss for (loss,) in losses]).sum() if losses else None

    def evaluate(self, x: Tensor | None = None, y: Tensor | None = None):
        """Forwards alone, without gradients, in eval mode. x, y: as for `step`.

        Returns on the last stage's rank the mean loss; without y what the last layer returns, (batch, …) or a tuple of
        such. None elsewhere. Raises as `step` does for a batch, an output or a loss; ValueError for outputs without
        rows, if there is no y.
        """
        head = lambda out, i, ys: scalar_loss(self.loss_fn(out, ys[i])) if ys else out  # noqa: E731
        with evaluating(self.modules.values()):
            made = self._play(self._evaluation, x, y, head)
            if not made:
                return None
            return whole_batch(made) if y is None else torch.stack([loss for (loss,) in made]).mean()

    def _read(self, name: str, batch: Tensor | None, stage: int) -> Sequence[Tensor]:
        return planned_micro_batches(self.plan, name, batch) if stage in self.runs else ()

    def _play(self, groups: list[list[Action]], x, y, head) -> list[tuple[Tensor, ...]]:
        """Do what the list says. head: (output, micro-batch, ys) → what is made of it. Returns all that it made."""
        refuse_after_failure(self._failed)
        if groups is self._training:
            self.tied.begin_step()
        self.spans, made = [], []
        try:  # a batch that is refused fails the step, too: others begin it, and wait for this rank
            xs = self._read("x", x, 0)
            ys = () if y is None and groups is self._evaluation else self._read("y", y, self.last_stage)
            for actions in groups:
                if actions[0].kind not in COMPUTATIONS:
                    self.messages.begin(actions)
                elif actions[0].kind == FORWARD:
                    self._forward(actions[0], xs, lambda out, i: head(out, i, ys), made)
                else:
                    self._backward(actions[0])
                if self.after is not None:
                    for action in actions:
                        self.after(action)
            self.messages.settle()
        except BaseException:
            self._failed = self.plan.schedule.ranks > 1
            self.messages.ready.clear()
            for run in self.runs.values():
                run.in_flight.clear()
            raise
        return made

    def _forward(self, action: Action, xs, head, made: list) -> None:
        stage, i = action.stage, action.micro_batch
        inputs = (xs[i],) if stage == 0 else self.messages.take(Action(RECEIVE_ACTIVATION, stage, i))
        loss = (lambda out: head(out, i)) if stage == self.last_stage else None
        begun = time.perf_counter()
        outputs = self.runs[stage].forward(i, inputs, loss)
        self._done(action, begun)
        if loss:
            made.append(outputs)
        else:
            self.messages.ready[Action(RECEIVE_ACTIVATION, stage + 1, i)] = outputs

    def _backward(self, action: Action) -> None:
        stage, i = action.stage, action.micro_batch
        gradients = [None] if stage == self.last_stage else self.messages.take(Action(RECEIVE_GRADIENT, stage, i))
        self.messages.settle(gone_before(action, self.messages.begun))
        quiet = getattr(self.modules[stage], "no_sync", nullcontext)
        quiet = nullcontext if action == self._last_backward[stage] else quiet
        mixed = torch.is_autocast_enabled(self.device.type)
        begun = time.perf_counter()
        with quiet(), torch.autocast(self.device.type, enabled=False) if mixed else nullcontext():
            made = self.runs[stage].backward(i, gradients)
        self._done(action, begun)
        if stage > 0:
            self.messages.ready[Action(RECEIVE_GRADIENT, stage - 1, i)] = made

    def _done(self, action: Action, begun: float) -> None:
        self.spans.append(Span(self.rank, action, begun, time.perf_counter()))
        self.messages.settle()


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules in eval mode, and no gradients; afterwards every part of them is in the mode that it was in.

    As eval() and train() do it, which layers may override to do more, such as merge weights; parts after their wholes.
    """
    modes = {part: part.training for module in modules for part in module.modules()}
    try:
        for part in modes:
            part.eval()
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.train(mode)


def whole_batch(made: list[tuple[Tensor, ...]]) -> Tensor | tuple[Tensor, ...]:
    """Micro-batches' outputs, each a tuple of (rows, …), as one batch: (batch, …), or a tuple of several such."""
    if any(t.dim() == 0 for outputs in made for t in outputs):
        raise ValueError(
            "expected outputs of rows, (rows, …), to make a batch of, found a single number of a micro-batch; if it is "
            "a loss, give evaluate y, too, which makes the mean"
        )
    whole = tuple(map(torch.cat, zip(*made, strict=True)))
    return whole[0] if len(whole) == 1 else whole


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
