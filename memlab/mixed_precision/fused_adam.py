"""Which parameters one kernel steps: their gradients are never widened, and need no chunks.

On a GPU it is that of `adam_kernel`, in main memory that of `adam_in_c`. The optimizer's own step does the same for all
others: where neither Triton nor a C compiler is, of other classes and options. A GPU waits for Python's answers, so a
parameter is looked at closely only when something of it is new.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor, optim
from torch._subclasses.fake_tensor import FakeTensor

from memlab.memory_timeline import on_imagined_card
from memlab.mixed_precision import adam_in_c
from memlab.mixed_precision.adam_kernel import COLUMNS, Launch, addresses
from memlab.mixed_precision.fitting import HALVES
from memlab.mixed_precision.flat_group import all_same

ELSEWHERE = Tensor.is_neg, Tensor._is_zerotensor
"""Whether a tensor keeps other numbers in its memory than it has, or none."""
KEPT = "master", "exp_avg", "exp_avg_sq", "step"
"""What the state of a parameter holds."""


def has_kernel(optimizer: optim.Optimizer, group: dict) -> bool:
    """Whether the kernel can step a group of this optimizer: torch's own Adam or AdamW, fused, and without AMSGrad."""
    return (
        type(optimizer) in (optim.Adam, optim.AdamW)
        and bool(group["fused"])
        and not group["amsgrad"]
        and not any(isinstance(group[name], Tensor) for name in ("lr", "weight_decay", "eps"))
        and not any(isinstance(beta, Tensor) for beta in group["betas"])
    )


class FusedAdam:
    """Steps of one group by the kernel. What it found of parameters holds until one of them is another.

    group: whose options they have. params: those that it steps.
    """

    def __init__(self, group: dict):
        self._group = group
        self.params: list[Tensor] = []
        self._asked: list[Tensor] = []
        self._gradients: list[Tensor] = []  # for the coming step
        self._mine: list[bool] = []  # of those asked
        self._runs: list[bool] = []
        self._looks: object = None
        self._columns: list[list[Tensor]] = []  # of each parameter's state what KEPT names
        self._values: list[object] = []  # all that is in the states
        self._addresses: list[int] | None = None  # imagined tensors have none
        self._launches: list[tuple[list[bool], Launch | None]] = []
        self._versions: list[int] = []  # of the weights, when their step ended
        self._storages: list[ref] = []

    def holds(self, asked: list[Tensor], gradients: list[Tensor], states: Mapping[Tensor, dict]) -> bool:
        """Whether it can step as before. asked: the parameters that have these gradients. states: the optimizer's."""
        self._gradients = gradients
        return (
            self._addresses is not None
            and all_same(asked, self._asked)
            and _runs(asked, self.params) == self._runs
            and _looks(gradients, self.params) == self._looks
            and list(map(attrgetter("_version"), self.params)) == self._versions
            and all_same(list(map(Tensor.untyped_storage, self.params)), [storage() for storage in self._storages])
            and all_same(_values(map(states.get, self.params)), self._values)
            and addresses(chain(self.params, *self._columns)) == self._addresses
        )

    def unwritten(self) -> list[Tensor]:
        """The parameters that are as its last step left them: nobody wrote to them, or gave them other memory."""
        left = zip(self.params, self._versions, self._storages, strict=False)  # none is left before a step
        return [p for p, version, storage in left if p._version == version and p.untyped_storage() is storage()]

    def begin(self, asked: list[Tensor], states_of: Callable[[list[Tensor]], list[dict]]) -> None:
        """Find out what it can step. states_of: gives states, and makes a "master" where it is missing."""
        self._addresses = None
        once = len(set(map(id, asked))) == len(asked)  # else one launch would step a parameter twice at a time
        able = [p for p in asked if once and can_step(p)]
        states = states_of(able)
        for state in states:
            if state.keys() == {"master"}:
                state.update(first_state(state["master"]))
        fit = list(map(suits, able, states))
        self.params, states = list(compress(able, fit)), list(compress(states, fit))
        mine = set(map(id, self.params))
        self._asked, self._mine = asked, [id(p) in mine for p in asked]
        self._versions, self._storages = [], [ref(p.untyped_storage()) for p in self.params]
        self._runs, self._looks, self._values = (
            _runs(asked, self.params),
            _looks(self._gradients, self.params),
            _values(states),
        )
        self._columns = [[state[name] for state in states] for name in KEPT]
        kinds = [(p.device, p.dtype, p.grad.dtype) for p in self.params]
        self._launches = []
        for kind in dict.fromkeys(kinds):
            which = [its == kind for its in kinds]
            columns = [list(compress(column, which)) for column in (self.params, *self._columns)]
            self._launches.append((which, None if _is_fake(columns[0][0]) else _launch(*columns)))
        if not any(map(_is_fake, asked)):
            self._addresses = addresses(chain(self.params, *self._columns))

    def step(self, scale: Tensor | None) -> None:
        """One step of `params`: moments, masters and weights, in place. The gradients stay as they are.

        scale: the loss scale that gradients are divided by, of one element; None for none.
        """
        gradients, self._gradients = list(compress(self._gradients, self._mine)), []
        torch.autograd.graph.increment_version(self.params)  # before: whatever interrupts us, they count as written to
        for which, launch in self._launches:
            its = list(compress(gradients, which))
            device = its[0].device
            inverse = None if scale is None else scale.to(device, torch.float64).reciprocal().float()
            if launch is None:  # imagined: only the table
                torch.empty(COLUMNS, len(its), dtype=torch.int64, device=device)
            else:
                launch.run(self._group, its, inverse)

    def end(self) -> None:
        """All groups have stepped: note how the weights are left."""
        self._versions = list(map(attrgetter("_version"), self.params))


def can_step(p: Tensor) -> bool:
    """Whether a kernel can step a parameter with a gradient now: of 16 bits, both where it runs and of one layout.

    Not while CUDA records a graph: when that is replayed, gradients may be elsewhere.
    """
    gradient = p.grad
    return (
        p.dtype in HALVES
        and _runs_at(p)
        and {type(p.detach()), type(gradient)} == {_plain_type(p)}
        and gradient.layout is p.layout is torch.strided
        and gradient.dtype in (*HALVES, torch.float32)
        and gradient.shape == p.shape
        and gradient.stride() == p.stride()
        and gradient.device == p.device
        and not any(keeps(tensor) for keeps in ELSEWHERE for tensor in (p, gradient))
        and p.numel() > 0
        and (not _in_c(p) or adam_in_c.works(p.dtype, gradient.dtype))
    )


def _runs_at(p: Tensor) -> bool:
    if _is_fake(p):
        return p.is_cuda or on_imagined_card(p)  # where Triton is taken to be
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False  # what it makes of real parameters is imagined
    if p.is_cuda:
        return not torch.cuda.is_current_stream_capturing() and _works_on(p.device)
    if _interpreted():
        return p.dtype is torch.float16 and _works_on(p.device)
    return _in_c(p)


def _in_c(p: Tensor) -> bool:
    """Whether its kernel would be the one in C."""
    return p.device.type == "cpu" and not _is_fake(p) and not _interpreted()


def _interpreted() -> bool:
    """Whether Triton's kernel is to run in main memory: slowly, to be tried where no GPU is."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _launch(weights: list[Tensor], *columns: list[Tensor]) -> Launch:
    """By the kernel for where they are."""
    return (adam_in_c.Launch if _in_c(weights[0]) else Launch)(weights, *columns)


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton steps 16 numbers there: it wants a C compiler, too."""
    if importlib.util.find_spec("triton") is None:
        return False
    weight, gradient = (torch.zeros(16, dtype=torch.float16, device=device) for _ in range(2))
    master, m, v, steps = (torch.zeros(16, dtype=torch.float32, device=device) for _ in range(4))
    columns = [[tensor] for tensor in (weight, master, m, v, steps[0])]
    try:
        Launch(*columns).run(optim.AdamW([master]).defaults, [gradient], None)
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
    except Exception as error:
        warnings.warn(
            f"expected Triton to work on {device}, found {type(error).__name__}: {error}; so PyTorch's kernels step on "
            "masters, in more memory and time. Triton needs a C compiler, such as gcc",
            stacklevel=2,
        )
        return False
    return True


def _is_fake(p: Tensor) -> bool:
    return isinstance(p, FakeTensor)


def _plain_type(p: Tensor) -> type:
    """Of tensors that lie where they say, and are imagined if this parameter is."""
    return FakeTensor if _is_fake(p) else Tensor


def first_state(master: Tensor) -> dict[str, Tensor]:
    """What Adam begins with: a counter of steps, and moments of the master's shape and strides, all 0."""
    moments = (torch.zeros_like(master, memory_format=torch.preserve_format) for _ in range(2))
    return dict(zip(KEPT[1:], [*moments, torch.zeros((), dtype=torch.float32, device=master.device)], strict=True))


def suits(p: Tensor, state: dict) -> bool:
    """Whether a parameter's state holds what `first_state` makes, and a "master", with its own strides.

    Masters are dense, so a parameter with gaps has none such.
    """
    *alike, steps = values = [state.get(name) for name in KEPT]
    return (
        all(type(its) is _plain_type(p) and its.dtype is torch.float32 and its.device == p.device for its in values)
        and all(its.shape == p.shape and its.stride() == p.stride() for its in alike)
        and steps.dim() == 0
    )


def _values(states: Iterable[dict | None]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, [state or {} for state in states])))


def _runs(asked: Sequence[Tensor], params: Sequence[Tensor]) -> list[bool]:
    return list(map(_runs_at, (*asked[:1], *params[:1])))


def _looks(gradients: Sequence[Tensor], params: Sequence[Tensor]) -> object:
    """Of what kind, size and layout they are; where some gradients have no strides, what is equal to nothing."""
    if {torch.strided} != set(map(attrgetter("layout"), gradients)):
        return float("nan")
    of_gradients = type, attrgetter("dtype"), Tensor.numel, Tensor.stride, Tensor.get_device, *ELSEWHERE
    looks = [list(map(one, gradients)) for one in of_gradients]
    return looks + [list(map(one, params)) for one in (Tensor.numel, Tensor.stride)]
