"""Other people's data parallelism on the ranks at hand: a few steps of training, its weights and its bytes.

    def compare(rank):
        batches = [...]                                # this rank's part of each step's batch
        return {name: train_on_rank(name, build, batches) for name in ways_to_train()}

    results = run_ranks(compare, 2)

Everything computes in FP32 with PyTorch's AdamW, so what differs are the ranks' sums of gradients, and of two numbers
there is only one sum: on two ranks all weights are equal bit for bit, if every framework computes the same model. By
default DeepSpeed's stage 3 does not: it puts a linear layer of its own in the place of PyTorch's, which rounds
elsewhere (`memory_efficient_linear`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from memlab.book.frameworks import deepspeed_ranks, has_deepspeed
from memlab.book.steps import shared_out
from memlab.data_parallelism import full_state_dict
from memlab.data_parallelism.arithmetic import RankBytes
from memlab.memory_timeline import Meter

Batch = tuple[Tensor, Tensor]
BUCKET = 2**16
"""Elements of DeepSpeed's buffers: by default they are of 5·10⁸, more than a small model has, and hide its stages."""


class Trained(NamedTuple):
    """What training on a rank came to. Bytes are of the last step, when all gradients are there."""

    weights: Tensor
    """(parameters,): the whole model's, side by side, on the CPU."""
    held: RankBytes
    """Parameters, gradients and optimizer states on this rank."""
    other_bytes: int
    """Whatever else is held at that moment: buckets, buffers, the batch. By the meter, less `held`."""
    peak_bytes: int
    """The most that was held in the last step, by the meter."""
    seconds: float
    """For everything: building, steps, bringing the weights together."""


class Running(NamedTuple):
    """A model and its optimizer, ready to train, however they are made."""

    loss_of: Callable[[Batch], Tensor]
    backward: Callable[[Tensor], None]
    step: Callable[[], None]
    """Update the weights, and let go of the gradients."""
    weights: Callable[[], list[Tensor]]
    """The whole model's parameters, in their order."""
    tensors: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor], Iterable[Tensor]]]
    """This rank's parameters, gradients and optimizer states."""


def ways_to_train() -> list[str]:
    """The names that `train_on_rank` knows, memlab's first; DeepSpeed's where it is installed."""
    return [name for name in MAKERS if has_deepspeed() or not name.startswith("DeepSpeed")]


def train_on_rank(
    how: str | Callable, build: Callable[[], nn.Module], batches: Sequence[Batch], lr: float = 1e-3
) -> Trained:
    """Train a model on this rank and all others, metered. Call it on each rank of a process group, in the same order.

    how: one of `ways_to_train()`, or a context manager of your own: how(model, lr) yields a Running.
    build: makes the model, the same on every rank; model(x, y) is its loss, a mean over the batch.
    batches: this rank's x and y for each step, at least one.

    Raises KeyError for a framework that there is not, RuntimeError where there is no process group.
    """
    make = how if callable(how) else MAKERS[how]
    if not distributed.is_initialized():
        raise RuntimeError("expected a process group, found none: call train_on_rank on the ranks of run_ranks")
    start = time.perf_counter()
    with Meter() as meter, make(build(), lr) as running:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            begin = len(meter.timeline) if last else 0
            loss = running.loss_of(batch)
            running.backward(loss)
            del loss
            if last:
                held = RankBytes(*map(bytes_of, running.tensors()))
                other_bytes = meter.timeline.totals[-1] - held.nbytes
            running.step()
        peak_bytes = max(meter.timeline.totals[begin:])
        weights = torch.cat([weight.detach().flatten().cpu() for weight in running.weights()])
    return Trained(weights, held, other_bytes, peak_bytes, time.perf_counter() - start)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once; of DTensors, the parts that lie here."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}.values())


@contextmanager
def torch_way(
    wrapped: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, states: Callable[[], dict] | None = None
) -> Iterator[Running]:
    """Anything that trains as PyTorch does. states: the optimizer's states on this rank; None: `optimizer.state`."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return parameters, gradients, tensors_in(optimizer.state if states is None else states())

    def weights() -> list[Tensor]:
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

    yield Running(lambda batch: wrapped(*batch), Tensor.backward, step, weights, tensors)


def tensors_in(state: dict) -> list[Tensor]:
    """All tensors in an optimizer's state."""
    return [value for one in state.values() for value in one.values() if isinstance(value, Tensor)]


def ddp(model: nn.Module, lr: float, **options):
    """DistributedDataParallel. options: gradient_as_bucket_view=True, and gradients live in its buckets."""
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    return torch_way(wrapped, model, torch.optim.AdamW(model.parameters(), lr=lr))


def zero_redundancy(model: nn.Module, lr: float):
    """DistributedDataParallel with ZeroRedundancyOptimizer: each rank has the states of some whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)
    return torch_way(wrapped, model, optimizer, lambda: optimizer.optim.state)


def fsdp2(model: nn.Module, lr: float, blocks: str = "blocks", **options):
    """FSDP2 on each block and on the whole. blocks: the attribute that lists them. options: as of fully_shard."""
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = distributed.init_device_mesh(device, (distributed.get_world_size(),))
    for block in getattr(model, blocks, ()):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return torch_way(model, model, torch.optim.AdamW(model.parameters(), lr=lr))


@contextmanager
def memlab_way(model: nn.Module, lr: float, stage: int, bucket_bytes: str = "256 KiB") -> Iterator[Running]:
    """This book's own, of a GPT or Llama: `shared_out`."""
    device, count = next(model.parameters()).device, sum(parameter.numel() for parameter in model.parameters())
    wrapped, optimizer = shared_out(model, stage, partial(torch.optim.AdamW, lr=lr), bucket_bytes)
    with torch_way(wrapped, model, optimizer) as running:

        def tensors() -> tuple[Iterable[Tensor], Iterable[Tensor], Iterable[Tensor]]:
            if stage == 2:
                optimizer.reduce_gradients()  # backward has sent them all; some may not be there yet
            parameters, gradients, states = running.tensors()
            parts = [part for group in optimizer.param_groups for part in group["params"]] if stage == 2 else []
            return parameters, [*gradients, *(part.grad for part in parts if part.grad is not None)], states

        def weights() -> list[Tensor]:
            if stage != 3:
                return running.weights()
            state = full_state_dict(model)  # on rank 0
            whole = torch.cat([weight.flatten() for weight in state.values()]) if state else torch.empty(count)
            distributed.broadcast(whole := whole.to(device), src=0)
            return [whole]

        yield running._replace(tensors=tensors, weights=weights)


@contextmanager
def deepspeed_zero(model: nn.Module, lr: float, stage: int) -> Iterator[Running]:
    """DeepSpeed's ZeRO in FP32, with PyTorch's AdamW and linear layers, and buffers that suit a small model.

    Even in FP32 it keeps a master copy of a rank's part of the weights; it counts as a state here.
    """
    parameters = list(model.parameters())
    device = parameters[0].device.type
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_max_live_parameters"), BUCKET)
        zero |= {"stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # of examples; only their number of steps counts here
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    with deepspeed_ranks(device) as deepspeed:
        adam = torch.optim.AdamW(parameters, lr=lr)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)

        def tensors() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
            if stage == 3:
                pieces, masters = [p.ds_tensor for p in parameters], optimizer.fp32_partitioned_groups_flat
                gradients = list(optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())
            else:
                pieces, masters = optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
                gradients = [grad for group in optimizer.averaged_gradients.values() if group for grad in group]
            gradients += [p.grad for p in parameters if p.grad is not None]
            return pieces, gradients, [*masters, *tensors_in(adam.state)]

        def weights() -> list[Tensor]:
            if stage < 3:
                return parameters
            with deepspeed.zero.GatheredParameters(parameters):
                return [parameter.detach().clone() for parameter in parameters]

        try:
            yield Running(lambda batch: engine(*batch), engine.backward, engine.step, weights, tensors)
        finally:
            engine.destroy()


MAKERS = {
    **{f"memlab, stage {stage}": partial(memlab_way, stage=stage) for stage in range(4)},
    "DDP": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2": fsdp2,
    **{f"DeepSpeed ZeRO-{stage}": partial(deepspeed_zero, stage=stage) for stage in (1, 2, 3)},
}
