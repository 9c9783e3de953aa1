"""Pipeline parallelism: a model's layers on several ranks, each computing some of them, micro-batch by micro-batch.

Read the pages in this order: `schedule` (who does what when, as data), `checking` (would it end?), `arithmetic` (what
it costs, in closed form) and `simulator` (played through).

Running it: `balance` (which layers go where), `plan` (everything that is known before), `stage` (one rank's layers),
`tied` (a parameter on two stages), `runtime` (`Pipeline`: real ranks that follow a schedule) and `gpt` (a GPT in layers).
"""

from memlab.pipeline_parallelism.arithmetic import bubble_share, in_flight
from memlab.pipeline_parallelism.balance import balance
from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.gpt import gpt_layers, gpt_loss
from memlab.pipeline_parallelism.plan import PipelinePlan, Wire, plan_pipeline
from memlab.pipeline_parallelism.runtime import Pipeline
from memlab.pipeline_parallelism.schedule import (
    Action,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    with_messages,
)
from memlab.pipeline_parallelism.simulator import Simulation, Span, StageCost, simulate

__all__ = [
    "Action",
    "Pipeline",
    "PipelinePlan",
    "Schedule",
    "Simulation",
    "Span",
    "StageCost",
    "Wire",
    "balance",
    "bubble_share",
    "check_schedule",
    "forward_only",
    "gpipe",
    "gpt_layers",
    "gpt_loss",
    "in_flight",
    "interleaved",
    "one_forward_one_backward",
    "plan_pipeline",
    "simulate",
    "with_messages",
]
