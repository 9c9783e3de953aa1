"""One parameter on two stages, such as the token embedding that is also the head: two copies that stay equal.

Each stage computes a gradient of its own use; their sum is the parameter's. Both ranks step on the same sum, from the same
beginning, so the copies stay equal to the bit. The price: its bytes, gradients and states twice, and one all-reduce a step.
"""

from __future__ import annotations

import torch
from torch import distributed, nn

from memlab.pipeline_parallelism.plan import PipelinePlan
from memlab.ranks import place_in


class TiedParameters:
    """The tied parameters that this rank has copies of. modules: this rank's stages."""

    def __init__(self, plan: PipelinePlan, modules: dict[int, nn.Module], group=None):
        self.pairs = []
        rank, _ = place_in(group)
        own = {name: p for module in modules.values() for name, p in module.named_parameters()}
        ranks_of = plan.schedule.ranks_of_stages
        for first, second in plan.tied:
            holders = [ranks_of[_stage_of(plan, name)] for name in (first, second)]
            if holders[0] == holders[1]:
                raise NotImplementedError("seed")
            members = sorted(distributed.get_global_rank(group or distributed.group.WORLD, at) for at in holders)
            pair = distributed.new_group(members, use_local_synchronization=True) if rank in holders else None
            if pair is not None:
                mine = own[first if rank == holders[0] else second]
                with torch.no_grad():
                    distributed.broadcast(
                        mine, distributed.get_global_rank(group or distributed.group.WORLD, holders[0]), group=pair
                    )
                self.pairs.append((mine, pair))

    def sum_gradients(self) -> None:
        """Give both copies the sum of both gradients."""
        for parameter, group in self.pairs:
            distributed.all_reduce(parameter.grad, group=group)


def _stage_of(plan: PipelinePlan, name: str) -> int:
    number = int(name.split(".")[0])
    return next(stage for stage, part in enumerate(plan.parts) if number in part)
