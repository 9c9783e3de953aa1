"""Exercise 5 of chapter 13: gradients averaged over real ranks, as backward makes them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.backward import backward_number
from memlab.book.checks import answers
from memlab.book.checks.answers import Wrong, a_function, exercise, hooks_on, kind_of
from memlab.book.checks.limits import CHECK_BYTES, TooLong, limited
from memlab.memory_timeline import Meter
from memlab.ranks import RankError, run_ranks
from memlab.units import format_bytes

_RANKS, _WIDTH = 3, 24
_PATIENCE_SECONDS, _LATE_SECONDS = 2.0, 0.05
_SPARE = 64  # bytes: one or the other scalar


class Net(nn.Module):
    """A tied weight, a frozen layer, a parameter that is never used; fails in backward if told so. x: (rows, width)."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.frozen, self.again = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.unused, self.last = nn.Parameter(torch.ones(7)), nn.Linear(_WIDTH, _WIDTH)
        self.frozen.requires_grad_(False)
        self.again.weight = self.tied.weight

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.frozen(self.tied(self.first(x).relu()).relu()).relu()
        if fails:
            x.register_hook(_fail)
        return self.last(self.again(x).relu()).square().mean()


class _Planned(Exception):
    pass


def _fail(gradient: Tensor) -> None:
    raise _Planned


class _Wire(TorchDispatchMode):
    """Notes what goes over the wire: its bytes, and whether backward was running."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares each rank importing the compiler, for seconds
        return False

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            if func.overloadpacket is not torch.ops.c10d.allreduce_:
                raise Wrong(f"found the collective {func.overloadpacket}; distributed.all_reduce is enough here.")
            nbytes = sum(tensor.nbytes for tensor in args[0])
            self.sent.append((nbytes, backward_number() != -1))
        return func(*args, **(kwargs or {}))


class _Measured(NamedTuple):
    """A backward: each parameter's gradient, bytes at the peak, bytes made in all, and what was sent."""

    gradients: list[Tensor | None]
    peak_bytes: int
    made_bytes: int
    wire: _Wire


def _batch(rank: int, step: int) -> Tensor:
    return torch.rand(8, _WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)) * (rank + 1)


# ---- on each rank


def _on_rank(rank: int, answer: Callable, folder: str, seconds: float) -> str:
    """What is wrong with the answer as this rank sees it, or "". Ends by itself, whatever the answer does."""
    try:
        with limited(seconds, CHECK_BYTES):
            distributed.barrier()
            _averages(rank, answer, folder)
            _ends_with_the_error(answer)
    except Wrong as error:
        return str(error)
    except TooLong:
        return (
            f"your code was still running after {seconds:g} s; does a loop in it end, and does every rank call alike?"
        )
    except NotImplementedError as error:
        return "" if str(error) else "NotImplementedError"
    except BaseException as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return f"your code asked for more than {format_bytes(CHECK_BYTES)} of memory."
        if "closed by peer" in str(error).lower() or "timed out" in str(error).lower():
            return ""  # another rank has ended first, and says why
        return f"your code raised {type(error).__name__}: {error}".rstrip(": ")
    return ""


def _context(answer: Callable, model: nn.Module) -> Any:
    context = answer(model)
    if not hasattr(context, "__enter__"):
        raise Wrong(f"expected averaged(model) to be a context; found {kind_of(context)}. Is @contextmanager there?")
    return context


class _Marks:
    """Lets rank 0 come late: it begins when the others' backward is through, or when they seem to wait for it."""

    def __init__(self, folder: str, rank: int):
        self.folder, self.rank, self.waited = Path(folder), rank, False

    def begin(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.rank == 0 and len(list(self.folder.iterdir())) < _RANKS - 1:
            if time.monotonic() > until:
                self.waited = True
                return
            time.sleep(0.002)
        time.sleep(_LATE_SECONDS * (self.rank == 0))

    def end(self) -> None:
        if self.rank:
            (self.folder / str(self.rank)).touch()


def _backward(rank: int, model: nn.Module, step: int, context: Any, marks: _Marks | None = None) -> _Measured:
    for p in model.parameters():
        p.grad = None
    x = _batch(rank, step)
    with Meter(model, inputs=x) as meter, _Wire() as wire:
        with context:
            if marks is not None:
                marks.begin()
            model(x).backward()
            if marks is not None:
                marks.end()
        end = len(meter.timeline)
        found = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
        totals = [int(total) for total in meter.timeline.totals[: end + 1]]
    made = sum(max(after - before, 0) for before, after in itertools.pairwise(totals))
    return _Measured(found, max(totals), made, wire)


def _averages(rank: int, answer: Callable, folder: str) -> None:
    model, alone = Net(), Net()
    trained = [p for name, p in model.named_parameters() if p.requires_grad and name != "unused"]
    for step in range(2):
        marks = _Marks(folder, rank) if step == 0 else None
        run = _backward(rank, model, step, _context(answer, model), marks)
        _same(rank, model, run.gradients, alone, step)
        _wire_is_right(run.wire, trained)
        if marks is not None and marks.waited:
            raise Wrong(
                "the means are right, and backward waits for its all-reduces. With async_op=True each returns a work "
                "at once, to be waited for at the end."
            )
        if hooks := hooks_on(model):
            raise Wrong(f"the means are right, and {hooks} hooks are left on the model when the context has ended.")
        usual = _backward(rank, alone, step, nullcontext())
        if (more := max(run.peak_bytes - usual.peak_bytes, run.made_bytes - usual.made_bytes)) > _SPARE:
            raise Wrong(
                f"the means are right, and a rank makes {more:,} B more than without averaging. Sum up in p.grad "
                "itself, and divide it in place."
            )


def _same(rank: int, model: nn.Module, found: list[Tensor | None], alone: nn.Module, step: int) -> None:
    """Each gradient, against the mean of those that a single process computes from every rank's batch."""
    total: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for other in range(_RANKS):
        for p in alone.parameters():
            p.grad = None
        alone(_batch(other, step)).backward()
        for name, p in alone.named_parameters():
            if p.grad is not None:
                total[name] = p.grad + total.get(name, 0)
                if other == rank:
                    own[name] = p.grad
    for (name, p), mine in zip(model.named_parameters(), found, strict=True):
        if name not in total:
            if mine is not None:
                what = "never used" if p.requires_grad else "frozen"
                raise Wrong(f"{name} is {what}, and has a gradient now.")
            continue
        if mine is None:
            raise Wrong(f"{name} has no gradient when the context has ended.")
        if _close(mine, total[name] / _RANKS):
            continue
        look = "It is not the mean of all ranks' gradients."
        if _close(mine, own[name]):
            look = "It is this rank's own. Is each work waited for, before the context ends?"
        elif _close(mine, own[name] / _RANKS):
            look = "It is this rank's own, divided. Is each work waited for, before the context ends?"
        elif _close(mine, total[name]):
            look = "It is the sum over the ranks, not the mean."
        elif _close(mine, total[name] / _RANKS**2):
            look = "It is divided by the number of ranks twice."
        elif _close(mine, total[name] / 2):
            look = "It is the sum over 3 ranks, divided by 2; distributed.get_world_size() tells how many there are."
        raise Wrong(f"rank {rank}, {_RANKS} ranks: the gradient of {name} is wrong. {look}")


def _close(mine: Tensor, right: Tensor) -> bool:
    return mine.shape == right.shape and torch.allclose(mine, right, rtol=1e-4, atol=1e-7)


def _wire_is_right(wire: _Wire, trained: list[nn.Parameter]) -> None:
    sent, nbytes = wire.sent, sum(size for size, _ in wire.sent)
    due_bytes = sum(p.nbytes for p in trained)
    if nbytes != due_bytes:
        many = "more" if nbytes > due_bytes else "less"
        raise Wrong(
            f"the means are right, and {nbytes:,} B were all-reduced, {abs(nbytes - due_bytes):,} {many} than the "
            f"gradients have. A tied weight's travels once; a frozen or unused parameter has none."
        )
    if late := sum(not in_backward for _, in_backward in sent):
        raise Wrong(
            f"the means are right, and {late} of {len(sent)} all-reduces begin when backward is over. A gradient that "
            "is there can travel while backward makes the next."
        )
    if len(sent) != len(trained):
        raise Wrong(f"the means are right, by {len(sent)} all-reduces for {len(trained)} gradients; one each is asked.")


def _ends_with_the_error(answer: Callable) -> None:
    model = Net()
    try:
        with _context(answer, model):
            model(_batch(0, 9), fails=True).backward()
    except _Planned:
        pass
    else:
        raise Wrong("the means are right; when backward raises, the context swallows the error. Let it go on.")
    if hooks := hooks_on(model):
        raise Wrong(
            f"the means are right; when backward raises, {hooks} hooks are left on the model. Is there a finally?"
        )


# ---- where it is asked


@contextlib.contextmanager
def _no_rank_stays() -> Iterator[None]:
    """End what the block has launched, should it be left before that has ended."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()


def averaged(answer: object) -> None:
    """Exercise 5: model → a context for one backward, at whose end every gradient is the mean over the ranks."""
    _ready()
    _averaged(answer)


@functools.cache
def _ready() -> None:
    """What a first launch imports is not the answer's time."""
    run_ranks(_nothing, 1)


def _nothing(rank: int) -> None:
    pass


@exercise
def _averaged(answer: object) -> str:
    function = a_function(answer, "averaged(model)")
    seconds = 0.6 * answers.CHECK_SECONDS
    with _no_rank_stays(), tempfile.TemporaryDirectory() as folder:
        try:
            # Ranks end themselves first, if anything can: what they say is more than where they are.
            found = run_ranks(_on_rank, _RANKS, function, folder, seconds, timeout=0.8 * answers.CHECK_SECONDS)
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            if isinstance(error, RankError) and said.startswith("after "):
                raise Wrong(f"your code was still running {said}; does a loop in it ever end?") from None
            raise Wrong(f"not every rank came to its end: {type(error).__name__} {said}".rstrip()) from None
    if "NotImplementedError" in found:
        raise NotImplementedError
    if wrong := next((said for said in found if said), ""):
        raise Wrong(wrong)
    nbytes = sum(p.nbytes for name, p in Net().named_parameters() if p.requires_grad and name != "unused")
    return f"{nbytes:,} B of gradients are averaged over {_RANKS} real ranks in no byte more, and nothing stays behind."
