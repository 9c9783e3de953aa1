"""Pages of the libraries for many ranks in reading order; chapter 13's stages beside one process and each other."""

import pkgutil
import re

import pytest
import torch

from memlab import data_parallelism, memory_monitoring, pipeline_parallelism, ranks, tensor_parallelism
from memlab.book.measures import data_parallelism as measures
from memlab.book.parallel_frameworks import train_on_rank
from memlab.book.steps import metered_step
from memlab.book.workloads import GPT, text_batch
from memlab.data_parallelism import rank_bytes
from memlab.data_parallelism.arithmetic import unit_sizes
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import imagine
from memlab.ranks import imagined_ranks, run_ranks


def is_page(package, name: str) -> bool:
    return type(getattr(package, name)) is type(pkgutil)


@pytest.mark.parametrize(
    "package", [data_parallelism, memory_monitoring, pipeline_parallelism, ranks, tensor_parallelism]
)
def test_the_reading_order_names_every_page_once_and_no_public_name_hides_one(package):
    order = package.__doc__.partition("Read the pages in this order")[2]
    named = [name for name in re.findall(r"`(\w+)`", order) if not hasattr(package, name) or is_page(package, name)]
    pages = [page.name for page in pkgutil.iter_modules(package.__path__)]
    assert sorted(named) == sorted(pages)
    assert all(is_page(package, name) for name in pages if hasattr(package, name))


def small():
    torch.manual_seed(0)
    return GPT(layers=2, width=32, heads=2, context=32)


def every_stage(rank):
    batches = [tuple(t.chunk(2)[rank] for t in text_batch(4, 32, seed=seed)) for seed in range(3)]
    return [train_on_rank(f"memlab, stage {stage}", small, batches) for stage in range(4)]


def test_on_two_ranks_all_stages_learn_the_same_weights_bit_by_bit_and_hold_less_and_less():
    plain, *sharded = run_ranks(every_stage, 2)[0]
    assert all(torch.equal(one.weights, plain.weights) for one in sharded)
    held = [one.held.nbytes for one in (plain, *sharded)]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4


@pytest.mark.parametrize("stage", range(4))
def test_a_metered_step_of_one_of_many_imagined_ranks_begins_with_what_its_stage_holds(stage):
    model = Transformer(layers=3, width=64, heads=4, vocabulary=256, context=32)
    units, root = unit_sizes(model)
    with imagine("H100-80GB"):
        step = metered_step(model, 2, 32, precision="mixed", implementation="fused", segments=3, ranks=7, stage=stage)
    found = step.bytes_by_category(0)
    buckets = [*units, root] if stage == 3 else [sum([*units, root], [])]
    formula = rank_bytes(buckets, 7, stage, weight_bytes=2, state_bytes=12, counter_bytes=4)
    assert (found["parameter"], found["optimizer_state"]) == (formula.parameters, formula.optimizer_states)


def test_fsdp2_is_compared_on_the_cpu_where_ours_is_also_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))  # where FSDP2 goes by itself
    with imagined_ranks(2):
        model, _ = measures.theirs(small(), 3)
    assert {parameter.device_mesh.device_type for parameter in model.parameters()} == {"cpu"}


def test_the_benchmarks_rows_of_launches_say_that_all_went_well():
    rows = {name: figure for name, figure, _ in measures.launches("cpu", 1)}
    assert [figure for name, figure in rows.items() if name.startswith("…")] == ["2 of 2", "3 of 3"]
