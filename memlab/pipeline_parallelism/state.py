"""A full checkpoint of a model whose layers are on several ranks, put together and taken apart stage by stage.

What is gathered has the whole model's names, "<layer>.<name>", and knows nothing of stages, schedules or ranks: it
loads into any pipeline of the same layers. It is put together in main memory on rank 0, and sent from main memory: a
group of NCCL alone sends nothing from there, one of "cpu:gloo,cuda:nccl", as `run_ranks` forms, does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from memlab.data_parallelism.agreement import raise_on_all, told_by_all
from memlab.memory_timeline import main_memory
from memlab.pipeline_parallelism.runtime import Pipeline
from memlab.pipeline_parallelism.tied import tied_names
from memlab.ranks import ALONE, receive, send
from memlab.tensor_parallelism import state as of_parts
from memlab.tensor_parallelism.cuts import cut_of


@torch.no_grad()
def full_state_dict(pipeline: Pipeline, tensor_group=None) -> dict[str, Tensor]:
    """The whole model's state dict, in main memory on the rank that is first in both groups; {} on the others.

    tensor_group: whose ranks have parts of each stage, as `gpt_layers` was given; None: stages are whole. All ranks
    must call it. Tied parameters share memory. Not for stages that fully_shard cut.
    """
    tensor_group = ALONE if tensor_group is None else tensor_group
    own = {}
    for module in pipeline.layers.values():
        own |= of_parts.full_state_dict(module, tensor_group)
    group, rank = pipeline.group, pipeline.rank
    first_of: dict[int, str] = {}
    alike = {name: first_of.setdefault(id(t), name) for name, t in own.items()}
    again = {name: names[0] for names in tied_names(pipeline.plan.tied) for name in names[1:]}
    mine = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    for other, (outline, theirs) in enumerate(told_by_all((mine, alike), group)):
        again |= {name: first for name, first in theirs.items() if first != name and name not in again}
        for name, (shape, dtype) in outline.items():
            if name in again or not other:
                continue
            if rank == other:
                send(own[name], 0, group)
            elif rank == 0:
                with main_memory():
                    own[name] = receive(torch.empty(shape, dtype=dtype, device="cpu"), other, group)
    if rank:
        return {}
    for name, first in again.items():
        if first in own:
            own[name] = own[first]
    return dict(sorted(own.items(), key=lambda item: int(item[0].split(".")[0])))


@torch.no_grad()
def load_full_state_dict(pipeline: Pipeline, state: Mapping[str, Tensor], tensor_group=None) -> None:
    """Load a whole model's state dict, of `full_state_dict` or a file, into this rank's stages.

    state: on every rank, best from a mapped file: each reads its own layers only. Or on that rank alone which has what
      `full_state_dict` returns, {} on the others: it sends them theirs. All ranks must call it.
    Tied copies all become the first name's, whatever the others have.
    Raises KeyError for names and ValueError for shapes that are not the model's, and for a state that only others than
    the first have, on every rank; nothing is loaded then.
    """
    tensor_group = ALONE if tensor_group is None else tensor_group
    group, rank = pipeline.group, pipeline.rank
    slots = {}
    for module in pipeline.layers.values():
        slots |= of_parts.slots_of(module, tensor_group)
    mine = {name: (tuple(p.shape) if (cut := cut_of(p)) is None else cut.shape, p.dtype) for name, p in slots.items()}
    outlines, having = zip(*told_by_all((mine, bool(state)), group), strict=True)
    expected = {name: kind for outline in outlines for name, kind in outline.items()}
    if distributed.get_backend(group) == "fake":  # imagined ranks tell no names of their stages, and send nothing
        if not state:
            return
        state = {name: t for name, t in state.items() if name in expected}
    problem = _misfit(expected, state) if state else None
    if any(having) and not having[0]:
        problem = ValueError(
            f"expected a state on all ranks, or on the first alone, found one on rank {having.index(True)} and none on "
            "rank 0; give it to rank 0"
        )
    problem = next((found for found in told_by_all(problem, group) if found is not None), None)
    raise_on_all(problem, tensor_group)  # of whose ranks one pipeline each has heard of it
    firsts = {name: names[0] for names in tied_names(pipeline.plan.tied) for name in names}
    state = {name: state.get(firsts.get(name, name), t) for name, t in state.items()}
    if having[0] and not all(having):
        for other, outline in enumerate(outlines[1:], 1):
            if rank == other:
                state = {}
            for name, (shape, dtype) in outline.items():
                if rank == 0:
                    send(state[name].to(dtype), other, group)
                elif rank == other:
                    state[name] = receive(torch.empty(shape, dtype=dtype, device="cpu"), 0, group)
    for module in pipeline.layers.values():
        names = module.state_dict(keep_vars=True)
        of_parts.load_full_state_dict(module, {name: state[name] for name in names if name in state}, tensor_group)


def _misfit(expected: Mapping[str, Any], state: Mapping[str, Any]) -> Exception | None:
    if missing := [name for name in expected if name not in state]:
        return KeyError(f"expected the names of the model, found no {', '.join(missing[:3])} ({len(missing)} missing)")
    if extra := [name for name in state if name not in expected]:
        return KeyError(f"expected the names of the model, found also {', '.join(extra[:3])} ({len(extra)} too many)")
    for name, (shape, _) in expected.items():
        if tuple(state[name].shape) != shape:
            return ValueError(f"expected {name} of shape {shape}, found {tuple(state[name].shape)}; of another model?")
    return None
