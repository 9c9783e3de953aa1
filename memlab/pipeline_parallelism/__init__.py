"""Pipeline parallelism: a model's layers on several ranks, each computing some of them, micro-batch by micro-batch.

Read the pages in this order: `schedule` (who does what when, as data), `orders` (GPipe, 1F1B and others), `checking`
(would it end?), `arithmetic` (what it costs, in closed form), `line` (what a rank holds) and `simulator` (played
through).

Before anything runs: `balancing` (which layers go where) and `plan` (what is known then), made by a `rehearsal` on
`imagined_layers`.

Running it: `stage` (one rank's layers), `messages` (what is under way), `promises` (is it as planned?), `tied` (a
parameter on two stages), `runtime` (`Pipeline`: real ranks that follow a schedule), `costs` (what a stage takes,
measured) and `gpt` (a GPT in layers). What there is only as a whole: `norms` (of gradients) and `state` (a full
checkpoint).

With data and tensor parallelism: `axes` (what a rank holds and sends) and `layout` (which axis first). `__main__`
trains a small GPT in stages, from a terminal.
"""

from memlab.pipeline_parallelism.arithmetic import bubble_share, in_flight
from memlab.pipeline_parallelism.axes import StageShare, stage_shares
from memlab.pipeline_parallelism.balancing import balance
from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.costs import bytes_on_stages, measure_layers, measure_stages
from memlab.pipeline_parallelism.gpt import gpt_layers, gpt_loss
from memlab.pipeline_parallelism.layout import Way, axis_seconds, ways
from memlab.pipeline_parallelism.line import StageCost
from memlab.pipeline_parallelism.norms import clip_grad_norm_
from memlab.pipeline_parallelism.orders import gpipe, interleaved, one_forward_one_backward, with_messages
from memlab.pipeline_parallelism.plan import PipelinePlan, plan_pipeline
from memlab.pipeline_parallelism.rehearsal import Wire
from memlab.pipeline_parallelism.runtime import Pipeline
from memlab.pipeline_parallelism.schedule import Action, Schedule
from memlab.pipeline_parallelism.simulator import Simulation, Span, simulate
from memlab.pipeline_parallelism.state import full_state_dict, load_full_state_dict

__all__ = [
    "Action",
    "Pipeline",
    "PipelinePlan",
    "Schedule",
    "Simulation",
    "Span",
    "StageCost",
    "StageShare",
    "Way",
    "Wire",
    "axis_seconds",
    "balance",
    "bubble_share",
    "bytes_on_stages",
    "check_schedule",
    "clip_grad_norm_",
    "full_state_dict",
    "gpipe",
    "gpt_layers",
    "gpt_loss",
    "in_flight",
    "interleaved",
    "load_full_state_dict",
    "measure_layers",
    "measure_stages",
    "one_forward_one_backward",
    "plan_pipeline",
    "simulate",
    "stage_shares",
    "ways",
    "with_messages",
]
