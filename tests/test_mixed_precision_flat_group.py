"""Parameters stepped as one vector: the same bits and counters as one by one, whatever happens between steps."""

import copy
import random

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, adam_in_c
from memlab.mixed_precision.flat_group import FlatGroup, can_be_flat
from tests.tiers import some

BF16 = torch.bfloat16
SHAPES = [(4, 8), (5,), (16,), (2, 3, 16), (), (0,), (33, 3), (64,)]  # four of them fill vectors
FLAT = [0, 2, 3, 7]


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """Else one kernel steps fused Adam's parameters, and no group does."""
    monkeypatch.setattr(adam_in_c, "works", lambda *types: False)


class OneByOne(MasterWeights):
    """What MasterWeights does with optimizers that are not known to be elementwise."""

    _rearranges = False


def parameters(shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(BF16)) for shape in shapes]


def give_gradients(params, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).to(BF16)
        p.grad = None if i in without else gradient.to(p.device, p.dtype)


def counts(masters) -> list[int]:
    """How many parameters each of its groups has."""
    flats: list[FlatGroup | None] = list(dict.fromkeys(masters._flats._of.values()))
    return [flat.count for flat in flats if flat is not None]


def assert_same(ours, params, theirs, others):
    for p, q in zip(params, others, strict=True):
        state, expected = ours.state.get(p, {}), theirs.state.get(q, {})
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            found = state[name]
            if torch.is_tensor(value):
                assert found.shape == value.shape and found.dtype == value.dtype and torch.equal(found, value), name
            else:
                assert found == value
        assert torch.equal(p, q)


def test_what_fills_no_whole_vectors_or_has_gaps_is_stepped_alone():
    base = torch.zeros(8, 16)
    fits = [base, base.T, base.view(2, 4, 4, 4).to(memory_format=torch.channels_last), base[:, None], base[2:4]]
    gaps = [base[:, :8], base[::2], base[:1].expand(4, 16), torch.zeros(17), torch.zeros(()), torch.zeros(0)]
    assert all(map(can_be_flat, fits)) and not any(map(can_be_flat, gaps))


CHUNKS = {"auto": 150, 150: None, None: 400, 400: "auto"}
EVENTS = {  # what users do to a parameter and its state
    "weight written": lambda ours, p, state: p.detach().mul_(0.5),
    "other data": lambda ours, p, state: setattr(p, "data", p.data * 0.75),
    "frozen": lambda ours, p, state: p.requires_grad_(not p.requires_grad),
    "state written": lambda ours, p, state: state["exp_avg"].mul_(2),
    "counter written": lambda ours, p, state: state["step"].add_(5),
    "state replaced": lambda ours, p, state: state.update(exp_avg=state["exp_avg"] + 1),
    "state moved": lambda ours, p, state: setattr(state["master"], "data", state["master"].data.clone()),
    "state gone": lambda ours, p, state: ours.state.pop(p),
    "lr": lambda ours, p, state: ours.param_groups[0].update(lr=ours.param_groups[0]["lr"] / 2),
    "moved": lambda ours, p, state: ours.param_groups[0]["params"].append(ours.param_groups[1]["params"].pop(0)),
    "loaded": lambda ours, p, state: ours.load_state_dict(copy.deepcopy(ours.state_dict())),
    "chunks": lambda ours, p, state: setattr(ours, "chunk_bytes", CHUNKS[ours.chunk_bytes]),
    **dict.fromkeys(("missing", "widened", "turned", "nothing"), lambda ours, p, state: None),
}


@some("seed", range(30), keep=6)
def test_on_a_random_walk_every_state_is_the_one_of_parameters_stepped_one_by_one(seed):
    chance = random.Random(seed)
    options = chance.choice([{"foreach": False}, {"foreach": True}, {"fused": True}])
    both = []
    for wrapper in (MasterWeights, OneByOne):
        params = parameters()
        groups = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.3}]
        both.append((params, wrapper(groups, optim.AdamW, lr=0.01, **options)))
    had_groups = 0
    for step in range(25):
        event, at = chance.choice([*EVENTS]) if step else "nothing", chance.choice(FLAT)
        for params, masters in both:
            state = masters.state.get(params[at], {})
            can = "step" in state or not event.startswith(("state", "counter"))
            if can and (event != "moved" or len(masters.param_groups[1]["params"]) > 1):
                EVENTS[event](masters, params[at], state)
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
        (params, ours), (others, theirs) = both
        assert_same(ours, params, theirs, others)
        had_groups += len(counts(ours)) > 0
    assert had_groups


def test_masters_and_states_have_twelve_bytes_an_element():
    params = parameters([(16, 64), (64,), (64, 64), (64,)])
    ours, numel = MasterWeights(params, optim.AdamW), sum(p.numel() for p in params)
    for step in range(2):
        give_gradients(params, step)
        ours.step()
    with Meter(nn.ParameterList(params), ours) as meter:
        ours.step()
    found = meter.timeline.bytes_by_category(len(meter.timeline))
    assert found["optimizer_state"] == 12 * numel + 4 * len(params) and found["temporary"] == 0
    assert "exp_avg of 0 and 3 more" in {storage.name for storage in meter.timeline.storages.values()}
