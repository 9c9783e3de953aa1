"""What the tests compare the meter with: the CPU allocator's own log, read from torch's profiler."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT, LSTM, MLP, ConvNet, text_batch
from memlab.memory_timeline import Meter, Timeline

ALLOCATION = torch._C._profiler._EventType.Allocation


class Checkpointed(GPT):
    """A GPT whose blocks run under torch's checkpoint."""

    def __init__(self, use_reentrant: bool, **sizes):
        super().__init__(**sizes)
        self.use_reentrant = use_reentrant

    def forward(self, x, y):
        stream = self.token_embedding(x) + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), y.flatten())


class Transformers(nn.Module):
    """A tiny model of Transformers, called like every workload: model(x, y) is the loss."""

    def __init__(self, name: str):
        super().__init__()
        import transformers

        shared = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256}
        sizes = {
            "GPT2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 256, "n_positions": 64},
            "Llama": shared | {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
            "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
            | {"decoder_start_token_id": 0},
            "Mamba": shared | {"state_size": 8},
        }[name]
        head = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
        self.model = getattr(transformers, name + head)(getattr(transformers, name + "Config")(**sizes))

    def forward(self, x, y):
        return self.model(input_ids=x, labels=y).loss


SIZES = {"layers": 2, "width": 64}
WORKLOADS: dict[str, Callable[[], nn.Module]] = {
    "MLP": MLP,
    "GPT": lambda: GPT(**SIZES),
    "GPT by hand": lambda: GPT(**SIZES, attention="by hand", dropout=0.1),
    "GPT checkpointed": lambda: Checkpointed(False, **SIZES),
    "GPT checkpointed, re-entrant": lambda: Checkpointed(True, **SIZES),
    "ConvNet": ConvNet,
    "LSTM": lambda: LSTM(width=64),
    "GPT2": lambda: Transformers("GPT2"),
    "Llama": lambda: Transformers("Llama"),
    "T5": lambda: Transformers("T5"),
    "Mamba": lambda: Transformers("Mamba"),
}


TRANSFORMERS = {"GPT2", "Llama", "T5", "Mamba"}
BY_DEFAULT = {"MLP", "GPT by hand", "GPT checkpointed, re-entrant", "ConvNet", "LSTM"}
EACH_WORKLOAD = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.thorough) for name in WORKLOADS]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small run fastest on one thread; a module that imports this runs so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_for(workload: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if workload == "MLP":
        return torch.randn(32, 256, generator=generator), torch.randint(16, (32,), generator=generator)
    if workload == "ConvNet":
        return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)
    return text_batch(2, 32, nbytes=100_000)


def fresh(workload: str, **options) -> Run:
    """A run of a workload; skips the test where the package that it needs is missing."""
    if workload in TRANSFORMERS:
        pytest.importorskip("transformers")
    return Run(workload, **options)


class Run:
    """A workload, its optimizer and a batch, the same at every making. `step()` is one training step."""

    def __init__(self, workload: str, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = WORKLOADS[workload]()
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.inputs = batch_for(workload)

    def step(self) -> None:
        loss = self.model(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def tensors_of(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of all tensors among an optimizer's states."""
    return sum(v.nbytes for states in optimizer.state.values() for v in states.values() if isinstance(v, torch.Tensor))


class Idle(TorchDispatchMode):
    """A mode that does nothing but hand every op on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def event_tree(code: Callable[[], None]) -> list:
    """Run `code` in torch's profiler, unmetered, and return the roots of the profiler's tree of events."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        code()
    return profile.profiler.kineto_results.experimental_event_tree()


@functools.cache
def kernels() -> frozenset[str]:
    """ATen's ops that are not merely composed of others, as `linear` is of `addmm`."""
    composed = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    names = set(torch._C._dispatch_get_all_op_names()) - composed
    return frozenset(name.partition(".")[0] for name in names if name.startswith("aten::") and not name.endswith("out"))


def allocations(roots: list) -> list[tuple[int, int, int]]:
    """(address, ±bytes, the outermost kernel's event or 0) in order of time."""
    found = []
    stack = [(root, 0) for root in roots]
    while stack:
        node, kernel = stack.pop()
        if node.tag == ALLOCATION:
            found.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, kernel))
        elif not kernel and node.name in kernels():
            kernel = node.id
        stack.extend((child, kernel) for child in node.children)
    return [row[1:] for row in sorted(found, key=lambda row: row[0])]


def blocks(rows: list[tuple[int, int, int]], without_scratch: bool = False) -> list[tuple[int, int]]:
    """(number of the block, ±bytes): addresses replaced by an order of birth, frees of older blocks left out.

    `without_scratch` takes out every block that one kernel both allocates and frees.
    """
    standing: dict[int, tuple[int, int]] = {}
    scratch: set[int] = set()
    events = []
    numbers = itertools.count()
    for address, nbytes, kernel in rows:
        if nbytes > 0:
            standing[address] = next(numbers), kernel
            events.append((standing[address][0], nbytes))
        elif address in standing:
            number, born_in = standing.pop(address)
            events.append((number, nbytes))
            if kernel and kernel == born_in:
                scratch.add(number)
    return canonical([event for event in events if not (without_scratch and event[0] in scratch)])


def canonical(events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same events with blocks numbered in the order of their births, those alive before left out."""
    numbers: dict[int, int] = {}
    renamed = []
    for block, nbytes in events:
        if nbytes > 0:
            numbers.setdefault(block, len(numbers))
        if block in numbers:
            renamed.append((numbers[block], nbytes))
    return renamed


def peak(events: list[tuple[int, int]]) -> int:
    return max(itertools.accumulate(nbytes for _, nbytes in events), default=0)


def events_of(timeline) -> list[tuple[int, int]]:
    """The timeline's events in the same form as `blocks`."""
    before = {event.storage for event in timeline._before}
    return canonical([(e.storage, e.delta) for e in timeline.events if e.storage not in before])


def metered_run(run: Run, **options) -> Meter:
    """One step of a workload under a meter that knows everything about it."""
    with Meter(run.model, run.optimizer, run.inputs, **options) as meter:
        run.step()
    return meter


def metered(workload: str, **options) -> Meter:
    """One step of a workload, with torch's default AdamW, under a meter."""
    return metered_run(fresh(workload), **options)


def shape_of(timeline: Timeline) -> list[tuple]:
    return [(e.delta, e.op, e.phase, timeline.storages[e.storage].category) for e in timeline.events]


def without_scratch(timeline: Timeline) -> list[tuple]:
    return [row for row in shape_of(timeline) if row[-1] != "workspace"]


def of(timeline: Timeline, category: str) -> list:
    return [s for s in timeline.storages.values() if s.category == category]
