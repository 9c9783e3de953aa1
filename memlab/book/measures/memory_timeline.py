"""Chapter 01: what the meter costs, and that no byte is missing."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

import torch

from memlab.book.allocator import allocated_peak
from memlab.book.measures.timing import compared, interleaved, printed_by, seconds, spread, trainer
from memlab.book.memory_tools_torch import tracked
from memlab.book.workloads import GPT, LSTM, MLP, ConvNet, text_batch
from memlab.memory_timeline import Meter, imagine


def metered(model, optimizer, batch, step, **options) -> Callable[[], Meter]:
    """The same step under a meter."""

    def run():
        with Meter(model, optimizer, inputs=batch, **options) as meter:
            step()
        return meter

    return run


def meter_time(device: str, rounds: int) -> list[tuple]:
    """Meter on against off, on a GPT's whole step, one thread; on a GPU on one of a GPU's size, too, in BF16."""
    sizes = [("GPT 4 × 256", 256, 4, 128, torch.float32)]
    if device == "cuda":
        sizes.append(("GPT 4 × 4,096 in BF16", 4096, 32, 1024, torch.bfloat16))
    rows = []
    for name, width, heads, tokens, dtype in sizes:
        batch = tuple(tensor.to(device) for tensor in text_batch(8, tokens))
        model = GPT(layers=4, width=width, heads=heads, context=tokens).to(device, dtype)
        model, optimizer, step = trainer(model, batch)
        times = interleaved({"off": step, "on": metered(model, optimizer, batch, step)}, rounds)
        rows.append((f"meter on / off, {name}, T = {tokens:,}, B = 8", compared(times, "on", "off"), "≤ 1.10×"))
    return rows


def meter_cost_per_op(device: str, rounds: int) -> list[tuple]:
    """What the meter adds to one op, beside an empty mode and MemTracker, where kernels take hardly any time."""
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

    contexts = {
        "off": contextlib.nullcontext,
        "empty": Empty,
        "meter": lambda: Meter(model, optimizer, inputs=batch),
        "tracker": lambda: tracked(model, optimizer, batch),
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
        held = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *batch)]
        existing = sum({one._cdata: one.nbytes() for one in held}.values())  # cuDNN lays an LSTM's weights into one
        del held
        witness = existing + allocated_peak(step, device)
        timeline = metered(*fresh(), workspace=True)().timeline
        apart = timeline.peak_bytes - witness
        rows.append((f"peak − an unmetered run's, {name}", f"{apart:+,} B of {witness:,} B", "within 64 B or 0.1 %"))
    return rows


def imagined_card(device: str, rounds: int) -> list[tuple]:
    """A training step on the imagined card beside the same on the real one: the peaks, and every event's bytes."""
    from memlab.book.hierarchy import card_at_hand  # which draws, too

    row, must = "peak on an imagined card − on the real one (storages)", "0 B, the same events"
    if device != "cuda":
        return [(row, "needs a GPU", must)]
    card = card_at_hand()
    if card is None:
        return [(row, "no such card is imagined", must)]
    rows = []
    for (name, make), cast in itertools.product(workloads().items(), (None, torch.bfloat16)):
        if name == "LSTM" or (cast and "checkpointed" in name):  # cuDNN's reserve, and what is cast again: not imagined
            continue

        def steps(bring, make=make, cast=cast):
            model, batch = make()
            batch = bring(batch)
            model, optimizer, step = trainer(Cast(model.cuda(), cast), batch)
            step()
            return metered(model, optimizer, batch, step)().timeline

        real = steps(lambda batch: tuple(tensor.cuda() for tensor in batch))
        with imagine(card) as gpu:
            imagined = steps(gpu.imagined)
        same = sorted(e.delta for e in imagined.events) == sorted(e.delta for e in real.events)
        apart = f"{imagined.peak_bytes - real.peak_bytes:+,} B of {real.peak_bytes:,} B"
        events = f"{'the same' if same else 'other'} events ({len(real.events):,})"
        rows.append((f"{row}, {name}{', autocast' * bool(cast)}", f"{apart}; {events}", must))
    return rows


class Cast(torch.nn.Module):
    """A model whose forward runs under a GPU's autocast to a dtype, or for None as it is."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *batch):
        with torch.autocast("cuda", self.dtype) if self.dtype else contextlib.nullcontext():
            return self.model(*batch)


def import_time(device: str, rounds: int) -> list[tuple]:
    """What `import memlab` adds to `import torch`, in fresh processes."""
    code = "import time, torch; start = time.perf_counter(); import memlab{}; print(time.perf_counter() - start)"
    rows = []
    for name in ("", ".memory_timeline"):
        times = [float(printed_by(code.format(name))) for _ in range(max(3, rounds // 4))]
        rows.append((f"import memlab{name} beyond import torch, s", spread(times, "{:.3f}"), "≤ 0.3"))
    return rows
