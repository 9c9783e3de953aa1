"""Parameters stepped as one vector: the same bits and counters as one by one, whatever happens between steps."""

import contextlib
import copy
import functools
import io
import random
import weakref

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, StochasticRounding, adam_in_c
from memlab.mixed_precision.flat_group import ELEMENTWISE, FlatGroup, can_be_flat, can_be_together
from memlab.offloading import OffloadedOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(4, 8), (5,), (16,), (2, 3, 16), (), (0,), (33, 3), (64,)]  # four of them fill vectors
FLAT = [0, 2, 3, 7]


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """Else one kernel steps fused Adam's parameters, and no group does."""
    monkeypatch.setattr(adam_in_c, "works", lambda *types: False)


class OneByOne(MasterWeights):
    """What MasterWeights does with optimizers that are not known to be elementwise."""

    _rearranges = False


def parameters(shapes=SHAPES, dtype=BF16, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).to(BF16)
        p.grad = None if i in without else gradient.to(p.device, p.dtype)


def groups_of(masters) -> list[FlatGroup]:
    return list(dict.fromkeys(flat for flat in masters._flats._of.values() if flat is not None))


def assert_same(ours, params, theirs, others, *, own_master=False):
    """own_master: theirs steps on FP32 weights."""
    for p, q in zip(params, others, strict=True):
        state, expected = ours.state.get(p, {}), dict(theirs.state.get(q, {}))
        if own_master:
            expected["master"] = q
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            found = state[name]
            if torch.is_tensor(value):
                assert found.shape == value.shape and found.dtype == value.dtype and torch.equal(found, value), name
            else:
                assert found == value
        assert torch.equal(p, q.to(p.dtype))


def step_both(ours, params, reference, wide, steps):
    """Step on 16-bit weights and, with the same gradients, the plain optimizer on FP32 ones."""
    for step in steps:
        give_gradients(params, step)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        ours.step()
        reference.step()
    assert_same(ours, params, reference, wide, own_master=True)


# ---- the same bits

OPTIONS = {
    optim.SGD: [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.Adam: [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    optim.AdamW: [{}, {"amsgrad": True, "maximize": True}, {"lr": torch.tensor(0.01)}],
    optim.NAdam: [{}],
    optim.RAdam: [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    optim.Adamax: [{}],
    optim.Adagrad: [{"initial_accumulator_value": 0.1}, {"lr_decay": 0.1}],
    optim.Adadelta: [{}],
    optim.RMSprop: [{}, {"momentum": 0.5, "centered": True}],
    optim.Rprop: [{}],
    optim.ASGD: [{"t0": 2}],
}
CASES = [
    (kind, options | how)
    for kind, its in OPTIONS.items()
    for options in its
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if "fused" not in how or kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
    if "foreach" not in how or not how["foreach"] or "lr" not in options
]


def test_every_class_that_is_called_elementwise_is_tried():
    assert set(OPTIONS) == ELEMENTWISE


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("chunk_bytes", ["auto", 400])
def test_a_vector_of_parameters_is_stepped_as_the_parameters_bit_for_bit(kind, options, chunk_bytes):
    params, wide = parameters(), [nn.Parameter(p.detach().float()) for p in parameters()]
    split = lambda ps: [{"params": ps[:4]}, {"params": ps[4:], "lr": 0.3}]  # noqa: E731
    ours, reference = (
        MasterWeights(split(params), kind, chunk_bytes=chunk_bytes, **options),
        kind(split(wide), **options),
    )
    for step in range(4):
        step_both(ours, params, reference, wide, [step])
    assert [flat.count for flat in groups_of(ours)] == ([3] if chunk_bytes == "auto" else [2])


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_large_parameters_that_several_threads_step_come_to_the_same_bits(device):
    shapes = [(300, 112), (16,), (1000, 160), (64, 64)]
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        params = [nn.Parameter(p.detach().to(device)) for p in parameters(shapes)]
        wide = [nn.Parameter(p.detach().float()) for p in params]
        ours, reference = MasterWeights(params, optim.AdamW, **options), optim.AdamW(wide, **options)
        step_both(ours, params, reference, wide, range(3))
        assert [flat.count for flat in groups_of(ours)] == [4]


def test_who_is_not_known_to_be_elementwise_sees_each_parameter():
    seen = []

    class Derived(optim.AdamW):
        def step(self, closure=None):
            seen.append([tuple(p.shape) for group in self.param_groups for p in group["params"]])

    for kind, words in ((Derived, {}), (optim.AdamW, {"chunk_bytes": None}), (optim.Adafactor, {})):
        params = parameters([(4, 8), (16,)])
        ours = MasterWeights(params, kind, **words)
        give_gradients(params, 0)
        ours.step()
        assert not groups_of(ours)
    assert seen == [[(4, 8), (16,)]]
    for kind in (StochasticRounding, OffloadedOptimizer):  # they keep no masters, or elsewhere
        params = parameters([(4, 8), (16,)])
        ours = kind(params, optim.AdamW)
        give_gradients(params, 0)
        ours.step()
        assert not groups_of(ours)


def test_what_fills_no_whole_vectors_or_has_gaps_is_stepped_alone():
    base = torch.zeros(8, 16)
    fits = [base, base.T, base.view(2, 4, 4, 4).to(memory_format=torch.channels_last), base[:, None], base[2:4]]
    gaps = [base[:, :8], base[::2], base[:1].expand(4, 16), torch.zeros(17), torch.zeros(()), torch.zeros(0)]
    assert all(map(can_be_flat, fits)) and not any(map(can_be_flat, gaps))


# ---- whatever happens between steps


def happen(params, ours, event: str, at: int, seed: int):
    """One thing that users do, to one of two pairs that have had the same."""
    p = params[at]
    with torch.no_grad():
        if event == "weight written":
            p.mul_(0.5)
        elif event == "other data":
            p.data = p.data.clone() * 0.75
        elif event == "frozen":
            p.requires_grad_(not p.requires_grad)
        elif event == "state written" and "exp_avg" in ours.state.get(p, {}):
            ours.state[p]["exp_avg"].mul_(2)
        elif event == "counter written" and "step" in ours.state.get(p, {}):
            ours.state[p]["step"].add_(5)
        elif event == "state replaced" and "exp_avg" in ours.state.get(p, {}):
            ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"].clone() + 1
        elif event == "state gone":
            ours.state.pop(p, None)
        elif event == "lr":
            ours.param_groups[0]["lr"] *= 0.5
        elif event == "moved" and len(ours.param_groups[1]["params"]) > 1:
            ours.param_groups[0]["params"].append(ours.param_groups[1]["params"].pop(0))
        elif event == "loaded":
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        elif event == "through a file":
            file = io.BytesIO()
            torch.save(ours.state_dict(), file)
            file.seek(0)
            ours.load_state_dict(torch.load(file))
        elif event == "chunks":
            ours.chunk_bytes = random.Random(seed).choice([1, 150, 400, "auto", None])


EVENTS = "weight written,other data,frozen,state written,counter written,state replaced,state gone,lr,moved,loaded"
EVENTS = [*EVENTS.split(","), "through a file", "chunks", "missing", "widened", "turned", "nothing", "nothing"]


@pytest.mark.parametrize("seed", range(30))
def test_on_a_random_walk_every_state_is_the_one_of_parameters_stepped_one_by_one(seed):
    chance = random.Random(seed)
    options = chance.choice([{"foreach": False}, {"foreach": True}, {"fused": True}])
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters()
        groups = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.3}]
        pairs.append((params, kind(groups, optim.AdamW, lr=0.01, **options)))
    had_groups = 0
    for step in range(25):
        event, at = chance.choice(EVENTS), chance.choice(FLAT)
        for params, masters in pairs:
            happen(params, masters, event, at, step)
            give_gradients(params, step, without=[at] if event == "missing" else ())
            for p in params:
                if not p.requires_grad:
                    p.grad = None
                elif event == "turned" and p.dim() == 2:
                    p.grad = p.grad.T.contiguous().T
            if event == "widened":
                masters.widen_gradients()
            masters.step()
            for p in params:
                p.grad = p.grad_dtype = None
        (params, ours), (others, theirs) = pairs
        assert_same(ours, params, theirs, others)
        had_groups += len(groups_of(ours)) > 0
    assert had_groups


def test_a_parameter_without_a_gradient_is_not_counted_and_what_begins_later_begins_at_one():
    params = parameters([(16,)] * 4)
    ours = MasterWeights(params, optim.AdamW)
    for step, without in enumerate([(2, 3), (), (0,), ()]):
        give_gradients(params, step, without)
        ours.step()
    assert [ours.state[p]["step"].item() for p in params] == [3, 4, 3, 3]
    assert [flat.count for flat in groups_of(ours)] == [2]  # those that began together and have not been apart


def test_parameters_that_are_thawed_make_a_group_of_their_own():
    params = parameters([(16,)] * 5)
    ours = MasterWeights(params, optim.AdamW)
    for step, without in enumerate([(0, 1), (0, 1), (), ()]):
        give_gradients(params, step, without)
        ours.step()
    assert sorted(flat.count for flat in groups_of(ours)) == [2, 3]


def test_a_sparse_gradient_takes_its_parameter_out_and_the_others_go_on():
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters([(8, 16), (16,), (32,)])
        pairs.append((params, kind(params, optim.SGD, lr=0.1)))
    for step in range(4):
        for params, masters in pairs:
            give_gradients(params, step)
            if step == 2:
                params[0].grad = params[0].grad.to_sparse()
            masters.step()
    assert_same(*reversed(pairs[0]), *reversed(pairs[1]))


@pytest.mark.parametrize("name", ["master", "exp_avg", "step"])
def test_states_whose_data_were_moved_are_stepped_where_they_are(name):
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters([(16,), (4, 8), (32,)])
        pairs.append((params, kind(params, optim.AdamW, lr=0.1)))
    for step in range(4):
        for params, masters in pairs:
            give_gradients(params, step)
            if step == 2:
                for state in masters.state.values():
                    state[name].data = state[name].data.clone()
            masters.step()
    assert_same(*reversed(pairs[0]), *reversed(pairs[1]))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_given_twice_is_stepped_twice_also_after_a_load():
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters([(16,), (32,)])
        pairs.append((params, kind([*params, params[0]], optim.AdamW, lr=0.1)))
    for step in range(4):
        for params, masters in pairs:
            give_gradients(params, step)
            if step == 2:
                masters.load_state_dict(copy.deepcopy(masters.state_dict()))
            masters.step()
    assert_same(*reversed(pairs[0]), *reversed(pairs[1]))


def test_a_step_in_inference_mode_leaves_states_that_can_be_written_to():
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters([(16,), (32,), (64,)])
        pairs.append((params, kind(params, optim.AdamW, lr=0.1)))
    for params, masters in pairs:
        stepped(params, masters, range(2))
        masters.load_state_dict(copy.deepcopy(masters.state_dict()))
        give_gradients(params, 2)
        with torch.inference_mode():
            masters.step()
        assert not any(value.is_inference() for state in masters.state.values() for value in state.values())
        masters.refresh()
    assert_same(*reversed(pairs[0]), *reversed(pairs[1]))


def test_a_parameter_in_two_groups_is_stepped_in_the_groups_order():
    params = parameters([(16,), (5,), (32,), (64,)])
    wide, both = [nn.Parameter(p.detach().float()) for p in params], []
    for kind, its in ((functools.partial(MasterWeights, optimizer_class=optim.SGD), params), (optim.SGD, wide)):
        both.append(kind([{"params": its[:2]}, {"params": its[2:], "lr": 0.5, "weight_decay": 0.5}], lr=0.1))
        both[-1].param_groups[1]["params"].append(its[1])
    ours, reference = both
    step_both(ours, params, reference, wide, range(3))
    assert [flat.count for flat in groups_of(ours)] == [2]


def test_parameters_that_are_gone_are_forgotten():
    params = parameters([(16,)] * 6)
    ours = MasterWeights(params, optim.AdamW)
    for step in range(8):
        give_gradients(params, step)
        ours.step()
        del ours.state[params.pop(0)]
        params.append(*parameters([(16,)], seed=step))
        ours.param_groups[0]["params"] = list(params)
    give_gradients(params[:-1], 9)
    ours.step()
    assert len(ours._flats._of) == len(ours.state) == 5


@pytest.mark.parametrize("entry", [lambda: [1], lambda: {"a": 1}, lambda: [torch.zeros(2)], lambda: "text"])
def test_what_others_keep_in_a_state_stays_there(entry):
    params = parameters([(16,), (32,)])
    ours = MasterWeights(params, optim.AdamW)
    stepped(params, ours, range(2))
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    entries = [entry(), entry()]
    for p, its in zip(params, entries, strict=True):
        ours.state[p]["log"] = its
    stepped(params, ours, range(2, 4))
    assert all(
        ours.state[p]["log"] is its and ours.state[p]["step"] == 4 for p, its in zip(params, entries, strict=True)
    )


@pytest.mark.parametrize("failing", ["_foreach_sqrt", "_foreach_lerp_", "_foreach_addcdiv_", "_foreach_copy_"])
def test_a_step_that_fails_halfway_leaves_what_it_would_have_one_by_one(failing, monkeypatch):
    pairs = []
    for kind in (MasterWeights, OneByOne):
        params = parameters([(16,), (4, 8), (32,)])
        pairs.append((params, kind(params, optim.AdamW, foreach=True, lr=0.1)))
    for step in range(4):
        for params, masters in pairs:
            give_gradients(params, step)
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(torch, failing, lambda *args, **kwargs: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    masters.step()
    (params, ours), (others, theirs) = pairs
    assert_same(ours, params, theirs, others)


# ---- saved and loaded


def stepped(params, masters, steps):
    for step in steps:
        give_gradients(params, step)
        masters.step()


def test_a_saved_state_counts_each_parameter_by_itself_also_in_the_optimizers_own_class():
    params = parameters()
    ours = MasterWeights(params, optim.AdamW, lr=0.1)
    stepped(params, ours, range(3))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    wide = [nn.Parameter(state.pop("master").clone()) for state in saved["state"].values()]
    plain = optim.AdamW(wide, lr=0.1)
    plain.load_state_dict(saved)
    step_both(ours, params, plain, wide, range(3, 6))
    assert {state["step"].item() for state in plain.state.values()} == {6}


@pytest.mark.parametrize("way", ["a dict", "a file", "deepcopy", "the dict of one by one"])
def test_loaded_states_are_put_together_again(way):
    params = parameters()
    kind = OneByOne if way == "the dict of one by one" else MasterWeights
    first = kind(params, optim.AdamW, lr=0.1)
    stepped(params, first, range(2))
    if way == "deepcopy":
        others, second = copy.deepcopy((params, first))
    else:
        others = [nn.Parameter(p.detach().clone()) for p in params]
        second, saved, file = MasterWeights(others, optim.AdamW), copy.deepcopy(first.state_dict()), io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        second.load_state_dict(torch.load(file) if way == "a file" else saved)
    stepped(others, second, range(2, 4))
    stepped(params, first, range(2, 4))
    assert_same(second, others, first, params)
    assert [flat.count for flat in groups_of(second)] == [4]


def test_states_that_were_put_together_are_not_the_loaded_dicts():
    params = parameters([(16,), (4, 8)])
    first, second = MasterWeights(params, optim.AdamW), MasterWeights(parameters([(16,), (4, 8)]), optim.AdamW)
    stepped(params, first, range(2))
    before = copy.deepcopy(first.state_dict()["state"])
    second.load_state_dict(first.state_dict())
    stepped(second.param_groups[0]["params"], second, range(2))
    for number, state in first.state_dict()["state"].items():
        assert all(torch.equal(value, before[number][name]) for name, value in state.items())


def test_states_with_other_counters_stay_apart():
    params = parameters([(16,)] * 3)
    ours = MasterWeights(params, optim.AdamW)
    stepped(params, ours, range(2))
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][1]["step"] += 1
    ours.load_state_dict(saved)
    stepped(params, ours, range(2))
    assert [ours.state[p]["step"].item() for p in params] == [4, 5, 4]
    assert not groups_of(ours)


def test_states_of_one_kind_fit_together_and_others_do_not():
    def like(**changes):
        masters = [torch.zeros(16), torch.zeros(2, 16)]
        states = [{"master": m, "m": m + 1, "step": torch.tensor(2.0), "none": None} for m in masters]
        states[1] |= changes
        return states

    assert can_be_together(like())
    for change in ({"m": torch.zeros(3)}, {"step": torch.tensor(3.0)}, {"none": 1}, {"other": 1}, {"step": 2.0}):
        assert not can_be_together(like(**change))
    assert not can_be_together(like(m=torch.zeros(16, 2).T))


# ---- bytes


def test_masters_and_states_have_twelve_bytes_an_element_and_a_file_has_no_more():
    params = parameters([(16, 64), (64,), (64, 64), (64,)])
    model = nn.ParameterList(params)
    ours, numel = MasterWeights(params, optim.AdamW), sum(p.numel() for p in params)
    for step in range(2):
        give_gradients(params, step)
        with Meter(model, ours) as meter:
            ours.step()
        held = meter.timeline.bytes_by_category(len(meter.timeline))
        assert held["optimizer_state"] == 12 * numel + 4 * len(params) and held["temporary"] == 0
    names = {storage.name: storage.nbytes for storage in meter.timeline.storages.values()}
    assert names["exp_avg of 0 and 3 more"] == 4 * numel
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert 12 * numel < file.tell() < 12 * numel + 8 * 1024


def test_after_a_load_nothing_is_held_twice():
    params = parameters([(16, 64), (64,), (64, 64), (64,)])
    model = nn.ParameterList(params)
    ours, numel = MasterWeights(params, optim.AdamW), sum(p.numel() for p in params)
    stepped(params, ours, range(2))
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    give_gradients(params, 2)
    with Meter(model, ours) as meter:
        ours.step()
    held = meter.timeline.bytes_by_category(len(meter.timeline))
    assert held["optimizer_state"] == 12 * numel + 4 * len(params) and held["temporary"] == 0


def held(masters) -> int:
    """Bytes of the storages in its states, each once."""
    values = [value for state in masters.state.values() for value in state.values()]
    return sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}.values())


def test_states_that_are_removed_are_freed_and_those_of_others_go_on():
    params, numel = parameters([(16, 64)] * 8), 16 * 64
    ours = MasterWeights([{"params": params[:4]}, {"params": params[4:]}], optim.AdamW)
    stepped(params, ours, range(2))
    for p in ours.param_groups.pop()["params"]:
        del ours.state[p]
    stepped(params[:4], ours, range(2, 4))
    assert held(ours) == 4 * (12 * numel + 4) and [flat.count for flat in groups_of(ours)] == [4]
    for p in params[:3]:
        p.grad = None
        del ours.state[p]
    give_gradients(params[3:4], 4)
    ours.param_groups[0]["params"] = params[3:4]
    ours.step()
    assert held(ours) == 12 * numel + 4 and not groups_of(ours)
    group = weakref.ref(ours.state[params[3]]["master"].untyped_storage())
    ours.state.clear()
    assert group() is None


def test_a_parameter_with_sparse_gradients_holds_no_room_of_others():
    params = parameters([(16, 64), (16, 16), (64,)])
    ours = MasterWeights(params, optim.SGD, lr=0.1)
    give_gradients(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    ours.step()
    assert held(ours) == 4 * sum(p.numel() for p in params) and [flat.count for flat in groups_of(ours)] == [2]


def test_cleared_states_are_freed_before_others_are_made():
    params = parameters([(16, 64)] * 4)
    model, ours, numel = nn.ParameterList(params), MasterWeights(params, optim.AdamW, fused=True), 4 * 16 * 64
    stepped(params, ours, range(2))
    ours.state.clear()
    give_gradients(params, 2)
    with Meter(model, ours) as meter:
        ours.step()
    assert meter.timeline.peak_bytes == (2 + 2 + 12 + 4) * numel + 4 * 4


def test_another_limit_makes_other_groups():
    params = parameters([(64,)] * 12)
    ours = MasterWeights(params, optim.AdamW)
    sizes = []
    for step, chunk_bytes in enumerate(["auto", 4 * 4 * 64, None, 1, "auto"]):
        ours.chunk_bytes = chunk_bytes
        give_gradients(params, step)
        ours.step()
        sizes.append([flat.count for flat in groups_of(ours)])
    assert sizes == [[12], [4, 4, 4], [], [], [12]]
    assert all(ours.state[p]["step"] == 5 for p in params) and held(ours) == 12 * (12 * 64 + 4)


def test_a_flat_group_is_of_one_chunk():
    params = parameters([(64,)] * 10)
    ours = MasterWeights(params, optim.SGD, lr=0.1, chunk_bytes=3 * 4 * 64)
    for step in range(3):
        give_gradients(params, step)
        ours.step()
        assert [len(chunk) for chunk in ours._chunks()] == [3, 3, 3, 1]
    assert [flat.count for flat in groups_of(ours)] == [3, 3, 3]
