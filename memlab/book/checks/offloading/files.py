"""Exercise 3 of chapter 09: what is saved for backward goes to files, which are gone when nobody wants them."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.book.checks.gradient_checkpointing.witness import hooks_come_off
from memlab.memory_timeline import Meter, Timeline
from memlab.units import KiB

_SPARE = 512  # bytes: one or the other scalar
_FILE_BYTES = 4 * KiB  # a file may have more than the tensor's bytes


class _Model(nn.Module):
    """tokens: (rows, length) → one number. Saves weights and their transposes, buffers, views and several dtypes."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        x = (x + q * k.sigmoid() + v.tanh()) * self.scale
        x = torch.where(x > 0, x, x.bfloat16().exp().float() - 1)
        x = self.out(x) @ self.out.weight
        last = (x * 2)[:, -1].sin()  # of all tokens, sine saves a view of the last
        return last.square().mean() + x.mean()


def _plain(folder: Path, model: nn.Module) -> contextlib.nullcontext:
    """No hooks."""
    return contextlib.nullcontext()


def _right(folder: Path, model: nn.Module) -> saved_tensors_hooks:
    """The least there is to hold and to write."""

    class Handle:
        def __init__(self, tensor: Tensor):
            self.path = folder / f"{next(names)}.pt"
            weakref.finalize(self, self.path.unlink, missing_ok=True)
            torch.save(tensor.detach().clone(), self.path)

    names = itertools.count()
    stays = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in stays else Handle(tensor)

    return saved_tensors_hooks(pack, lambda kept: torch.load(kept.path) if isinstance(kept, Handle) else kept)


@dataclass
class _Run:
    gradients: list[list[Tensor | None]]
    turn: int
    timeline: Timeline
    ends: list[int]
    sizes: list[int]
    left: list[Path]


_ROWS, _LENGTH, _WIDTH = 6, 24, 32


def _made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return _Model(_WIDTH), torch.randint(64, (_ROWS, _LENGTH))


def _forward(swap: Callable, folder: Path, model: nn.Module, tokens: Tensor) -> Tensor:
    with hooks_come_off():
        context = swap(folder, model)
        if not hasattr(context, "__enter__"):
            raise Wrong(
                f"expected a context, such as saved_tensors_hooks(pack, unpack); found {type(context).__name__}."
            )
        with context:
            return model(tokens)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _run(swap: Callable, folder: Path, backwards: int = 1) -> _Run:
    model, tokens = _made()
    gradients, ends = [], []
    with Meter(model, inputs=tokens) as meter:
        loss = _forward(swap, folder, model, tokens)
        turn, sizes = len(meter.timeline), [path.stat().st_size for path in _files(folder)]
        for number in range(backwards):
            loss.backward(retain_graph=number + 1 < backwards)
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
            ends.append(meter.timeline.totals[-1])
    timeline = meter.timeline
    del loss
    return _Run(gradients, turn, timeline, ends, sizes, _lying_about(folder))


def _lying_about(folder: Path) -> list[Path]:
    """Files that are still there when garbage has been collected, if there are any without."""
    if _files(folder):
        gc.collect()
    return _files(folder)


@functools.cache
def _reference(backwards: int) -> tuple[_Run, _Run]:
    with tempfile.TemporaryDirectory() as folder:
        return _run(_plain, Path(folder), backwards), _run(_right, Path(folder), backwards)


@functools.cache
def _saved() -> list[tuple[int, bool, int]]:
    """Of each tensor that is saved: its bytes, whether it is a parameter's or buffer's, and its storage's bytes."""
    model, tokens = _made()
    stays, saved = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}, []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.append((tensor.nbytes, storage.data_ptr() in stays, storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return saved


@exercise
def swap_to(answer: object) -> str:
    """Exercise 3: (folder, model) → a context in which what is saved goes to files."""
    with tempfile.TemporaryDirectory() as folder, hooks_come_off():
        try:
            _check(a_function(answer, "swap_to(folder, model)"), Path(folder))
        except FileNotFoundError as error:
            raise Wrong(
                f"a file is not there any more when it is wanted ({Path(error.filename or '').name}). Has each handle "
                "a file of its own? And does it stay until the handle goes, however often it is read?"
            ) from None
    plain, right = _reference(1)
    held = [run.timeline.totals[run.turn] - run.timeline.totals[0] for run in (plain, right)]
    return f"{held[0]:,} B between forward and backward became {held[1]:,} B, and no file is left, whatever happens."


def _check(swap: Callable, folder: Path) -> None:
    for name, backwards in (("one", 1), ("two", 2)):
        found = _run(swap, _inside(folder, name), backwards)
        for mine, right in zip(found.gradients, _reference(backwards)[0].gradients, strict=True):
            _same_gradients(mine, right, "with retain_graph=True and a second backward: " * (backwards > 1))
        _lets_go(found, *_reference(backwards))
        _wrote_what_it_should(found)
        _nothing_left(found.left, f"after {name} backward{'s' * (backwards > 1)}")
    _reads_its_files(swap, folder)
    _without_backward(swap, folder)
    _error_in_between(swap, folder)
    _two_graphs(swap, folder)


def _inside(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def _same_gradients(mine: list[Tensor | None], right: list[Tensor], when: str = "") -> None:
    for grad, due in zip(mine, right, strict=True):
        if grad is None or not torch.allclose(grad, due, rtol=1e-5, atol=1e-7):
            raise Wrong(
                f"{when}the gradients are not those without hooks. Does each handle read the file of its own tensor, "
                "of the same shape and dtype?"
            )


def _lets_go(found: _Run, plain: _Run, right: _Run) -> None:
    mine = found.timeline.totals[found.turn]
    if (more := mine - right.timeline.totals[right.turn]) > _SPARE:
        look = " Nothing has left." if mine >= plain.timeline.totals[plain.turn] else " What does each handle hold?"
        raise Wrong(
            f"the gradients are right, and between forward and backward {more:,} B more are held than need be.{look}"
        )
    largest = max(nbytes for nbytes, stays, _ in _saved() if not stays)
    if (more := found.timeline.peak_bytes - right.timeline.peak_bytes) > largest + _SPARE:
        raise Wrong(
            f"the gradients are right, and the peak is {more:,} B higher than it need be. Each tensor should be read "
            f"when it is wanted, not before. {beyond(found.timeline, right.timeline)}"
        )
    for mine, due in zip(found.ends, right.ends, strict=True):
        if (more := mine - due) > _SPARE:
            kept = " (retain_graph=True)" * (len(found.ends) > 1)
            raise Wrong(f"the gradients are right, and {more:,} B too many are alive when backward has ended{kept}.")


def _wrote_what_it_should(found: _Run) -> None:
    wanted = [nbytes for nbytes, stays, _ in _saved() if not stays]
    most, written = sum(wanted) + _FILE_BYTES * len(wanted), sum(found.sizes)
    weights = [nbytes for nbytes, stays, _ in _saved() if stays]
    if written < sum(wanted) // 2:
        raise Wrong(
            f"the gradients are right and the device has let go, and at the turn the folder's files have {written:,} B "
            f"of {sum(wanted):,}. Where are the others? In `folder` they should be, as files that one can see."
        )
    if len(found.sizes) > len(wanted):
        raise Wrong(
            f"the gradients are right, and {len(found.sizes)} files are there at the turn; {len(wanted)} tensors "
            f"should leave. {len(weights)} more share a storage with parameters and buffers, and stay."
        )
    if written > most:
        raise Wrong(
            f"the gradients are right, and the files have {written:,} B; the tensors that should leave have "
            f"{sum(wanted):,}. What is written of a view, it or all of its storage?"
        )


def _nothing_left(left: list[Path], when: str) -> None:
    if left:
        raise Wrong(
            f"the gradients are right, and {when} {len(left)} files are still in the folder. A file goes when its "
            "handle does: who removes it, and who still has the handle?"
        )


def _reads_its_files(swap: Callable, folder: Path) -> None:
    """With zeros in the files, backward must not come to the right gradients."""
    (right,), (model, tokens) = _reference(1)[0].gradients, _made()
    inside = _inside(folder, "zeros")
    loss = _forward(swap, inside, model, tokens)
    for path in _files(inside):
        path.write_bytes(bytes(path.stat().st_size))  # no shorter: who has mapped it reads zeros, and is not killed
    try:
        loss.backward()
        _same_gradients([p.grad for p in model.parameters()], right)
    except Exception:
        return
    raise Wrong(
        "the gradients are right, also with zeros in the files: nobody reads them, so all that they had is still in "
        "memory. A handle should hold a path, and unpack read its file."
    )


def _without_backward(swap: Callable, folder: Path) -> None:
    inside = _inside(folder, "none")
    loss = _forward(swap, inside, *_made())
    there = len(_files(inside))
    del loss
    _nothing_left(_lying_about(inside), f"after a forward ({there} files) whose loss was dropped, without a backward,")


class _Stop(Exception):
    pass


def _error_in_between(swap: Callable, folder: Path) -> None:
    inside = _inside(folder, "error")
    model, tokens = _made()

    def stop(*_) -> None:
        raise _Stop

    model.out.register_forward_hook(stop)
    try:
        _forward(swap, inside, model, tokens)
    except _Stop as error:
        error.__traceback__ = None  # its frames hold the graph
    else:
        raise Wrong("an error that the model raises in its forward does not come out of your context any more.")
    _nothing_left(_lying_about(inside), "after an error in the middle of a forward")


def _two_graphs(swap: Callable, folder: Path) -> None:
    inside = _inside(folder, "two graphs")
    (one, tokens), other = _made(), _Model(_WIDTH)
    right = []
    for model in (one, other):
        model(tokens).backward()
        right.append([p.grad for p in model.parameters()])
        model.zero_grad()
    losses = [_forward(swap, inside, model, tokens) for model in (one, other)]
    for loss, model, due in zip(losses, (one, other), right, strict=True):
        loss.backward()
        _same_gradients([p.grad for p in model.parameters()], due, "two graphs in one folder at a time: ")
    del loss, losses
    _nothing_left(_lying_about(inside), "after two graphs")
