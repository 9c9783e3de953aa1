"""Masters are made once and kept, whatever others do to weights and states; what cannot be kept is refused."""

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import LossScaler, MasterWeights, StochasticRounding
from memlab.offloading import OffloadedOptimizer
from tests.harness import refused

BF16, FP16 = torch.bfloat16, torch.float16


def ones(*shapes, dtype=BF16):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def stepped(optimizer, params, steps=1, gradient=1.0):
    for _ in range(steps):
        for p in params:
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return [p.flatten()[0].item() for p in params]


@pytest.mark.parametrize("kind", [MasterWeights, OffloadedOptimizer])
def test_who_looks_for_a_state_before_the_first_step_changes_nothing(kind):
    params, others = ones((4,), (3,)), ones((4,), (3,))
    looked, left = kind(params, optim.AdamW, lr=1e-3), kind(others, optim.AdamW, lr=1e-3)
    assert all(looked.state[p].get("exp_avg") is None for p in params)
    assert stepped(looked, params, 20) == stepped(left, others, 20) != [1.0, 1.0]
    looked.load_state_dict(looked.state_dict())


def test_a_parameter_that_comes_to_have_16_bits_gets_a_master_then():
    always, later = ones((4,)) + ones((4,), dtype=torch.float32)
    masters = MasterWeights([always, later], optim.SGD, lr=1e-3, momentum=0.5)
    stepped(masters, [always, later])
    later.data, later.grad = later.data.bfloat16(), None
    first, second = stepped(masters, [always, later], 40)
    assert first == second
    masters.load_state_dict(masters.state_dict())


def test_a_state_that_was_only_looked_at_and_a_master_from_before_fp32_are_saved_and_loaded():
    params = ones((4,), (3,))
    masters, others = MasterWeights(params, optim.AdamW), MasterWeights(ones((4,), (3,)), optim.AdamW)
    stepped(masters, params[:1])
    assert masters.state[params[1]].get("step") is None
    others.load_state_dict(masters.state_dict())
    params[0].data, params[0].grad = params[0].data.float(), None
    stepped(masters, params[:1])
    before = {name: state.clone() for name, state in masters.state[params[0]].items()}
    masters.load_state_dict(masters.state_dict())
    after = masters.state[params[0]]
    assert after.keys() == before.keys() and all(torch.equal(after[name], state) for name, state in before.items())


@pytest.mark.parametrize(("kind", "option"), [(optim.AdamW, "maximize"), (optim.SGD, "fused")])
def test_options_that_torch_has_come_to_have_are_filled_in_as_the_class_does(kind, option):
    params, filled_in = ones((4,)), []
    for optimizer in (kind(params), MasterWeights(params, kind)):
        stepped(optimizer, params)
        saved = optimizer.state_dict()
        del saved["param_groups"][0][option]
        optimizer.load_state_dict(saved)
        stepped(optimizer, params)
        filled_in.append(optimizer.param_groups[0][option])
    assert filled_in[0] == filled_in[1]


def test_another_view_of_the_same_memory_is_taken_over():
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=BF16)
    square, part = nn.Parameter(flat.clone().view(2, 2)), nn.Parameter(flat[:2])
    masters = MasterWeights([square, part], optim.SGD, lr=0.0)
    stepped(masters, [square, part])
    square.data, part.data = square.data.T, flat[2:]
    stepped(masters, [square, part])
    assert square.tolist() == [[1, 3], [2, 4]] and part.tolist() == [3, 4]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_given_twice_is_stepped_twice_as_in_fp32():
    (p,), (q,) = ones((4,)), ones((4,), dtype=torch.float32)
    masters, reference = MasterWeights([p, p], optim.SGD, lr=0.25), optim.SGD([q, q], lr=0.25)
    for _ in range(3):
        assert stepped(masters, [p]) == stepped(reference, [q])


def test_a_group_that_is_added_is_refused_like_the_first_and_is_then_not_there():
    (p,), (other,) = ones((4,)), ones((4,))
    masters, tied = MasterWeights([p], optim.SGD, lr=0.25), nn.Parameter(p.detach())
    for group, words in (
        ({"params": [tied]}, "found two of (4,) and (4,) in the same; tie weights"),
        ({"params": [other], "differentiable": True}, "without differentiable=True"),
    ):
        refused(lambda group=group: masters.add_param_group(group), ValueError, words)
    assert len(masters.param_groups) == 1 and stepped(masters, [p]) == [0.75]
    masters.add_param_group({"params": [other]})
    assert stepped(masters, [p, other]) == [0.5, 0.75]


def test_a_parameter_that_becomes_fp16_is_not_rounded_stochastically():
    (p,) = ones((4,))
    optimizer = StochasticRounding([p], optim.SGD)
    p.data = p.data.half()
    refused(lambda: stepped(optimizer, [p]), ValueError, "found one that has become FP16; use MasterWeights")


class FailsInTheSecondChunk(optim.SGD):
    chunks = 0

    def step(self, closure=None):
        type(self).chunks += 1
        if self.chunks == 2:
            raise RuntimeError("once")
        return super().step(closure)


@pytest.mark.parametrize("widened", [False, True])
def test_gradients_of_a_chunk_that_had_stepped_are_as_before_too_when_another_raises(widened):
    params, scaler = ones((1,), dtype=torch.float32) + ones((1,)), LossScaler(4.0)
    masters = MasterWeights(params, type("Once", (FailsInTheSecondChunk,), {}), lr=1.0, chunk_bytes=4)
    scaler.scale(sum(params).sum().float()).backward()
    if widened:
        masters.widen_gradients()
    with pytest.raises(RuntimeError, match="once"):
        scaler.step(masters)
    assert [p.grad.item() for p in params] == [4.0, 4.0]
    scaler.step(masters)
    assert [p.item() for p in params] == [-1.0, 0.0]  # the first stepped twice


class CountsInItself(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"t": torch.zeros(())})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        self.apply(lambda group: self.t)

    def apply(self, count):
        for group in self.param_groups:
            t = count(group)
            for p in group["params"]:
                p.sub_(p.grad / t)


class CountsInATensor(CountsInItself):
    @torch.no_grad()
    def step(self, closure=None):
        self.apply(lambda group: group["t"].add_(1))


class CountsBesideParameters(CountsInItself):
    @torch.no_grad()
    def step(self, closure=None):
        t = self.state["t"] = (self.state["t"] or 0) + 1 if "t" in self.state else 1
        self.apply(lambda group: t)


@pytest.mark.parametrize("kind", [CountsInItself, CountsInATensor])
def test_who_counts_steps_beyond_a_parameter_is_right_in_one_chunk_and_refused_in_several(kind):
    params, wide = ones((4,), (3,)), ones((4,), (3,), dtype=torch.float32)
    masters, reference = MasterWeights(params, kind, chunk_bytes=None), kind(wide)
    stepped(masters, params, 3)
    stepped(reference, wide, 3)
    assert all(torch.equal(masters.state[p]["master"], q) for p, q in zip(params, wide, strict=True))
    in_chunks = MasterWeights(params, kind, chunk_bytes=1)
    refused(lambda: stepped(in_chunks, params), ValueError, "found 't' changed once a chunk; use chunk_bytes=None")


def test_a_count_kept_beside_the_parameters_states_is_refused():
    params = ones((4,))
    with pytest.raises(ValueError, match="keep its states by parameter, found one under 't', which would be lost"):
        stepped(MasterWeights(params, CountsBesideParameters), params)


def test_a_sparse_gradient_needs_no_room_as_if_it_were_dense():
    table, layer = nn.Embedding(1000, 8, sparse=True).to(BF16), nn.Linear(8, 8).to(BF16)
    masters = MasterWeights([*table.parameters(), *layer.parameters()], optim.SGD)
    for _ in range(2):
        layer(table(torch.tensor([1, 2]))).sum().backward()
        with Meter(nn.ModuleList([table, layer]), masters) as meter:
            masters.step()
        masters.zero_grad()
    assert max(event.delta for event in meter.timeline.events) == 4 * 64
