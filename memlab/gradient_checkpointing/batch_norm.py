"""BatchNorm counted once: a recomputation normalises as the forward did, and leaves the running statistics alone.

In training, BatchNorm's forward has a side effect: it moves running statistics towards the batch's, and counts. Run
again for backward it would do so twice for one batch: with momentum 0.1 they would go 19 % of the way instead of 10 %.
The second run needs none of it, since in training these buffers are written and never read. So while a layer is
recomputed it has others to write to. Nothing is written back afterwards, as its own were never touched: autograd counts
every write to a tensor that it saved, and would refuse to go on.

Which layers a function calls cannot be seen from outside, as they may be inside a lambda. So they are met where they
are called: by a hook before every module's forward, there while a recomputation runs, and heeding its thread only.
Where the function is such a layer's own forward, as for a layer chosen in `checkpointed`, no module is called: then the
layer is met at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def statistics_stand_still(function: Callable | None = None) -> Iterator[Callable[[Tensor], Tensor]]:
    """In the block and in this thread, BatchNorm and InstanceNorm in training mode don't move running statistics.

    function: what the block calls; it may be the bound forward of such a layer.

    Yields a function from a tensor that is being saved for backward to the one to keep: for a buffer lent to a layer it
    is the layer's own, which training's backward doesn't read either, so that the lent one dies with the layer's
    forward; every other tensor stands for itself.

    Layers in evaluation mode read their own buffers, as ever. Still counted twice, or wrongly:
    - layers that aren't called as modules inside of it: `layer.forward(x)`, `F.batch_norm` given buffers, compiled or
      scripted code;
    - a layer that another thread runs at that moment, whose update is lost: buffers belong to all threads;
    - other state that a forward moves: counters of your own, observers for quantisation that average, and spectral
      norm, whose power iteration goes on, so that the second run has other weights and gradients are not exact either.
    """
    lender = _Lender()
    hook = register_module_forward_pre_hook(lender.lend)
    try:
        lender.lend(getattr(function, "__self__", None), ())
        yield lender.own
    finally:
        hook.remove()
        lender.close()


class _Lender:
    """Lends buffers to each layer for the time of its forward."""

    def __init__(self):
        self.thread = threading.get_ident()
        self.aside: dict[Module, dict[str, Tensor | None]] = {}  # the layers with lent buffers, and their own
        self.hooks = {}

    def lend(self, module: Module | None, args: tuple) -> None:
        """Called before every module's forward."""
        if not isinstance(module, _NormBase) or threading.get_ident() != self.thread:
            return
        if not module.training or module.running_mean is None or has_lent_buffers(module):
            return
        self.aside[module] = {name: module._buffers[name] for name in BUFFERS}
        for name, buffer in self.aside[module].items():
            module._buffers[name] = None if buffer is None else buffer.clone()  # selective never counts it
        if module not in self.hooks:
            self.hooks[module] = module.register_forward_hook(self.give_back)

    def give_back(self, module: Module, *_) -> None:
        """Called after its forward, as the last hook."""
        module._buffers.update(self.aside.pop(module, {}))

    def own(self, tensor: Tensor) -> Tensor:
        """The layer's own buffer if this is a lent one, else the tensor itself."""
        for module, buffers in self.aside.items():
            for name, buffer in buffers.items():
                if tensor is module._buffers[name]:
                    return buffer
        return tensor

    def close(self) -> None:
        """Leave no hook, and no lent buffer in a layer whose forward did not begin, or did not come to its end."""
        for hook in self.hooks.values():
            hook.remove()
        for module in list(self.aside):
            self.give_back(module)


def has_lent_buffers(module: Module) -> bool:
    """Whether a recomputation around this one has seen to it."""
    lenders = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    return any(isinstance(lender, _Lender) and module in lender.aside for lender in lenders)
