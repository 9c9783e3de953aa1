"""What the meter says of storages and moments where it is easily wrong: phase, category, line and reason."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from memlab.gradient_checkpointing import checkpoint as our_checkpoint
from memlab.memory_timeline import Meter, Timeline
from memlab.memory_timeline.nodes import STRETCH
from tests.memory_timeline_helpers import Idle, Run, one_thread  # noqa: F401

ROWS = 20


def made(timeline: Timeline, phase: str, nbytes: int = 1000) -> list[tuple[str, str, str]]:
    """Operation, category and reason of what was made in a phase, from `nbytes` on."""
    found = [s for s in timeline.storages.values() if s.phase == phase and s.nbytes >= nbytes]
    return [(storage.op, storage.category, storage.reason) for storage in found]


CHECKPOINTS = {
    "PyTorch's": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "PyTorch's, reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "ours": our_checkpoint,
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_what_is_recomputed_is_saved_by_the_op_that_saves_it(how):
    model = nn.Sequential(nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 30), nn.Tanh())
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(model, inputs=x) as meter:
        CHECKPOINTS[how](model, x).sum().backward()
    saved = [reason for _, category, reason in made(meter.timeline, "recompute") if category == "activation"]
    assert saved[:2] == ["recomputed: saved by gelu for its backward", "recomputed: saved by linear for its backward"]
    assert set(saved[2:]) <= {"recomputed: saved by tanh for its backward"}


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        return gradient * gate * (1 + x * (1 - gate))


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_forward_that_runs_again_without_gradients_is_recomputation(how):
    layer, x = nn.Linear(30, 30), torch.ones(ROWS, 30, requires_grad=True)

    def block(x):
        with torch.no_grad():
            scale = x.abs() + 1
        return Swish.apply(layer(x)) * scale

    with Meter(layer, inputs=x) as meter:
        CHECKPOINTS[how](block, x).sum().backward()
    again = {op: category for op, category, _ in made(meter.timeline, "recompute")}
    assert {"abs", "add", "addmm", "sigmoid"} <= again.keys()
    assert again["sigmoid"] == "activation"


@pytest.mark.parametrize("meters", [1, 2])
def test_a_graph_of_gradients_is_no_recomputation(meters):
    x = torch.ones(400, requires_grad=True)
    with Meter(inputs=x) as outer, Meter(inputs=x) as inner:
        y = x.sin() ** 2
        y.register_hook(lambda gradient: gradient * 3)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
    timeline = (inner, outer)[meters - 1].timeline
    assert made(timeline, "recompute") == []
    assert len(made(timeline, "backward")) > 5


def test_a_readers_own_mode_inside_a_meter_changes_nothing_that_it_says():
    def said(inside):
        run = Run("MLP")  # in which the engine adds no gradients up: under a mode it does not add in place
        with Meter(run.model, run.optimizer, run.inputs) as meter, inside():
            run.step()
        timeline = meter.timeline
        events = [(e.delta, e.op, e.phase, str(e.line)) for e in timeline.events]
        return events, [(s.category, s.reason, s.module, str(s.line)) for s in timeline.storages.values()]

    assert said(Idle) == said(contextlib.nullcontext)


def test_a_copy_that_hands_a_gradient_to_its_parameter_has_a_line_of_forward():
    layer = nn.Linear(30, 30)
    with Meter(layer) as meter:
        loss = layer.weight.sum() * 3
        loss.backward()
    (gradient,) = (s for s in meter.timeline.storages.values() if s.category == "gradient")
    assert gradient.line.source == "loss = layer.weight.sum() * 3"


def test_a_gradient_that_was_made_where_nobody_saw_it_is_a_gradient():
    weight = nn.Parameter(torch.ones(400))
    buffers = []
    thread = threading.Thread(target=lambda: buffers.append(torch.empty(400)))  # as a compiled model's are
    with Meter(nn.ParameterList([weight])) as meter:
        thread.start()
        thread.join()
        torch.mul(weight.detach(), 2, out=buffers[0])
        weight.grad = buffers[0]
    assert meter.timeline.bytes_by_category(len(meter.timeline))["gradient"] == 1600


def test_a_batch_out_of_another_process_is_an_input():
    data = [torch.ones(300) for _ in range(2)]
    with Meter() as meter:
        for batch in DataLoader(data, batch_size=2, num_workers=1):
            batch.sum()
    (found,) = (s for s in meter.timeline.storages.values() if s.nbytes == 2400)
    assert found.category == "input" and found.line.source.startswith(("for batch in DataLoader", "batch.sum()"))


def test_what_is_copied_or_loaded_inside_the_block_is_no_input(tmp_path):
    layer = nn.Linear(30, 30, bias=False)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    for make in (lambda: copy.deepcopy(layer.state_dict()), lambda: torch.load(tmp_path / "weights.pt")):
        with Meter(layer) as meter:
            made = make()
        (found,) = (s for s in meter.timeline.storages.values() if s.nbytes == 3600 and s.category != "parameter")
        assert found.category == "temporary" and "outside" not in found.reason
        del made


class ByHand(torch.optim.Optimizer):
    """A reader's own optimizer, whose step is all the closure's."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        closure()


@pytest.mark.parametrize("make", [ByHand, lambda params: torch.optim.SGD(params, lr=0.1)])
def test_after_a_step_that_raised_forward_is_forward(make):
    weight = torch.ones(400, requires_grad=True)
    optimizer = make([weight])

    def fails():
        raise ValueError("planted")

    with Meter(None, optimizer, weight) as meter:
        with pytest.raises(ValueError, match="planted"):
            optimizer.step(fails)
        y = weight * 2
        with torch.no_grad():
            y = weight * 3
        (weight * weight).sum().backward()
        del y
    phases = {event.phase for event in meter.timeline.events}
    assert phases == {"forward", "backward"}


def test_what_a_closure_lets_go_is_of_its_own_phase():
    weight, x = nn.Parameter(torch.ones(30, 30)), torch.ones(ROWS, 30)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure():
        loss = (x @ weight).relu().sum()
        loss.backward()
        return loss

    with Meter(nn.ParameterList([weight]), optimizer, inputs=x) as meter:
        optimizer.step(closure)
    freed = [event.phase for event in meter.timeline.events if event.delta == -4 * ROWS * 30]
    assert freed and "optimizer" not in freed


def test_a_first_meter_inside_inference_mode(fresh_counts):
    layer = nn.Linear(30, 30)
    with torch.inference_mode(), Meter(layer) as meter:
        layer(torch.ones(ROWS, 30))
    assert meter.timeline.peak_bytes == 4 * (30 * 30 + 30 + 2 * ROWS * 30)


@pytest.fixture
def fresh_counts():
    """As in a process in which no meter has run."""
    from memlab.memory_timeline.accumulation import sole_owner_counts

    sole_owner_counts.cache_clear()


def test_nested_tensors_inside_a_transformer_in_evaluation():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x, padding = torch.ones(4, 10, 32), torch.zeros(4, 10, dtype=torch.bool)
    padding[0, 5:] = True
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with Meter(encoder, inputs=(x, padding)) as meter:
            found = encoder(x, src_key_padding_mask=padding)
    assert torch.equal(found, expected)
    held = [*encoder.parameters(), x, padding, found]
    assert meter.timeline.bytes_at(len(meter.timeline)) == sum(tensor.nbytes for tensor in held)


def test_higher_order_ops_run_under_the_meter():
    q = torch.randn(1, 1, 128, 16)
    expected = flex_attention(q, q, q)
    with Meter(inputs=q) as meter:
        found = flex_attention(q, q, q)
    assert torch.equal(found, expected)
    assert meter.timeline.bytes_at(len(meter.timeline)) == q.nbytes + found.nbytes


def passing(timeline: Timeline) -> list[tuple[str, str]]:
    """Reason and line of all that was made in backward, in order, but the gradient that it begins with."""
    found = [s for s in timeline.storages.values() if s.phase == "backward" and s.op != "ones_like"]
    return [(storage.reason, storage.line.source) for storage in found]


def test_an_in_place_op_on_a_view_answers_for_the_copies_that_its_backward_makes():
    x, scale = torch.ones(ROWS, 30, requires_grad=True), torch.ones(ROWS, 3, requires_grad=True)
    with Meter(inputs=(x, scale)) as meter:
        h = x * 1
        factor = scale.exp()
        h[:, :3].mul_(factor)
        h.sum().backward()
    clone, *_ = (s for s in meter.timeline.storages.values() if s.op == "clone")
    assert clone.reason == "saved by mul for its backward" and clone.line.source == "h[:, :3].mul_(factor)"
    *before, of_factor, of_x = passing(meter.timeline)
    assert set(before) == {("gradient passing through mul", "h[:, :3].mul_(factor)")} and len(before) == 4
    assert of_factor == ("gradient passing through exp", "factor = scale.exp()")
    assert of_x == ("gradient passing through mul", "h = x * 1")


@pytest.mark.parametrize("follows", [torch.sin, torch.detach], ids=["an op with a node", "an op without one"])
def test_the_view_through_which_a_tensor_was_written_is_that_ops_too(follows):
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(inputs=x) as meter:
        view = (x * 1)[:, :3]
        view.mul_(2)
        follows(view)
        view.cos().sum().backward()
    lines = [line for reason, line in passing(meter.timeline) if reason == "gradient passing through mul"]
    assert lines == ["view.mul_(2)"] * 4 + ["view = (x * 1)[:, :3]"]
    assert {line for _, line in passing(meter.timeline)} == {"view.cos().sum().backward()", *lines}


def test_a_function_is_called_by_its_own_name_and_not_by_its_first_op():
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(inputs=x) as meter:
        Swish.apply(x * 2).sum().backward()
    storages = list(meter.timeline.storages.values())
    assert {s.reason for s in storages if s.category == "activation"} >= {"saved by Swish for its backward"}
    assert not [s.reason for s in storages if "sigmoid" in s.reason]
    assert {s.reason for s in storages if s.line.source.startswith("return gradient")} == {
        "gradient passing through Swish"
    }


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)  # else autograd makes a view, which is an op
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_a_function_without_ops_is_not_taken_for_the_op_that_follows_it():
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(inputs=x) as meter:
        Reversal.apply(x * 2).exp().sum().backward()
    negated = [s for s in meter.timeline.storages.values() if s.op == "neg"]
    assert [(s.reason, s.line.source) for s in negated] == [
        ("result of neg in backward, saved by nobody", "return -gradient")
    ]


def test_nodes_of_two_threads_with_the_same_numbers_are_told_apart():
    # Nested deeper than the engine follows in one thread, reentrant backwards go on in others, as all do on a GPU.
    def nested(depth, x):
        for _ in range(0 if depth else ROWS):
            x = x.tanh()
        return checkpoint(nested, depth - 1, x, use_reentrant=True) if depth else x

    x = torch.ones(500, requires_grad=True)
    with Meter(inputs=x) as meter:
        h = x
        for _ in range(ROWS):
            h = h.sin()
        nested(130, h).sum().backward()
    threads = [made // STRETCH for made in meter._nodes._forward_of]
    assert len(set(threads)) > 1, "expected more than one thread to have made nodes"
    storages = meter.timeline.storages.values()
    expected = [("tanh_backward", "tanh"), ("cos", "sin")]
    found = {(s.op, s.reason) for s in storages if s.op in dict(expected)}
    assert found == {(op, f"gradient passing through {of}") for op, of in expected}


GIVEN = {
    "to a tensor": lambda y, x, gradient: y.backward(gradient),
    "to several": lambda y, x, gradient: torch.autograd.backward([y, y.sum()], [gradient, None]),
    "for some inputs": lambda y, x, gradient: torch.autograd.grad(y, x, gradient),
}


@pytest.mark.parametrize("how", GIVEN)
def test_a_gradient_that_backward_is_given_is_not_what_an_op_saved(how):
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(inputs=x) as meter:
        y = (x * 2).exp()
        gradient = torch.full_like(y, 0.5)
        GIVEN[how](y, x, gradient)
    found = {op: (category, reason) for op, category, reason in made(meter.timeline, "forward")}
    assert found["full_like"] == ("temporary", "gradient that backward began with")
    assert found["exp"] == ("activation", "saved by exp for its backward")


def test_a_result_that_is_also_the_gradient_is_still_what_its_op_saved():
    x = torch.ones(ROWS, 30, requires_grad=True)
    with Meter(inputs=x) as meter:
        y = x.exp()
        y.backward(y.detach())
    assert made(meter.timeline, "forward") == [("exp", "activation", "saved by exp for its backward")]
