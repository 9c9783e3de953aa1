"""The meter sees every op and every byte, says whose line it was and why, and counts each storage once."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.workloads import MLP
from memlab.memory_timeline import CATEGORIES, Meter, imagine
from tests.memory_timeline_helpers import (
    EACH_WORKLOAD,
    fresh,
    metered,
    of,
    one_thread,  # noqa: F401
    tensors_of,
)
from tests.tiers import pairs


class Ops(TorchDispatchMode):
    """Torch's own way to list ops: a mode that notes names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workload", EACH_WORKLOAD)
def test_every_op_of_a_step_is_seen_in_order_and_every_byte_has_a_birth_line_in_the_models_code_and_a_reason(workload):
    meter, run = metered(workload), fresh(workload)
    with Ops() as ops:
        run.step()
    place = torch.ops.aten.add_.Tensor  # the engine's sums, which the meter makes in place
    seen = [torch.ops.aten.add.Tensor if op.func is place else op.func for op in meter._history.ops]
    assert seen == [torch.ops.aten.add.Tensor if func is place else func for func in ops.names]
    storages = meter.timeline.storages.values()
    assert all(s.reason and s.category in CATEGORIES for s in storages)
    assert [s for s in storages if s.phase != "before" and not s.line.source] == []
    if workload.startswith("GPT") and workload != "GPT2":
        classes = ("MLP", "GPT", "Attention", "FeedForward", "Block", "Checkpointed")
        ours = {f"{name}.forward" for name in classes} | {"Run.step"}
        assert {s.line.function for s in storages if s.line.function} <= ours
    assert {span.phase for span in meter.timeline.phases} == {"forward", "backward", "optimizer"} | (
        {"recompute"} if "checkpointed" in workload else set()
    )


def test_a_gradients_line_is_the_forward_line_that_it_is_the_gradient_of():
    def forward(x):
        a = torch.sin(x)
        b = torch.exp(a)
        return b.sum()

    x = torch.randn(100, requires_grad=True)
    with Meter() as meter:
        forward(x).backward()
    backward = [s for s in meter.timeline.storages.values() if s.phase == "backward"]
    lines = {(s.op, s.line.source) for s in backward if s.op in ("cos", "mul")}
    assert lines == {("mul", "b = torch.exp(a)"), ("cos", "a = torch.sin(x)"), ("mul", "a = torch.sin(x)")}
    assert all(s.line.function.endswith("forward") for s in backward if s.op != "ones_like")


def test_a_saved_tensor_hooks_copies_are_seen_at_the_hooks_line():
    def pack(tensor):
        return tensor.double()

    def unpack(packed):
        return packed.float()

    x = torch.randn(50, requires_grad=True)
    with Meter() as meter, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        x.sin().sum().backward()
    lines = {(s.line.source, s.phase, s.nbytes) for s in meter.timeline.storages.values()}
    assert ("return tensor.double()", "forward", 400) in lines
    assert any(source == "return packed.float()" and nbytes == 200 for source, _, nbytes in lines)


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's: sign of a momentum."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                direction = state["momentum"].sign()
                parameter.sub_(direction, alpha=group["lr"])


OPTIMIZERS = {
    "AdamW for-loop": lambda ps: torch.optim.AdamW(ps, foreach=False),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "Lion": Lion,
}


def small(name):
    model = MLP(32, 64, 8)
    return model, OPTIMIZERS[name](model.parameters()), (torch.randn(4, 32), torch.randint(8, (4,)))


@pairs("name, given", OPTIMIZERS, [True, False])
def test_an_optimizers_states_are_exactly_what_it_keeps(name, given):
    model, optimizer, inputs = small(name)
    with Meter(model, optimizer if given else None, inputs) as meter:
        model(*inputs).backward()
        optimizer.step()
    timeline = meter.timeline
    assert timeline.bytes_by_category(len(timeline))["optimizer_state"] == tensors_of(optimizer) > 0
    stepping = [s for s in timeline.storages.values() if s.phase == "optimizer"]
    assert {s.category for s in stepping} <= {"optimizer_state", "temporary"}
    names = {n for n, _ in model.named_parameters()}
    assert {s.name.rpartition(" of ")[2] for s in of(timeline, "optimizer_state")} == names
    own = {'state["momentum"] = torch.zeros_like(parameter)', 'direction = state["momentum"].sign()'}
    assert {s.line.source for s in stepping} == (own if name == "Lion" else {"optimizer.step()"})


@pairs("name, named, workspace", OPTIMIZERS, [True, False], [False, True])
def test_what_a_step_holds_from_before_counts_from_the_first_one_also_of_what_was_not_given(name, named, workspace):
    model, optimizer, inputs = small(name)
    model(*inputs).backward()
    optimizer.step()
    with Meter(model if named else None, None, inputs if named else (), workspace=workspace) as meter:
        for _ in range(2):
            optimizer.step()
    timeline = meter.timeline
    weights, states = sum(p.nbytes for p in model.parameters()), tensors_of(optimizer)
    met = [e for e in timeline.events if e.op == "step"]
    assert sum(e.delta for e in met) == states + (0 if named else 2 * weights)
    assert {(e.phase, e.line.source) for e in met} == {("optimizer", "optimizer.step()")}
    first = next(n for n, e in enumerate(timeline.events) if e.phase == "optimizer")
    assert timeline.events[first : first + len(met)] == met
    found = timeline.bytes_by_category(len(timeline))
    assert (found["optimizer_state"], found["gradient"]) == (states, weights)
    assert found["parameter" if named else "input"] >= weights
    names = {s.reason.removeprefix("gradient of ") for s in of(timeline, "gradient")}
    assert names == ({n for n, _ in model.named_parameters()} if named else {"a parameter"})


@pytest.mark.parametrize("order", ["before the meter", "inside the meter"])
def test_an_optimizer_that_steps_inside_backward_frees_each_gradient_at_once(order):
    model, x = MLP(32, 64, 8), torch.randn(4, 32)
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def step_and_free(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register():
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_and_free)

    if order == "before the meter":
        register()
    with Meter(model, inputs=x) as meter:
        if order == "inside the meter":
            register()
        model(x).pow(2).sum().backward()
    timeline = meter.timeline
    sizes = sorted(p.nbytes for p in model.parameters())
    assert sorted(s.nbytes for s in of(timeline, "gradient")) == sizes
    assert timeline.curves["gradient"][-1] == 0 and max(timeline.curves["gradient"]) < sum(sizes)
    states = {(s.phase, s.line.source) for s in of(timeline, "optimizer_state")}
    assert states == {("optimizer", "optimizers[parameter].step()")}


def test_a_hook_that_throws_a_gradient_away_does_not_trip_the_meter():
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with Meter(model) as meter:
        model(torch.ones(2, 4)).sum().backward()
    assert meter.timeline.bytes_by_category(len(meter.timeline))["gradient"] == model.bias.nbytes


def test_a_storage_is_counted_once_however_many_tensors_share_it_and_a_view_pins_all_of_it():
    with Meter() as meter:
        x = torch.ones(1000)
        views = [x[::2], x.view(10, 100).t(), x.detach(), x.expand(5, 1000), x.unsqueeze(0), *x.chunk(4)]
        corner = x[:1]
        del x, views
        held = meter.held_bytes
        del corner
    assert (held, meter.timeline.peak_bytes, meter.timeline.totals[-1]) == (4000, 4000, 0)
    assert len(meter.timeline.storages) == 1


def test_tied_weights_are_one_parameter_with_one_gradient():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    with Meter(model) as meter:
        model(torch.arange(10)).sum().backward()
    last = meter.timeline.bytes_by_category(len(meter.timeline))
    assert last["parameter"] == last["gradient"] == 50 * 8 * 4
    assert [s.name for s in of(meter.timeline, "parameter")] == ["0.weight"]


def test_resizing_is_seen_by_every_way_to_resize():
    with Meter() as meter:
        x = torch.ones(100)
        x.resize_(200)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(4000)
        out = torch.empty(0)
        torch.add(torch.ones(50), 1, out=out)
    assert [e.delta for e in meter.timeline.events if e.storage == 0] == [400, 400, -800, 4000]
    (grown,) = [s for s in meter.timeline.storages.values() if s.op in ("empty", "add")]
    held = sum(e.delta for e in meter.timeline.events if e.storage == grown.id)
    assert held == 200 == out.untyped_storage().nbytes()


@pytest.mark.parametrize("machine", [contextlib.nullcontext, lambda: imagine("H100-80GB")], ids=["real", "imagined"])
def test_a_storage_from_before_that_had_no_bytes_is_born_when_it_gets_some(machine):
    with machine():
        empty, full = torch.ones(50), torch.ones(70)
        empty.untyped_storage().resize_(0)
        with Meter() as meter:
            empty.untyped_storage().resize_(200)
            empty.add_(1)
            full.untyped_storage().resize_(400)  # its 280 bytes were there, and counted nowhere
            empty.untyped_storage().resize_(0)
            empty.untyped_storage().resize_(240)
    events = [(event.delta, event.op) for event in meter.timeline.events if event.delta]
    assert events == [(200, "resize_"), (-200, "resize_"), (240, "resize_")]
    (storage,) = meter.timeline.storages.values()
    assert (storage.nbytes, storage.shape, storage.dtype) == (200, (200,), "uint8")


@pytest.mark.parametrize("workspace", [False, True])
def test_what_is_resized_to_nothing_and_back_or_written_to_has_the_size_that_it_gets(workspace):
    given = torch.ones(3, 4)
    with Meter(inputs=given, workspace=workspace) as meter:
        parts = [torch.empty(0) for _ in range(3)]
        torch.unbind_copy(given, out=parts)  # an op without a result
        x = torch.ones(1 << 16)
        for _ in range(3):
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(1 << 18)
        del x
    timeline = meter.timeline
    assert {len(part) for part in parts} == {4}
    assert [s.nbytes for s in timeline.alive(len(timeline))] == [given.nbytes, 16, 16, 16]
    assert timeline.peak_bytes == 96 + (1 << 18) and min(map(min, timeline.curves.values())) >= 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_gradients_and_csr_count_indices_and_values():
    model = nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with Meter(model, optimizer) as meter:
        model(torch.tensor([1, 5, 7])).sum().backward()
        optimizer.step()
    assert sum(s.nbytes for s in of(meter.timeline, "gradient")) >= 3 * 8 + 3 * 16 * 4
    assert sum(s.nbytes for s in of(meter.timeline, "optimizer_state")) >= 2 * 1000 * 16 * 4
    for csr, parts in (
        (torch.eye(10).to_sparse_csr(), ("crow_indices", "col_indices", "values")),
        (torch.eye(10).to_sparse_csc(), ("ccol_indices", "row_indices", "values")),
    ):
        with Meter(inputs=csr) as meter:
            csr @ torch.ones(10, 2)
        parts = [getattr(csr, part)() for part in parts]
        assert meter.timeline.bytes_at(0) == sum(part.untyped_storage().nbytes() for part in parts)


def test_distributed_tensors_are_counted_by_what_is_inside(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(64, 64, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Replicate()]))
        x = distribute_tensor(torch.ones(8, 64), mesh, [Replicate()])
        with Meter(model, inputs=x) as meter:
            model(x).sum().backward()
    finally:
        distributed.destroy_process_group()
    timeline = meter.timeline
    assert timeline.bytes_by_category(0) == dict.fromkeys(CATEGORIES, 0) | {"parameter": 16384, "input": 2048}
    assert timeline.bytes_by_category(len(timeline))["gradient"] == 16384


def test_categories_of_a_linear_layer_are_the_closed_form():
    model, x = nn.Linear(100, 50), torch.ones(20, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Meter(model, optimizer, x) as meter:
        for _ in range(3):
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    timeline = meter.timeline
    parameters = (100 * 50 + 50) * 4
    assert timeline.bytes_by_category(0) == dict.fromkeys(CATEGORIES, 0) | {"parameter": parameters, "input": 8000}
    curves = timeline.curves
    assert set(curves["parameter"]) == {parameters} and set(curves["input"]) == {8000}
    assert max(curves["gradient"]) == max(curves["optimizer_state"]) == parameters
    assert curves["gradient"][-1] == 0 and curves["optimizer_state"][-1] == parameters
    # pow saves the layer's output; the pow's result nobody saves; the loss waits for its backward as a Python object.
    assert [s.nbytes for s in of(timeline, "activation")] == [20 * 50 * 4, 4] * 3
    # The gradient that backward begins with is let go by Python as backward returns.
    assert [span.phase for span in timeline.phases] == ["forward", "backward", "optimizer"] * 3


@pytest.mark.parametrize(("zero", "kept", "born"), [(None, 440, 2), (True, 0, 6), (False, 440, 2)])
def test_gradients_live_as_long_as_zero_grad_lets_them_and_micro_batches_share_one(zero, kept, born):
    model, x = nn.Linear(10, 10), torch.ones(2, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Meter(model, optimizer, x) as meter:
        for _ in range(3):
            model(x).sum().backward()
            if zero is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=zero)
    curve = meter.timeline.curves["gradient"]
    assert (curve[-1], max(curve), len(of(meter.timeline, "gradient"))) == (kept, 440, born)


def test_what_was_there_before_is_what_it_is_from_the_start():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    model[0].requires_grad_(False)
    model(torch.ones(4, 10)).sum().backward()
    gathered = torch.empty(10)
    model.register_buffer("gathered", nn.Parameter(gathered[:0], requires_grad=False))  # for a time
    with Meter(model) as meter:
        model(torch.ones(4, 10)).sum().backward()
        gathered.sum()
    start = meter.timeline.bytes_by_category(0)
    assert (start["parameter"], start["gradient"], start["buffer"]) == (440 + 80 + 40, 80, 2 * 40 + 8)
    assert sorted(s.name for s in of(meter.timeline, "gradient")) == ["1.bias", "1.weight"]


def test_a_batch_that_was_not_named_is_an_input_from_its_first_use():
    numpy = pytest.importorskip("numpy")
    model, outside = nn.Linear(10, 10), torch.from_numpy(numpy.ones((4, 10), dtype="float32"))
    with Meter(model) as meter:
        model(outside)
        inside = torch.from_numpy(numpy.ones((4, 10), dtype="float32"))
        model(inside)
        torch.tensor([1.0, 2.0]) * 2  # of Python's numbers: no input
    assert [s.nbytes for s in of(meter.timeline, "input")][0] == 160
    assert 8 not in {s.nbytes for s in of(meter.timeline, "input")}
    (found,) = [s for s in meter.timeline.storages.values() if "from_numpy" in s.line.source]
    assert found.nbytes == 160
