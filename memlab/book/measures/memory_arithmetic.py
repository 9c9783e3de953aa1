"""Chapter 02: a model that fits no machine, imagined."""

from __future__ import annotations

from memlab.book.measures.timing import printed_by, spread
from memlab.units import format_bytes

IMAGINED_STEP = """
import time, torch
torch.set_num_threads(1)
from memlab.book.steps import build
from memlab.memory_arithmetic import preset, training_step
from memlab.memory_monitoring import ProcessMemory
from memlab.memory_timeline import Meter, imagine

host = ProcessMemory()
host.peaks()  # the mark begins anew
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
print(built - start, stop - built, host.peaks().get("resident", host.read()["resident"]), peak, peak - expected)
"""
"""Not `ru_maxrss`: that begins with what its parent had resident when it started the process."""


def imagined_step(device: str, rounds: int) -> list[tuple]:
    """A whole step of Llama-2 70B (80 layers, 4,096 tokens, BF16, fused AdamW), imagined and metered: one a process."""
    runs = [printed_by(IMAGINED_STEP).split() for _ in range(max(1, rounds // 5))]
    built, seconds, host, peaks, apart = zip(*(map(float, run) for run in runs), strict=True)
    name = "imagined Llama-2 70B"
    return [
        (f"{name}: the step and its timeline, s", spread(seconds), "≤ 10"),
        (f"{name}: building it, s", spread(built), ""),
        (f"{name}: host memory of the process", format_bytes(int(max(host))), "≤ 2 GiB"),
        (f"{name}: peak", f"{int(peaks[0]):,} B, {int(apart[0]):+,} B from the arithmetic", ""),
    ]
