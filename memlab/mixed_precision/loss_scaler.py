"""Loss scaling: multiply the loss, so that small gradients fit into FP16; divide the gradients before the step.

FP16 has no number between 0 and 6e-8, and few digits below 6e-5, where many gradients lie. By the chain rule a loss
S times as large has gradients S times as large: so backward runs on S · loss, and the optimizer steps on gradient / S.
While S is a power of two, that changes exponents and no digit.

The best S is the largest with which nothing overflows, and training moves it. So it is tried out: where a gradient is
inf or nan the step is skipped and S backs off, and after some time without it grows. Micikevicius et al. 2018, section
3.2. A GPU is never waited for, but where Python must know whether to skip; fused optimizers ask that on the GPU too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memlab.mixed_precision.overflow import gradients_in_memory, multiply_and_check, note_losses
from memlab.mixed_precision.scaler_settings import FP32, ScalerSettings

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"  # how far an optimizer has come since the last update()


class LossScaler(ScalerSettings):
    """torch.amp.GradScaler's contract, for any device, and some things beyond it.

        scaler.scale(model(x, y)).backward()  # once, or as often as you accumulate
        scaler.unscale_(optimizer)            # only if you look at the gradients, to clip them
        scaler.step(optimizer)                # steps, unless a gradient is inf or nan
        scaler.update()                       # multiplies the scale by a factor, if it is time
        scaler.step_scheduler(scheduler)      # steps it, if its optimizer stepped

    init_scale: the first S. backoff_factor: S is multiplied by it after an overflow, growth_factor: after
    growth_interval iterations without. enabled=False: every method does what it would without scaling.
    agree: a function that makes all ranks skip together. It gets a 0-dim FP32 tensor, 1. if this rank met inf or nan,
      else 0., and returns the one that all agree on (all-reduce MAX). It is called once per optimizer and update(),
      before anything reads that tensor, and where a rank has no gradient too, which without `agree` step() refuses.
      Ranks whose gradients are DTensors, cut over all of them as FSDP2's are, skip together without it; replicas of
      such ranks need it.

    FP16 gradients are unscaled in FP16: what the scale had saved from underflow is rounded or lost after all. An
    optimizer that can `widen_gradients()`, as MasterWeights can, is asked to first, and then nothing is lost.

    After an inf or nan among the losses, before the scale, every optimizer skips until update(), also if gradients are
    finite (x² overflows, 2x does not). GradScaler looks at no loss. Losses to be weighted or masked, reduce first.

    Not here: get_growth_factor, set_growth_factor and the like; growth_factor, backoff_factor and growth_interval are
    attributes. Pickle and deepcopy; there is state_dict().

    With either, torch's fused SGD (2.11, 2.13) goes on from a momentum that nobody wrote, if its first step was
    skipped: begin with a scale that does not overflow, or use foreach=True.

    Raises TypeError or ValueError for settings that make no sense.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        agree: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._agree = agree
        self._stages, self._found_inf = {}, {}  # optimizer → its stage; → 1. if it met inf or nan. Until update()
        self._latest = WeakKeyDictionary()  # optimizer → found_inf of its latest step; None: unscaled and not stepped

    def scale(self, outputs):
        """S · loss. outputs: a tensor of any shape, or lists, tuples or an iterator of them: the same back.

        Raises TypeError for anything else.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._make_scale(outputs.device)
            note_losses(self._bad_loss, outputs)
            return outputs * self._scale.to(outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            return map(self.scale, outputs)
        raise TypeError(f"expected a loss: a tensor, or lists or tuples of tensors; found {outputs!r}")

    def unscale_(self, optimizer) -> None:
        """Divide the optimizer's gradients by S, in place, and note whether one is inf or nan.

        Once per update(), when all gradients are there; there may be none. Raises RuntimeError the second time, after
        step() and before scale(); TypeError for what is no optimizer.
        """
        if not self._enabled:
            return
        if (stage := self._stage(optimizer)) != READY:
            raise RuntimeError(
                f"expected an optimizer that is {READY} for unscale_(), found one {stage} since the last update(); "
                "unscale once an iteration, before step(), and end the iteration with update()"
            )
        if hasattr(optimizer, "widen_gradients"):
            optimizer.widen_gradients()
        precise = torch.float32 if self._scale.device.type == "mps" else torch.float64
        self._multiply_gradients(optimizer, self._scale.to(precise).reciprocal().float())
        self._latest[optimizer] = None

    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(*args, **kwargs) on unscaled gradients, and its result; None if skipped.

        One that unscales and skips by itself (`_step_supports_amp_scaling`: torch's fused ones) is given tensors
        `grad_scale` and `found_inf`, and runs, with gradients or without; for others, none is a RuntimeError. So is a
        second step before update(), and a closure, whose gradients would be made inside the step, where nobody can
        check them. Raises what unscale_ raises, too.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args)):
            raise RuntimeError("expected step() without a closure, whose gradients nobody could check; found one")
        if (stage := self._stage(optimizer)) == STEPPED:
            raise RuntimeError("expected one step() of an optimizer per update(), found a second; call update() first")
        by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if stage == READY and by_itself:
            self._multiply_gradients(optimizer, self._one)  # only to look at them
            self._stages[optimizer], self._latest[optimizer] = READY, None  # until it has divided them
        elif stage == READY:
            self.unscale_(optimizer)
        if optimizer not in self._found_inf and not (by_itself and not gradients_in_memory(optimizer)):
            self._stages[optimizer] = stage  # nothing was divided: after an error the next step divides
            raise RuntimeError(
                "expected an optimizer with gradients, found one without any when it was unscaled: first call "
                "backward() on a scaled loss that depends on its parameters (where only some ranks have gradients, "
                "give LossScaler an `agree`)"
            )
        found_inf = self._found_inf.get(optimizer, self._bad_loss)
        if by_itself:
            result = self._step_itself(optimizer, stage == READY, found_inf.clone(), *args, **kwargs)
        else:
            result = None if found_inf.item() else optimizer.step(*args, **kwargs)
        self._stages[optimizer], self._latest[optimizer] = STEPPED, found_inf.clone()
        return result

    def _step_itself(self, optimizer, divides: bool, found_inf: Tensor, *args, **kwargs):
        """The step of an optimizer that divides and skips by itself. `grad_scale` may be there: the user's own."""
        scale = getattr(optimizer, "grad_scale", None)
        if divides:
            scale = self._scale if scale is None else self._scale * scale
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: S backs off if any optimizer met inf or nan, else grows if it is time (and never to inf).

        new_scale: take this one instead, a number or a tensor of one element. Raises RuntimeError if no gradient was
        unscaled or stepped on since the last update(); TypeError or ValueError for a new_scale that makes no sense.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale.item() if isinstance(new_scale, Tensor) else new_scale)
        elif not self._found_inf:
            raise RuntimeError("expected step() or unscale_() of gradients before update(): no gradient was checked")
        else:
            found_inf = functools.reduce(torch.maximum, self._found_inf.values())
            factors = self.growth_factor, self.backoff_factor, self.growth_interval
            torch._amp_update_scale_(self._scale, self._growth_tracker, found_inf, *factors)
            self._scale.clamp_(min=FP32.tiny)  # 0 is no scale to come back from
        self._stages, self._found_inf = {}, {}
        if self._bad_loss is not None:
            self._bad_loss.zero_()

    def skipped(self, optimizer) -> bool:
        """Whether its latest step was skipped, by step() or by you, who unscaled and didn't step. Waits for the GPU.

        Raises RuntimeError for an optimizer that was never given to step() or unscale_().
        """
        if self._enabled and optimizer not in self._latest:
            raise RuntimeError("expected an optimizer that was given to scaler.step(), found one that never was")
        return self._enabled and ((found_inf := self._latest[optimizer]) is None or bool(found_inf.item()))

    def step_scheduler(self, scheduler, *args, **kwargs) -> None:
        """scheduler.step(*args, **kwargs), unless its optimizer's latest step was skipped. For schedules in steps.

        Else warm-up runs on while nothing is learnt, and torch warns of a scheduler that steps before its optimizer.
        """
        if not self.skipped(scheduler.optimizer):
            scheduler.step(*args, **kwargs)

    def _stage(self, optimizer) -> str:
        """How far an optimizer has come, if it is one and there is a scale."""
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"expected an optimizer, found {type(optimizer).__name__}")
        if self._scale is None and self._agree is None:
            raise RuntimeError("expected scaler.scale(loss).backward() before unscale_() and step(), found no loss yet")
        self._make_scale(next((p.device for group in optimizer.param_groups for p in group["params"]), "cpu"))
        return self._stages.get(optimizer, READY)

    def _multiply_gradients(self, optimizer, factor: Tensor) -> None:
        """Multiply gradients in place by a 0-dim FP32 tensor, and note found_inf, such a tensor too: 1. or 0."""
        gradients = gradients_in_memory(optimizer)
        self._stages[optimizer] = UNSCALED
        if not gradients and self._agree is None:
            return  # nothing was checked, so nothing is noted
        self._found_inf[optimizer] = self._one  # should something raise: skipped, not divided twice
        found_inf = multiply_and_check(gradients, factor, self._bad_loss)
        if self._agree is not None:
            agreed = self._agree(found_inf)
            if not isinstance(agreed, Tensor) or agreed.numel() != 1:
                raise TypeError(f"expected agree to return the tensor of one element agreed on, found {agreed!r}")
            found_inf = agreed.reshape(()).to(factor).ne(0).float()  # a fused kernel skips on exactly 1.
        self._found_inf[optimizer] = found_inf
