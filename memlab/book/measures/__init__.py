"""What `python -m memlab.benchmark` measures, chapter by chapter.

A measure is a function of a device ("cpu" or "cuda") and a number of rounds; it gives rows of three texts: what is
measured, the figure, and what it must reach ("" where nothing is demanded).
"""

from memlab.book.measures.caching_allocator import recorded_allocator, replay_speed, static_plans
from memlab.book.measures.data_parallelism import beside_pytorch, equal_to_one_process, launches
from memlab.book.measures.gradient_accumulation import (
    accumulated_gradients,
    accumulation_time,
    largest_batch,
    padding,
)
from memlab.book.measures.gradient_checkpointing import (
    attention_backward,
    checkpointed_step,
    optimal_plans,
    selective_step,
)
from memlab.book.measures.memory_arithmetic import imagined_step
from memlab.book.measures.memory_hierarchy import tiled_attention_digits_and_bytes, tiled_attention_time
from memlab.book.measures.memory_monitoring import leaks_by_the_meter, leaks_of_processes, monitor_cost
from memlab.book.measures.memory_timeline import (
    imagined_card,
    import_time,
    meter_cost_per_op,
    meter_exactness,
    meter_time,
)
from memlab.book.measures.mixed_precision import loss_scaling
from memlab.book.measures.offloading import (
    offloaded_step,
    streamed_weights,
    swapped_to_files,
    swapped_to_the_host,
)
from memlab.book.measures.pictures import live_figure, pictures_that_move
from memlab.book.measures.pipeline_parallelism import (
    piped_beside_pytorch,
    piped_equal_to_one_process,
    simulated_beside_metered,
)
from memlab.book.measures.tensor_parallelism import split_beside_dtensor, split_bytes, split_equal_to_one_process

MEASURES = (
    meter_time,
    meter_cost_per_op,
    meter_exactness,
    import_time,
    imagined_card,
    imagined_step,
    tiled_attention_digits_and_bytes,
    tiled_attention_time,
    replay_speed,
    static_plans,
    recorded_allocator,
    loss_scaling,
    accumulated_gradients,
    accumulation_time,
    padding,
    largest_batch,
    checkpointed_step,
    selective_step,
    attention_backward,
    optimal_plans,
    swapped_to_files,
    swapped_to_the_host,
    offloaded_step,
    streamed_weights,
    launches,
    equal_to_one_process,
    beside_pytorch,
    split_equal_to_one_process,
    split_beside_dtensor,
    split_bytes,
    piped_equal_to_one_process,
    piped_beside_pytorch,
    simulated_beside_metered,
    monitor_cost,
    leaks_by_the_meter,
    leaks_of_processes,
    live_figure,
    pictures_that_move,
)
