"""A parameter larger than a chunk is stepped slice by slice: to the same bits, with whole states, from one slice's FP32
gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from memlab.memory_arithmetic.optimizers import CHUNK_BYTES, VECTOR, slice_elements
from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, adam_in_c, master_weights
from memlab.mixed_precision.gradient_block import GradientBlock
from memlab.mixed_precision.slices import can_be_sliced, in_slices
from tests.test_mixed_precision_flat_group import CASES, assert_same, give_gradients, step_both

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def without_the_kernel_in_c(monkeypatch):
    """Fused Adam makes no FP32 gradients where its kernel works."""
    monkeypatch.setattr(adam_in_c, "works", lambda *types: False)


@pytest.fixture
def sliced(monkeypatch) -> list[int]:
    """A list that gets the elements of each slice."""
    numels = []

    def watched(*args):
        for its, tensors in in_slices(*args):
            numels.append(tensors[0].numel())
            yield its, tensors

    monkeypatch.setattr(master_weights, "in_slices", watched)
    return numels


def pair(shapes, kind=optim.AdamW, chunk_bytes=1000, dtype=BF16, **options):
    """16-bit parameters and their optimizer; the same in FP32 and torch's. Those of 64 × 64 lie column by column."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params = [nn.Parameter(p.detach().t()) if p.shape == (64, 64) else p for p in params]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    return MasterWeights(params, kind, chunk_bytes=chunk_bytes, **options), params, kind(wide, **options), wide


# ---- how many elements


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_slices_are_whole_vectors_as_equal_as_can_be_and_fit_in_a_chunk_of_one_vector_or_more(count, chunk_bytes):
    each = slice_elements(count, chunk_bytes)
    if 4 * count <= chunk_bytes or count <= VECTOR:
        assert each == count
        return
    assert 4 * each <= max(chunk_bytes, 4 * VECTOR) and each % VECTOR == 0
    most = max(1, chunk_bytes // (4 * VECTOR)) * VECTOR
    number = -(-count // each)
    assert number == -(-count // most)  # no more than must be
    assert each - VECTOR < -(-count // number)  # a vector less, and they would not suffice


# ---- the same bits


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_slices_are_stepped_as_the_parameter_bit_for_bit(kind, options, sliced):
    ours, params, reference, wide = pair([(77, 13), (16,), (64, 64), (1024,), (3, 5)], kind, **options)
    for step in range(4):
        give_gradients(params, step)
        for p, q in zip(params, wide, strict=True):
            p.grad = torch.empty_like(p).copy_(p.grad)
            q.grad = p.grad.float()
        ours.step()
        reference.step()
        assert_same(ours, params, reference, wide, own_master=True)
    assert sliced == 4 * [*4 * [208], 169, *17 * [240], 16, *4 * [208], 192]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_slices_that_several_threads_step_come_to_the_same_bits(how, threads, sliced):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, params, reference, wide = pair([(1003, 1001), (1024, 1024)], chunk_bytes="auto", **how)
        step_both(ours, params, reference, wide, range(2))
    finally:
        torch.set_num_threads(before)
    assert len(sliced) == 2 * 4 and max(sliced) * 4 <= CHUNK_BYTES["cpu"]


def test_a_scale_is_divided_out_of_every_slice(sliced):
    ours, params, reference, wide = pair([(77, 13)], optim.SGD, dtype=torch.float16, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        give_gradients(params, step)
        wide[0].grad = params[0].grad.float()
        params[0].grad = params[0].grad * 1024
        scaler.scale(torch.ones(()))
        scaler.step(ours)
        scaler.update()
        reference.step()
    assert_same(ours, params, reference, wide, own_master=True)
    assert sliced == 3 * [*4 * [208], 169]


# ---- what is kept is whole


def test_states_stay_the_same_tensors_and_count_each_step_once(sliced):
    ours, params, _, _ = pair([(77, 13)])
    give_gradients(params, 0)
    ours.step()
    state = ours.state[params[0]]
    before = dict(state)
    assert {name: value.shape for name, value in state.items()} == {
        "master": (77, 13), "step": (), "exp_avg": (77, 13), "exp_avg_sq": (77, 13)
    }  # fmt: skip
    for _ in range(2):
        ours.step()
    assert ours.state[params[0]] is state and state["step"] == 3 and state.keys() == before.keys()
    assert all(state[name] is value for name, value in before.items())
    storages = {value.untyped_storage()._cdata for value in before.values()}
    assert len(storages) == 4 and all(value.untyped_storage().nbytes() == value.nbytes for value in before.values())


def test_a_state_that_begins_later_or_goes_is_whole_or_gone(sliced):
    ours, params, reference, wide = pair([(77, 13)], optim.SGD, lr=0.1)
    step_both(ours, params, reference, wide, [0])
    for optimizer in (ours, reference):
        optimizer.param_groups[0]["momentum"] = 0.9
    step_both(ours, params, reference, wide, [1, 2])
    assert ours.state[params[0]]["momentum_buffer"].shape == (77, 13)

    state = {"master": torch.zeros(48), "momentum_buffer": torch.zeros(48)}
    for its, _ in in_slices(state, [], 64):
        del its["momentum_buffer"]
    assert state.keys() == {"master"}


def test_a_step_in_slices_goes_on_from_one_that_had_none_and_from_a_state_dict(sliced):
    ours, params, reference, wide = pair([(77, 13), (32, 128)])
    for step, chunk_bytes in enumerate([1000, None, 64, "auto", 5000]):
        ours.chunk_bytes = chunk_bytes
        step_both(ours, params, reference, wide, [step])
        saved = copy.deepcopy(ours.state_dict())
        ours = MasterWeights(params, optim.AdamW, chunk_bytes=chunk_bytes)
        ours.load_state_dict(saved)
    assert max(sliced) == 16 * 64 and min(sliced) == 1001 % 16


# ---- when it is not


@pytest.mark.parametrize(
    "why", ["another class", "no chunks", "wide", "turned", "foreign", "mutable", "gaps", "gaps in both"]
)
def test_what_cannot_be_sliced_is_stepped_whole(why, sliced):
    kind = type("Derived", (optim.AdamW,), {}) if why == "another class" else optim.AdamW
    ours, params, reference, wide = pair([(48, 64)], kind, chunk_bytes=None if why == "no chunks" else 1000)
    p, q = params[0], wide[0]
    if why.startswith("gaps"):
        p.data, q.data = p.data[:, ::2], q.data[:, ::2].contiguous()
    for step in range(3):
        give_gradients(params, step)
        if why == "wide":
            ours.widen_gradients()
        if why == "turned":
            p.grad = p.grad.t().contiguous().t()
        if why == "gaps in both":
            p.grad = p.grad.repeat_interleave(2, 1)[:, ::2]
        q.grad = p.grad.float()
        if why in ("foreign", "mutable") and step == 0:
            ours.step()
            reference.step()
            ours.state[p]["theirs"] = torch.zeros(3) if why == "foreign" else []
            sliced.clear()
            continue
        ours.step()
        reference.step()
        p.grad, p.grad_dtype = None, BF16
    assert torch.equal(ours.state[p]["master"], q) and torch.equal(p, q.bfloat16())
    assert sliced == []
    assert why != "foreign" or not can_be_sliced(ours.state[p])


# ---- errors


@pytest.mark.parametrize("loaded", [False, True])
def test_a_weight_whose_strides_change_after_its_master_was_made_is_stepped_whole(loaded, sliced):
    masters, params, reference, wide = pair([(9, 8, 7, 7)])
    step_both(masters, params, reference, wide, range(2))
    assert sliced
    sliced.clear()
    for p in (*params, *wide):
        p.data = p.data.contiguous(memory_format=torch.channels_last)
        p.grad = None
    if loaded:
        masters.load_state_dict(masters.state_dict())
    for seed in (2, 3):
        give_gradients(params, seed)
        for p, q in zip(params, wide, strict=True):
            p.grad = p.grad.contiguous(memory_format=torch.channels_last)
            q.grad = p.grad.float()
        masters.step()
        reference.step()
    assert_same(masters, params, reference, wide, own_master=True)
    assert bool(sliced) is loaded  # a master that was loaded is made anew, with the weight's strides


@pytest.mark.parametrize("first", [True, False])
def test_if_a_slices_step_raises_weights_are_their_masters_and_no_state_is_half_made(first, monkeypatch, sliced):
    ours, params, _, _ = pair([(77, 13)], optim.SGD, lr=0.1, momentum=0.9)
    p = params[0]
    if not first:
        give_gradients(params, 0)
        ours.step()
    sliced.clear()
    before, step = p.detach().clone(), optim.SGD.step.__wrapped__

    def fails(self, closure=None):
        step(self)
        if len(sliced) == 3:
            raise KeyboardInterrupt

    give_gradients(params, 1)
    fails.__wrapped__ = fails
    with monkeypatch.context() as patched:
        patched.setattr(optim.SGD, "step", fails)
        with pytest.raises(KeyboardInterrupt):
            ours.step()
    assert torch.equal(p, ours.state[p]["master"].bfloat16())
    moved = (p != before).flatten()
    assert moved[: 3 * 208].any() and not moved[3 * 208 :].any()
    assert ours.state[p].keys() == ({"master"} if first else {"master", "momentum_buffer"})
    assert ours.param_groups[0]["params"] == [p] and not ours._inner.state
    give_gradients(params, 2)
    ours.step()  # the optimizer is as good as before
    assert torch.equal(p, ours.state[p]["master"].bfloat16()) and ours.state[p]["momentum_buffer"].shape == p.shape


# ---- bytes


def test_a_step_holds_the_fp32_gradients_of_one_slice_and_two_of_its_temporaries():
    count = 40 * 2**10
    ours, params, _, _ = pair([(40, 1024)], chunk_bytes=16 * 2**10)
    give_gradients(params, 0)
    ours.step()
    with Meter(nn.ParameterList(params), ours) as meter:
        ours.step()
    kept = count * (2 + 2 + 4 + 8) + 4
    assert meter.timeline.peak_bytes == kept + 3 * 16 * 2**10 + 4  # √v, √v divided, and a counter


def test_if_there_is_no_memory_for_a_slices_gradients_nothing_is_left_behind(monkeypatch):
    ours, params, _, _ = pair([(77, 13)])
    give_gradients(params, 0)
    before = params[0].detach().clone()

    def full(self, masters, flats=()):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(GradientBlock, "views", full)
        with pytest.raises(MemoryError):
            ours.step()
    assert torch.equal(params[0], before) and not ours._inner.state and ours._inner.param_groups is ours.param_groups
    ours.step()
    assert ours.state[params[0]]["step"] == 1
