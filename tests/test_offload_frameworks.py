"""Other people's offloading, run here: what it moves, what it keeps, and whether it computes the same."""

import contextlib
import threading

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

from memlab.book.frameworks import deepspeed_alone, has_deepspeed
from memlab.book.measures.offloading import metered, wide_gpt
from memlab.book.offload_frameworks import Moves, counted_moves, in_host, zero_offload_bytes
from memlab.book.workloads import GPT, text_batch
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import MasterWeights
from memlab.offloading import swap_activations
from memlab.ranks import one_rank

SIZES = {"layers": 2, "width": 64, "heads": 2, "context": 32}
PARAMETERS = sum(parameter.numel() for parameter in GPT(**SIZES).parameters())
CARD = "imagined H100-80GB"
SIDE_BYTES = 4 * 256 * 256

needs_deepspeed = pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed (memlab[frameworks])")


def test_bytes_of_a_swap_are_those_left_on_the_models_card_and_not_what_the_host_holds():
    held, peak = {}, {}
    with imagine("H100-80GB"):
        model, x = GPT(**SIZES).bfloat16(), torch.zeros(64, 32, dtype=torch.long)
        for name, context in {"none": contextlib.nullcontext(), "swap": swap_activations("cpu")}.items():
            held[name], peak[name], _ = metered(model, (x, x), context)
    given = 2 * PARAMETERS + x.nbytes
    assert given < held["swap"] < given + 0.1 * (held["none"] - given)
    assert held["swap"] < peak["swap"] < peak["none"]


def test_the_wide_model_that_a_gpu_swaps_is_never_in_main_memory():
    with Meter() as meter:
        model = wide_gpt("meta")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert sum(p.nbytes for p in model.parameters()) > 6 * 2**30 and meter.timeline.peak_bytes == 0


def eight_saved_tensors_of_three(context):
    """The timeline of an expression that saves 8 tensors over 3 storages."""
    a, w = ((torch.randn(256, 256) / 16).requires_grad_() for _ in "aw")
    with Meter(inputs=(a, w)) as meter:
        with context:
            y = (a @ w).exp()
            loss = (y * y + y.sin() + y @ w).sum()
        loss.backward()
    return meter.timeline


def test_on_imagined_hardware_what_save_on_cpu_moves_lies_in_the_hosts_memory():
    with imagine("H100-80GB"):
        plain = eight_saved_tensors_of_three(contextlib.nullcontext())
        with counted_moves() as moves:
            theirs = eight_saved_tensors_of_three(save_on_cpu())
    assert moves == Moves(8, 8 * SIDE_BYTES, 8, 8 * SIDE_BYTES)
    assert list(plain.devices) == [CARD]
    assert theirs.on("cpu").peak_bytes == 8 * SIDE_BYTES
    assert theirs.on("cpu").totals[-1] == 0


def test_a_move_goes_to_the_other_place_and_casts_and_copies_within_one_do_not_count():
    x = torch.randn(8)
    with counted_moves() as moves:
        there = x.cpu()
        assert in_host(there) and not in_host(x) and there.data_ptr() != x.data_ptr()
        assert there.cpu() is there
        back = there.to("cpu", torch.float64)
        assert not in_host(back) and torch.equal(back, x.double())
        assert in_host(back.to(torch.device("cpu"), torch.float32))
        x.to(torch.float64), x.to(back), x.clone()
        assert moves == Moves(2, 32 + 32, 1, 64)
        loss = x.sum().cpu()
        assert not in_host(loss.to("cpu")) and moves.to_card == 2
        del loss.untyped_storage().was_on_card  # a number that was made on the host, such as a random seed
        assert loss.to("cpu") is loss
    assert x.cpu() is x and x.to("cpu") is x


def test_tensors_without_one_storage_of_their_own_pass_uncounted():
    with one_rank("cpu") as mesh:
        sharded, sparse = distribute_tensor(torch.ones(4), mesh), torch.eye(2).to_sparse()
        with counted_moves() as moves:
            assert sharded.cpu() is sharded and sharded.to("cpu") is sharded and sparse.cpu() is sparse
    assert moves == Moves()


def test_moves_keep_gradients_and_after_an_error_tensors_move_as_before():
    before = torch.Tensor.to, torch.Tensor.cpu
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(ZeroDivisionError), counted_moves():
        x.cpu().to("cpu").square().sum().backward()
        1 / 0  # noqa: B018
    assert torch.equal(x.grad, 2 * x.detach())
    assert (torch.Tensor.to, torch.Tensor.cpu) == before


def trained(prepare):
    torch.manual_seed(0)
    model = prepare(GPT(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        x, y = text_batch(4, 32, seed=step)
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model


def test_fsdps_cpu_offload_trains_on_a_cpus_mesh_bit_for_bit_as_plain_pytorch_and_leaves_no_group_behind():
    def sharded(model):
        options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    plain, threads = trained(lambda model: model), threading.active_count()
    with one_rank("cpu") as mesh, counted_moves() as moves:
        model = trained(sharded)
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
        assert all(in_host(parameter.to_local()) for parameter in model.parameters())
        assert all(in_host(parameter.grad.to_local()) for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), weights, strict=True))
    assert moves.to_host_bytes == (1 + 4) * 4 * PARAMETERS  # weights once, gradients each step
    assert not torch.distributed.is_initialized() and threading.active_count() == threads


def by_zero_offload(stage=2, steps=4, **offload):
    """Weights after so many steps of BF16 with FP32 masters, and what ZeRO-Offload kept."""
    torch.manual_seed(0)
    model = GPT(**SIZES)
    zero = {"stage": stage, "reduce_bucket_size": 2**16}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    config |= {"bf16": {"enabled": True}, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    if offload:
        zero["offload_optimizer"] = {"pin_memory": False, **offload}
    with deepspeed_alone() as deepspeed:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
        for step in range(steps):
            x, y = text_batch(4, 32, seed=step)
            engine.backward(F.cross_entropy(engine(x).flatten(0, 1).float(), y.flatten()))
            engine.step()
        kept = zero_offload_bytes(optimizer)
        engine.destroy()
    return [parameter.detach() for parameter in model.parameters()], kept


def by_master_weights():
    torch.manual_seed(0)
    model = GPT(**SIZES).bfloat16()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(4):
        x, y = text_batch(4, 32, seed=step)
        F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
        optimizer.step()
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_offload_gives_the_weights_of_fp32_masters_and_keeps_eighteen_bytes_a_parameter_on_the_host(stage):
    weights, kept = by_zero_offload(stage, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(weights, by_master_weights(), strict=True))
    assert list(kept.values()) == [each * PARAMETERS for each in (2, 4, 8, 4, 2)]
    assert not torch.distributed.is_initialized()


@needs_deepspeed
def test_deepspeeds_bytes_are_asked_only_of_zero_offload():
    with pytest.raises(ValueError, match="expected DeepSpeed's optimizer of stage 1 or 2 with offload_optimizer"):
        by_zero_offload(steps=1)
