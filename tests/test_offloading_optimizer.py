"""An optimizer on the host: the same step bit for bit, wherever its states lie; the device holds what is promised."""

import contextlib
import copy
import errno
import gc
import io
import os
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from memlab.book.steps import metered_step
from memlab.data_parallelism import DataParallel, fully_shard
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.offloading import OffloadedOptimizer, host_gradients, host_link, host_optimizer, state_file
from memlab.ranks import run_ranks
from memlab.units import MiB
from tests.harness import refusals, refused
from tests.late_streams import late_streams
from tests.tiers import pairs, some

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(30, 4), (5,), (0,), (2, 3, 4), (7, 1), (1,)]
CARD = "imagined H100-80GB"


def parameters(dtype=BF16, shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def backward(params, seed, but=()) -> None:
    """Gradients through autograd, the same for every list of parameters of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    for number, p in enumerate(params):
        weights = torch.randn(p.shape, generator=generator).to(p.dtype)
        if number not in but and p.requires_grad:
            (p * weights).sum().backward()


def reference(params, kind, **options) -> optim.Optimizer:
    first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
    halves = first.dtype in (BF16, FP16)
    return MasterWeights(params, kind, **options) if halves else kind(params, **options)


def train(optimizer, params, *seeds: int) -> None:
    for seed in seeds:
        backward(params, seed)
        optimizer.step()
        optimizer.zero_grad()


def equal(ours, theirs) -> bool:
    return all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def disk_of(nbytes: int):
    """No file can have room beyond so many bytes."""
    allocate = getattr(os, "posix_fallocate", lambda *_: None)

    def nearly_full(handle, start, wanted):
        if start + wanted > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(handle, start, wanted)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="find room for .*, found: No space") as e:
        patch.setattr(os, "posix_fallocate", nearly_full, raising=False)
        yield
    assert e.value.errno == errno.ENOSPC


def assert_same_states(ours: dict, theirs: dict) -> None:
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for number, states in theirs["state"].items():
        assert ours["state"][number].keys() == states.keys()
        for name, value in states.items():
            mine = ours["state"][number][name]
            assert not torch.is_tensor(value) or (mine.dtype == value.dtype and torch.equal(mine, value))


@pytest.fixture(params=["cpu", "folder"])
def to(request, tmp_path):
    return "cpu" if request.param == "cpu" else tmp_path


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path):
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memlab")]
    assert not os.listdir(tmp_path)


ALGORITHMS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {}),
    "AdamW, for-loop": (optim.AdamW, {"foreach": False}),
    "AdamW, foreach, AMSGrad": (optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "RAdam": (optim.RAdam, {}),
}


@pairs("name, gradients, dtype, chunk_bytes, place", ALGORITHMS, [0, 1], [BF16, FP32], [1, 200, None], ["cpu", "file"])
def test_weights_and_states_are_those_of_the_plain_optimizer_bit_for_bit(
    name, gradients, dtype, chunk_bytes, place, tmp_path
):
    kind, options = ALGORITHMS[name]
    ours, theirs = parameters(dtype), parameters(dtype)
    groups = lambda params: [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]  # noqa: E731
    plain = reference(groups(theirs), kind, **options)
    how = {"to": "cpu" if place == "cpu" else tmp_path, "gradients": bool(gradients), "chunk_bytes": chunk_bytes}
    offloaded = OffloadedOptimizer(groups(ours), kind, **how, **options)
    for step in range(5):
        for params, optimizer in ((ours, offloaded), (theirs, plain)):
            backward(params, step, but=(1, 4) if step == 2 else (4,) if step < 2 else ())
            backward(params, 10 + step, but=(0, 4))  # accumulated
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.7  # as a scheduler has it
    assert equal(ours, theirs)
    assert_same_states(offloaded.state_dict(), plain.state_dict())


def test_frozen_and_unused_parameters_cost_nothing_and_unfreezing_one_needs_no_call(to):
    params = parameters()
    params[0].requires_grad_(False)
    offloaded = OffloadedOptimizer(params, optim.AdamW, to=to, gradients=True)
    backward(params, 0, but=(1,))
    offloaded.step()
    assert set(offloaded.state) == set(params[2:])
    params[0].requires_grad_(True)
    before = params[0].detach().clone()
    backward(params, 1)
    offloaded.step()
    assert set(offloaded.state) == set(params) and not torch.equal(params[0], before)
    backward(params, 2)
    assert params[0].grad is None


@pytest.mark.parametrize("gradients", [False, True])
def test_a_step_without_any_gradient_changes_nothing_as_torchs_own(gradients, to):
    (p,) = parameters(shapes=[(4,)])
    optimizer = OffloadedOptimizer([p], optim.AdamW, to=to, gradients=gradients)
    before = p.detach().clone()
    assert optimizer.step() is None and optimizer.step(lambda: 2.0) == 2.0
    assert torch.equal(p, before) and not optimizer.state_dict()["state"]
    backward([p], 0)
    optimizer.step()
    assert not torch.equal(p, before)


def test_a_parameter_added_later_is_stepped_and_its_gradient_leaves_too(to):
    ours, theirs = parameters(), parameters()
    offloaded = OffloadedOptimizer(ours[:1], optim.AdamW, to=to, gradients=True)
    plain = MasterWeights(theirs[:1], optim.AdamW)
    for optimizer, params in ((offloaded, ours), (plain, theirs)):
        train(optimizer, params[:1], 0)
        optimizer.add_param_group({"params": params[1:], "lr": 0.1})
        backward(params, 1)
        assert optimizer is plain or all(p.grad is None for p in ours)
        optimizer.step()
    assert equal(ours, theirs)


def test_layouts_without_order_or_with_holes_are_stepped_alike(to):
    base, images = torch.randn(6, 4).to(BF16), torch.randn(2, 3, 4, 4).to(BF16)
    weights = [base.t(), base[::2], base[:, 1:3], images.to(memory_format=torch.channels_last)]
    ours, theirs = ([nn.Parameter(w.clone(memory_format=torch.preserve_format)) for w in weights] for _ in range(2))
    ours.append(nn.Parameter(base.clone()[:, 1:3]))
    theirs.append(nn.Parameter(base.clone()[:, 1:3]))
    train(OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=True, lr=0.1), ours, 0, 1, 2)
    train(MasterWeights(theirs, optim.AdamW, lr=0.1), theirs, 0, 1, 2)
    assert equal(ours, theirs)


def test_what_others_write_to_a_weight_is_taken_over(to):
    ours, theirs = parameters(), parameters()
    offloaded, plain = OffloadedOptimizer(ours, optim.AdamW, to=to), MasterWeights(theirs, optim.AdamW)
    for optimizer, params in ((offloaded, ours), (plain, theirs)):
        train(optimizer, params, 0, 1)
        with torch.no_grad():
            params[0].mul_(2)
        train(optimizer, params, 2)
    assert equal(ours, theirs)
    assert_same_states(offloaded.state_dict(), plain.state_dict())


def test_a_sparse_gradient_is_stepped_and_refused_where_it_should_leave(to):
    def trained(make):
        layer = nn.Embedding.from_pretrained(torch.ones(4, 2, dtype=BF16), freeze=False, sparse=True)
        optimizer = make(layer.parameters())
        for _ in range(3):
            layer(torch.tensor([0, 2, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach()

    ours = trained(lambda p: OffloadedOptimizer(p, optim.SparseAdam, to=to, lr=0.1))
    assert torch.equal(ours, trained(lambda p: MasterWeights(p, optim.SparseAdam, lr=0.1)))
    with pytest.raises(TypeError, match="expected dense gradients, found a sparse one; use gradients=False"):
        trained(lambda p: OffloadedOptimizer(p, optim.SparseAdam, to=to, gradients=True, lr=0.1))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_are_zeroed_or_dropped_as_torch_does(dtype, gradients, to):
    ours, theirs = parameters(dtype), parameters(dtype)
    ours[5].requires_grad_(False)
    theirs[5].requires_grad_(False)
    offloaded = OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=gradients, lr=0.1)
    plain = reference(theirs, optim.AdamW, lr=0.1)
    for optimizer, params in ((offloaded, ours), (plain, theirs)):
        for seed, but in enumerate([(1, 2), (0, 1)]):
            backward(params, seed, but)  # of 0 from now on: its moments and its decay still move number 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        backward(params, 2)
        optimizer.zero_grad(set_to_none=False)  # a batch that is left out
        optimizer.step()
        optimizer.zero_grad()
        backward(params, 3, but=(0,))
        optimizer.step()
        optimizer.zero_grad()
    assert equal(ours, theirs)
    assert_same_states(offloaded.state_dict(), plain.state_dict())
    assert all(p.grad is None for p in ours)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_offloaded_gradients_is_clipping_fp32_ones(norm_type, to):
    ours, theirs = ([p for p in parameters() if p.numel()] for _ in range(2))
    offloaded = OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=True)
    plain = MasterWeights(theirs, optim.AdamW)
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        plain.widen_gradients()
        norm = offloaded.clip_grad_norm_(0.5, norm_type)
        expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
        assert norm.dtype is FP32 and torch.equal(norm, expected) and norm > 0.5
        for optimizer in (offloaded, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert equal(ours, theirs)


def test_tensors_of_several_dtypes_are_clipped_as_torch_does_and_saved_with_nothing_else_of_the_file(to):
    dtypes = (FP32, torch.float64, torch.complex64)
    ours, theirs = ([parameters(dtype, [(300,)])[0] for dtype in dtypes] for _ in range(2))
    offloaded, plain = OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=True), optim.AdamW(theirs)
    for params in (ours, theirs):
        sum((p * p.conj()).real.sum() for p in params).backward()
    norm, expected = offloaded.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(theirs, 0.5)
    assert torch.equal(norm, expected) and norm.dtype is torch.float64 and norm > 0.5
    files = io.BytesIO(), io.BytesIO()
    for optimizer, file in zip((offloaded, plain), files, strict=True):
        optimizer.step()
        torch.save(optimizer.state_dict(), file)
    assert equal(ours, theirs)
    assert abs(files[0].tell() - files[1].tell()) < 300 * FP32.itemsize, "less than the smallest gradient"
    files[0].seek(0)
    assert_same_states(torch.load(files[0], weights_only=True), plain.state_dict())


def test_clipping_what_stays_is_torchs_clipping(to):
    ours, theirs = parameters(), parameters()
    offloaded = OffloadedOptimizer(ours, optim.AdamW, to=to)
    backward(ours, 0)
    backward(theirs, 0)
    assert torch.equal(offloaded.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(theirs, 0.1))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True))


def test_a_gradient_after_clipping_is_refused_and_zero_grad_forgets_the_clipping():
    (p,) = parameters(shapes=[(4,)])
    offloaded = OffloadedOptimizer([p], optim.SGD, lr=1.0, gradients=True)
    assert offloaded.clip_grad_norm_(1.0) == 0
    backward([p], 0)
    offloaded.clip_grad_norm_(1e-3)
    with pytest.raises(
        RuntimeError, match=r"step\(\) or zero_grad\(\) after clip_grad_norm_\(\), found another gradient"
    ):
        backward([p], 1)
    offloaded.zero_grad()
    p.sum().backward()
    before = p.detach().clone()
    offloaded.step()
    assert torch.equal(p, (before.float() - 1).to(BF16))


@pytest.mark.parametrize("scaler", [LossScaler, lambda **options: torch.amp.GradScaler("cpu", **options)])
def test_a_loss_scaler_works_on_gradients_that_stay_and_is_refused_for_those_that_leave(scaler, to):
    ours, theirs = parameters(FP16), parameters(FP16)
    for params, optimizer in (
        (ours, OffloadedOptimizer(ours, optim.AdamW, to=to)),
        (theirs, MasterWeights(theirs, optim.AdamW)),
    ):
        scale = scaler(init_scale=8.0, growth_interval=1)
        for step in range(4):
            loss = sum((p * (step + 1)).sum() for p in params) * (torch.inf if step == 2 else 1)
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
        assert scale.get_scale() == 8.0 * 2 * 2 / 2 * 2
    assert equal(ours, theirs)
    leaving, scale = OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=True), scaler(init_scale=8.0)
    scale.scale(ours[0].sum()).backward()
    with pytest.raises(RuntimeError, match="expected gradients=False with a loss scaler"):
        scale.step(leaving)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_run_that_stops_and_resumes_elsewhere_is_the_run_that_does_not_stop(dtype, gradients, to, tmp_path):
    whole, params = parameters(dtype), parameters(dtype)
    plain, saved = reference(whole, optim.AdamW), None
    makers = [
        lambda: OffloadedOptimizer(params, optim.AdamW, to=to, gradients=gradients),
        lambda: OffloadedOptimizer(params, optim.AdamW, to=tmp_path),
        lambda: reference(params, optim.AdamW),
        lambda: OffloadedOptimizer(params, optim.AdamW),
        lambda: OffloadedOptimizer(params, optim.AdamW, to=to, gradients=gradients),
    ]
    for step, make in enumerate(makers):
        optimizer = make()
        if saved is not None:
            saved.seek(0)
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        train(optimizer, params, 2 * step, 2 * step + 1)
        train(plain, whole, 2 * step, 2 * step + 1)
        torch.save(optimizer.state_dict(), saved := io.BytesIO())
        del optimizer
    assert equal(params, whole)


@pytest.mark.parametrize("backwards", [False, True])
def test_an_optimizer_that_starts_afresh_or_goes_back_forgets_what_there_was_and_its_file_does_not_grow(backwards, to):
    ours, theirs = parameters(FP32), parameters(FP32)
    offloaded, plain = OffloadedOptimizer(ours, optim.AdamW, to=to), optim.AdamW(theirs)
    start, sizes = copy.deepcopy(offloaded.state_dict()), set()
    for round in range(4):
        for optimizer, params in ((offloaded, ours), (plain, theirs)):
            optimizer.zero_grad()
            backward(params, 2 * round, but=(1,) if round == 2 else ())
            optimizer.step()
        saved = copy.deepcopy(offloaded.state_dict())
        assert_same_states(saved, plain.state_dict())
        for state in saved["state"].values() if backwards else ():
            for name in reversed(list(state)):
                state[name] = state.pop(name)
        for state in (start, saved) if round % 2 else (saved, start):
            offloaded.load_state_dict(copy.deepcopy(state))
        plain.load_state_dict(saved if round % 2 else start)
        sizes.add(to == "cpu" or offloaded._file._end)
    assert len(sizes) == 1 and equal(ours, theirs)


def test_a_state_dict_of_bf16_states_is_refused_and_nothing_changes(to):
    params = parameters()
    offloaded, plain = OffloadedOptimizer(params, optim.AdamW, to=to), optim.AdamW(parameters())
    backward(params, 0)
    backward(plain.param_groups[0]["params"], 0)
    offloaded.step()
    plain.step()
    before = copy.deepcopy(offloaded.state_dict())
    with pytest.raises(ValueError, match="a master of shape None where"):
        offloaded.load_state_dict(plain.state_dict())
    assert_same_states(offloaded.state_dict(), before)


def test_of_two_optimizers_that_take_a_gradient_the_second_says_so():
    (p,) = made = [nn.Parameter(torch.ones(3))]
    first, second = (OffloadedOptimizer(made, optim.SGD, lr=1.0, gradients=True) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"found that another optimizer .* has taken it; close\(\) that one"):
        p.sum().backward()
    second.close()
    first.zero_grad()
    p.sum().backward()
    first.step()
    assert torch.equal(p, torch.zeros(3))


def trained_by_two_ranks(rank: int) -> dict:
    """What becomes of the weights whose gradients are taken, by who averages them and who came first; or the error."""
    found = {}
    for wrap in (DistributedDataParallel, DataParallel, fully_shard):
        for optimizer_first in (True, False) if wrap is not fully_shard else (False,):
            for gradients in (False, True):
                torch.manual_seed(0)
                model, case = nn.Linear(4, 1), (wrap.__name__, optimizer_first, gradients)
                make = lambda: OffloadedOptimizer(model.parameters(), optim.SGD, gradients=gradients, lr=0.1)  # noqa: B023, E731
                optimizer = make() if optimizer_first else None
                wrapped = wrap(model) or model
                optimizer = optimizer or make()
                rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
                try:
                    for _ in range(2):
                        for part in rows.split(4):
                            wrapped(part).pow(2).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    found[case] = torch.cat([p.flatten() for p in model.parameters()])
                except RuntimeError as error:
                    found[case] = str(error)
    return found


def test_gradients_that_are_taken_before_ranks_average_them_are_refused_and_after_it_are_right():
    ranks = run_ranks(trained_by_two_ranks, 2)
    for found in ranks:
        for (wrap, optimizer_first, gradients), result in found.items():
            if gradients and wrap != "fully_shard":
                assert result.startswith("expected gradients that backward alone makes, found some that are averaged")
            else:
                assert torch.equal(result, found[wrap, optimizer_first, False])
    for wrap in ("DistributedDataParallel", "DataParallel"):
        assert torch.equal(*(found[wrap, True, False] for found in ranks))


def test_a_gradient_put_beside_the_one_that_was_taken_is_refused_and_hooks_that_look_are_not(to):
    (p,) = params = parameters(shapes=[(4,)])
    optimizer = OffloadedOptimizer(params, optim.SGD, to=to, gradients=True)
    looked = []
    p.register_post_accumulate_grad_hook(lambda p: looked.append(p.grad))
    with Meter(nn.ParameterList(params), optimizer):
        backward(params, 0)
    optimizer.step()
    p.grad = torch.ones_like(p)  # alone, as where backward is the reader's own
    optimizer.step()
    backward(params, 1)
    p.grad = torch.zeros_like(p)
    for use in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="or written to p.grad, when this optimizer has taken its own"):
            use()
    optimizer.zero_grad()
    optimizer.step()
    assert looked == [None, None]


@pairs("gradients, dtype, place", [False, True], [BF16, FP32], ["cpu", "a folder that main memory stands for"])
def test_on_a_card_are_weights_and_gradients_or_weights_alone_and_the_rest_is_on_the_host(
    gradients, dtype, place, tmp_path
):
    to, each, size = "cpu" if place == "cpu" else tmp_path, (64, 32), dtype.itemsize
    with imagine("H100-80GB"):
        model = nn.ParameterList([nn.Parameter(torch.zeros(each, dtype=dtype)) for _ in range(10)])
        optimizer = OffloadedOptimizer(model.parameters(), optim.AdamW, to=to, gradients=gradients, fused=True)
        for _ in range(2):
            with Meter(model, optimizer) as meter:
                for p in model:
                    p.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    total, one = 10 * 64 * 32, 64 * 32
    card, host = meter.timeline.on(CARD), meter.timeline.on("cpu")
    loss = size + size  # and its gradient
    held = size * (one if gradients else total)
    assert card.peak_bytes == size * total + held + loss
    assert card.bytes_at(len(card.events)) == size * total
    widened = 4 * total * (dtype is BF16)  # of one chunk, for the model is small
    copies = size * (one if dtype is BF16 and not gradients else total)  # each goes when it is widened
    states = 12 * total + 10 * 4  # master, two moments, and the step counters
    assert host.bytes_at(len(host.events)) == states
    assert host.peak_bytes == 12 * total + 10 * 4 + copies + widened


def test_with_a_folder_two_chunks_are_in_memory_while_the_step_lasts_and_none_after(tmp_path):
    tensors, each = 8, 1024
    model = nn.ParameterList(parameters(shapes=[(each,)] * tensors))
    optimizer = OffloadedOptimizer(model.parameters(), optim.AdamW, to=tmp_path, chunk_bytes=2 * 4 * each, fused=True)
    for _ in range(2):
        backward(model, 0)
        with Meter(model, optimizer) as meter:
            optimizer.step()
    timeline, chunk = meter.timeline, 2 * each
    held = tensors * each * 4 + tensors * 4  # weights, gradients, counters
    assert timeline.peak_bytes == held + 2 * 12 * chunk + 4 * chunk
    assert timeline.bytes_at(len(timeline.events)) == held
    assert all(state.keys() == {"step"} for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64, torch.complex64])
def test_on_a_disk_that_lacks_a_byte_nothing_is_stepped_whatever_the_dtype_until_there_is_room(dtype, tmp_path):
    each = 64 * 64 * torch.finfo(dtype).bits // 8 * (2 if dtype.is_complex else 1)
    needed = 4 * ((2 * each) if dtype is not BF16 else 12 * 64 * 64)  # two moments, and of 16 bits a master
    params = parameters(dtype, [(64, 64)] * 4)
    before = [p.detach().clone() for p in params]
    optimizer = OffloadedOptimizer(params, optim.AdamW, to=tmp_path, chunk_bytes=1)
    for p in params:
        p.abs().sum().backward()
    with disk_of(needed - 1):
        optimizer.step()
    assert equal(params, before) and not optimizer.state
    optimizer.step()
    assert not torch.equal(params[0], before[0])


def test_states_that_find_no_place_in_a_step_stay_in_memory_until_there_is_one(tmp_path):
    class Unforeseen(optim.AdamW):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].shape == (2, 3):
                raise ArithmeticError("no step of a small one")
            return super().step(closure)

    ours, theirs = (parameters(FP32, [(300,), (301,), (302,)]) for _ in range(2))
    offloaded = OffloadedOptimizer(ours, Unforeseen, to=tmp_path, gradients=True)
    plain = optim.AdamW(theirs)
    backward(ours, 0)
    with disk_of(0):
        offloaded.step()
    train(plain, theirs, 0)
    assert_same_states(offloaded.state_dict(), plain.state_dict())
    train(offloaded, ours, 1)
    train(plain, theirs, 1)
    assert equal(ours, theirs)
    assert_same_states(offloaded.state_dict(), plain.state_dict())
    assert all(state.keys() == {"step"} for state in offloaded.state.values())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_that_were_clipped_are_clipped_when_a_step_that_found_no_room_is_tried_again(dtype, tmp_path):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizers = [OffloadedOptimizer(p, optim.AdamW, to=tmp_path, gradients=True, eps=1.0) for p in (ours, theirs)]
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        backward(params, 0)
        assert optimizer.clip_grad_norm_(1e-2) > 1
    with disk_of(0):
        optimizers[0].step()
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        optimizer.step()
        train(optimizer, params, 1)  # the clipping was for those that are stepped
    assert equal(ours, theirs)
    assert_same_states(*(optimizer.state_dict() for optimizer in optimizers))


def broken(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_after_a_write_that_failed_in_a_step_the_states_are_not_used_again(tmp_path, monkeypatch):
    params, failed, write = parameters(), [], state_file.UnnamedFile.write
    optimizer = OffloadedOptimizer(params, optim.AdamW, to=tmp_path, chunk_bytes=1)
    backward(params, 0)
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(
        state_file.UnnamedFile, "write", lambda *what: write(*what) if failed else broken(failed.append(1))
    )
    with pytest.raises(OSError, match="Input/output"):
        optimizer.step()
    with pytest.raises(OSError, match="found a failed write; load a state dict"):
        optimizer.step()
    optimizer.load_state_dict(good)
    optimizer.step()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_step_that_raises_halfway_leaves_states_beside_their_masters(gradients, to):
    class Halfway(optim.SGD):
        def step(self, closure=None):
            for m in self.param_groups[0]["params"]:
                if m.numel() == 3:
                    raise ArithmeticError("no")
                m.sub_(m.grad)
                self.state[m]["sum"] = torch.ones_like(m)

    params = parameters(shapes=[(2,), (3,), (4,)])
    optimizer = OffloadedOptimizer(params, Halfway, to=to, chunk_bytes=1, gradients=gradients)
    start = [p.detach().float() for p in params]
    for p in params:
        p.sum().backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    states = optimizer.state_dict()["state"]
    assert torch.equal(states[0]["master"], start[0] - 1) and torch.equal(params[0], (start[0] - 1).to(BF16))
    assert torch.equal(states[1]["master"], start[1]) and 2 not in states
    assert optimizer._passage is None and not optimizer._coming


@pytest.mark.parametrize("close", [True, False])
def test_hooks_and_the_file_go_with_the_optimizer_or_when_it_is_closed(close, to):
    params = parameters()
    optimizer = OffloadedOptimizer(params, optim.AdamW, to=to, gradients=True)
    backward(params, 0)
    optimizer.step()
    file, gone = optimizer._file and optimizer._file._file.raw, weakref.ref(optimizer)
    if close:
        backward(params, 1)
        optimizer.close()
        uses = {
            "step": optimizer.step,
            "load": lambda: optimizer.load_state_dict({}),
            "save": optimizer.state_dict,
        }
        for purpose, use in uses.items():
            if file or purpose != "save":
                refused(use, RuntimeError, "expected an optimizer to …, found one that was closed; make another")
        assert file or len(optimizer.state_dict()["state"]) == len(params)
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None for p in params)
    else:
        del optimizer
        gc.collect()
        assert gone() is None
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert file is None or file.closed
    backward(params, 1)
    assert params[0].grad is not None


def clipped_nan():
    (p,) = parameters(shapes=[(4,)])
    optimizer = OffloadedOptimizer([p], optim.SGD, gradients=True)
    (p * torch.nan).sum().backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


REFUSALS = {
    "an optimizer": (lambda: OffloadedOptimizer([], optim.SGD(parameters())), TypeError, "an optimizer's class"),
    "a closure": (lambda: OffloadedOptimizer(parameters(), optim.LBFGS), ValueError, "closure"),
    "no chunk": (lambda: OffloadedOptimizer(parameters(), optim.SGD, chunk_bytes=0), ValueError, "at least 1"),
    "no folder": (
        lambda: OffloadedOptimizer(parameters(), optim.SGD, to="no/where"),
        FileNotFoundError,
        "expected to make a file in folder 'no/where', found: No such file",
    ),
    "a copy": (lambda: copy.deepcopy(OffloadedOptimizer(parameters(), optim.SGD)), TypeError, "state_dict() to save"),
    "a norm of NaN": (clipped_nan, RuntimeError, "finite norm, found nan"),
    "gradients alone": (lambda: training_step(SIZES, 2, 4, offload="gradients"), ValueError, "'states and gradients'"),
    "no card": (lambda: training_step(SIZES, 2, 4, offload="states", hardware="cpu"), ValueError, "hardware='gpu'"),
    "bf16": (lambda: training_step(SIZES, 2, 4, offload="states", precision="bf16"), ValueError, "use 'mixed'"),
}


@refusals(REFUSALS)
def test_what_cannot_be_offloaded_is_refused(call, error, words):
    refused(call, error, words)


@pytest.fixture
def late_device(monkeypatch):
    """CPU tensors pass for a device's, and the two ways of the link are late."""
    memory = lambda nbytes: torch.full((nbytes,), 123, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(host_link, "LINKED", ("cpu",))
    monkeypatch.setattr(host_optimizer, "in_main_memory", lambda tensor: not isinstance(tensor, nn.Parameter))
    monkeypatch.setattr(host_gradients, "pinned_bytes", memory)
    monkeypatch.setattr(host_link, "pinned_bytes", memory)
    return late_streams(monkeypatch)


@pairs("gradients, dtype, chunk_bytes, place", [False, True], [BF16, FP32], [1, 200, None], ["cpu", "file"])
def test_over_a_late_link_the_step_is_the_same_and_nothing_is_on_its_way_after(
    late_device, gradients, dtype, chunk_bytes, place, tmp_path
):
    ours, theirs = parameters(dtype), parameters(dtype)
    how = {"to": "cpu" if place == "cpu" else tmp_path, "gradients": gradients, "chunk_bytes": chunk_bytes}
    offloaded, plain = OffloadedOptimizer(ours, optim.AdamW, **how), reference(theirs, optim.AdamW)
    for step in range(5):
        for params in (ours, theirs):
            backward(params, step)
            backward(params, 10 + step, but=(1,))
        for optimizer in (offloaded, plain):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 2)
        if step == 3:  # a batch that is left out
            backward(ours, 99)
            offloaded.zero_grad()
        assert step == 2 or not any(stream.waiting for stream in late_device)
        assert equal(ours, theirs)
    down, up = late_device
    assert down.log[0] == up.log[0] == "wait"  # for what makes gradients and reads weights
    assert not gradients or ("copy", "copy") not in pairwise(down.log)  # each waits for its own backward
    assert_same_states(offloaded.state_dict(), plain.state_dict())


def test_gradients_that_came_down_for_a_step_that_raised_are_not_those_of_the_next(late_device, tmp_path, monkeypatch):
    ours, theirs = parameters(), parameters()
    optimizers = [OffloadedOptimizer(params, optim.AdamW, to=tmp_path) for params in (ours, theirs)]
    for step in (0, 1, 2):
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            for p in params:
                p.grad = None  # as the model's zero_grad has it
            backward(params, step)
            if step != 1:
                optimizer.step()
        if step == 1:
            with monkeypatch.context() as patch:
                patch.setattr(state_file.StateFile, "read", broken)
                with pytest.raises(OSError, match="Input/output"):
                    optimizers[0].step()
    assert equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("gradients", [False, True])
def test_on_a_gpu_the_step_is_that_of_the_cpu_and_its_bytes_those_of_the_table(gradients, to):
    shapes = [(256, 256)] * 20
    before = torch.cuda.memory_allocated()
    ours, theirs = [nn.Parameter(p.detach().cuda()) for p in parameters(shapes=shapes)], parameters(shapes=shapes)
    offloaded = OffloadedOptimizer(ours, optim.AdamW, to=to, gradients=gradients, chunk_bytes="1 MiB", fused=True)
    plain = MasterWeights(theirs, optim.AdamW, fused=True)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            weights = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
            (p * weights.cuda()).sum().backward()
            (q * weights).sum().backward()
        for optimizer in (offloaded, plain):
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 3 * MiB  # 2.5 MiB of weights
    assert equal([p.cpu() for p in ours], theirs)


SIZES = Transformer(layers=2, width=32, heads=2, vocabulary=64, context=32)
STEPS = [
    {"precision": "mixed", "tokens": 32},
    {"precision": "mixed", "tokens": 4, "first_step": True, "optimizer": "momentum"},
    {"precision": "mixed", "tokens": 4, "micro_batches": 3, "implementation": "fused"},
    {"precision": "mixed", "tokens": 32, "segments": 2, "micro_batches": 2},
    {"precision": "fp32", "tokens": 4, "optimizer": "sgd"},
    {"precision": "autocast", "tokens": 32, "segments": 1},
]


@some("options, offload", [(o, w) for o in STEPS for w in ("states", "states and gradients")], keep=6)
def test_the_predicted_peak_of_the_card_is_the_metered_one(options, offload):
    options = options | {"offload": offload}
    step = training_step(SIZES, 2, **options)
    with imagine("H100-80GB"):
        timeline = metered_step(SIZES, 2, device="cuda", **options)
    card, host = timeline.on(CARD), timeline.on("cpu")
    assert card.peak_bytes == step.peak_bytes
    if "segments" not in options:
        found = {name: nbytes for name, nbytes in card.bytes_by_category(card.peak_event).items() if nbytes}
        assert step.peak.by_category().items() <= found.items() | {("activation", 0)}
    kept = host.bytes_by_category(len(host.events))["optimizer_state"]
    assert kept == step.in_main_memory.of("optimizer_state").nbytes


def test_bytes_a_parameter_are_those_of_zero_offload():
    model = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    table = {}
    for offload in (None, "states", "states and gradients"):
        step = training_step(model, 1, 1024, precision="mixed", implementation="fused", offload=offload)
        end = step.moment("optimizer step").by_category()
        here = sum(end.get(name, 0) for name in ("parameter", "gradient", "optimizer_state"))
        table[offload] = [round(nbytes / model.parameters, 3) for nbytes in (here, step.in_main_memory.nbytes)]
    assert table == {None: [16, 0], "states": [4, 12], "states and gradients": [2, 14]}
