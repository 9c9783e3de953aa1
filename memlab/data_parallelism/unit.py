"""A unit of `fully_shard`: a module's parameters, which are gathered together, used together and freed together.

It has a shard for each dtype, and shows the module whole parameters while it is used, this rank's parts in between.
"""

from __future__ import annotations

from torch import nn

from memlab.data_parallelism.flat import sharing
from memlab.data_parallelism.shard import FlatShard

UNIT = "_fully_shard_unit"
"""The attribute of a sharded module, and of a parameter in a unit."""

HOOKS = (
    "autograd sees whole parameters, and would never call it: use register_post_accumulate_grad_hook, which is called "
    "with this rank's part and its mean gradient"
)
"""What to do about a hook on a parameter of a unit."""


class Unit:
    """A module's parameters that are in no other unit, by dtype and by whether they are trained."""

    def __init__(self, module: nn.Module, shards: list[FlatShard], reshard_after_forward: bool | None):
        self.module, self.shards = module, shards
        self.reshard_after_forward = reshard_after_forward
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # (module, name, part, whole)
        self.running = 0  # forwards of it that are running
        self.calls = 0  # forwards of it whose backward has not come through
        self.expected = False  # gathered ahead, and not needed yet
        self.due = False  # its gradients are to be reduced in the backward to come
        self.shown = False  # whether the modules hold whole parameters

    @property
    def gathered(self) -> bool:
        """Whether its buffers have bytes, be they filled or on the way."""
        return any(shard.gathered is not None for shard in self.shards)

    def begin_gathering(self) -> None:
        """Have it gathered, if it is not."""
        for shard in self.shards:
            if shard.gathered is None:
                shard.begin_gathering()

    def show(self) -> None:
        """Wait until it is gathered, and let the modules see whole parameters.

        Raises RuntimeError where a module's parameter, or its memory, was replaced since `fully_shard`, and for a
        hook on one that would not be called.
        """
        for shard in self.shards:
            shard.wait()
        if not self.shown:
            for module, name, part, full in self.slots:
                if module._parameters.get(name) is not part or part.numel() and not self._holds(part):
                    raise _put_in_later(module, name, "another parameter or other memory")
                if part._backward_hooks:
                    raise RuntimeError(
                        f"expected no register_hook on {name} of {type(module).__name__}, found one; {HOOKS}"
                    )
                if full.requires_grad != part.requires_grad:
                    full.requires_grad_(part.requires_grad)
            self._put(whole=True)
            self.shown = True

    def refuse_others(self) -> None:
        """Raise RuntimeError for a parameter in the module that is in no unit: every rank would train it by itself.

        While no unit of the module is shown.
        """
        for module in self.module.modules():
            for name, p in module._parameters.items():
                if p is not None and p.requires_grad and not hasattr(p, UNIT):
                    raise _put_in_later(module, name, "a parameter that is in no unit")

    def hide(self) -> None:
        """Let the modules see this rank's parts."""
        if self.shown:
            self._put(whole=False)
            self.shown = False

    def free(self) -> None:
        """Give the buffers' bytes back."""
        self.hide()
        self.expected = False
        for shard in self.shards:
            shard.free()

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced, of a backward that failed."""
        for shard in self.shards:
            shard.gradients, shard.arrived = None, set()
            for p in shard.full:
                p.grad = None

    def _holds(self, part: nn.Parameter) -> bool:
        storage = part.untyped_storage()._cdata
        return any(storage == shard.piece.untyped_storage()._cdata for shard in self.shards)

    def _put(self, whole: bool) -> None:
        for module, name, part, full in self.slots:
            p = full if whole else part
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = p
            else:
                setattr(module, name, p)  # an LSTM keeps a list of its weights up to date there


def refuse_shared_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError for parameters that are tied by their memory alone: each would get a piece of its own."""
    keys = {p: key for key, p in named}
    for one, other in sharing(list(keys)):
        key, its = list(keys.values())[one], list(keys.values())[other]
        raise ValueError(
            f"expected parameters with memory of their own, found {key} and {its} in the same; tied weights are one "
            "Parameter: b.weight = a.weight, and not b.weight.data = a.weight.data"
        )


def _put_in_later(module: nn.Module, name: str, found: str) -> RuntimeError:
    return RuntimeError(
        f"expected {name} of {type(module).__name__} as fully_shard left it, found {found}; change weights in place "
        "(copy_), or put them in before fully_shard"
    )
