"""How good the library is, in figures: `python -m memlab.benchmark`.

Every time here is a ratio, or comes with one: the runs that are compared take turns in one process, and min, median and
max of the rounds are printed. Bytes are exact. `--quick` runs few rounds, to see that everything works.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from memlab.book.allocator import allocated_peak
from memlab.book.tables import Table
from memlab.book.workloads import GPT, LSTM, MLP, ConvNet, text_batch
from memlab.memory_timeline import Meter
from memlab.units import format_bytes

ROUNDS, QUICK = 25, 3


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes, in seconds; on CUDA until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, all of them once a round, so that they share the machine's good and bad moments."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """min – median – max."""
    return " – ".join(form.format(value) for value in (min(values), statistics.median(values), max(values)))


def trainer(model, batch, **options):
    """A model with AdamW and a function that does one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step():
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def metered(model, optimizer, batch, step, **options) -> Callable[[], Meter]:
    """The same step under a meter."""

    def run():
        with Meter(model, optimizer, inputs=batch, **options) as meter:
            step()
        return meter

    return run


def meter_time(device: str, rounds: int) -> list[tuple]:
    """Meter on against off, on a GPT's whole step, one thread."""
    batch = tuple(tensor.to(device) for tensor in text_batch(8, 128))
    model, optimizer, step = trainer(GPT(layers=4, width=256, context=128).to(device), batch)
    times = interleaved({"off": step, "on": metered(model, optimizer, batch, step)}, rounds)
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    low = min(times["on"]) / min(times["off"])
    return [
        ("meter on / off, GPT 4 × 256, T = 128, B = 8", f"{spread(ratios)}× (fastest / fastest {low:.2f}×)", "≤ 1.10×")
    ]


def meter_cost_per_op(device: str, rounds: int) -> list[tuple]:
    """What the meter adds to one op, beside an empty mode and MemTracker, where kernels take hardly any time."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    class Empty(TorchDispatchMode):
        ops = 0

        @classmethod
        def _should_skip_dynamo(cls):
            return False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Empty.ops += 1
            return func(*args, **(kwargs or {}))

    batch = tuple(tensor.to(device) for tensor in text_batch(1, 8))
    model, optimizer, step = trainer(GPT(layers=4, width=16, heads=2, context=8).to(device), batch)

    def tracker():
        found = MemTracker()
        found.track_external(model, optimizer, *batch)
        return found

    contexts = {
        "off": contextlib.nullcontext,
        "empty": Empty,
        "meter": lambda: Meter(model, optimizer, inputs=batch),
        "tracker": tracker,
    }
    step()
    inside: dict[str, list[float]] = {name: [] for name in contexts}
    around: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(rounds):
        for name, context in contexts.items():
            Empty.ops = 0 if name == "empty" else Empty.ops
            start = time.perf_counter()
            with context():
                inside[name].append(seconds(step))
            around[name].append(time.perf_counter() - start - inside[name][-1])
    cost = {
        name: [(on - off) / Empty.ops * 1e6 for on, off in zip(inside[name], inside["off"], strict=True)]
        for name in contexts
    }
    ratios = [a / b for a, b in zip(cost["tracker"], cost["meter"], strict=True)]
    return [
        (f"meter, µs an op ({Empty.ops} ops of a tiny GPT's step)", spread(cost["meter"], "{:.1f}"), "≤ 15"),
        ("of which an empty dispatch mode, µs an op", spread(cost["empty"], "{:.1f}"), ""),
        ("MemTracker, µs an op", spread(cost["tracker"], "{:.1f}"), ""),
        ("MemTracker / meter", spread(ratios, "{:.1f}") + "×", "≥ 5×"),
        ("putting the meter on and off, ms", spread([1e3 * s for s in around["meter"]], "{:.1f}"), ""),
    ]


def workloads() -> dict[str, Callable[[], tuple]]:
    """name → a function that makes (model, batch), the same on every call."""
    from torch.utils.checkpoint import checkpoint

    class CheckpointedGPT(GPT):
        def forward(self, x, y):
            for block in self.blocks:
                block.forward = lambda stream, block=block: checkpoint(
                    type(block).forward, block, stream, use_reentrant=False
                )
            return super().forward(x, y)

    images = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    text = text_batch(4, 64)
    makers = {
        "MLP": lambda: (MLP(), (torch.randn(64, 256), torch.randint(16, (64,)))),
        "GPT": lambda: (GPT(layers=2, width=64), text),
        "GPT, checkpointed": lambda: (CheckpointedGPT(layers=2, width=64), text),
        "ConvNet": lambda: (ConvNet(), images),
        "LSTM": lambda: (LSTM(), text),
    }
    try:
        import transformers
    except ImportError:
        return makers
    sizes = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {"hidden_size": 64, "num_hidden_layers": 2}
    configs = {
        "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, **sizes)),
        "Llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(
                intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, **small, **sizes
            ),
        ),
        "T5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(
                d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, **sizes
            ),
        ),
        "Mamba": (transformers.MambaForCausalLM, transformers.MambaConfig(state_size=8, **small, **sizes)),
    }

    class Loss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return self.model(input_ids=x, labels=y).loss

    for name, (kind, config) in configs.items():
        makers[f"Transformers' {name}"] = lambda kind=kind, config=config: (Loss(kind(config)), text)
    return makers


def meter_exactness(device: str, rounds: int) -> list[tuple]:
    """Total peak with workspace=True, against the allocator's peak in a run without a meter."""
    rows = []
    for name, make in workloads().items():

        def fresh(make=make):
            torch.manual_seed(0)
            model, batch = make()
            model, batch = model.to(device), tuple(tensor.to(device) for tensor in batch)
            model, optimizer, step = trainer(model, batch, foreach=True)
            return model, optimizer, batch, step

        fresh()[3]()
        model, optimizer, batch, step = fresh()
        existing = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *batch))
        witness = existing + allocated_peak(step, device)
        timeline = metered(*fresh(), workspace=True)().timeline
        apart = timeline.peak_bytes - witness
        rows.append(
            (f"peak, {name}", f"{timeline.peak_bytes:,} B, {apart:+,} B from an unmetered run", "≤ 64 B or 0.1 %")
        )
    return rows


def import_time(device: str, rounds: int) -> list[tuple]:
    """What `import memlab` adds to `import torch`, in fresh processes."""
    code = "import time, torch; start = time.perf_counter(); import memlab{}; print(time.perf_counter() - start)"
    rows = []
    for name in ("", ".memory_timeline"):
        runs = [subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True)
                for _ in range(max(3, rounds // 4))]  # fmt: skip
        times = [float(run.stdout) for run in runs]
        rows.append((f"import memlab{name} beyond import torch, s", spread(times, "{:.3f}"), "≤ 0.3"))
    return rows


def pictures_that_move(device: str, rounds: int) -> list[tuple]:
    """In a real browser: from a slider's key to new pixels, from the pointer to the explorer's table; opening it."""
    from memlab.book.browser import chromium
    from memlab.book.responsiveness import response_times

    if chromium() is None or any(importlib.util.find_spec(name) is None for name in ("playwright", "jupyterlab")):
        return [("pictures that move", "not measured: needs Chromium and the test extra", "")]
    batch = tuple(tensor.to(device) for tensor in text_batch(1, 8))
    model, optimizer, step = trainer(GPT(layers=24, width=16, heads=2, context=8).to(device), batch, foreach=True)
    steps = [metered(model, optimizer, batch, step)().timeline for _ in range(12)]
    many = metered(model, optimizer, batch, lambda: [step() for _ in range(8)])().timeline
    times = response_times(steps, many, rounds)
    return [
        ("slider to new pixels, half a second apart, ms", spread(times["slide"], "{:.0f}"), "≤ 150"),
        (f"explorer hover, {len(many):,} events, ms", spread(times["hover"], "{:.0f}"), "≤ 50"),
        (f"opening explore, {len(many):,} events, s", spread([ms / 1e3 for ms in times["open"]]), "≤ 1"),
    ]


IMAGINED_STEP = """
import resource, time, torch
torch.set_num_threads(1)
from memlab.book.steps import build
from memlab.memory_arithmetic import preset, training_step
from memlab.memory_timeline import Meter, imagine

start, llama = time.perf_counter(), preset("Llama-2 70B")
with imagine("H100-80GB"):
    torch.set_default_dtype(torch.bfloat16)
    model = build(llama)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randint(llama.vocabulary, (1, 4096)), torch.randint(llama.vocabulary, (1, 4096))
    built = time.perf_counter()
    with Meter(model, optimizer, inputs=(x, y)) as meter:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
peak = meter.timeline.peak_bytes
stop = time.perf_counter()
expected = training_step(llama, 1, 4096, precision="bf16", implementation="fused", first_step=True).peak_bytes
print(built - start, stop - built, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, peak, peak - expected)
"""


def imagined_step(device: str, rounds: int) -> list[tuple]:
    """A whole step of Llama-2 70B (80 layers, 4,096 tokens, BF16, fused AdamW), imagined and metered: one a process."""
    runs = [subprocess.run([sys.executable, "-c", IMAGINED_STEP], capture_output=True, text=True, check=True)
            for _ in range(max(1, rounds // 5))]  # fmt: skip
    built, seconds, host, peaks, apart = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    name = "imagined Llama-2 70B"
    return [
        (f"{name}: the step and its timeline, s", spread(seconds), "≤ 10"),
        (f"{name}: building it, s", spread(built), ""),
        (f"{name}: host memory of the process", format_bytes(int(max(host))), "≤ 2 GiB"),
        (f"{name}: peak", f"{int(peaks[0]):,} B, {int(apart[0]):+,} B from the arithmetic", ""),
    ]


MEASURES = ("meter_time", "meter_cost_per_op", "meter_exactness", "import_time", "imagined_step", "pictures_that_move")


def measured(
    device: str, rounds: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[str, str, str]]:
    """Every measure on a device, "cpu" or "cuda", in one thread: its name, its figure, and what it must reach.

    `progress` is told how many of how many parts have ended.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's notes of itself
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for done, name in enumerate(MEASURES):
            progress(done, len(MEASURES))
            rows += globals()[name](device, rounds)
    finally:
        torch.set_num_threads(threads)
    return rows


def main() -> None:
    """Print every measure with its figure and what it must reach."""
    parser = argparse.ArgumentParser(prog="python -m memlab.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works, not to quote")
    rounds = QUICK if parser.parse_args().quick else ROUNDS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"torch {torch.__version__}, {name}, {rounds} rounds; min – median – max\n")
    print(Table(["measure", "figure", "must reach"], measured(device, rounds)))


if __name__ == "__main__":
    main()
