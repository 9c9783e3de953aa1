"""Answers to the exercises of chapter 09: wrong ones, each of which loses its points, and other right ones."""

from __future__ import annotations

from tests.exercises_memory_arithmetic import cell, variants


def hand(transfer: object, waits: object, free: object, inputs: object) -> str:
    """The four numbers of exercise 1."""
    return f"transfer_ms, waits_ms, free_width, inputs_width = {transfer}, {waits}, {free}, {inputs}"


def parts(weight: object, twice: object, held: object) -> str:
    """The three numbers of exercise 2."""
    return f"weight_bytes, twice_bytes, held_bytes = {weight}, {twice}, {held}"


def noted(value: str) -> str:
    """note that returns an expression."""
    return f"def note(hidden):\n    return {value}"


filed = variants(
    """
    def swap_to(folder, model):
        class Handle:
            def __init__(self, tensor):
                self.path = Path(FOLDER«folder», NAME«f"{uuid.uuid4()}.pt"»)
                CLEAN«weakref.finalize(self, self.path.unlink, missing_ok=True)»
                WRITE«torch.save(tensor.detach().clone(), self.path)»

        stays = STAYS«{t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}»

        def pack(tensor):
            return tensor if tensor.untyped_storage().data_ptr() in stays else Handle(tensor)

        def unpack(kept):
            return READ«torch.load(kept.path)» if isinstance(kept, Handle) else kept

        return END«saved_tensors_hooks(pack, unpack)»
    """
)


once = variants(
    """
    def swap_once(host):
        sent = SENT«weakref.WeakKeyDictionary()»

        def pack(tensor):
            storage = tensor.untyped_storage()
            version = VERSION«tensor._version»
            count = storage.nbytes() // tensor.itemsize
            parcels = sent.setdefault(KEY«storage», {})
            if version not in parcels:
                parcels[version] = SEND«host.send(tensor.as_strided((count,), (1,), 0))»
            return HANDLE«(parcels[version], tensor.shape, tensor.stride(), tensor.storage_offset())»

        def unpack(handle):
            return FETCH«host.fetch(handle[0])».as_strided(*handle[1:])

        return END«saved_tensors_hooks(pack, unpack)»
    """
)


whom = variants(
    """
    def whom_to_send(tensors, budget_bytes):
        def held(chosen):
            return sum(tensors[i][0] for i in chosen)

        def spared(chosen):
            return sum(WORTH«tensors[i][0] * (tensors[i][2] - tensors[i][1])» for i in chosen)

        every = [c for n in range(len(tensors) + 1) for c in itertools.combinations(range(len(tensors)), n)]
        best = max((chosen for chosen in every if FITS«held(chosen) <= budget_bytes»), key=spared)
        return END«list(best)»
    """
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


back = variants(
    """
    def when_to_call(tensors, bytes_per_ms):
        begins, free_until = [0.0] * len(tensors), float("inf")
        for i in sorted(range(len(tensors)), key=lambda i: ORDER«(tensors[i][2], i)», reverse=True):
            free_until = BEGIN«min(tensors[i][2], free_until) - tensors[i][0] / bytes_per_ms»
            begins[i] = free_until
        return END«begins»
    """
)


home = variants(
    """
    class HostAdam:
        def __init__(self, params, lr, host):
            self.params, self.host = list(params), host
            with WHERE«host()»:
                self.masters = [MASTER«p.detach().to("cpu", torch.float32, copy=True)» for p in self.params]
            self.adam = ADAM«torch.optim.AdamW(self.masters, lr=lr)»

        @torch.no_grad()
        def step(self):
            with THERE«self.host()»:
                for p, master in zip(self.params, self.masters):
                    if SKIP«p.grad is None»:
                        continue
                    master.grad = DOWN«p.grad.to("cpu", copy=True).float()»
                    GONE«p.grad = None»
                self.adam.step()
                AFTER«self.adam.zero_grad()»
            for p, master in zip(self.params, self.masters):
                UP«p.copy_(master)»
            THEN«pass»
    """
)


TRANSFER, WAITS, FREE, INPUTS = 23.77, 14.61, 10_625, 625
WEIGHT, TWICE, HELD = 180_224, 40_960, 123_520

WRONG: dict[str, dict[str, str]] = {
    "free-answer": {
        "backward's width": hand(TRANSFER, WAITS, FREE // 2, INPUTS),
        "nothing": hand(0, 0, 0, 0),
        "seconds": hand(TRANSFER / 1000, WAITS / 1000, FREE, INPUTS),
        "microseconds": hand(TRANSFER * 1000, WAITS * 1000, FREE, INPUTS),
        "beside backward": hand(TRANSFER, 5.44, FREE, INPUTS),
        "a float": hand(TRANSFER, WAITS, float(FREE), INPUTS),
        "one width for both": hand(TRANSFER, WAITS, FREE, FREE),
        "texts": hand('"23.8 ms"', '"14.6 ms"', '"10,625"', '"625"'),
    },
    "nothing-answer": {
        "the loss as well": parts(WEIGHT, TWICE, HELD + 4),
        "nothing": parts(0, 0, 0),
        "elements": parts(WEIGHT // 4, TWICE // 4, HELD // 4),
        "the head's input": parts(WEIGHT, TWICE + 10_240, HELD),
        "one block's": parts(WEIGHT, TWICE // 4, HELD),
        "in KiB": parts(176, 40, 120.625),
        "floats": parts(float(WEIGHT), float(TWICE), float(HELD)),
        "texts": parts('"180,224 B"', '"40,960 B"', '"123,520 B"'),
    },
    "note-answer": {
        "contiguous": noted("hidden[:, 0].detach().contiguous()"),
        "with its graph": noted("hidden[:, 0].clone()"),
        "all tokens": noted("hidden.detach().clone()"),
        "the last token": noted("hidden[:, -1].detach().clone()"),
        "a list": noted("hidden[:, 0].tolist()"),
        "an array": noted("hidden[:, 0].detach().numpy().copy()"),
        "no return": "def note(hidden):\n    hidden[:, 0].detach().clone()",
        "unsolved": "def note(hidden):\n    raise NotImplementedError",
    },
    "files-answer": {
        "read ones stay": filed(READ="kept.__dict__.setdefault('read', torch.load(kept.path))"),
        "another shape": filed(READ="torch.load(kept.path).flatten()"),
        "nothing leaves": filed(END="saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)"),
        "buffers leave": filed(STAYS="{t.untyped_storage().data_ptr() for t in model.parameters()}"),
        "whole storages": filed(WRITE="torch.save(tensor.detach(), self.path)"),
        "names by shape": filed(NAME='f"{tuple(tensor.shape)}.pt"'),
        "numbers that begin again": filed(
            NAME='f"{next(names)}.pt"', STAYS="STAYS\n    names = itertools.count()"
        ).replace("STAYS", "{t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}"),
        "emptied, not removed": filed(CLEAN='weakref.finalize(self, self.path.write_bytes, b"")'),
        "files elsewhere": "import tempfile\n" + filed(FOLDER="tempfile.gettempdir()"),
        "an array, beside a file that nobody reads": filed(
            CLEAN="self.values = tensor.detach().view(torch.uint8).numpy().copy(), tensor.dtype",
            WRITE="self.path.write_bytes(self.values[0].tobytes()); weakref.finalize(self, self.path.unlink)",
            READ="torch.from_numpy(kept.values[0]).view(kept.values[1])",
        ),
        "hooks of their own accord": filed(END="(h := saved_tensors_hooks(pack, unpack), h.__enter__())[0]"),
        "no context": filed(END="pack, unpack"),
        "memory-hungry": filed(CLEAN="hoard = torch.ones(2**30)"),
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
    },
    "once-answer": {
        "by the storage's id": once(SENT="{}", KEY="id(storage)"),
        "memory-hungry": once(SEND="host.send(torch.ones(2**30))"),
        "the view that comes first": once(SEND="host.send(tensor)"),
        "nothing leaves": once(END="saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)"),
        "no offset": once(HANDLE="(parcels[version], tensor.shape, tensor.stride())"),
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
        "a hook left on": once(END="(h := saved_tensors_hooks(pack, unpack), h.__enter__())[0]"),
        "no return": once(END="None"),
        "by address and size": once(SENT="{}", KEY="(storage.data_ptr(), storage.nbytes())"),
        "the handle has the tensor": once(
            HANDLE="(parcels[version], tensor.shape, tensor.stride(), tensor.storage_offset(), tensor)"
        ).replace("handle[1:]", "handle[1:4]"),
        "versions do not count": once(VERSION="0"),
    },
    "whom-answer": {
        "the smallest first": first("tensors[i][0]"),
        "everyone": whom(FITS="True"),
        "tensors, not indices": whom(END="[tensors[i] for i in best]"),
        "twice each": whom(END="list(best) * 2"),
        "empties the list": whom(END="(list(best), tensors.clear())[0]"),
        "tensors of torch": whom(END="torch.tensor(best).tolist()"),
        "unsolved": "def whom_to_send(tensors, budget_bytes):\n    raise NotImplementedError",
        "an endless loop": "def whom_to_send(tensors, budget_bytes):\n    while True:\n        pass",
        "the largest area first": first("-tensors[i][0] * (tensors[i][2] - tensors[i][1])"),
        "the most bytes": whom(WORTH="tensors[i][0]"),
        "the most time": whom(WORTH="tensors[i][2] - tensors[i][1]"),
    },
    "back-answer": {
        "in the list's order": back(ORDER="i"),
        "all at once": back(BEGIN="0.0"),
        "as if alone": back(BEGIN="tensors[i][2] - tensors[i][0] / bytes_per_ms"),
        "the largest last": back(ORDER="tensors[i][0]"),
        "without the link": back(BEGIN="min(tensors[i][2], free_until - tensors[i][0] / bytes_per_ms)"),
        "pairs": back(END="list(enumerate(begins))"),
        "the first alone": back(END="begins[:1]"),
        "tensors of torch": back(END="torch.tensor(begins).tolist()"),
        "sorts the list": back(END="(tensors.sort(), begins)[1]"),
        "no return": back(END="None"),
        "unsolved": "def when_to_call(tensors, bytes_per_ms):\n    raise NotImplementedError",
        "the list's last first": back(ORDER="(tensors[i][2], -i)"),
    },
    "home-answer": {
        "ten times as fast": home(ADAM="torch.optim.AdamW(self.masters, lr=10 * lr)"),
        "leaves autograd switched off": home(THEN="torch.set_grad_enabled(False)")
        .replace("    @torch.no_grad()\n", "")
        .replace("with self.host", "torch.set_grad_enabled(False)\n        with self.host"),
        "memory-hungry": home(MASTER="torch.ones(2**30)"),
        "on the device": home(WHERE="nullcontext()", THERE="nullcontext()"),
        "weights go up in FP32": home(UP="p.copy_(torch.empty_like(p, dtype=torch.float32).copy_(master))"),
        "gradients stay": home(GONE="pass"),
        "the masters' gradients stay": home(AFTER="pass"),
        "new parameters": home(UP="p.data = master.clone()"),
        "data of the masters": home(UP="p.data = master.bfloat16()"),
        "Adam, without the decay": home(ADAM="torch.optim.Adam(self.masters, lr=lr)"),
        "no step": "class HostAdam:\n    def __init__(self, params, lr, host):\n        pass",
        "a text": 'HostAdam = "torch.optim.AdamW"',
        "history": home(THEN="self.__dict__.setdefault('old', []).extend(p.detach().clone() for p in self.params)"),
        "moments on the device": home(THERE="nullcontext()"),
        "the library's": cell(
            """
            from memlab.mixed_precision import MasterWeights


            def HostAdam(params, lr, host):
                with host():
                    return MasterWeights(params, torch.optim.AdamW, lr=lr)
            """
        ),
    },
}

CRASHES = {"another shape", "the view that comes first"}
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
        "a global count": "numbers = itertools.count()\n" + filed(NAME='f"{next(numbers)}.pt"'),
        "bytes and nothing else": filed(
            CLEAN="self.kind = tensor.dtype, tensor.shape; weakref.finalize(self, self.path.unlink)",
            WRITE="self.path.write_bytes(tensor.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes())",
            READ="torch.frombuffer(bytearray(kept.path.read_bytes()), dtype=kept.kind[0]).view(kept.kind[1])",
        ),
        "a folder for each": "import tempfile\n"
        + filed(FOLDER="(made := tempfile.TemporaryDirectory(dir=folder)).name", CLEAN="self.folder = made"),
        "mapped when it is wanted": filed(READ="torch.load(kept.path, mmap=True)"),
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
    },
    "back-answer": {
        "a tuple": back(END="tuple(begins)"),
        "numpy's numbers": "import numpy\n\n\n" + back(END="list(numpy.array(begins))"),
    },
    "home-answer": {
        "in one go": home(DOWN='p.grad.to("cpu", torch.float32)'),
        "fused": home(ADAM="torch.optim.AdamW(self.masters, lr=lr, foreach=True)"),
        "without the frozen ones": home(
            SKIP="not p.requires_grad or p.grad is None", AFTER="self.adam.zero_grad(set_to_none=True)"
        ),
        "rounded on the host": home(UP="p.copy_(rounded(master, self.host))").replace(
            "class HostAdam",
            "def rounded(master, host):\n    with host():\n        return master.bfloat16()\n\n\nclass HostAdam",
        ),
    },
}
