"""The Meter: watches a piece of training code and notes every storage's birth and death.

How it sees: a TorchDispatchMode is told of every op, in forward, backward, recomputation and optimizer alike. It looks
at the tensors that come back. A storage not met before is a birth; a weak reference on it reports the death, whoever
let go of it. Nothing is kept alive, nothing is copied, and no saved tensor of autograd's is ever read, since reading
one can run a checkpointed forward again.

The hot path notes numbers only. What a storage became (a gradient, an activation, an optimizer's state …), and why it
was kept, is worked out once, afterwards, from the notes.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memlab.backward import backward_number, uncompiled
from memlab.memory_timeline.accumulation import ADD, ADD_, GradientSums
from memlab.memory_timeline.history import BACKWARD, FORWARD, OPTIMIZER, History
from memlab.memory_timeline.lines import AUTOGRAD, ENGINE
from memlab.memory_timeline.lines import OPTIMIZER as OPTIMIZER_CODE
from memlab.memory_timeline.nodes import Nodes
from memlab.memory_timeline.ownership import Members, modules_of, named_roots, owned_inputs
from memlab.memory_timeline.recognition import Recognition
from memlab.memory_timeline.resizing import watch_resizing
from memlab.memory_timeline.storages import Storages
from memlab.memory_timeline.timeline import Timeline
from memlab.memory_timeline.whereabouts import Whereabouts
from memlab.memory_timeline.workspace import CPULog, CUDACounters, CUDALevels

DEVICE_OF = torch.ops.prim.device.default
CALL, MODE = torch._ops.OpOverload.__call__.__code__, "__torch_dispatch__"  # how a mode hands an op on

_current_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr
_this_thread = threading.get_ident
_grad_enabled = torch._C.is_grad_enabled


class _Kinds(dict):
    """type → Tensor for tensors of any class, list for lists and tuples, None for the rest; judged once a type."""

    def __missing__(self, kind: type) -> type | None:
        self[kind] = found = Tensor if issubclass(kind, Tensor) else list if issubclass(kind, (list, tuple)) else None
        return found


_KINDS = _Kinds()


class Meter(TorchDispatchMode):
    """Records the memory of what its thread runs in the `with` block, op by op, on any device; backward's threads too.

        with Meter(model, optimizer, inputs=(x, y)) as meter:
            model(x, y).backward()
            optimizer.step()
        meter.timeline.peak_bytes

    model: an nn.Module, a list of them, or None to meter bare tensor code. Its parameters, gradients and buffers count
      from the start and give names, in a list after their model's place in it ("0.weight"). optimizer: its states
      likewise (those of any optimizer that steps inside are recognised anyway). inputs: the batch, in tuples, lists or
      dicts; a tensor not named here counts from its first use on, as an input.
    workspace: also record what kernels allocate for themselves, from the allocator's own log; slower. Memory that no op
      returns, such as the random states that a checkpoint keeps, is not seen without it, and is the next op's with it.

    The timeline can be read during the block and after it, also when the block raised. A Meter records once.
    Not here: a Ctrl-C in the microseconds in which the meter itself is put on, notes something or is taken off.
    Raises TypeError or ValueError for what is not a model, a batch, or has no bytes (device "meta"). Entering it raises
    RuntimeError the second time, and with `workspace` inside a profiler's block; ValueError with `workspace` on
    imagined hardware.
    """

    supports_higher_order_operators = True  # flex_attention and its kind are then one op each

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares 3 µs an op, and importing the compiler at the first
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the meter is off while torch.compile compiles, and on while what it made runs: yes."""
        return True

    def __init__(self, model=None, optimizer=None, inputs=(), *, workspace: bool = False):
        super().__init__()
        self._modules = modules_of(model)
        Members.of(named_roots(self._modules)).check_memory()  # here, before anything is set up
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"expected an optimizer (torch.optim.Optimizer) or None, found {type(optimizer).__name__}; of several "
                "give one, or none: all that step inside the block are recognised"
            )
        for _ in owned_inputs(inputs):
            pass
        self._optimizer, self._inputs = optimizer, inputs
        self._workspace = workspace
        self._history = History()
        self._undo: ExitStack | None = None

    # ---- entering and leaving

    def __enter__(self) -> Meter:
        if self._undo is not None:
            raise RuntimeError("expected a Meter that has not run; it records once, so make another: Meter(model, ...)")
        self._imagined = getattr(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE), "imagines", None)
        if self._imagined and self._workspace:
            raise ValueError(
                "expected workspace=False, since imagined hardware runs no kernels; found True: measure it on a GPU"
            )
        with ExitStack() as stack:
            self._set_up(stack)
            super().__enter__()
            stack.callback(self._take_off_mode)
            self._undo = stack.pop_all()
        del self._modules, self._optimizer, self._inputs  # the record may outlive the model
        return self

    def __exit__(self, *error) -> None:
        self._storages.forget()
        try:
            self._undo.close()
        finally:
            self._recognition.forget()

    def _take_off_mode(self) -> None:
        """Take this mode off, also from under those that were entered later and are still on."""
        modes = _get_current_dispatch_mode_stack()
        above = modes[modes.index(self) + 1 :] if self in modes else []
        for mode in reversed(above):
            TorchDispatchMode.__exit__(mode, None, None, None)
        super().__exit__(None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    def _set_up(self, stack: ExitStack) -> None:
        history = self._history = History(self._imagined and f"imagined {self._imagined}")
        self._ops, self._lines, self._numbers = history.ops, history.lines, history.lines.numbers
        self._last_read, self._read_in_backward = history.last_read, history.read_in_backward
        self._sizes = history.sizes
        roots = named_roots(self._modules)
        members = Members.of(roots)
        members.check_memory()
        device = members.parameters[0][1].device if members.parameters else torch.device("cpu")
        levels = CUDALevels(history, device) if device.type == "cuda" else None
        self._log = None
        if self._workspace:
            self._log = CPULog(history) if levels is None else CUDACounters(history, device, levels)
        self._here = here = Whereabouts(roots, history.lines)
        self._storages = storages = self._make_storages(history)
        self._live = storages.live
        self._nodes = Nodes(here.thread, storages.given)
        history.functions = self._nodes.functions
        self._sums = GradientSums(history, storages.live, imagined=bool(self._imagined))
        self._recognition = recognition = self._make_recognition(storages)

        stack.callback(storages.forget)
        recognition.names.learn(roots, members)
        recognition.adopt(members.owned())
        if self._optimizer is not None:
            recognition.adopt_optimizer(self._optimizer)
        recognition.adopt(owned_inputs(self._inputs))
        self._adopted = self.event_count
        stack.callback(recognition.recognise_model)

        here.watch(stack)
        recognition.watch([parameter for _, parameter in members.parameters], stack)
        for context in (watch_resizing(storages.resized), levels, self._log):
            if context is not None:
                stack.enter_context(context)

    def _make_storages(self, history: History) -> Storages:
        return Storages(history, self._here, self._log, imagined=bool(self._imagined))

    def _make_recognition(self, storages: Storages) -> Recognition:
        return Recognition(self._modules, storages, imagined=self._imagined)

    @property
    def timeline(self) -> Timeline:
        """What was recorded so far. Raises RuntimeError before the block was entered."""
        if self._undo is None:
            raise RuntimeError("expected a Meter that has run: `with meter: ...` first, then meter.timeline")
        return self._history.timeline()

    @property
    def event_count(self) -> int:
        """How many allocations and frees were recorded so far, on all devices: a mark for `timeline.event_of`."""
        return len(self._history.changes)

    @property
    def event(self) -> int:
        """The timeline's event so far, so that `totals[event]` is held, where all memory is on one device.

        Where some is on another, even an optimizer's step counters, take `timeline.event_of(event_count)`.
        """
        return self.event_count - self._adopted

    @property
    def held_bytes(self) -> int:
        """What tensors hold at this moment; on imagined hardware, on the card."""
        return self._history.held

    def highest_since(self, mark: int) -> int:
        """The most that tensors held since `event_count` was `mark`, in bytes; on imagined hardware, on the card."""
        return self._history.highest_since(mark)

    # ---- the hot path: once an op, so every look-up counts, and calls are few

    @uncompiled
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # asking an imagined tensor's device is no op
            return func(*args, **(kwargs or {}))
        if types and (wrappers := [kind for kind in types if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__]):
            fake = [kind.__name__ == "FakeTensor" for kind in wrappers]
            if any(fake) and not self._imagined:
                return func(*args, **(kwargs or {}))  # somebody else's, such as a compiler's: they have no bytes
            if not all(fake):  # a wrapper such as DTensor: let it unwrap itself, and see the ops on what is inside
                return NotImplemented
        live, nodes, here, flat = self._live, self._nodes, self._here, self._ops.flat
        number, thread = len(flat) // 6, _this_thread()
        try:
            caller = sys._getframe(1)
            while (code := caller.f_code) is CALL or code.co_name == MODE:  # a mode inside this one, such as a meter
                if code is CALL and caller.f_back.f_code.co_name != MODE:
                    break
                caller = caller.f_back
        except (ValueError, AttributeError):  # a thread of autograd's own, with no Python on it
            caller = None
        node = forward_op = -1
        in_formula = caller is None or caller.f_code is ENGINE
        task = backward_number()
        in_backward = in_formula or task != -1
        if in_backward and (evaluated := _current_node()) is not None:
            node, forward_op = nodes.find(evaluated, task, caller, thread)
            if in_formula and func is ADD and self._sums.is_one(args, kwargs, evaluated, node):
                func = ADD_
        if in_formula:
            phase = BACKWARD
            if forward_op >= 0:
                line, module = flat[6 * forward_op + 2], flat[6 * forward_op + 3]
            elif (
                birthplace := self._storages.birthplace(args)
            ) is not None:  # such as of what accumulates into a .grad
                line, module = birthplace
            else:
                line, module = self._lines.number(here.owners.climb(caller)[0]), here.modules[-1]
        elif (
            here.step_line is not None
            and not in_backward
            and not _grad_enabled()  # a closure's gradients are on
            and here.in_torchs_step(caller)
        ):
            phase, line, module = OPTIMIZER, here.step_line, ""
        else:
            frame, owners, passed = caller, here.owners, 0
            while frame is not None and (owner := owners[frame.f_code.co_filename]):
                passed |= owner
                frame = frame.f_back
            line = self._numbers.get((id(frame.f_code), frame.f_lasti)) if frame is not None else -1
            if line is None:
                line = self._lines.number(frame)
            module = here.modules[-1]
            if not in_backward and not passed & (OPTIMIZER_CODE | AUTOGRAD) and not here.stepping:
                phase = FORWARD
            else:
                phase = here.phase(caller, passed)
                if phase is BACKWARD and forward_op >= 0:  # Python code called by the engine: a Function's backward
                    line, module = flat[6 * forward_op + 2], flat[6 * forward_op + 3]
                    if own := owners.climb_below_engine(caller):
                        line = self._lines.number(own)
        sequence = _next_sequence_number()
        if sequence != nodes.next_of[thread]:  # autograd made a node, and this is the op that it is for
            nodes.made(sequence, thread, number)
        flat += (func, phase, line, module, forward_op, node)

        if phase is not OPTIMIZER:  # an optimizer reads parameters, gradients and states, which are known
            for argument in args if not kwargs else (*args, *kwargs.values()):
                kind = _KINDS[type(argument)]
                if kind is Tensor:
                    try:
                        storage = live[argument.untyped_storage()._cdata]
                    except (KeyError, NotImplementedError):
                        self._storages.meet(argument, number, phase, line)
                    else:
                        self._last_read[storage] = number
                        if forward_op >= 0 and phase is BACKWARD:
                            self._read_in_backward += (storage, forward_op)
                elif kind is list:
                    for item in argument:
                        if isinstance(item, Tensor):
                            self._storages.meet(item, number, phase, line)

        if self._log is not None:
            result = self._log.run(number, func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)

        kind = _KINDS[type(result)]
        if kind is Tensor:
            try:
                storage = result.untyped_storage()
            except NotImplementedError:  # sparse
                self._storages.made(result, number, phase, line)
            else:
                known = live.get(storage._cdata)
                if known is None or storage.nbytes() != self._sizes[known]:
                    self._storages.note(storage, result, number, phase, line)
        elif kind is list:
            self._storages.all_made(result, number, phase, line)
        elif kwargs and result is None:  # as of split_copy with `out`, whose tensors it may have given a size
            self._storages.all_made(kwargs.values(), number, phase, line)
        return result
