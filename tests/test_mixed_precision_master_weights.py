"""Master weights: the step is FP32's, bit for bit; no more is held than promised; and nothing is lost on the way."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights
from tests.harness import refusals, refused
from tests.tiers import pairs, some

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(3, 4), (5,), (0,), (2, 3, 4), (7, 1)]


def parameters(dtype=BF16, shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def pairs_of(dtype=BF16, shapes=SHAPES):
    """16-bit parameters, and FP32 ones of the same values."""
    narrow = parameters(dtype, shapes)
    return narrow, [nn.Parameter(p.detach().float()) for p in narrow]


def give_gradients(narrow, wide, seed=0, scale=1.0):
    """The same gradients to both, exact in 16 bits; those of `narrow` times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(narrow, wide, strict=True):
        g = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad, q.grad = g * scale, g.float()


def step_both(masters: MasterWeights, narrow, reference, wide, steps=3):
    for step in range(steps):
        give_gradients(narrow, wide, seed=step)
        masters.step()
        reference.step()


def stepped(masters: MasterWeights, gradient=1.0, steps=1):
    """The optimizer, after steps with this gradient everywhere."""
    for _ in range(steps):
        for p in itertools.chain(*(group["params"] for group in masters.param_groups)):
            p.grad = torch.full_like(p, gradient)
        masters.step()
    return masters


def assert_same(masters: MasterWeights, narrow, reference, wide):
    for p, q in zip(narrow, wide, strict=True):
        state = masters.state[p]
        assert torch.equal(state["master"], q)
        assert torch.equal(p, q.to(p.dtype))
        assert state.keys() - {"master"} == reference.state[q].keys()
        for name, value in reference.state[q].items():
            assert not torch.is_tensor(value) or (value.dtype == state[name].dtype and torch.equal(value, state[name]))


ALGORITHMS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, Nesterov, decay": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {}),
    "AdamW, for-loop, maximize": (optim.AdamW, {"foreach": False, "maximize": True}),
    "AdamW, foreach, AMSGrad": (optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "AdamW, lr as a tensor": (optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "Adagrad with a first accumulator that BF16 cannot hold": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
}


@some("name, chunk_bytes, dtype", itertools.product(ALGORITHMS, [1, 100, "auto", None], [BF16, FP16]), keep=40)
def test_masters_and_states_are_those_of_fp32_bit_for_bit_however_small_the_chunks(name, chunk_bytes, dtype):
    """Of several that fill vectors, and so may be stepped as one, and of some that are larger than a chunk."""
    kind, options = ALGORITHMS[name]
    narrow, wide = pairs_of(dtype, [*SHAPES, (16, 4), (32,), (3, 16)])
    masters = MasterWeights(
        [{"params": narrow[:2]}, {"params": narrow[2:], "lr": 0.3}], kind, chunk_bytes=chunk_bytes, **options
    )
    reference = kind([{"params": wide[:2]}, {"params": wide[2:], "lr": 0.3}], **options)
    step_both(masters, narrow, reference, wide, steps=4)
    assert_same(masters, narrow, reference, wide)


def test_fp32_and_fp64_parameters_are_their_own_masters():
    narrow, wide = pairs_of()
    narrow += [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
    wide += [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
    masters, reference = MasterWeights(narrow, optim.AdamW, chunk_bytes=60), optim.AdamW(wide)
    for step in range(3):
        give_gradients(narrow[:-2], wide[:-2], seed=step)
        for p in (*narrow[-2:], *wide[-2:]):
            p.grad = torch.full_like(p, step - 0.7)
        given = [p.grad for p in narrow]
        masters.step()
        reference.step()
        assert all(p.grad is g for p, g in zip(narrow, given, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(narrow[-2:], wide[-2:], strict=True))
    assert all("master" not in masters.state[p] for p in narrow[-2:])
    assert_same(masters, narrow[:-2], reference, wide[:-2])


def test_frozen_parameters_and_those_without_a_gradient_cost_nothing():
    narrow, wide = pairs_of()
    narrow[0].requires_grad_(False)
    masters = MasterWeights(narrow, optim.Adagrad)
    assert not masters.state  # nor what it makes in 16 bits when it is built
    give_gradients(narrow[3:], wide[3:])
    before = [p.detach().clone() for p in narrow]
    masters.step()
    assert set(masters.state) == set(narrow[3:])
    assert all(torch.equal(p, b) for p, b in zip(narrow[:3], before[:3], strict=True))


def test_layouts_of_weights_and_gradients_may_differ():
    base, image = torch.randn(6, 4).to(BF16), torch.randn(2, 3, 4, 4).to(BF16)
    weights = [base.t(), base[::2], base[:, 1:3], image.to(memory_format=torch.channels_last)]
    for options, widened in itertools.product(({"foreach": False}, {"foreach": True}, {"fused": True}), (False, True)):
        narrow = [nn.Parameter(w.detach().clone(memory_format=torch.preserve_format)) for w in weights]
        narrow.append(nn.Parameter(base.clone()[:, 1:3]))
        wide = [nn.Parameter(p.detach().float().contiguous()) for p in narrow]
        masters, reference = MasterWeights(narrow, optim.AdamW, lr=0.1, **options), optim.AdamW(wide, lr=0.1, **options)
        for step in range(2):
            give_gradients(narrow, wide, seed=step)
            narrow[0].grad = narrow[0].grad.t().contiguous().t()
            if widened:
                masters.widen_gradients()
            masters.step()
            reference.step()
        for p, q in zip(narrow, wide, strict=True):
            assert torch.equal(p, q.to(BF16))


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_states_saved_in_one_order_of_dimensions_go_on_in_another(options):
    plain = nn.Parameter(torch.randn(2, 3, 4, 4).to(BF16))
    turned = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    before, after = (MasterWeights([p], optim.AdamW, lr=0.1, **options) for p in (plain, turned))
    for resumed in (False, True):
        if resumed:
            turned.data.copy_(plain)
            after.load_state_dict(copy.deepcopy(before.state_dict()))
        for p in (plain, turned):
            p.grad = torch.linspace(-1, 1, p.numel(), dtype=BF16).view(p.shape) * torch.ones_like(p)
        before.step()
        after.step()
    assert torch.equal(plain, turned)


def test_a_16_bit_gradient_of_an_fp32_parameter_is_its_own_and_touches_no_other():
    strided, narrow = nn.Parameter(torch.ones(4, 6)[:, ::2]), nn.Parameter(torch.ones(12, dtype=BF16))
    strided.grad_dtype = None
    masters = MasterWeights([strided, narrow], optim.SGD, lr=1.0)
    strided.grad, narrow.grad = torch.full((4, 3), 2.0, dtype=BF16), torch.full((12,), 9.0, dtype=BF16)
    given = strided.grad
    masters.step()
    assert torch.equal(strided, torch.full((4, 3), -1.0)) and torch.equal(narrow.float(), torch.full((12,), -8.0))
    assert strided.grad is given


def test_a_sparse_gradient_stays_sparse_and_repeated_rows_are_added_in_fp32():
    rows = torch.tensor([0, 2, 2, 2])
    weight = torch.ones(4, 2, dtype=BF16)
    layers = [nn.Embedding.from_pretrained(w.clone(), freeze=False, sparse=True) for w in (weight, weight.float())]
    masters = MasterWeights(layers[0].parameters(), optim.SparseAdam, lr=0.01)
    reference = optim.SparseAdam(layers[1].parameters(), lr=0.01)
    for _ in range(3):
        for layer in layers:
            layer(rows).sum().backward()
        assert layers[0].weight.grad.is_sparse
        masters.step()
        reference.step()
        masters.zero_grad()
        reference.zero_grad()
    assert torch.equal(masters.state[layers[0].weight]["master"], layers[1].weight)


def test_a_step_that_raises_halfway_keeps_states_and_weights_beside_their_masters():
    class Halfway(optim.SGD):
        def step(self, closure=None):
            for number, m in enumerate(self.param_groups[0]["params"]):
                if number:
                    raise ArithmeticError("no")
                m.sub_(m.grad)
                self.state[m]["steps"] = 1

    params = parameters(shapes=[(2,), (3,)])
    masters, start = MasterWeights(params, Halfway), [p.detach().float() for p in params]
    with pytest.raises(ArithmeticError):
        stepped(masters)
    assert masters.state[params[0]]["steps"] == 1
    assert not masters._inner.state and masters._inner.param_groups is masters.param_groups
    assert all(state["master"].grad is None for state in masters.state.values())
    for p, s, moved in zip(params, start, (1, 0), strict=True):
        assert torch.equal(masters.state[p]["master"], s - moved) and torch.equal(p, (s - moved).to(BF16))


def test_a_state_that_the_optimizer_gives_up_is_not_kept():
    class GivingUp(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for m in self.param_groups[0]["params"]:
                if self.state[m]:
                    del self.state[m]
                else:
                    self.state[m]["kept"] = True

    params = parameters(shapes=[(2,), (3,)])
    masters = MasterWeights(params, GivingUp)
    for names in ({"master", "kept"}, {"master"}, {"master", "kept"}):
        stepped(masters)
        assert [set(masters.state[p]) for p in params] == [names, names]


class Counting(optim.Optimizer):
    """Keeps its counter in the group: step t takes t times the gradient; `together`: also a sum over parameters."""

    def __init__(self, params, together=False):
        super().__init__(params, {"t": 0, "together": together, "total": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                p.sub_(group["t"] * p.grad)
                if group["together"]:
                    group["total"] += p.sum().item()


def test_an_optimizer_that_counts_in_its_group_or_looks_at_all_parameters_is_right_in_one_chunk():
    narrow, wide = pairs_of()
    masters = MasterWeights([{"params": narrow[:2]}, {"params": narrow[2:]}], Counting, chunk_bytes=None, together=True)
    reference = Counting([{"params": wide[:2]}, {"params": wide[2:]}], together=True)
    step_both(masters, narrow, reference, wide)
    assert_same(masters, narrow, reference, wide)
    saved = masters.state_dict()["param_groups"]
    assert [(group["t"], group["total"]) for group in saved] == [(3, g["total"]) for g in reference.param_groups]
    masters.chunk_bytes = 1
    with pytest.raises(ValueError, match="found 't' changed once a chunk; use chunk_bytes=None"):
        stepped(masters)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}])
def test_sixteen_bytes_a_parameter_and_one_chunk_of_gradients(options):
    tensors, each = 10, 1000
    model = nn.ParameterList(parameters(shapes=[(each,)] * tensors))
    masters = MasterWeights(model.parameters(), optim.AdamW, chunk_bytes=2 * 4 * each, **options)
    stepped(masters)
    with Meter(model, masters) as meter:
        masters.step()
    timeline, total = meter.timeline, tensors * each
    found = timeline.bytes_by_category(timeline.peak_event)
    roots = 2 * 4 * each if options["foreach"] else 3 * 4 * each
    assert found["parameter"] == 2 * total and found["gradient"] == 2 * total
    assert found["optimizer_state"] == (4 + 8) * total + 4 * tensors
    assert found["temporary"] == 2 * 4 * each + roots
    assert timeline.bytes_at(len(timeline)) == 16 * total + 4 * tensors
    names = {storage.name for storage in timeline.storages.values()}
    assert {"master of 0", "exp_avg of 9"} <= names


def test_no_widened_gradient_outlives_a_step_that_fails():
    params = parameters(shapes=[(100,)] * 3)

    class Fails(optim.SGD):
        def step(self):
            raise RuntimeError("in the middle")

    masters = MasterWeights(params, Fails)
    for p in params:
        p.grad = torch.ones_like(p)
    with Meter(nn.ParameterList(params)) as meter:
        with pytest.raises(RuntimeError, match="in the middle"):
            masters.step()
        masters.state.clear()
    assert meter.timeline.bytes_at(len(meter.timeline)) == 3 * 100 * 4


def scaler_of(scale, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


@pairs("options, dtype", [{"foreach": False}, {"fused": True}], [BF16, FP16])
def test_grad_scaler_leaves_the_unscaling_to_fp32(options, dtype):
    narrow, wide = pairs_of(dtype)
    own = nn.Parameter(torch.ones(4))
    masters, reference = MasterWeights([*narrow, own], optim.AdamW, **options), optim.AdamW(wide, **options)
    scaler = scaler_of(256.0)
    for step in range(3):
        scaler.scale(torch.zeros(()))
        give_gradients(narrow, wide, seed=step, scale=256.0)
        own.grad = torch.full_like(own, 256.0)
        given = [p.grad.clone() for p in (*narrow, own)]
        scaler.step(masters)
        scaler.update()
        reference.step()
        assert all(torch.equal(p.grad, g) for p, g in zip((*narrow, own), given, strict=True))
    assert_same(masters, narrow, reference, wide)
    alone = nn.Parameter(torch.ones(4))
    plain = optim.AdamW([alone], **options)
    for _ in range(3):
        alone.grad = torch.ones_like(alone)
        plain.step()
    assert torch.equal(own, alone)
    assert not hasattr(masters, "grad_scale") and not hasattr(masters, "found_inf")


def test_a_gradient_that_overflowed_skips_the_step_whole():
    narrow, wide = pairs_of(FP16)
    masters, scaler = MasterWeights(narrow, optim.AdamW), scaler_of(1024.0)
    scaler.scale(torch.zeros(()))
    give_gradients(narrow, wide)
    narrow[1].grad[2] = torch.inf
    before = [p.detach().clone() for p in narrow]
    scaler.step(masters)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(narrow, before, strict=True)) and not masters.state
    assert scaler.get_scale() == 512.0


def test_widened_gradients_are_exact_take_two_bytes_more_and_are_16_bit_again_once_cleared():
    model, x = nn.Linear(32, 32).to(BF16), torch.ones(2, 32, dtype=BF16)
    masters = MasterWeights(model.parameters(), optim.SGD, lr=0.1)
    model(x).sum().backward()
    exact, numel, largest = [p.grad.float() for p in model.parameters()], 32 * 32 + 32, 32 * 32
    with Meter(model, masters) as meter:
        masters.widen_gradients()
        masters.widen_gradients()
    assert meter.timeline.bytes_at(len(meter.timeline)) == (2 + 4) * numel
    assert meter.timeline.peak_bytes == (2 + 2) * numel + 4 * largest  # one tensor at a time
    assert all(p.grad.dtype is FP32 and torch.equal(p.grad, g) for p, g in zip(model.parameters(), exact, strict=True))
    masters.step()
    masters.zero_grad()
    model(x).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


def test_the_groups_are_the_models_own_and_a_scheduler_moves_them():
    narrow, wide = pairs_of()
    masters, reference = MasterWeights(narrow, optim.AdamW, lr=0.1), optim.AdamW(wide, lr=0.1)
    assert all(a is b for a, b in zip(masters.param_groups[0]["params"], narrow, strict=True))
    schedules = [optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (masters, reference)]
    for _ in range(3):
        step_both(masters, narrow, reference, wide, steps=1)
        for schedule in schedules:
            schedule.step()
    assert_same(masters, narrow, reference, wide)


def test_hooks_run_once_a_step_and_not_once_a_chunk():
    masters, seen = MasterWeights(parameters(), optim.AdamW, chunk_bytes=1), []
    masters.register_step_pre_hook(lambda optimizer, *_: seen.append(("before", optimizer)))
    everywhere = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("after", optimizer)))
    try:
        stepped(masters)
    finally:
        everywhere.remove()
    assert seen == [("before", masters), ("after", masters)]


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    p = nn.Parameter(torch.ones(1, dtype=BF16))
    masters = MasterWeights([p], optim.SGD, lr=0.5)

    def closure():
        masters.zero_grad()
        loss = (2 * p).sum()
        loss.backward()
        return loss

    assert masters.step(closure).item() == 2.0
    assert p.item() == 0.0
    assert masters.step() is None


def test_a_write_to_some_elements_leaves_the_low_bits_of_the_others():
    p = nn.Parameter(torch.ones(2, dtype=BF16))
    masters = MasterWeights([p], optim.SGD, lr=1.0)
    for _ in range(3):
        stepped(masters, 2**-10)
        with torch.no_grad():
            p[0] = 5.0
    stepped(masters, 2**-10)
    assert masters.state[p]["master"].tolist() == [5 - 3 * 2**-10, 1 - 4 * 2**-10]


def assigned(model: nn.Module, weights: torch.Tensor) -> None:
    model.weight.data = weights


def swapped(model: nn.Module, weights: torch.Tensor) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({"weight": weights})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("write", [assigned, swapped])
def test_weights_that_are_put_in_another_way_are_taken_over(write):
    model = nn.Linear(4, 3, bias=False, dtype=BF16)
    masters = stepped(MasterWeights(model.parameters(), optim.SGD, lr=1.0), 2**-10, steps=2)
    write(model, torch.full((3, 4), 5.0, dtype=BF16))
    stepped(masters, 2**-10)
    assert (masters.state[model.weight]["master"] == 5 - 2**-10).all() and (model.weight == 5).all()


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pairs("name, weights_first", ["AdamW, fused", "SGD, Nesterov, decay", "SGD", "AdamW, foreach, AMSGrad"], [True, False])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, weights_first):
    kind, options = ALGORITHMS[name]

    def run(model, masters, steps):
        for step in steps:
            for p in model:
                p.grad = torch.full_like(p, 2**-8 * (step - 2.5))
            masters.step()

    def made():
        model = nn.ParameterList([*parameters(shapes=[(3, 4), (5,)]), nn.Parameter(torch.ones(2))])
        return model, MasterWeights(model.parameters(), kind, chunk_bytes=30, **options)

    whole = made()
    run(*whole, range(8))
    first = made()
    run(*first, range(4))
    saved = through_a_file([first[0].state_dict(), first[1].state_dict()])
    second = made()
    for part in (0, 1) if weights_first else (1, 0):
        second[part].load_state_dict(saved[part])
    run(*second, range(4, 8))
    for p, q in zip(whole[0], second[0], strict=True):
        assert torch.equal(p, q)
        assert whole[1].state[p].keys() == second[1].state[q].keys()
        for key, value in whole[1].state[p].items():
            assert value is None or (torch.equal(value, second[1].state[q][key]))
            assert value is None or value.dtype is second[1].state[q][key].dtype is FP32


def test_masters_without_their_weights_do_not_overwrite_what_the_model_has():
    one, four = (nn.Parameter(torch.full((2,), value, dtype=BF16)) for value in (1.0, 4.0))
    first, second = (stepped(MasterWeights([p], optim.SGD, lr=1.0), 2**-10) for p in (one, four))
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.state[four]["master"].tolist() == [4 - 2**-10] * 2


def test_a_dict_that_is_refused_changes_nothing():
    narrow = parameters()
    masters = stepped(MasterWeights(narrow, optim.AdamW))
    before, held = copy.deepcopy(masters.state_dict()), {p: state["master"] for p, state in masters.state.items()}
    broken = copy.deepcopy(before)
    broken["state"][0]["master"], broken["param_groups"][0]["lr"] = torch.zeros(1), 7.0
    with pytest.raises(ValueError, match=r"for parameter 0 .* where torch.Size\(\[3, 4\]\) was expected"):
        masters.load_state_dict(broken)
    after = masters.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for p, (number, state) in zip(narrow, after["state"].items(), strict=True):
        assert masters.state[p]["master"] is held[p]
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())


def test_hooks_of_loading_may_change_the_dict_and_see_what_was_loaded():
    narrow = parameters()
    masters = stepped(MasterWeights(narrow, optim.AdamW))
    doubled, seen = copy.deepcopy(masters.state_dict()), []
    for state in doubled["state"].values():
        state["exp_avg"] *= 2
    masters.register_load_state_dict_pre_hook(
        lambda optimizer, given: doubled if given == {"in": "its own format"} else None
    )
    masters.register_load_state_dict_post_hook(lambda optimizer: seen.extend(optimizer.state[p] for p in narrow))
    masters.load_state_dict({"in": "its own format"})
    for number, (p, state) in enumerate(zip(narrow, seen, strict=True)):
        assert state is masters.state[p] and state["master"].dtype is FP32
        assert torch.equal(state["exp_avg"], doubled["state"][number]["exp_avg"])


def test_a_deep_copy_goes_on_like_the_original():
    narrow = parameters()
    masters = stepped(MasterWeights(narrow, optim.AdamW))
    params, copied = copy.deepcopy((narrow, masters))
    for p, q in zip(narrow, params, strict=True):
        q.grad = p.grad.clone()
    masters.step()
    copied.step()
    assert all(torch.equal(p, q) for p, q in zip(narrow, params, strict=True))


def loaded(state_dict):
    MasterWeights(parameters(), optim.AdamW).load_state_dict(state_dict)


def plain_state():
    plain = optim.AdamW(wide := pairs_of()[1])
    for q in wide:
        q.grad = torch.ones_like(q)
    plain.step()
    return plain.state_dict()


PLAIN, ADAM = optim.AdamW(parameters(FP32)), optim.AdamW
REFUSALS = {
    "no 16 bits": (lambda: MasterWeights(parameters(FP32), ADAM), ValueError, "found only torch.float32, which"),
    "an optimizer": (lambda: MasterWeights(parameters(), PLAIN), TypeError, "an optimizer's class, found an AdamW;"),
    "LBFGS": (lambda: MasterWeights(parameters(), optim.LBFGS), ValueError, "found LBFGS, whose step calls a closure"),
    "no chunk": (
        lambda: MasterWeights(parameters(), ADAM, chunk_bytes=0), ValueError, "of at least 1, 'auto', or None",
    ),
    "differentiable": (
        lambda: MasterWeights(parameters(), optim.SGD, differentiable=True), ValueError, "without differentiable=True",
    ),
    "another class's dict": (
        lambda: loaded(plain_state()), ValueError,
        "expected a state dict of MasterWeights …load it into the class and model that wrote it",
    ),
    "other groups": (
        lambda: loaded(MasterWeights([{"params": [p]} for p in parameters()], ADAM).state_dict()), ValueError,
        "different number of parameter groups",
    ),
    "a scaler's dict": (
        lambda: loaded(scaler_of(2.0).state_dict()), ValueError, "expected state and param_groups, …found",
    ),
}  # fmt: skip


@refusals(REFUSALS)
def test_bad_input_is_refused_with_what_to_do(call, error, words):
    refused(call, error, words)
