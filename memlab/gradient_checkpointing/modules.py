"""Checkpointing by module: every block, every k-th, or whichever you choose.

A model need not be rewritten to be checkpointed. In a `with` block, a chosen module's `forward` is replaced by one that
runs the old one under `checkpoint`; parameters, names and hooks stay where they are, and at its end nothing is left.

Each checkpointed block frees its bytes and costs its forward. After the forward of L blocks, n of them checkpointed,

    (L − n) · bytes that a block saves + n · bytes of a block's input

are held. When a block is computed again its bytes stand on top, so the last one, whose bytes backward wants at once, is
best left alone: to drop them frees nothing at the peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.nn import Module

from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.gradient_checkpointing.selective import selective_checkpoint


def every(blocks: Iterable[Module], k: int) -> list[Module]:
    """The first of every k blocks: numbers 0, k, 2k … of them. k = 1 is all; with k > 1 the last is seldom among them.

    Raises TypeError if k is no int, ValueError if k < 1.

    >>> every("abcdefgh", 3)
    ['a', 'd', 'g']
    """
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"expected k to be an int, found {k!r}")
    if k < 1:
        raise ValueError(f"expected k >= 1 (1: all blocks), found {k}")
    return list(blocks)[::k]


@contextmanager
def checkpointed(model: Module, which: Iterable[Module], *, keep=None) -> Iterator[list[Module]]:
    """In the block, calls of the chosen modules of `model` are checkpointed: `with checkpointed(model, blocks): …`.

        with checkpointed(model, every(model.blocks, 2)):
            model(x, y).backward()

    which: modules of the model, such as `every(model.blocks, 2)`.
    keep: None, or as of `selective_checkpoint`, which is then used.

    Backward may run after the block, though not inside another one; and it must run inside where a `checkpoint` of your
    own is around. Hooks on a chosen module run once, around the checkpoint; those on modules inside it run again in the
    recomputation. Outside grad mode (evaluation under `no_grad`) a module runs as it always does.

    Gives the list of the chosen. Don't copy or pickle the model in the block.

    Raises TypeError for what is no model or no choice; ValueError if nothing is chosen, a module that is no part of the
    model, or one inside another; RuntimeError for one that is checkpointed already.
    """
    if not isinstance(model, Module):
        raise TypeError(f"expected a model (torch.nn.Module), found {type(model).__name__}")
    run = checkpoint if keep is None else functools.partial(selective_checkpoint, keep=keep)
    chosen = _choose(model, which)
    for module in chosen:
        if isinstance(vars(module).get("forward"), _Checkpointed):
            raise RuntimeError(
                f"expected modules that are not checkpointed, found a {type(module).__name__} that is; leave the block "
                "that it is in first"
            )
    with ExitStack() as undo:
        for module in chosen:
            undo.callback(_put_back, module, vars(module).get("forward"))
            module.forward = _Checkpointed(run, module.forward)
        yield chosen


class _Checkpointed(functools.partial):
    """Stands in for a module's forward."""


def _put_back(module: Module, own: Callable | None) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own


def _choose(model: Module, which: Iterable[Module]) -> list[Module]:
    """Each module once, in the order of `model.modules()`."""
    if not isinstance(which, Iterable):
        raise TypeError(f"expected a list of modules to choose, found {type(which).__name__}")
    given = list(which)
    if strange := [one for one in given if not isinstance(one, Module)]:
        raise TypeError(f"expected modules, found {strange[0]!r}")
    if strange := set(given) - set(model.modules()):
        raise ValueError(f"expected modules of the model, found a {type(strange.pop()).__name__} that is no part of it")
    chosen = [module for module in model.modules() if module in set(given)]
    if not chosen:
        raise ValueError(f"expected at least one module of the {type(model).__name__} to be chosen, found none")
    inside = {module for outer in chosen for module in outer.modules() if module is not outer}
    if nested := [module for module in chosen if module in inside]:
        raise ValueError(
            f"expected modules apart from each other to be chosen, found a {type(nested[0]).__name__} inside another; "
            "choose the outer ones or the inner ones"
        )
    return chosen
