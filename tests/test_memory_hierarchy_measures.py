"""What is counted when bandwidth is measured, that nothing stays behind, and where the roofline places an op."""

import contextlib
import functools
import math
import os
import sys
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import memlab.memory_hierarchy.levels as levels_page
from memlab.book.workloads import GPT
from memlab.memory_hierarchy import (
    Level,
    Op,
    OpCounter,
    bound_by,
    disk_bandwidth,
    fit_levels,
    least_seconds,
    measure_bandwidth,
    measure_peak_flops,
    roof,
    transfer_bandwidth,
)
from memlab.memory_hierarchy.bandwidth import _passes, best_seconds
from memlab.memory_hierarchy.counting import FLOPS
from memlab.memory_hierarchy.levels import levels
from memlab.memory_hierarchy.touched import touched_bytes
from memlab.units import GiB, KiB, MiB
from tests.harness import nothing_left_behind, refusals, refused
from tests.tiers import some
from tests.torch_ops import forward_and_backward, ops_of_torch

MATRIX = {packet.__name__ for packet in FLOPS if not isinstance(packet, str)}


def counted(run) -> list[Op]:
    with OpCounter() as counter:
        run()
    return counter.ops


def only(run) -> Op:
    (op,) = counted(run)
    return op


@pytest.mark.parametrize(("batch", "inputs", "outputs"), [(16, 32, 48), (1, 7, 5)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_linear_layer_has_the_flops_and_bytes_of_the_closed_form(batch, inputs, outputs, mode):
    layer, x = torch.nn.Linear(inputs, outputs, bias=False), torch.randn(batch, inputs)
    with mode():
        op = only(lambda: layer(x))
    flops, nbytes = 2 * batch * inputs * outputs, 4 * (batch * inputs + inputs * outputs + batch * outputs)
    assert (op.flops, op.nbytes, op.calls, op.phase) == (flops, nbytes, 1, "forward")
    assert op.intensity == flops / nbytes


def test_its_backward_makes_two_products_of_as_many_flops():
    layer, x = torch.nn.Linear(32, 48, bias=False), torch.randn(16, 32, requires_grad=True)
    y, seed = layer(x), torch.randn(16, 48)
    products = [op for op in counted(lambda: y.backward(seed)) if op.name == "mm"]
    assert sum(op.flops for op in products) == 2 * 2 * 16 * 32 * 48
    assert sum(op.nbytes for op in products) == 2 * 4 * (16 * 32 + 32 * 48 + 16 * 48)
    assert {op.phase for op in products} == {"backward"}


x, y, whole = torch.randn(64, 32), torch.randn(64, 32), torch.arange(64)
N = 64 * 32 * 4


@pytest.mark.parametrize(
    ("run", "flops", "nbytes"),
    [
        (lambda: x + y, 64 * 32, 3 * N),
        (lambda: x + x, 64 * 32, 2 * N),
        (lambda: square + square.t(), 64 * 64, 2 * 64 * 64 * 4),
        (lambda: square @ square.t(), 2 * 64**3, 2 * 64 * 64 * 4),
        (lambda: x.view(-1) * x.view(32, 64).reshape(-1), 64 * 32, 2 * N),
        (lambda: square[:32, :32] + square[:32, :32].t(), 32 * 32, 2 * 32 * 32 * 4),
        (lambda: x + y[0], 64 * 32, 2 * N + 32 * 4),
        (lambda: x[0] + y[:, :1], 64 * 32, 32 * 4 + 64 * 4 + N),
        (lambda: x.expand(5, 64, 32) * 2, 5 * 64 * 32, N + 5 * N),
        (lambda: x.clone().zero_(), 0, 2 * N + N),
        (lambda: torch.exp(x, out=y.detach()), 64 * 32, 2 * N),
        (lambda: x.sum(), 64 * 32, N + 4),
        (lambda: x.sum(0), 64 * 32, N + 32 * 4),
        (lambda: x.t().contiguous(), 0, 2 * N),
        (lambda: x.bfloat16(), 0, N + N // 2),
        (lambda: torch.cat([x, y]), 0, 4 * N),
        (lambda: torch.zeros_like(x), 0, N),
        (lambda: x.new_zeros(64, 32), 0, N),
        (lambda: x[whole[:8]], 0, 8 * 8 + 2 * 8 * 32 * 4),
        (lambda: F.embedding(whole[:8], x), 0, 8 * 8 + 2 * 8 * 32 * 4),
        (lambda: whole + whole, 0, 2 * 64 * 8),
        (lambda: torch._foreach_add([x, y], 1.0), 2 * 64 * 32, 4 * N),
        (lambda: torch._foreach_copy_([x.detach()], [y]), 0, 2 * N),
    ],
)
def test_every_byte_is_read_once_and_written_once(run, flops, nbytes):
    ops = counted(run)
    assert (sum(op.flops for op in ops), sum(op.nbytes for op in ops)) == (flops, nbytes)


cube, square = torch.randn(5, 32, 64), torch.randn(64, 64)


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: x @ square[0][:32], 2 * 64 * 32),
        (lambda: torch.zeros(64).addmv_(x, square[0][:32]), 2 * 64 * 32),
        (lambda: square[0] @ square[1], 2 * 64),
        (lambda: torch.zeros(64, 64).addbmm_(cube.mT, cube), 5 * 2 * 64 * 32 * 64),
        (lambda: F.bilinear(x, square, cube), 2 * 64 * 5 * 32 * 64),
        (lambda: torch.baddbmm(x[None], x[None], y.t()[None] @ x[None]), 2 * (32 * 64 * 32) + 2 * (64 * 32 * 32)),
    ],
)
def test_products_for_which_torch_has_no_formula_have_one_here(run, flops):
    assert sum(op.flops for op in counted(run)) == flops


image = torch.randn(1, 4, 8, 8)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.slice_scatter(x, x[:3], 0, 0, 3),
        lambda: F.pad(image, (1, 1, 1, 1), mode="reflect"),
        lambda: torch.masked_select(x, whole[:32] > 3),
        lambda: F.interpolate(image, scale_factor=2),
        lambda: F.max_unpool2d(image, torch.arange(256).view(1, 4, 8, 8) % 64, 1),
        lambda: F.unfold(image, 2),
        lambda: torch.index_fill(x, 0, whole[:2], 1.0),
        lambda: x.clone().put_(whole[:2], x[0, :2]),
        lambda: [torch.view_copy(x, (32, 64)), torch.split_copy(x, 32), torch.unbind_copy(x)],
    ],
)
def test_what_only_moves_data_has_no_flops(run):
    assert sum(op.flops for op in counted(run)) == 0


POOLS = {  # read in backward besides the result's gradient, in bytes
    "max pool": (lambda x: F.max_pool2d(x, 2), 4 * 4 * 4 * 8),
    "max pool to a size": (lambda x: F.adaptive_max_pool2d(x, 4), 4 * 4 * 4 * 8),
    "mean pool": (lambda x: F.avg_pool2d(x, 2), 0),
    "repeated edges": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 0),
}


@pytest.mark.parametrize(("run", "more"), POOLS.values(), ids=POOLS)
def test_the_backward_of_a_pool_and_of_a_pad_does_not_read_the_input(run, more):
    leaf = image.clone().requires_grad_()
    y = run(leaf)
    ops = [op for op in counted(lambda: y.backward(torch.ones_like(y))) if "pool" in op.name or "pad" in op.name]
    assert [op.nbytes for op in ops] == [y.nbytes + leaf.nbytes + more]


def test_ops_are_those_that_run_without_a_counter_too():
    norm, leaf = torch.nn.BatchNorm2d(4), image.clone().requires_grad_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert [op.name for op in counted(lambda: norm.eval()(leaf))] == ["native_batch_norm"]
            assert [op.name for op in counted(lambda: norm.train()(leaf))] == ["add_", "native_batch_norm"]
            found = only(lambda: F.interpolate(leaf, scale_factor=2))
            assert (found.name, found.nbytes) == ("upsample_nearest2d", leaf.nbytes + 4 * leaf.nbytes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ops_on_a_jagged_tensor_are_those_on_its_values_and_on_a_strided_nested_one_none():
    layer, parts = torch.nn.Linear(8, 16), [torch.randn(3, 8), torch.randn(5, 8)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    strided = torch.nested.nested_tensor(parts)
    products = [(op.phase, op.flops) for op in counted(lambda: layer(jagged).sum().backward()) if op.name in MATRIX]
    assert products == [("forward", 2 * 8 * 8 * 16), *[("backward", 2 * 8 * 8 * 16)] * 2]
    with torch.inference_mode():
        assert counted(lambda: [layer(strided), strided * 2, torch.nested.to_padded_tensor(strided, 0.0)]) == []


@some("part", range(20), keep=1)
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_list_of_ops_can_be_counted_and_has_the_flops_of_its_own_counter(part):
    with_formula = {str(op).rpartition(".")[2] for op in flop_registry}
    number, differing = 0, {}
    for op in (op for op in ops_of_torch()[part::20] if torch.float32 in op.supported_dtypes("cpu")):
        learned = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
        torch.manual_seed(0)
        samples = [next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=learned))) for _ in range(2)]
        first, again = (functools.partial(forward_and_backward, op, s.input, s.args, s.kwargs) for s in samples)
        try:
            first()
        except (RuntimeError, AssertionError):  # it does not run on a CPU, or its backward takes no ones
            continue
        found = Counter()
        try:
            with FlopCounterMode(display=False) as theirs, OpCounter() as ours:
                again()
        except Exception as error:
            differing[op.formatted_name] = error
            continue
        for each in ours.ops:
            found[each.name] += each.flops * (each.name in with_formula)
        expected = theirs.get_flop_counts().get("Global", {}).items()
        expected = +Counter({str(name).rpartition(".")[2]: flops for name, flops in expected})
        number += 1
        if +found != expected:
            differing[op.formatted_name] = +found, expected
    assert differing == {}
    assert number > 15


def test_sparse_tensors_are_left_out():
    embedding = torch.nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())

    def step():
        embedding(whole[:4]).sum().backward()
        optimizer.step()
        sparse = torch.eye(8).to_sparse()
        return sparse @ torch.ones(8, 3), torch.index_select(sparse, 0, whole[:2]), sparse + sparse

    ops = counted(step)
    assert ("embedding", ((100, 8), (4,)), 4 * (8 + 2 * 8 * 4)) in [(op.name, op.shapes, op.nbytes) for op in ops]
    assert {op.phase for op in ops} == {"forward", "backward", "optimizer"}


def test_an_op_in_place_reads_what_it_changes_a_copy_does_not_and_a_view_moves_nothing():
    a, b = torch.randn(6, 8), torch.randn(6, 8)
    N = a.nbytes
    for run, nbytes in ((lambda: a.add_(b), 3 * N), (lambda: a.add_(1), 2 * N), (lambda: a.copy_(b), 2 * N)):
        assert only(run).nbytes == nbytes
    assert only(lambda: a.fill_(1)).nbytes == N and only(lambda: a.copysign_(b)).flops == 48
    views = (a.t, a.detach, lambda: a[2:], lambda: a.view(-1), lambda: a.expand(3, 6, 8), lambda: a.unbind())
    empty = (lambda: torch.empty(10), lambda: torch.empty_like(a), lambda: a.new_empty(4))
    other = (lambda: a.resize_(30), lambda: a.resize_as_(b), lambda: a.set_(scores))
    for run in (*views, *empty, *other):
        assert counted(run) == []
    a = torch.zeros(10, 10)
    parts = (a[2:4], a[:, 3], a[:, :1].expand(10, 10), a[:0])
    assert [touched_bytes(part) for part in parts] == [80, 40, 40, 0]


three, ones, scores = torch.tensor([3, 5, 7]), torch.ones(3), torch.randn(8, 1000)
targets, probabilities = torch.arange(8), torch.randn(8, 1000).log_softmax(-1)


@pytest.mark.parametrize(
    ("run", "flops", "nbytes"),
    [
        (lambda a: torch.take(a, three), 0, 3 * (8 + 2 * 4)),
        (lambda a: a.index_put_((three,), ones), 0, 3 * (8 + 2 * 4)),
        (lambda a: a.index_put_((three,), ones, accumulate=True), 3, 3 * (8 + 3 * 4)),
        (lambda a: a.view(100, 100).index_put_((three,), ones[0]), 0, 3 * 8 + 4 + 300 * 4),
        (lambda a: a.view(100, 100).__setitem__((slice(None), three), ones), 0, 3 * (8 + 4) + 300 * 4),
        (lambda a: a.index_put_((a > 9,), ones[0]), 0, 10000 * (1 + 4) + 4),
        (lambda a: a.scatter_(0, three, 1.0), 0, 3 * (8 + 4)),
        (lambda a: a.index_add_(0, three, ones), 3, 3 * (8 + 3 * 4)),
        (lambda a: a.index_copy_(0, three, ones), 0, 3 * (8 + 2 * 4)),
        (lambda a: a.scatter_(0, three, scores[0]), 0, 3 * (8 + 2 * 4)),
        (lambda a: a.scatter_add_(0, three, scores[0]), 3, 3 * (8 + 3 * 4)),
        (lambda a: a.scatter_reduce_(0, three, scores[0], "sum"), 3, 3 * (8 + 3 * 4)),
        (lambda a: a.put_(three, ones), 0, 3 * (8 + 2 * 4)),
        (lambda a: a.put_(three, ones, accumulate=True), 3, 3 * (8 + 3 * 4)),
        (lambda a: F.nll_loss(probabilities, targets), 0, 8 * (4 + 8) + 2 * 4),
    ],
)
def test_an_op_that_touches_a_few_elements_moves_those_alone(run, flops, nbytes):
    ops = counted(lambda: run(torch.zeros(10000)))
    assert (ops[-1].flops, ops[-1].nbytes) == (flops, nbytes)


def test_a_bag_of_embeddings_reads_the_rows_that_are_asked_for():
    table, bags = torch.randn(1000, 16), torch.tensor([[1, 2, 3], [4, 5, 6]])
    op = next(op for op in counted(lambda: F.embedding_bag(bags, table)) if "embedding_bag" in op.name)
    assert op.flops == 6 * 16
    rows, sums, whole = 4 * 6 * 16, 4 * 2 * 16, 8 * (6 + 2)  # whole: indices and offsets
    notes = 8 * (6 + 2 + 2)  # of each row its bag, of each bag its size and maximum: PyTorch makes them or not
    assert rows + sums + whole <= op.nbytes <= rows + sums + whole + notes


def test_what_draws_numbers_writes_them_and_reads_none():
    a = torch.zeros(10_000)
    for draw in (a.exponential_, a.log_normal_, a.cauchy_, lambda: a.geometric_(0.5)):
        assert only(draw).nbytes == a.nbytes


def test_windows_that_share_elements_are_read_once():
    windows = torch.zeros(100).unfold(0, 20, 1)
    assert touched_bytes(windows) == 400 and touched_bytes(windows[:, :0]) == 0
    assert touched_bytes(torch.zeros(9, 9)[::2, ::3]) == 4 * 5 * 3
    assert only(windows.clone).nbytes == 400 + 4 * 81 * 20


def test_the_gradient_of_a_loss_of_classes_is_written_once_and_its_scores_are_not_read():
    leaf = probabilities.clone().requires_grad_()
    loss = F.nll_loss(leaf, targets)
    op = next(op for op in counted(loss.backward) if op.name == "nll_loss_backward")
    assert (op.flops, op.nbytes) == (0, 8 * 1000 * 4 + 8 * 8 + 2 * 4)


def test_calls_of_one_op_on_the_same_shapes_are_added_up():
    a, b = torch.randn(4, 4), torch.randn(8, 4)
    ops = counted(lambda: [a.exp(), a.exp(), b.exp()])
    assert [(op.name, op.shapes, op.calls, op.nbytes) for op in ops] == [
        ("exp", ((4, 4),), 2, 2 * 128),
        ("exp", ((8, 4),), 1, 256),
    ]


def test_the_flops_of_a_gpts_step_are_those_of_torchs_own_counter_and_of_the_arithmetic():
    """Forward: 2 FLOPs a token for each weight of a matrix, 4 a score for each feature; backward twice that."""
    model, tokens = GPT(layers=2, width=32, heads=4, context=16, attention="by hand"), torch.randint(256, (2, 16))
    ops = counted(lambda: model(tokens, tokens).backward())
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    forward = 2 * weights * tokens.numel() + 2 * (2 * 2 * 2 * 16 * 16 * 32)
    with FlopCounterMode(display=False) as theirs:
        model(tokens, tokens).backward()
    assert sum(op.flops for op in ops if op.name in MATRIX) == theirs.get_total_flops() > 0
    found = Counter()
    for op in ops:
        found[op.phase] += op.flops * (op.name in MATRIX)
    assert found == {"forward": forward, "backward": 2 * forward}


def test_fused_attention_is_counted_on_a_cpu_too_and_moves_no_scores():
    q, k, v = (torch.randn(2, 4, 64, 8) for _ in range(3))
    op = only(lambda: F.scaled_dot_product_attention(q, k, v))
    assert op.flops == 2 * (2 * 2 * 4 * 64 * 64 * 8)
    assert op.nbytes == 4 * (4 * q.numel() + 2 * 4 * 64)
    q.requires_grad_()
    ops = counted(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert sum(op.flops for op in ops if op.phase == "backward" and op.name in MATRIX) == 5 * (2 * 2 * 4 * 64 * 64 * 8)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizers_step_is_a_phase_of_its_own_and_reads_and_writes_its_states(options):
    parameter = torch.randn(1000, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, **options)
    for _ in range(2):
        parameter.grad = torch.randn(1000)
        ops = counted(optimizer.step)
    assert {op.phase for op in ops} == {"optimizer"}
    # Fused: parameter, gradient and momentum in, parameter and momentum out. Else b·m in place, + g, and p − lr·m.
    assert sum(op.nbytes for op in ops) == 4 * 1000 * (5 if options.get("fused") else 8)


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.LBFGS, max_iter=2)])
def test_what_a_steps_closure_runs_is_forward_and_backward(kind):
    weight = torch.ones(3, requires_grad=True)
    optimizer = kind([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.exp().sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        ops = counted(step)
        assert {op.phase for op in ops if op.name == "exp"} == {"forward"}
        assert {op.phase for op in ops} == {"forward", "backward", "optimizer"}
        assert ops[-1].phase == "optimizer"


def test_a_closure_that_raises_ends_the_step_and_a_step_inside_a_step_does_not():
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            with contextlib.suppress(ZeroDivisionError):
                torch.optim.SGD([weight], lr=0.1).step(closure)
            with torch.no_grad():
                weight.exp()

    def run():
        Outer([weight], lr=0.1).step(lambda: 1 / 0)
        weight.detach().sin()
        Outer([weight], lr=0.1).step()
        weight.detach().cos()

    phases = {op.name: op.phase for op in counted(run)}
    assert (phases["sin"], phases["exp"], phases["cos"]) == ("forward", "optimizer", "forward")


def test_a_counter_inside_of_itself_is_refused_and_after_a_step_that_raises_all_is_as_before():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    page, counter = sys.modules["torch.optim.optimizer"], OpCounter()
    hooks = dict(page._global_optimizer_pre_hooks), dict(page._global_optimizer_post_hooks)
    with nothing_left_behind(), pytest.raises(RuntimeError, match="no step"), counter:
        with pytest.raises(RuntimeError, match="an OpCounter that is not counting"), counter:
            pass
        torch.ones(3)
        Fails([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    assert hooks == (page._global_optimizer_pre_hooks, page._global_optimizer_post_hooks)
    torch.zeros(3)
    assert [op.name for op in counter.ops] == ["ones", "zeros"]
    with counter:
        torch.ones(3).exp()
    assert {op.phase for op in counter.ops} == {"forward"} and len(counter.ops) == 2


def test_left_of_the_ridge_memory_bounds_an_op_and_right_of_it_compute():
    def op(flops: int, nbytes: int) -> Op:
        return Op("op", "forward", (), 1, flops, nbytes)

    peak, bandwidth = 1000.0, 10.0  # the ridge: 100 FLOPs a byte
    assert [bound_by(op(flops, 1), peak, bandwidth) for flops in (0, 99, 100, 101)] == ["memory"] * 2 + ["compute"] * 2
    assert [roof(intensity, peak, bandwidth) for intensity in (0, 1, 100, 1e9)] == [0, 10, 1000, 1000]
    assert least_seconds(op(500, 1), peak, bandwidth) == 0.5 and least_seconds(op(500, 20), peak, bandwidth) == 2
    assert op(1, 0).intensity == math.inf


def test_the_measured_peak_is_a_speed():
    assert 1e6 < measure_peak_flops() < 1e18


@pytest.mark.parametrize("size", [64, 4 * KiB, MiB])
def test_the_bytes_of_a_measurement_are_those_that_its_ops_read_and_write(size):
    store = torch.arange(MiB / 4)
    for kind in ("read", "copy"):
        run, moved = _passes(kind, store, size, 256 * KiB)
        ops = counted(run)
        if kind == "copy":
            assert sum(op.nbytes for op in ops) == moved
            assert torch.equal(store[size // 8 : size // 4], store[: size // 8])  # one half is now the other
        else:  # the counter counts the working set once; the sum goes over it once a row
            assert sum(op.flops for op in ops) * 4 == moved
        assert moved == size * max(1, 256 * KiB // size)


@pytest.mark.parametrize(("size", "calls"), [(32 * MiB, 1), (64 * MiB, 4), (256 * MiB, 1)])
def test_on_a_gpu_what_no_l2_holds_is_read_in_a_call_a_pass(size, calls):
    class OnACard(torch.Tensor):
        is_cuda = True

    store = torch.empty(256 * MiB // 4, device="meta").as_subclass(OnACard)
    run, moved = _passes("read", store, size, 256 * MiB)
    ops = counted(run)
    assert sum(op.calls for op in ops if op.name == "sum") == calls
    assert sum(op.flops for op in ops) * 4 == moved == 256 * MiB


def test_each_size_has_a_speed_in_the_order_asked_and_threads_are_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for kind in ("read", "copy"):
            curve = measure_bandwidth(["64 KiB", 4096, 100], kind=kind, seconds=0.01)
            assert [size for size, _ in curve] == [64 * KiB, 4096, 96]
            assert all(0 < speed < math.inf for _, speed in curve)
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError):
            measure_bandwidth([2**62], seconds=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_best_of_several_runs_counts_and_the_first_does_not():
    calls = []
    assert 0 < best_seconds(lambda: calls.append(1), repeats=4) < 1
    assert len(calls) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_and_transfers_have_speeds():
    assert all(speed > 0 for _, speed in measure_bandwidth([MiB, 64 * MiB], "cuda", seconds=0.1))
    curves = transfer_bandwidth([MiB])
    assert len(curves) == 4 and all(speed > 0 for curve in curves.values() for _, speed in curve)
    assert {"registers", "L2", "device memory"} <= {level.name for level in levels("cuda")}


def test_the_disks_file_is_written_whole_read_twice_and_gone(tmp_path, monkeypatch):
    sizes = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), fsync(number)))
    found = disk_bandwidth(tmp_path, 5 * MiB + 3)
    assert sizes == [5 * MiB + 3] and list(tmp_path.iterdir()) == []
    assert min(found.write, found.read, found.again) > 0
    assert found.from_disk is None or 0 <= found.from_disk <= 1


def test_the_file_is_gone_also_when_writing_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        disk_bandwidth(tmp_path, MiB)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not os.access("/proc/self/io", os.R_OK), reason="Linux tells")
def test_where_no_disk_is_none_answers():
    assert disk_bandwidth("/dev/shm", MiB).from_disk == 0


OP = Op("mm", "forward", (), 1, 100, 10)
REFUSALS = {
    "a byte less": (lambda: measure_bandwidth([63]), ValueError, "sizes of at least 64 bytes, found 63"),
    "no sizes": (lambda: measure_bandwidth([]), ValueError, "sizes of at least 64 bytes, found none"),
    "writing": (lambda: measure_bandwidth([4096], kind="write"), ValueError, "one of 'read', 'copy'; found 'write'"),
    "a meta device": (lambda: measure_bandwidth([4096], "meta"), ValueError, "one of 'cpu', 'cuda'; found 'meta'"),
    "one size": (lambda: measure_bandwidth(4096), TypeError, "expected sizes in a list, found 4096"),
    "no bandwidth": (lambda: roof(1.0, 1.0, 0.0), ValueError, "expected FLOP/s and bytes/s above 0"),
    "less than no intensity": (lambda: roof(-1, 1.0, 1.0), ValueError, "at least 0 FLOPs a byte, found -1"),
    "no folder": (lambda: disk_bandwidth("/none"), NotADirectoryError, "expected a folder"),
    "a file too large": (lambda: disk_bandwidth(".", "1000 TiB"), ValueError, "expected a size from 1 byte to"),
    "a counter that never ran": (lambda: OpCounter().ops, RuntimeError, "expected an OpCounter that has run"),
}
if not torch.cuda.is_available():
    REFUSALS["no GPU"] = (lambda: measure_bandwidth([64], "cuda"), RuntimeError, "a GPU to measure, found none")
    REFUSALS["no GPU to copy to"] = (transfer_bandwidth, RuntimeError, "expected a GPU to copy to, found none")


@refusals(REFUSALS)
def test_what_cannot_be_measured_is_refused(call, error, words):
    refused(call, error, words)


def test_the_levels_grow_outwards_and_end_with_the_disk(tmp_path):
    found = levels(folder=tmp_path)
    assert found[-1].name == "disk" and all(level.nbytes > 0 for level in found)
    sizes = [level.nbytes for level in found[:-1]]
    assert sizes == sorted(sizes)


def test_caches_are_read_where_linux_tells_them_and_instructions_are_left_out(tmp_path, monkeypatch):
    for i, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M")]):
        (tmp_path / f"index{i}").mkdir()
        for name, text in {"level": level, "type": kind, "size": size}.items():
            (tmp_path / f"index{i}" / name).write_text(f"{text}\n")
    monkeypatch.setattr(levels_page, "CACHES", tmp_path)
    monkeypatch.setattr(levels_page.platform, "system", lambda: "Linux")
    assert levels_page._caches() == [(1, 48 * KiB), (2, 2 * MiB)]
    monkeypatch.setattr(levels_page, "CACHES", tmp_path / "none")
    assert levels_page._caches() == []


def test_a_mac_is_asked_with_sysctl_and_what_it_lacks_is_left_out(monkeypatch):
    told = {"hw.l1dcachesize": 64 * KiB, "hw.l2cachesize": 4 * MiB}
    monkeypatch.setattr(levels_page.platform, "system", lambda: "Darwin")
    monkeypatch.setenv("PATH", "")
    assert levels_page._caches() == []  # there is no sysctl to ask
    monkeypatch.setattr(levels_page, "_sysctl", told.get)
    assert levels_page._caches() == [(1, 64 * KiB), (2, 4 * MiB)]


def test_a_plateau_is_the_median_of_the_sizes_well_inside_a_level():
    named = [Level("L1", 32 * KiB), Level("L2", 512 * KiB), Level("L3", 768 * KiB), Level("memory", GiB)]
    speeds = {4: 90, 8: 100, 16: 110, 32: 70, 64: 60, 128: 50, 256: 40, 512: 30, 1024: 12, 2048: 10, 4096: 8}
    found = fit_levels([(size * KiB, speed) for size, speed in speeds.items()], named)
    assert [(p.name, p.bytes_per_second) for p in found] == [("L1", 100), ("L2", 50), ("L3", None), ("memory", 9)]


def test_registers_have_no_plateau_though_they_are_larger_than_the_next_level():
    named = [Level("registers", 256 * KiB, 132), Level("shared memory and L1", 228 * KiB, 132), Level("L2", 50 * MiB)]
    found = fit_levels([(64 * KiB, 9.0), (MiB, 5.0)], named)
    assert [p.bytes_per_second for p in found] == [None, 9.0, 5.0]
