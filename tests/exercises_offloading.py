"""Answers to the exercises of chapter 09: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import ANYTHING, cell


def hand(transfer: object, waits: object, free: object, inputs: object) -> str:
    """The four numbers of exercise 1."""
    return f"transfer_ms, waits_ms, free_width, inputs_width = {transfer}, {waits}, {free}, {inputs}"


def parts(weight: object, twice: object, held: object) -> str:
    """The three numbers of exercise 2."""
    return f"weight_bytes, twice_bytes, held_bytes = {weight}, {twice}, {held}"


def noted(value: str) -> str:
    """note that returns an expression."""
    return f"def note(hidden):\n    return {value}"


def filed(**changes: str) -> str:
    """swap_to, right but for the changes."""
    terms = {
        "NAME": 'f"{uuid.uuid4()}.pt"',
        "FOLDER": "folder",
        "CLEAN": "weakref.finalize(self, self.path.unlink, missing_ok=True)",
        "WRITE": "torch.save(tensor.detach().clone(), self.path)",
        "STAYS": "{t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}",
        "KEEP": "tensor.untyped_storage().data_ptr() in stays",
        "READ": "torch.load(kept.path)",
        "END": "saved_tensors_hooks(pack, unpack)",
    }
    return cell(
        """
        def swap_to(folder, model):
            class Handle:
                def __init__(self, tensor):
                    self.path = Path(FOLDER, NAME)
                    CLEAN
                    WRITE

            stays = STAYS

            def pack(tensor):
                return tensor if KEEP else Handle(tensor)

            def unpack(kept):
                return READ if isinstance(kept, Handle) else kept

            return END
        """,
        **terms | changes,
    )


def once(**changes: str) -> str:
    """swap_once, right but for the changes."""
    terms = {
        "SENT": "weakref.WeakKeyDictionary()",
        "KEY": "storage",
        "VERSION": "tensor._version",
        "SEND": "host.send(tensor.as_strided((count,), (1,), 0))",
        "HANDLE": "(parcels[version], tensor.shape, tensor.stride(), tensor.storage_offset())",
        "FETCH": "host.fetch(handle[0])",
        "VIEW": ".as_strided(*handle[1:])",
        "END": "saved_tensors_hooks(pack, unpack)",
    }
    return cell(
        """
        def swap_once(host):
            sent = SENT

            def pack(tensor):
                storage = tensor.untyped_storage()
                version = VERSION
                count = storage.nbytes() // tensor.itemsize
                parcels = sent.setdefault(KEY, {})
                if version not in parcels:
                    parcels[version] = SEND
                return HANDLE

            def unpack(handle):
                return FETCHVIEW

            return END
        """,
        **terms | changes,
    )


def whom(**changes: str) -> str:
    """whom_to_send, right but for the changes."""
    terms = {
        "COUNTS": "range(len(tensors) + 1)",
        "FITS": "held(chosen) <= budget_bytes",
        "WORTH": "tensors[i][0] * (tensors[i][2] - tensors[i][1])",
        "CHOICE": "max",
        "END": "list(best)",
    }
    return cell(
        """
        def whom_to_send(tensors, budget_bytes):
            def held(chosen):
                return sum(tensors[i][0] for i in chosen)

            def spared(chosen):
                return sum(WORTH for i in chosen)

            every = [c for n in COUNTS for c in itertools.combinations(range(len(tensors)), n)]
            best = CHOICE((chosen for chosen in every if FITS), key=spared)
            return END
        """,
        **terms | changes,
    )


def first(order: str) -> str:
    """whom_to_send that takes one tensor after the other, in an order, each that still fits."""
    return cell(
        """
        def whom_to_send(tensors, budget_bytes):
            chosen = []
            for i in sorted(range(len(tensors)), key=lambda i: ORDER):
                if tensors[i][0] <= budget_bytes:
                    chosen.append(i)
                    budget_bytes -= tensors[i][0]
            return chosen
        """,
        ORDER=order,
    )


def back(**changes: str) -> str:
    """when_to_call, right but for the changes."""
    terms = {
        "ORDER": "(tensors[i][2], i)",
        "REVERSE": "True",
        "BEGIN": "min(tensors[i][2], free_until) - tensors[i][0] / bytes_per_ms",
        "NOTE": "begins[i] = free_until",
        "END": "begins",
    }
    return cell(
        """
        def when_to_call(tensors, bytes_per_ms):
            begins, free_until = [0.0] * len(tensors), float("inf")
            for i in sorted(range(len(tensors)), key=lambda i: ORDER, reverse=REVERSE):
                free_until = BEGIN
                NOTE
            return END
        """,
        **terms | changes,
    )


def home(**changes: str) -> str:
    """HostAdam, right but for the changes."""
    terms = {
        "WHERE": "host()",
        "MASTER": 'p.detach().to("cpu", torch.float32, copy=True)',
        "ADAM": "torch.optim.AdamW(self.masters, lr=lr)",
        "THERE": "self.host()",
        "SKIP": "p.grad is None",
        "DOWN": 'p.grad.to("cpu", copy=True).float()',
        "GONE": "p.grad = None",
        "BEFORE": "pass",
        "AFTER": "self.adam.zero_grad()",
        "UP": "p.copy_(master)",
        "THEN": "pass",
    }
    return cell(
        """
        class HostAdam:
            def __init__(self, params, lr, host):
                self.params, self.host = list(params), host
                with WHERE:
                    self.masters = [MASTER for p in self.params]
                self.adam = ADAM

            @torch.no_grad()
            def step(self):
                BEFORE
                with THERE:
                    for p, master in zip(self.params, self.masters):
                        if SKIP:
                            continue
                        master.grad = DOWN
                        GONE
                    self.adam.step()
                    AFTER
                for p, master in zip(self.params, self.masters):
                    UP
                THEN
        """,
        **terms | changes,
    )


TRANSFER, WAITS, FREE, INPUTS = 23.77, 14.61, 10_625, 625
WEIGHT, TWICE, HELD = 180_224, 40_960, 123_520

WRONG: dict[str, dict[str, str]] = {
    "free-answer": {
        "nothing": hand(0, 0, 0, 0),
        "seconds": hand(TRANSFER / 1000, WAITS / 1000, FREE, INPUTS),
        "microseconds": hand(TRANSFER * 1000, WAITS * 1000, FREE, INPUTS),
        "a link of bits": hand(8 * TRANSFER, WAITS, FREE, INPUTS),
        "GiB": hand(22.135, 12.97, FREE, INPUTS),
        "half of it": hand(TRANSFER / 2, WAITS, FREE, INPUTS),
        "twice as much": hand(2 * TRANSFER, WAITS, FREE, INPUTS),
        "the arithmetic": hand(9.163, WAITS, FREE, INPUTS),
        "one token": hand(0.0029, WAITS, FREE, INPUTS),
        "waits for all": hand(TRANSFER, TRANSFER, FREE, INPUTS),
        "waits for the arithmetic": hand(TRANSFER, 9.163, FREE, INPUTS),
        "one after the other": hand(TRANSFER, 32.93, FREE, INPUTS),
        "the other way round": hand(TRANSFER, -WAITS, FREE, INPUTS),
        "beside backward": hand(TRANSFER, 5.44, FREE, INPUTS),
        "waits in seconds": hand(TRANSFER, WAITS / 1000, FREE, INPUTS),
        "backward's width": hand(TRANSFER, WAITS, FREE // 2, INPUTS),
        "twice the width": hand(TRANSFER, WAITS, 2 * FREE, 2 * INPUTS),
        "a width less": hand(TRANSFER, WAITS, FREE - 1, INPUTS),
        "a width more": hand(TRANSFER, WAITS, FREE + 1, INPUTS),
        "the ridge": hand(TRANSFER, WAITS, 7_500, INPUTS),
        "without the bytes": hand(TRANSFER, WAITS, 312, INPUTS),
        "a float": hand(TRANSFER, WAITS, float(FREE), INPUTS),
        "one width for both": hand(TRANSFER, WAITS, FREE, FREE),
        "inputs first": hand(TRANSFER, WAITS, INPUTS, FREE),
        "half of the inputs' width": hand(TRANSFER, WAITS, FREE, 312),
        "texts": hand('"23.8 ms"', '"14.6 ms"', '"10,625"', '"625"'),
        "equal to everything": ANYTHING + hand("Anything()", "Anything()", "Anything()", "Anything()"),
    },
    "nothing-answer": {
        "nothing": parts(0, 0, 0),
        "the blocks' weights": parts(WEIGHT - 32_768, TWICE, HELD),
        "the head's weight": parts(32_768, TWICE, HELD),
        "the embedding as well": parts(WEIGHT + 32_768, TWICE, HELD),
        "biases as well": parts(WEIGHT + 4_608, TWICE, HELD),
        "elements": parts(WEIGHT // 4, TWICE // 4, HELD // 4),
        "twice as much": parts(2 * WEIGHT, 2 * TWICE, 2 * HELD),
        "both copies": parts(WEIGHT, 2 * TWICE, HELD),
        "the head's input": parts(WEIGHT, TWICE + 10_240, HELD),
        "one block's": parts(WEIGHT, TWICE // 4, HELD),
        "hidden twice": parts(WEIGHT, TWICE + 122_880, HELD),
        "one hidden": parts(WEIGHT, 30_720, HELD),
        "without the tokens": parts(WEIGHT, TWICE, HELD - 640),
        "the tokens alone": parts(WEIGHT, TWICE, 640),
        "tokens of 4 bytes": parts(WEIGHT, TWICE, HELD - 320),
        "the views": parts(WEIGHT, TWICE, 6_144),
        "the views and the tokens": parts(WEIGHT, TWICE, 6_784),
        "the views as well": parts(WEIGHT, TWICE, HELD + 6_144),
        "the weights as well": parts(WEIGHT, TWICE, HELD + WEIGHT),
        "the loss as well": parts(WEIGHT, TWICE, HELD + 4),
        "all together": parts(WEIGHT, TWICE, WEIGHT + TWICE + HELD),
        "in KiB": parts(176, 40, 120.625),
        "floats": parts(float(WEIGHT), float(TWICE), float(HELD)),
        "texts": parts('"180,224 B"', '"40,960 B"', '"123,520 B"'),
        "equal to everything": ANYTHING + parts("Anything()", "Anything()", "Anything()"),
    },
    "note-answer": {
        "the view": noted("hidden[:, 0].detach()"),
        "with its graph": noted("hidden[:, 0].clone()"),
        "the view of a copy": noted("hidden.detach().clone()[:, 0]"),
        "contiguous": noted("hidden[:, 0].detach().contiguous()"),
        "reshaped": noted("hidden[:, 0].detach().reshape(len(hidden), -1)"),
        "to the CPU": noted('hidden[:, 0].detach().to("cpu")'),
        "by data": noted("hidden.data[:, 0]"),
        "all tokens": noted("hidden.detach().clone()"),
        "the first text": noted("hidden[0].detach().clone()"),
        "the last token": noted("hidden[:, -1].detach().clone()"),
        "the mean": noted("hidden.detach().mean(1)"),
        "keeps a dimension": noted("hidden[:, :1].detach().clone()"),
        "rounded": noted("hidden[:, 0].detach().bfloat16()"),
        "wider": noted("hidden[:, 0].detach().double()"),
        "a list": noted("hidden[:, 0].tolist()"),
        "an array": noted("hidden[:, 0].detach().numpy().copy()"),
        "zeros what it has": noted("(hidden[:, 0].detach().clone(), hidden.detach().zero_())[0]"),
        "keeps hidden as well": "hoard = []\n"
        + noted("(hidden[:, 0].detach().clone(), hoard.append(hidden.detach()))[0]"),
        "no return": "def note(hidden):\n    hidden[:, 0].detach().clone()",
        "a syntax error": "def note(hidden:\n    return 0",
        "an empty cell": "",
        "unsolved": "def note(hidden):\n    raise NotImplementedError",
    },
    "files-answer": {
        "nothing leaves": filed(END="saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)"),
        "torch's, which stays on a CPU": "def swap_to(folder, model):\n    return torch.autograd.graph.save_on_cpu()",
        "everything leaves": filed(STAYS="set()"),
        "buffers leave": filed(STAYS="{t.untyped_storage().data_ptr() for t in model.parameters()}"),
        "transposed weights leave": filed(KEEP="isinstance(tensor, nn.Parameter) or tensor is model.scale"),
        "whole storages": filed(WRITE="torch.save(tensor.detach(), self.path)"),
        "one name": filed(NAME='"saved.pt"'),
        "names by address": filed(NAME='f"{tensor.data_ptr()}.pt"'),
        "names by shape": filed(NAME='f"{tuple(tensor.shape)}.pt"'),
        "numbers that begin again": filed(
            NAME='f"{next(names)}.pt"', STAYS="STAYS\n    names = itertools.count()"
        ).replace("STAYS", "{t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}"),
        "never removed": filed(CLEAN="pass"),
        "removed when read": filed(CLEAN="pass", READ="(torch.load(kept.path), kept.path.unlink())[0]"),
        "emptied, not removed": filed(CLEAN='weakref.finalize(self, self.path.write_bytes, b"")'),
        "handles that somebody keeps": "handles = []\n" + filed(CLEAN="handles.append(self)"),
        "handles that somebody keeps, with a cleaner": "handles = []\n"
        + filed(CLEAN="handles.append(self); weakref.finalize(self, self.path.unlink, missing_ok=True)"),
        "files elsewhere": "import tempfile\n" + filed(FOLDER="tempfile.gettempdir()"),
        "in memory": "import io\n"
        + filed(
            CLEAN="self.bytes = io.BytesIO()",
            WRITE="torch.save(tensor.detach().clone(), self.bytes)",
            READ="(kept.bytes.seek(0), torch.load(kept.bytes))[1]",
        ),
        "in memory, beside files that nobody reads": "import io\n"
        + filed(
            CLEAN="self.bytes = io.BytesIO(); weakref.finalize(self, self.path.unlink, missing_ok=True)",
            WRITE="torch.save(tensor.detach().clone(), self.bytes); self.path.write_bytes(self.bytes.getvalue())",
            READ="(kept.bytes.seek(0), torch.load(kept.bytes))[1]",
        ),
        "an array, beside a file that nobody reads": filed(
            CLEAN="self.values = tensor.detach().view(torch.uint8).numpy().copy(), tensor.dtype",
            WRITE="self.path.write_bytes(self.values[0].tobytes()); weakref.finalize(self, self.path.unlink)",
            READ="torch.from_numpy(kept.values[0]).view(kept.values[1])",
        ),
        "a copy on the device as well": filed(CLEAN="self.copy = tensor.detach() + 0").replace(
            "self.copy", "weakref.finalize(self, self.path.unlink, missing_ok=True)\n            self.copy"
        ),
        "the tensor as well": filed(CLEAN="self.tensor = tensor").replace(
            "self.tensor", "weakref.finalize(self, self.path.unlink, missing_ok=True)\n            self.tensor"
        ),
        "large ones alone": filed(KEEP="tensor.nbytes < 16_000 or tensor.untyped_storage().data_ptr() in stays"),
        "read ones stay": filed(READ="kept.__dict__.setdefault('read', torch.load(kept.path))"),
        "rounded": filed(
            WRITE="torch.save(tensor.detach().bfloat16(), self.path)", READ="torch.load(kept.path).float()"
        ),
        "another shape": filed(READ="torch.load(kept.path).flatten()"),
        "hooks of their own accord": filed(END="(h := saved_tensors_hooks(pack, unpack), h.__enter__())[0]"),
        "no context": filed(END="pack, unpack"),
        "swallows errors": cell(
            """
            import contextlib

            @contextlib.contextmanager
            def swallowing(hooks):
                try:
                    with hooks:
                        yield
                except Exception:
                    pass


            RIGHT
            """
        ).replace("RIGHT", filed(END="swallowing(saved_tensors_hooks(pack, unpack))")),
        "no return": filed(END="None"),
        "memory-hungry": filed(CLEAN="hoard = torch.ones(2**30)"),
        "an endless loop": filed(CLEAN="while True:\n                pass"),
        "unsolved": "def swap_to(folder, model):\n    raise NotImplementedError  # your answer",
    },
    "once-answer": {
        "nothing leaves": once(END="saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)"),
        "by address": "swap_once = by_address",
        "each by itself": "def swap_once(host):\n    return saved_tensors_hooks(host.send, host.fetch)",
        "each by itself, whole": once(SENT="{}", KEY="object()"),
        "whole storages, by address": once(SENT="{}", KEY="storage.data_ptr()"),
        "by the storage's id": once(SENT="{}", KEY="id(storage)"),
        "by address and size": once(SENT="{}", KEY="(storage.data_ptr(), storage.nbytes())"),
        "by the tensor's address": once(SENT="{}", KEY="tensor.data_ptr()"),
        "a strong key": once(SENT="{}"),
        "versions do not count": once(VERSION="0"),
        "the first version alone": once(VERSION="min(parcels_of(tensor), default=tensor._version)").replace(
            "def pack", "def parcels_of(tensor):\n        return sent.get(tensor.untyped_storage(), {})\n\n    def pack"
        ),
        "no strides": once(HANDLE="(parcels[version], tensor.shape, tensor.storage_offset())").replace(
            ".as_strided(*handle[1:])", "[handle[2] : handle[2] + handle[1].numel()].view(handle[1])"
        ),
        "no offset": once(HANDLE="(parcels[version], tensor.shape, tensor.stride())"),
        "the view that comes first": once(SEND="host.send(tensor)"),
        "each view": once(
            SENT="weakref.WeakKeyDictionary()",
            VERSION="(tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset())",
        ),
        "a copy is sent, and stays": "copies = []\n"
        + once(SEND="(copies.append(tensor + 0), host.send(tensor.as_strided((count,), (1,), 0)))[1]"),
        "the handle has the tensor": once(HANDLE="(parcels[version], *tensor_view(tensor), tensor)")
        .replace("handle[1:]", "handle[1:4]")
        .replace(
            "def swap_once",
            "def tensor_view(t):\n    return t.shape, t.stride(), t.storage_offset()\n\n\ndef swap_once",
        ),
        "what was fetched stays": once(SENT="weakref.WeakKeyDictionary()", FETCH="fetched(handle[0])").replace(
            "def pack",
            "here = {}\n\n    def fetched(it):\n        return here.setdefault(id(it), host.fetch(it))\n\n    def pack",
        ),
        "a dictionary for good": "everything = {}\n"
        + once(SENT="everything", KEY="(storage.data_ptr(), next(numbers))").replace(
            "def swap_once", "numbers = itertools.count()\n\n\ndef swap_once"
        ),
        "parcels for good": "hoard = []\n"
        + once(SEND="(hoard.append(host.send(tensor.as_strided((count,), (1,), 0))), hoard[-1])[1]"),
        "a finalizer that has the dictionary": cell(
            """
            def swap_once(host):
                sent = {}

                def pack(tensor):
                    storage = tensor.untyped_storage()
                    if id(storage) not in sent:
                        sent[id(storage)] = {}
                        weakref.finalize(storage, sent.pop, id(storage))
                    parcels = sent[id(storage)]
                    if tensor._version not in parcels:
                        parcels[tensor._version] = host.send(torch.tensor([], dtype=tensor.dtype).set_(storage))
                    view = tensor.size(), tensor.stride(), tensor.storage_offset()
                    return lambda: host_fetch(parcels_of, view)

                return saved_tensors_hooks(pack, lambda handle: handle())
            """
        ).replace(
            "return lambda: host_fetch(parcels_of, view)",
            "parcel = parcels[tensor._version]\n        return lambda: host.fetch(parcel).as_strided(*view)",
        ),
        "a hook left on": once(END="(h := saved_tensors_hooks(pack, unpack), h.__enter__())[0]"),
        "no context": once(END="pack, unpack"),
        "no return": once(END="None"),
        "parcels for tensors": once(FETCH="handle[0]"),
        "memory-hungry": once(SEND="host.send(torch.ones(2**30))"),
        "an endless loop": once(SEND="host.send(tensor)").replace(
            "parcels[version] =", "while True: parcels[version] ="
        ),
        "unsolved": "def swap_once(host):\n    raise NotImplementedError",
    },
    "whom-answer": {
        "the largest area first": first("-tensors[i][0] * (tensors[i][2] - tensors[i][1])"),
        "the longest away first": first("tensors[i][1] - tensors[i][2]"),
        "the largest first": first("-tensors[i][0]"),
        "the smallest first": first("tensors[i][0]"),
        "whoever comes first": first("i"),
        "the oldest first": first("tensors[i][1]"),
        "the last wanted first": first("-tensors[i][2]"),
        "the most bytes": whom(WORTH="tensors[i][0]"),
        "the most time": whom(WORTH="tensors[i][2] - tensors[i][1]"),
        "the most tensors": whom(WORTH="1"),
        "the least": whom(CHOICE="min"),
        "everyone": whom(FITS="True"),
        "below the budget": whom(FITS="held(chosen) < budget_bytes or not chosen"),
        "half of the budget": whom(FITS="2 * held(chosen) <= budget_bytes"),
        "pairs at most": whom(COUNTS="range(3)"),
        "never all": whom(COUNTS="range(max(1, len(tensors)))"),
        "from the moment of forward": whom(WORTH="tensors[i][0] * tensors[i][2]"),
        "those that stay": whom(END="[i for i in range(len(tensors)) if i not in best]"),
        "tensors, not indices": whom(END="[tensors[i] for i in best]"),
        "a number": whom(END="spared(best)"),
        "counts from one": whom(END="[i + 1 for i in best]"),
        "twice each": whom(END="list(best) * 2"),
        "empties the list": whom(END="(list(best), tensors.clear())[0]"),
        "tensors of torch": whom(END="torch.tensor(best).tolist()"),
        "no return": whom(END="None"),
        "an endless loop": "def whom_to_send(tensors, budget_bytes):\n    while True:\n        pass",
        "unsolved": "def whom_to_send(tensors, budget_bytes):\n    raise NotImplementedError",
    },
    "back-answer": {
        "all at once": back(BEGIN="0.0"),
        "when they are wanted": back(BEGIN="tensors[i][2]"),
        "as if alone": back(BEGIN="tensors[i][2] - tensors[i][0] / bytes_per_ms"),
        "one after the other, from 0": back(
            BEGIN="(free_until if free_until < 1e30 else 0.0)", REVERSE="False"
        ).replace("begins[i] = free_until", "begins[i] = free_until; free_until += tensors[i][0] / bytes_per_ms"),
        "in the list's order": back(ORDER="i"),
        "in the opposite order": back(ORDER="(-tensors[i][2], i)"),
        "the list's last first": back(ORDER="(tensors[i][2], -i)"),
        "by when they were saved": back(ORDER="(tensors[i][1], i)"),
        "the largest last": back(ORDER="tensors[i][0]"),
        "arrivals": back(NOTE="begins[i] = free_until + tensors[i][0] / bytes_per_ms"),
        "without the link": back(BEGIN="min(tensors[i][2], free_until - tensors[i][0] / bytes_per_ms)"),
        "a link without pauses": back(
            BEGIN="(tensors[i][2] if free_until > 1e30 else free_until) - tensors[i][0] / bytes_per_ms"
        ),
        "never before 0": back(NOTE="begins[i] = free_until = max(0.0, free_until)"),
        "half of the time": back(BEGIN="min(tensors[i][2], free_until) - tensors[i][0] / bytes_per_ms / 2"),
        "twice the time": back(BEGIN="min(tensors[i][2], free_until) - 2 * tensors[i][0] / bytes_per_ms"),
        "upside down": back(BEGIN="min(tensors[i][2], free_until) - bytes_per_ms / tensors[i][0]"),
        "times, not over": back(BEGIN="min(tensors[i][2], free_until) - bytes_per_ms * tensors[i][0]"),
        "whole milliseconds": back(BEGIN="min(tensors[i][2], free_until) - tensors[i][0] // bytes_per_ms"),
        "seconds": back(END="[begin / 1000 for begin in begins]"),
        "a millisecond early": back(END="[begin - 1 for begin in begins]"),
        "sorted": back(END="sorted(begins)"),
        "pairs": back(END="list(enumerate(begins))"),
        "the first alone": back(END="begins[:1]"),
        "tensors of torch": back(END="torch.tensor(begins).tolist()"),
        "sorts the list": back(END="(tensors.sort(), begins)[1]"),
        "no return": back(END="None"),
        "unsolved": "def when_to_call(tensors, bytes_per_ms):\n    raise NotImplementedError",
    },
    "home-answer": {
        "on the device": home(WHERE="nullcontext()", THERE="nullcontext()"),
        "masters on the device": home(WHERE="nullcontext()"),
        "moments on the device": home(THERE="nullcontext()"),
        "no masters": home(MASTER="p.detach()", DOWN="p.grad"),
        "masters of BF16": home(MASTER='p.detach().to("cpu", copy=True)', DOWN='p.grad.to("cpu", copy=True)'),
        "masters read back": home(BEFORE="[m.copy_(p) for p, m in zip(self.params, self.masters)]"),
        "widened on the device": home(THERE="nullcontext()", DOWN="p.grad.float()").replace(
            "self.adam.step()\n", "pass\n            with self.host():\n                self.adam.step()\n"
        ),
        "widened on the device, then down": home(
            BEFORE="wide = {p: p.grad.float() for p in self.params if p.grad is not None}",
            DOWN='wide.pop(p).to("cpu", copy=True)',
        ),
        "weights go up in FP32": home(UP="p.copy_(torch.empty_like(p, dtype=torch.float32).copy_(master))"),
        "gradients stay": home(GONE="pass"),
        "gradients are zeroed": home(GONE="p.grad.zero_()"),
        "the masters' gradients stay": home(AFTER="pass"),
        "nothing goes up": home(UP="pass"),
        "new parameters": home(UP="p.data = master.clone()"),
        "data of the masters": home(UP="p.data = master.bfloat16()"),
        "SGD": home(ADAM="torch.optim.SGD(self.masters, lr=lr)"),
        "ten times as fast": home(ADAM="torch.optim.AdamW(self.masters, lr=10 * lr)"),
        "as fast as it likes": home(ADAM="torch.optim.AdamW(self.masters)"),
        "Adam, without the decay": home(ADAM="torch.optim.Adam(self.masters, lr=lr)"),
        "half as fast": home(ADAM="torch.optim.AdamW(self.masters, lr=lr / 2)"),
        "three times as fast": home(ADAM="torch.optim.AdamW(self.masters, lr=3 * lr)"),
        "a new Adam each time": home(BEFORE="self.adam = torch.optim.AdamW(self.masters, lr=1e-3, betas=(0.5, 0.5))"),
        "amsgrad": home(ADAM="torch.optim.AdamW(self.masters, lr=lr, amsgrad=True)"),
        "steps twice": home(AFTER="self.adam.step(); self.adam.zero_grad()"),
        "opposite gradients": home(DOWN='-p.grad.to("cpu", copy=True).float()'),
        "one gradient for all": home(
            DOWN="torch.full_like(master, p.grad.float().mean().item() if p.grad.numel() < 40 else -1.0)"
        ),
        "steps whoever has none": home(
            SKIP="False", DOWN="(torch.zeros_like(p) if p.grad is None else p.grad).float() - 0.01"
        ),
        "history": home(THEN="self.__dict__.setdefault('old', []).extend(p.detach().clone() for p in self.params)"),
        "history on the host": home(
            AFTER="self.adam.zero_grad(); self.__dict__.setdefault('old', []).extend(m.clone() for m in self.masters)"
        ),
        "the library's": cell(
            """
            from memlab.mixed_precision import MasterWeights


            def HostAdam(params, lr, host):
                with host():
                    return MasterWeights(params, torch.optim.AdamW, lr=lr)
            """
        ),
        "the library's, wrapped": cell(
            """
            from memlab.mixed_precision import MasterWeights


            class HostAdam:
                def __init__(self, params, lr, host):
                    self.host = host
                    with host():
                        self.optimizer = MasterWeights(params, torch.optim.AdamW, lr=lr)

                def step(self):
                    with self.host():
                        self.optimizer.step()
                    self.optimizer.zero_grad()
            """
        ),
        "no step": "class HostAdam:\n    def __init__(self, params, lr, host):\n        pass",
        "a text": 'HostAdam = "torch.optim.AdamW"',
        "leaves autograd switched off": home(THEN="torch.set_grad_enabled(False)")
        .replace("    @torch.no_grad()\n", "")
        .replace(
            "        pass\n        with self.host", "        torch.set_grad_enabled(False)\n        with self.host"
        ),
        "memory-hungry": home(MASTER="torch.ones(2**30)"),
        "an endless loop": home(BEFORE="while True:\n            pass"),
        "unsolved": "class HostAdam:\n    def __init__(self, params, lr, host):\n        raise NotImplementedError",
    },
}

CRASHES = {"rounded", "another shape", "the view that comes first", "parcels for tensors"}
"""Mistakes that end with an error of Python's, torch's or the library's own, which is told; all others are told why."""

RIGHT: dict[str, dict[str, str]] = {
    "free-answer": {
        "rounded to three digits": hand(23.8, 14.6, FREE, INPUTS),
        "to the last": hand("8192 * 34 * 4096 / 48e6", "transfer_ms(0)", FREE, INPUTS).replace(
            "transfer_ms(0)", "14.605125768"
        ),
    },
    "note-answer": {
        "copied by hand": noted("torch.empty(len(hidden), hidden.shape[2]).copy_(hidden[:, 0].detach())"),
        "by index": noted("hidden.detach().index_select(1, torch.tensor([0])).squeeze(1)"),
        "a new tensor": noted("torch.tensor(hidden[:, 0].tolist())"),
    },
    "files-answer": {
        "removed by __del__": filed(CLEAN="pass").replace(
            "    stays = ", "        def __del__(self):\n            self.path.unlink(missing_ok=True)\n\n    stays = "
        ),
        "a global count": "numbers = itertools.count()\n" + filed(NAME='f"{next(numbers)}.pt"'),
        "a temporary file with a name": cell(
            """
            import tempfile


            def swap_to(folder, model):
                stays = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

                def pack(tensor):
                    if tensor.untyped_storage().data_ptr() in stays:
                        return tensor
                    file = tempfile.NamedTemporaryFile(dir=folder)
                    torch.save(tensor.clone(), file)
                    file.flush()
                    return file

                def unpack(kept):
                    if isinstance(kept, torch.Tensor):
                        return kept
                    kept.seek(0)
                    return torch.load(kept)

                return saved_tensors_hooks(pack, unpack)
            """
        ),
        "bytes and nothing else": filed(
            CLEAN="self.kind = tensor.dtype, tensor.shape; weakref.finalize(self, self.path.unlink)",
            WRITE="self.path.write_bytes(tensor.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes())",
            READ="torch.frombuffer(bytearray(kept.path.read_bytes()), dtype=kept.kind[0]).view(kept.kind[1])",
        ),
        "mapped when it is wanted": filed(READ="torch.load(kept.path, mmap=True)"),
        "a folder for each": "import tempfile\n"
        + filed(FOLDER="(made := tempfile.TemporaryDirectory(dir=folder)).name", CLEAN="self.folder = made"),
    },
    "once-answer": {
        "by a reference to the storage": cell(
            """
            def swap_once(host):
                sent = {}

                def pack(tensor):
                    storage = tensor.untyped_storage()
                    key = storage.data_ptr(), tensor._version
                    if key not in sent or sent[key][0]() is not storage:
                        whole = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                        sent[key] = weakref.ref(storage), host.send(whole)
                    return sent[key][1], tensor.size(), tensor.stride(), tensor.storage_offset()

                def unpack(handle):
                    parcel, size, stride, offset = handle
                    return host.fetch(parcel).as_strided(size, stride, offset)

                return saved_tensors_hooks(pack, unpack)
            """
        ),
    },
    "whom-answer": {
        "by bits": cell(
            """
            def whom_to_send(tensors, budget_bytes):
                best, most = [], 0
                for bits in range(2 ** len(tensors)):
                    chosen = [i for i in range(len(tensors)) if bits >> i & 1]
                    spared = sum(tensors[i][0] * (tensors[i][2] - tensors[i][1]) for i in chosen)
                    if sum(tensors[i][0] for i in chosen) <= budget_bytes and spared > most:
                        best, most = chosen, spared
                return best
            """
        ),
        "with or without the first": cell(
            """
            def whom_to_send(tensors, budget_bytes, start=0):
                if start == len(tensors):
                    return set()
                without = whom_to_send(tensors, budget_bytes, start + 1)
                if tensors[start][0] > budget_bytes:
                    return without
                with_it = {start} | whom_to_send(tensors, budget_bytes - tensors[start][0], start + 1)
                return max(without, with_it, key=lambda chosen: sum(area(*tensors[i]) for i in chosen))


            def area(nbytes, saved_ms, wanted_ms):
                return nbytes * (wanted_ms - saved_ms)
            """
        ),
    },
    "back-answer": {
        "a tuple": back(END="tuple(begins)"),
        "numpy's numbers": "import numpy\n\n\n" + back(END="list(numpy.array(begins))"),
        "a dictionary on the way": cell(
            """
            def when_to_call(tensors, bytes_per_ms):
                order = sorted(range(len(tensors)), key=lambda i: tensors[i][2])
                begin = {}
                for place in range(len(order) - 1, -1, -1):
                    nbytes, _, end = tensors[order[place]]
                    if place + 1 < len(order):
                        end = min(end, begin[order[place + 1]])
                    begin[order[place]] = end - nbytes / bytes_per_ms
                return [begin[i] for i in range(len(tensors))]
            """
        ),
    },
    "home-answer": {
        "in one go": home(DOWN='p.grad.to("cpu", torch.float32)'),
        "one at a time": home(
            ADAM="[torch.optim.AdamW([m], lr=lr) for m in self.masters]",
        )
        .replace("self.adam.step()", "[adam.step() for adam in self.adam]")
        .replace("self.adam.zero_grad()", "[adam.zero_grad() for adam in self.adam]"),
        "fused": home(ADAM="torch.optim.AdamW(self.masters, lr=lr, foreach=True)"),
        "rounded on the host": home(UP="p.copy_(rounded(master, self.host))").replace(
            "class HostAdam",
            "def rounded(master, host):\n    with host():\n        return master.bfloat16()\n\n\nclass HostAdam",
        ),
        "without the frozen ones": home(
            SKIP="not p.requires_grad or p.grad is None", AFTER="self.adam.zero_grad(set_to_none=True)"
        ),
        "as an optimizer of torch": cell(
            """
            class HostAdam(torch.optim.AdamW):
                def __init__(self, params, lr, host):
                    self.weights, self.host = list(params), host
                    with host():
                        super().__init__([p.detach().to("cpu", torch.float32, copy=True) for p in self.weights], lr=lr)

                @torch.no_grad()
                def step(self):
                    masters = self.param_groups[0]["params"]
                    with self.host():
                        for p, master in zip(self.weights, masters):
                            master.grad = None if p.grad is None else p.grad.to("cpu", copy=True).float()
                            p.grad = None
                        super().step()
                        self.zero_grad()
                    for p, master in zip(self.weights, masters):
                        p.copy_(master)
            """
        ),
    },
}
