"""swap_activations: the same gradients, fewer bytes, and nothing left behind, however a step ends."""

import contextlib
import copy
import errno
import functools
import gc
import itertools
import os
import tempfile
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_pre_hooks as module_hooks

from memlab.book.workloads import GPT, ConvNet, Llama
from memlab.gradient_checkpointing import checkpointed, every
from memlab.memory_timeline import Meter, imagine
from memlab.offloading import link, store, swap_activations
from memlab.offloading.files import SpillFile
from memlab.offloading.slab import Slab
from memlab.offloading.unnamed import UnnamedFile
from memlab.units import KiB, MiB
from tests.harness import refusals, refused
from tests.tiers import some


def values(*shape, seed=0, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


class LateLink(link.Link):
    """A GPU's stream at its worst: each copy runs only when somebody waits for it, or for a later one."""

    pinned = True

    def __init__(self, *_):
        self.queue, self.count, self.lock, self.in_flight = [], 0, threading.Lock(), []

    def up(self, source, target):
        self.count += 1
        self.queue.append((self.count, source, target))
        self.last = self.count
        return self.count

    def run(self, mark):
        with self.lock, torch.no_grad():
            while self.queue and mark is not None and self.queue[0][0] <= mark:
                _, source, target = self.queue.pop(0)
                target.copy_(source)

    def down(self, source, target, written_to):
        self.in_flight.append((self.up(source, target), source, source._version, written_to))
        self.settle(link.IN_FLIGHT)

    wait = synchronize = run

    def settle(self, keep=0):
        while len(self.in_flight) > keep:
            mark, source, version, written_to = self.in_flight.pop(0)
            self.run(mark)
            if source._version != version:
                written_to()


def left_behind() -> list:
    """Threads and hooks that are still there."""
    return [t.name for t in threading.enumerate() if t.name.startswith("memlab")] + list(module_hooks.values())


@pytest.fixture(autouse=True)
def clean():
    yield
    if left_behind():
        gc.collect()  # what a caught error's traceback holds
    assert left_behind() == []


FIXED = {"ram_bytes": "600 KiB"}
WAYS = {
    "a slab of one piece": FIXED | {"ram_bytes": "16 KiB"},
    "all sizes, 5 ahead": FIXED | {"min_bytes": 0, "prefetch": 5},
    "late copies, a small slab": {"ram_bytes": "300 KiB"},
    "late copies": {"prefetch": 2},
    "a file": FIXED,
    "a file, waiting": FIXED | {"prefetch": 0},
    "late copies, no slab": {"ram_bytes": 0},
}


@pytest.fixture(params=[*[*WAYS][:4], *(pytest.param(way, marks=pytest.mark.thorough) for way in [*WAYS][4:])])
def way(request):
    return request.param


@pytest.fixture
def swap(way, tmp_path, monkeypatch):
    """Every way of swapping; the late ones as on a GPU, whose copies are over only when they are waited for."""
    if way.startswith("late"):
        monkeypatch.setattr(store, "Link", LateLink)
        monkeypatch.setattr(torch, "empty", nonsense)
    if way == "late copies":
        monkeypatch.setattr("memlab.offloading.swap.in_main_memory", lambda tensor: False)
    yield swap_activations("cpu" if way == "late copies" else tmp_path, **WAYS[way])
    assert os.listdir(tmp_path) == []


def nonsense(*size, _empty=torch.empty, **options):
    """torch.empty, but never with the right values by chance."""
    tensor = _empty(*size, **options)
    return tensor.fill_(255) if tensor.dtype is torch.uint8 else tensor


def step(model, batch, context=None, seed=0):
    """Gradients of one step, and the loss."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with context or contextlib.nullcontext():
        loss = model(*batch)
        loss = loss if loss.dim() == 0 else loss.sum()
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters()]


def alike(found, expected) -> bool:
    """Equal bit for bit, None where None is."""
    return len(found) == len(expected) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, expected, strict=True)
    )


def tokens(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (batch, length), generator=generator) for _ in range(2))


def gpt(**sizes):
    torch.manual_seed(1)
    return GPT(**{"layers": 2, "width": 64, "heads": 4, "context": 64, "dropout": 0.1} | sizes)


@pytest.mark.parametrize("way", WAYS)
def test_a_gpts_gradients_are_the_same_bit_for_bit(swap):
    model, batch = gpt(), tokens(4, 64)
    for seed in range(3):
        expected = step(model, batch, seed=seed)
        assert alike(step(model, batch, swap, seed=seed), expected)
        assert swap.moved_bytes > 0 and swap.elsewhere_bytes == 0


MODELS = {
    "attention by hand": lambda: (gpt(attention="by hand"), tokens(4, 64)),
    "grouped attention": lambda: (Llama(layers=2, width=64, heads=4, kv_heads=2, context=64), tokens(4, 64)),
    "convolutions": lambda: (ConvNet(), (torch.randn(4, 3, 32, 32), torch.arange(4))),
    "an MLP": lambda: (nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.GELU()), (torch.randn(256, 64),)),
    "16-bit weights": lambda: (gpt(layers=1, width=32).bfloat16(), tokens(2, 16)),
}


@some("name, way", itertools.product(MODELS, WAYS), keep=15)
def test_other_models_gradients_are_too(swap, name):
    torch.manual_seed(1)
    model, batch = MODELS[name]()
    assert alike(step(copy.deepcopy(model), batch, swap), step(model, batch))


def test_checkpointed_blocks_swap_their_inputs_only(swap):
    model, batch = gpt(layers=3), tokens(8, 64)
    expected = step(model, batch)
    with checkpointed(model, every(model.blocks, 1)):
        assert alike(step(model, batch, swap), expected)
    inputs = 3 * 8 * 64 * 64 * 4
    head = inputs // 3 * 2  # the last norm and the head save their inputs
    logits = 8 * 64 * 256 * 4
    masks = 8 * 64 * 64 * 4  # CPU dropout after the embedding
    if swap.min_bytes:
        assert inputs < swap.moved_bytes <= inputs + head + logits + masks + 2 * 8 * 64 * 8


def test_backward_twice_and_double_backward(swap):
    def gradients(context):
        x = values(64, 64)
        with context:
            y = (x.sin() * (x @ x).tanh()).exp()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        return first.detach(), second, again

    assert alike(gradients(swap), gradients(contextlib.nullcontext()))


def test_backward_of_a_part_keeps_nothing_on_the_device(swap, monkeypatch):
    x = values(64, 256)
    with swap:
        y = x.sin().exp()
        z = y * y.cos()
    made = []
    memory = store.Store._memory
    monkeypatch.setattr(store.Store, "_memory", lambda *a: made.append(weakref.ref(t := memory(*a))) or t)
    torch.autograd.grad(z.sum(), y, retain_graph=True)
    assert made and not [reference for reference in made if reference() is not None]


def test_several_forwards_before_their_backwards_which_run_in_several_threads_at_once(swap):
    xs = [values(64, 128, seed=i) for i in range(4)]
    expected = [torch.autograd.grad((x.exp() * x.sin()).tanh().sum(), x)[0] for x in xs]
    losses = []
    for x in xs:
        with swap:
            losses.append((x.exp() * x.sin()).tanh().sum())
    found = [None] * 4

    def backward(i):
        found[i] = torch.autograd.grad(losses[i], xs[i])[0]

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert alike(found, expected)


def test_under_no_grad_nothing_is_swapped_and_other_contexts_may_stand_around_and_inside(swap, tmp_path):
    x = values(64, 64)
    inner = swap_activations(tmp_path)
    with swap:
        with torch.no_grad():
            x.exp().sin()
        assert swap.moved_bytes == 0
        with inner:
            y = x.exp()
        z = y.sin()
    assert inner.moved_bytes == y.nbytes and (swap.moved_bytes == y.nbytes)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], x.exp().cos() * x.exp())


OPS = [
    lambda a, i: a.t(),
    lambda a, i: a[i % a.shape[0] :],
    lambda a, i: a[:, :: 1 + i % 3],
    lambda a, i: a.reshape(-1)[: a.numel() // 2 * 2].view(2, -1),
    lambda a, i: a[:1].expand(3, -1),
    lambda a, i: a.tanh(),
    lambda a, i: a.sin(),
    lambda a, i: a.unfold(0, min(2, a.shape[0]), 1).flatten(1),
    lambda a, i: a.clone().mul_(a),
]


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 63), st.integers(0, 99)), min_size=1, max_size=12),
    st.sampled_from([0, 1, 2]),
)
def test_any_views_of_any_storages_come_back_right(picks, prefetch):
    """A chain of ops that save views of each other's results: their gradients are those of plain autograd."""

    def loss(x):
        made = [x * 1.5]
        for op, start, which in picks:
            b = OPS[op](made[which % len(made)], start)
            made.append((b * b).cos() if op < 5 else b)
        return sum((b * b).sum() for b in made)

    x = values(16, 16)
    (expected,) = torch.autograd.grad(loss(x), x)
    with swap_activations(tempfile.gettempdir(), min_bytes=0, prefetch=prefetch, ram_bytes="4 KiB") as swap:
        y = loss(x)
    (found,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert swap.elsewhere_bytes == 0


def test_a_storage_that_eight_entries_save_leaves_once(swap):
    a, w = values(64, 64), values(64, 64, seed=1)

    def loss(a, w):
        y = (a @ w).exp()
        return (y * y + y.sin() + y @ w).sum()

    with swap:
        y = loss(a, w)
    assert swap.moved_bytes == 64 * 64 * 4  # a and w are leaves: y of `loss` is the one activation
    assert alike(torch.autograd.grad(y, (a, w)), torch.autograd.grad(loss(a, w), (a, w)))


def test_a_tensor_and_its_transpose_share_one_copy_and_neither_gets_the_others_strides(swap):
    """Where ms-swift's pull request 10157 found a transpose with its original's copy."""
    x, w = values(48, 64), values(48, 32, seed=1)
    with swap:
        h = x * 2
        y = (h.t() @ w).sum()
        moved = swap.moved_bytes
        z = (h * h).sum()
    assert swap.moved_bytes == moved
    expected = ((x * 2).t() @ w).sum() + (x * 2).square().sum()
    assert alike(torch.autograd.grad(y + z, (x, w)), torch.autograd.grad(expected, (x, w)))


@pytest.mark.parametrize("when", ["at once", "after the context", "saved again between"])
def test_what_is_written_to_after_it_was_saved_gives_right_gradients_or_autograds_error(swap, when):
    x = values(64, 256)
    with swap:
        h = x * 1
        y = h.sin() + h * h  # saves h
        if when != "after the context":
            h.mul_(3)
        z = h * h if when == "saved again between" else h  # saves what it is now
    if when == "after the context":
        with torch.no_grad():
            h.mul_(3)
    try:
        (found,) = torch.autograd.grad(y.sum() + z.sum() * (when == "saved again between"), x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assert any(isinstance(s.link, LateLink) for s in swap._stores.values())
    else:
        expected = x.cos() + 2 * x + (18 * x if when == "saved again between" else 0)
        torch.testing.assert_close(found, expected)


def test_what_was_saved_before_a_write_is_not_taken_for_an_alias_that_counts_writes_by_itself(swap):
    weight, h = values(64, 64), torch.zeros(64, 64)
    with swap:
        before = weight * h  # whose backward does not come
        h.add_(1)
        again = h.data
        y = weight * again
    assert (again._version, h._version) == (0, 1)
    (found,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(found, torch.ones(64, 64)) and before.grad_fn is not None


def test_a_weight_written_to_before_backward_and_what_a_backward_writes_to_are_autograds_error(swap):
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0].cos_().mul_(gradient)

    layer, x = nn.Linear(64, 64), values(64, 64)
    with swap:
        h = x * 2
        square = h * h
        y = square.sum() + Sine.apply(h).sum()  # whose backward comes first
        z = layer(layer(x)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    for loss in (y, z):
        refused(loss.backward, RuntimeError, "modified by an inplace operation")


def test_parameters_buffers_their_views_and_small_tensors_stay(swap):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.frozen = nn.Linear(64, 64).requires_grad_(False)
            self.register_buffer("mask", torch.rand(64, 64))

        def forward(self, x):
            return F.linear(F.linear(x, self.inner.weight.t().t()), self.frozen.weight.t()) * self.mask * self.mask.t()

    layer, x = Layer(), values(64, 64)
    with swap:
        y = layer(x)
    assert y.requires_grad and swap.moved_bytes == 0
    y.sum().backward()
    if swap.min_bytes:
        with swap:
            y = (x[:8] * 2).sin()  # 2 KiB
        assert swap.moved_bytes == 0
        y.sum().backward()


def of_sparse_conjugated_and_negated():
    sparse = torch.eye(64, dtype=torch.complex64).to_sparse()

    def loss(x):
        h = x * 2
        return ((h.conj() * h).real + torch.sparse.mm(sparse, h).imag + (h.conj().imag * h.imag)).sum()

    return loss, values(64, 64, dtype=torch.complex64)


def of_nothing():
    zeros = torch._efficientzerotensor((64, 64))
    return lambda x: (x.sin() * zeros + x.sin() * x).sum(), values(64, 64)


def of_nested():
    linear = nn.Linear(64, 64)

    def loss(x):
        hidden = F.relu(linear(torch.nested.as_nested_tensor([x[:3], x[3:]])))
        return torch.nested.to_padded_tensor(hidden, 0.0).square().sum()

    return loss, values(7, 64)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [of_sparse_conjugated_and_negated, of_nothing, of_nested])
def test_tensors_without_plain_memory_of_their_own_stay_and_are_right(swap, make):
    loss, x = make()
    with swap:
        y = loss(x)
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(loss(x), x)[0])
    if make is of_nothing:  # torch.func wraps what is saved
        expected = torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
        with swap:
            assert torch.equal(torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1], expected)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model_is_compiled_once_and_swapped(tmp_path, inside):
    torch._dynamo.reset()
    graphs, swap = CompileCounterWithBackend("aot_eager"), swap_activations(tmp_path)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 1))
    x = values(256, 64)
    expected = step(model, (x,))
    if inside:
        model.compile(backend=graphs)
    else:
        model = torch.compile(model, backend=graphs)
    for _ in range(3):
        assert alike(step(model, (x,), swap), expected)
        assert swap.moved_bytes == 2 * 256 * 64 * 4
    # A module with hooks, told to compile itself: torch 2.15 compiles it nevertheless, 2.11 and 2.13 do not.
    assert graphs.frame_count == 1 or (inside and graphs.frame_count == 0)


def test_a_tangent_stays_where_it_is_and_the_host_memory_gets_none(tmp_path):
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), values(2, 4).detach()
    jacobian = functools.partial(torch.autograd.functional.jacobian, strategy="forward-mode", vectorize=True)
    expected = jacobian(lambda x: layers(x * x), x)
    with Meter() as meter, swap_activations(tmp_path, min_bytes=0, ram_bytes=MiB):
        found = jacobian(lambda x: layers(x * x), x)
    assert torch.equal(found, expected)
    large = [storage for storage in meter.timeline.storages.values() if storage.nbytes >= MiB]
    assert len(large) <= 1  # the host memory itself


def test_what_is_traced_to_be_run_again_stays(tmp_path):
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), values(8, 16).detach()
    expected = torch.func.linearize(model, x)[1](x)
    with swap_activations(tmp_path, min_bytes=0):
        found = torch.func.linearize(model, x)[1](x)
    assert torch.equal(found, expected)


def test_on_a_cpu_swapping_to_the_cpu_moves_nothing_and_changes_nothing():
    swap = swap_activations("cpu")
    model, batch = gpt(), tokens(2, 64)
    assert alike(step(model, batch, swap), step(model, batch))
    assert (swap.moved_bytes, swap.freed_bytes) == (0, 0)


def test_freed_is_what_the_meter_sees_freed_to_the_byte(tmp_path):
    model, batch = gpt(), tokens(4, 64)
    totals = {}
    for name, context in (("plain", contextlib.nullcontext()), ("swapped", swap_activations(tmp_path, ram_bytes=MiB))):
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with Meter(model, inputs=batch) as meter, context:
            loss = model(*batch)
        totals[name] = meter.timeline.totals[-1]
        if name == "swapped":
            assert 0 < context.freed_bytes <= context.moved_bytes
            assert totals["plain"] - (totals["swapped"] - MiB) == context.freed_bytes
        loss.backward()


def test_what_somebody_else_holds_is_moved_and_not_freed_and_a_small_view_frees_its_whole_storage(tmp_path):
    x = values(1024, 256)
    swap = swap_activations(tmp_path)
    with swap:
        h = x * 2
        y = h.sin().cos()
    assert (swap.moved_bytes, swap.freed_bytes) == (2 * h.nbytes, h.nbytes)
    del h
    assert swap.freed_bytes == swap.moved_bytes
    y.sum().backward()
    assert swap.freed_bytes == swap.moved_bytes  # what dies after its use was not freed by swapping
    x.grad = None
    with swap:
        loss = (x * 2)[512:516].sin().sum()  # saves 4 KiB of 1 MiB
    assert (swap.moved_bytes, swap.freed_bytes) == (4 * KiB, MiB)
    with torch.inference_mode():
        loss.backward()
    assert torch.equal(x.grad[512:516], 2 * (x * 2)[512:516].cos())


def test_the_slab_is_made_once_and_kept_by_the_swap(tmp_path):
    model, batch = gpt(), tokens(4, 64)
    swap = swap_activations(tmp_path, ram_bytes="1 MiB")
    step(model, batch, swap)
    (only,) = swap._stores.values()
    memory = only.slab._chunks[0][0]
    step(model, batch, swap)
    assert only.slab._chunks[0][0] is memory and only.slab.allocated_bytes == MiB and only.slab.taken_bytes == 0


def test_a_piece_that_three_layers_saved_is_read_once(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(SpillFile, "read", lambda *a, _read=SpillFile.read: reads.append(a[1].nbytes) or _read(*a))
    layers, x = [nn.Linear(64, 64) for _ in range(3)], values(256, 64)
    swap = swap_activations(tmp_path, ram_bytes=0)
    with swap:
        h = x.sin()
        y = sum(layer(h) for layer in layers)
    del h
    y.sum().backward(retain_graph=True)
    assert reads == [256 * 64 * 4]  # and x is a leaf, which stays
    y.sum().backward()
    assert reads == [256 * 64 * 4] * 2


def test_tensors_are_read_ahead_of_need_in_the_reverse_order_of_saving(tmp_path, monkeypatch):
    log = []
    read, unpack = SpillFile.read, store.Store.take
    monkeypatch.setattr(SpillFile, "read", lambda *a: log.append(("read", a[1].nbytes // KiB)) or read(*a))
    monkeypatch.setattr(store.Store, "take", lambda s, p: log.append(("take", p.nbytes // KiB)) or unpack(s, p))
    xs = [values(i, 1024) for i in range(1, 6)]
    expected = {
        0: [e for i in (20, 16, 12, 8, 4) for e in (("take", i), ("read", i))],
        2: [("take", 20), ("read", 20), ("read", 16), ("read", 12), ("take", 16), ("read", 8), ("take", 12),
            ("read", 4), ("take", 8), ("take", 4)],
    }  # fmt: skip
    for prefetch, order in expected.items():
        log.clear()
        with swap_activations(tmp_path, ram_bytes=0, prefetch=prefetch):
            y = 0
            for x in xs:
                y = (x * 2).sin().sum() + y * 1
        y.backward()
        assert log == order


@pytest.mark.parametrize("to", ["cpu", "folder"])
def test_on_an_imagined_card_activations_lie_in_main_memory(to, tmp_path):
    peaks, host = {}, {}
    for swapped in (False, True):
        with imagine("H100-80GB") as gpu:
            model, batch = gpt(layers=4, width=256, context=256), gpu.imagined(tokens(8, 256))
            context = contextlib.nullcontext()
            if swapped:
                context = swap = swap_activations("cpu" if to == "cpu" else tmp_path, ram_bytes="16 MiB")
            with Meter(model, inputs=batch) as meter:
                step(model, batch, context)
                step(model, batch, context)
            peaks[swapped] = meter.timeline.on("imagined H100-80GB").peak_bytes
            host[swapped] = meter.timeline.on("cpu").peak_bytes
    assert peaks[True] < 0.5 * peaks[False]
    taken = host[True] - host[False]  # beside CUDA's random state
    assert swap.freed_bytes == swap.moved_bytes - sum(x.nbytes for x in batch) > 0.5 * peaks[False]
    assert taken % Slab.CHUNK_BYTES == 0 and swap.moved_bytes <= taken < swap.moved_bytes + Slab.CHUNK_BYTES


def failing(monkeypatch, after: int):
    """The file takes `after` writes; then the disk is full."""
    writes, move = itertools.count(), UnnamedFile._move

    def fails(file, call, *args):
        if call == file.raw.write and next(writes) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        move(file, call, *args)

    monkeypatch.setattr(UnnamedFile, "_move", fails)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("after, ram", [(0, "0 B"), (5, "0 B"), (0, "150 KiB"), (1, "600 KiB"), (6, "300 KiB")])
def test_a_disk_that_is_full_is_an_error_in_the_forward_that_names_the_folder(
    tmp_path, monkeypatch, prefetch, after, ram
):
    model, batch = gpt(), tokens(4, 64)
    expected = step(model, batch)
    model.zero_grad(set_to_none=True)
    swap = swap_activations(tmp_path, prefetch=prefetch, ram_bytes=ram)
    with monkeypatch.context() as patch:
        failing(patch, after)
        with pytest.raises(OSError, match=f"write .* KiB in folder '{tmp_path}', found: No space left") as caught, swap:
            model(*batch)
        assert caught.value.errno == errno.ENOSPC
        assert all(p.grad is None for p in model.parameters())
    del caught
    gc.collect()
    assert os.listdir(tmp_path) == [] and swap.elsewhere_bytes == 0
    assert alike(step(model, batch, swap), expected)  # with space again, it works again


def test_a_read_that_fails_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    model, batch = gpt(), tokens(4, 64)
    swap = swap_activations(tmp_path, ram_bytes="64 KiB")
    with swap:
        loss = model(*batch)
    (only,) = swap._stores.values()
    os.truncate(only.file._file.raw.fileno(), 1000)
    with pytest.raises(OSError, match=f"expected to read .* in folder '{tmp_path}'"):
        loss.backward()
    del loss


@pytest.mark.parametrize("end", ["no backward", "an error in the forward", "an error in the backward"])
def test_however_a_step_ends_it_leaves_nothing_and_the_swap_works_on(swap, end):
    model, batch = gpt(), tokens(4, 64)

    def stop(*_):
        raise KeyError("stop")

    hook = (
        model.blocks[1].feed_forward.register_forward_hook(stop)
        if end == "an error in the forward"
        else model.blocks[0].norm2.weight.register_hook(stop)
    )
    with pytest.raises(KeyError) if end != "no backward" else contextlib.nullcontext():
        with swap:
            loss = model(*batch)
        assert swap.elsewhere_bytes > 0
        if end != "no backward":
            loss.backward()
    hook.remove()
    loss = None
    values(1).sum().backward()  # autograd keeps the rest of a graph that failed until its next backward
    gc.collect()
    assert swap.elsewhere_bytes == 0 and left_behind() == []
    assert alike(step(model, batch, swap), step(model, batch))


def test_entering_twice_is_an_error_and_the_first_goes_on(swap):
    x = values(64, 64)
    with swap:
        y = x.exp()
        with pytest.raises(RuntimeError, match="one forward at a time"), swap:
            pass
        z = y.sin()
    assert swap.moved_bytes == y.nbytes
    z.sum().backward()


PREFETCH = "expected prefetch as a number of tensors"
REFUSALS = {
    "a negative prefetch": (lambda: swap_activations(prefetch=-1), ValueError, PREFETCH),
    "a true prefetch": (lambda: swap_activations(prefetch=True), ValueError, PREFETCH),
    "a size in words": (lambda: swap_activations("/", ram_bytes="many"), ValueError, "expected a size such as"),
    "no such folder": (lambda: swap_activations("no/where"), OSError, "expected to make a file in folder 'no/where'"),
}


@refusals(REFUSALS)
def test_options_that_mean_nothing_are_errors(call, error, words):
    refused(call, error, words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("to", ["cpu", "folder"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_on_a_gpu_gradients_are_the_same_bit_for_bit_and_memory_is_free(to, prefetch, tmp_path):
    model = gpt(layers=6, width=512, context=256).cuda()
    batch = tuple(x.cuda() for x in tokens(8, 256))
    swap = swap_activations("cpu" if to == "cpu" else tmp_path, prefetch=prefetch)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # the memory-efficient backward adds in any order
        expected = step(model, batch)
        for _ in range(3):
            assert alike(step(model, batch, swap), expected)
    torch.cuda.synchronize()
    held = []
    for context in (contextlib.nullcontext(), swap):
        before = torch.cuda.memory_allocated()
        with context:
            loss = model(*batch)
        held.append(torch.cuda.memory_allocated() - before)
        del loss
    assert held[1] < 0.3 * held[0]
    assert all(memory.is_pinned() for s in swap._stores.values() for memory, _ in s.slab._chunks)
