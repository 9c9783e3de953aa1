"""BatchNorm sees the micro-batch, not the batch: what accumulation changes, and the half of it that can be mended.

In training, BatchNorm does two things with the mean and variance of its input: it normalises by them, and it moves its
running statistics, which evaluation will normalise by, towards them. Accumulated, both see micro-batches.

Normalising cannot be mended in one pass. The full batch's statistics at layer l are known only when layer l − 1 has
finished *all* micro-batches; so each layer would wait for all k, and its backward, which sums over the batch too, would
need the k micro-batches' activations at once. Not to keep those is what accumulation is for. (GroupNorm and LayerNorm
never look past one example: they don't notice.)

The running statistics can be mended, since nothing waits for them. For a group of N values a channel

    total sum of squares = sum of squares within micro-batches + sum of squares between their means

so three things per channel, a count, a mean and a sum of squares, are enough to merge micro-batch after micro-batch
(Chan, Golub and LeVeque 1979), and the running statistics move once, as for the full batch. Accumulated
plainly they move k times, each time towards the variance within one micro-batch, which misses the part between.
The idea is GPipe's: Huang et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, distributed
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from memlab.backward import backward_number

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def deferred_batch_norm(model: Module) -> Iterator[None]:
    """In the block, around the micro-batches of one step, running statistics stand still; at its end they move once.

        with deferred_batch_norm(model):
            accumulate(loss, micro_batches)
        optimizer.step()

    Every BatchNorm of the model that is in training mode and tracks running statistics still normalises by the
    micro-batch. Its `running_mean` and `running_var` then move by its momentum towards the mean and the unbiased
    variance of all micro-batches' values together, each value counting once, however ragged the micro-batches; and
    `num_batches_tracked` grows by one. In the first such layer that is the full batch's update, up to rounding. Deeper
    layers see inputs that earlier ones normalised by micro-batch, and have the exact statistics of *those*.

    Each forward of a layer counts, under `no_grad` too, as it does without the block; but not its recomputation in
    backward. Where one step calls a layer several times for the same micro-batch, for real and fake or two of a pair,
    it still moves once, towards all values together, where the full batch would move it once for each call.

    Layers in evaluation mode, and those without running statistics, are left alone. Statistics are merged in the
    buffers' dtype, at least FP32. A layer with 16-bit buffers rounds a micro-batch's statistics to them first, and an
    FP16 one gives inf for a variance above 65,504; 16-bit inputs under FP32 buffers, as in autocast, lose nothing.

    Memory, until the block ends: 16 bytes a channel and 8 a layer with FP32 buffers, however many the micro-batches.
    Time: a handful of ops on vectors of channels, and no pass over the activations.

    If the block raises, nothing moves. Hooks are gone at its end in any case. Don't copy or pickle the model inside.

    Raises TypeError for what is no model; RuntimeError inside another such block, and at the end for a layer that moved
    unseen (compiled before its first block: such code looks at no hooks); NotImplementedError for a SyncBatchNorm over
    several ranks, whose counts are not known here.
    """
    if not isinstance(model, Module):
        raise TypeError(f"expected a model (torch.nn.Module), found {type(model).__name__}")
    layers = [_Layer(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    with ExitStack() as undo:
        for layer in layers:
            layer.watch(undo)
        yield
    for layer in layers:
        layer.refuse_unseen()
    for layer in layers:
        layer.move()


def deferrable(module: _BatchNorm) -> bool:
    """Whether its forward would move running statistics."""
    return module.training and module.track_running_stats and module.running_mean is not None


def written(module: _BatchNorm) -> int | None:
    """How often its counter has been written to: a number that costs a GPU no synchronisation."""
    return None if module.num_batches_tracked is None else module.num_batches_tracked._version


def zeros(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of this shape and device, and fit for training even if the first forward is under inference_mode."""
    with torch.inference_mode(False):
        return torch.zeros_like(like, dtype=dtype)


class _Moments:
    """Of a set of values per channel: how many, their mean, and the sum of squared distances from it."""

    def __init__(self, like: Tensor):
        wide = torch.promote_types(like.dtype, torch.float32)
        self.count, self.mean, self.squares = 0, zeros(like, wide), zeros(like, wide)

    def merge(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Add `count` values of this mean and unbiased variance, (channels,) each."""
        total = self.count + count
        distance = mean - self.mean
        self.squares.add_(variance, alpha=count - 1)  # within
        self.squares.addcmul_(distance, distance, value=self.count * count / total)  # between
        self.mean.add_(distance, alpha=count / total)
        self.count = total


class _Layer:
    """One BatchNorm. For the time of its own forward it has other buffers, and momentum 1.

    So its kernel, which computes the statistics anyway, writes them down: running = 0 · running + 1 · statistics.
    The same buffers serve every forward, as autograd keeps a reference to them until backward (it never reads them).
    """

    def __init__(self, name: str, module: _BatchNorm):
        self.name, self.module = name, module
        self.moments: _Moments | None = None
        self.scratch: dict[str, Tensor | None] | None = None
        self.own: tuple[dict[str, Tensor | None], float | None] | None = None  # what is set aside during a forward

    def watch(self, undo: ExitStack) -> None:
        """Put the hooks on, innermost around the forward, and have `undo` take them off."""
        module = self.module
        if any(isinstance(getattr(hook, "__self__", None), _Layer) for hook in module._forward_hooks.values()):
            raise RuntimeError(
                f"expected one deferred_batch_norm around a step, found {self.name or 'the model'!r} inside another; "
                "enter it once, around all micro-batches"
            )
        if isinstance(module, SyncBatchNorm) and distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size(module.process_group)
            if ranks > 1:
                raise NotImplementedError(
                    f"expected layers that see one rank's values, found {self.name!r}, a SyncBatchNorm over {ranks} "
                    "ranks; use BatchNorm (DDP sends rank 0's running statistics to all), or no deferral"
                )
        self.version = written(module)
        undo.callback(self.put_back)
        undo.callback(module.register_forward_pre_hook(self.before).remove)
        undo.callback(module.register_forward_hook(self.after, prepend=True, always_call=True).remove)

    @torch._disable_dynamo  # compiled, with the merge, the statistics came out wrong
    def before(self, module: _BatchNorm, args: tuple) -> None:
        """Set the layer's own buffers aside."""
        self.put_back()  # if a forward was interrupted: at Ctrl-C torch calls no hook
        if not deferrable(module):
            return
        own = {name: module._buffers[name] for name in BUFFERS}
        if self.scratch is None:
            self.scratch = {name: None if buffer is None else zeros(buffer) for name, buffer in own.items()}
        self.own = own, module.momentum
        module._buffers.update(self.scratch)
        module.momentum = 1.0

    @torch._disable_dynamo
    def after(self, module: _BatchNorm, args: tuple, output: Tensor | None) -> None:
        """Put them back and merge what the kernel wrote. output: (batch, channels, ...), None if forward raised."""
        if self.own is None:
            return
        self.put_back()
        if output is None or output.numel() == 0 or backward_number() != -1:  # the last: recomputed, so counted before
            return
        if self.moments is None:
            self.moments = _Moments(self.scratch["running_mean"])
        count = output.numel() // output.shape[1]
        self.moments.merge(count, self.scratch["running_mean"], self.scratch["running_var"])

    def put_back(self) -> None:
        """Give the layer its own buffers and momentum again."""
        if self.own is not None:
            buffers, self.module.momentum = self.own
            self.module._buffers.update(buffers)
            self.own = None

    def refuse_unseen(self) -> None:
        """Raise if running statistics moved in the block though no forward was seen."""
        if self.moments is None and deferrable(self.module) and written(self.module) != self.version:
            raise RuntimeError(
                f"expected the forward of {self.name or 'the model'!r} to run its hooks, found running statistics that "
                "moved without; if it is compiled, compile it anew and call it first inside deferred_batch_norm"
            )

    def move(self) -> None:
        """Move the running statistics towards the group's, once, by torch's own formula."""
        module, moments = self.module, self.moments
        if moments is None:
            return
        factor = module.momentum or 0.0  # 0, as torch has it, where there is no counter either
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            factor = 1 / float(module.num_batches_tracked) if module.momentum is None else factor
        found = moments.mean, moments.squares / (moments.count - 1)
        for running, statistic in zip((module.running_mean, module.running_var), found, strict=True):
            running.copy_(running.to(statistic.dtype).lerp(statistic, factor))
