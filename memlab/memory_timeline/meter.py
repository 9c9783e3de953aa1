"""The Meter: watches a piece of training code and notes every storage's birth and death.

How it sees: a TorchDispatchMode is told of every op, in forward, backward, recomputation and optimizer alike. It looks
at the tensors that come back. A storage not met before is a birth; a weak reference on it reports the death, whoever
let go of it. Nothing is kept alive, nothing is copied, and no saved tensor of autograd's is ever read, since reading
one can run a checkpointed forward again.

The hot path notes numbers only. What a storage became (a gradient, an activation, an optimizer's state …), and why it
was kept, is worked out once, afterwards, from the notes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from memlab.memory_timeline.accumulation import ADD, ADD_, sole_owner_counts, would_add_in_place
from memlab.memory_timeline.history import BACKWARD, BEFORE, FORWARD, OPTIMIZER, OUTSIDE, History
from memlab.memory_timeline.interrupts import noticing_interrupts
from memlab.memory_timeline.lines import AUTOGRAD, BACKWARD_CALLS, ENGINE
from memlab.memory_timeline.lines import OPTIMIZER as OPTIMIZER_CODE
from memlab.memory_timeline.nodes import Nodes
from memlab.memory_timeline.ownership import (
    Members,
    Owned,
    ParameterNames,
    gradients_of,
    modules_of,
    named_roots,
    owned_by_optimizer,
    owned_inputs,
    storages_of,
)
from memlab.memory_timeline.resizing import watch_resizing
from memlab.memory_timeline.timeline import Timeline
from memlab.memory_timeline.uncompiled import uncompiled
from memlab.memory_timeline.whereabouts import Whereabouts
from memlab.memory_timeline.workspace import CPULog, CUDACounters, CUDALevels

META = torch.device("meta")
DEVICE_OF = torch.ops.prim.device.default
LIFT_FRESH = torch.ops.aten.lift_fresh.default
CALL, MODE = torch._ops.OpOverload.__call__.__code__, "__torch_dispatch__"  # how a mode hands an op on

_current_task = torch._C._current_graph_task_id  # -1 outside backward
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


class _Death(weakref.ref):
    """A weak reference to a storage that still knows its numbers when the storage is gone."""

    __slots__ = ("address", "number")


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
        self._changing = True  # so long, any number of interrupts wait
        self._sole_owner = sole_owner_counts(imagined=bool(self._imagined))
        with ExitStack() as stack:
            self._set_up(stack)
            super().__enter__()
            stack.callback(self._take_off_mode)
            if self._interrupted:
                raise KeyboardInterrupt
            self._undo = stack.pop_all()
        del self._inputs, self._optimizer
        self._changing = False
        return self

    def __exit__(self, *error) -> None:
        self._changing = True
        try:
            if self._interrupted:
                self._interrupt()
        finally:
            self._deaths.clear()  # what dies from here on dies after the block
            try:
                self._undo.close()
            finally:
                self._modules = []  # the record may outlive the model
                self._parameter_names.forget()
        if self._interrupted:
            raise KeyboardInterrupt

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
        self._last_read, self._read_in_backward, self._sizes = (
            history.last_read,
            history.read_in_backward,
            history.sizes,
        )
        self._interrupted = False
        stack.enter_context(noticing_interrupts(self._notice_interrupt, self._died))
        self._live: dict[int, int] = {}  # a storage's address → its number; addresses are used again after a free
        self._deaths: dict[int, _Death] = {}
        stack.callback(self._deaths.clear)
        roots = named_roots(self._modules)
        self._here = Whereabouts(roots, history.lines)
        self._nodes = Nodes(self._here.thread)
        history.functions = self._nodes.functions
        members = Members.of(roots)
        members.check_memory()
        self._parameter_names = ParameterNames()
        self._parameter_names.learn(roots, members)
        self._strangers: set[int] = set()  # ids of parameters that optimizers have, and the models have not

        device = members.parameters[0][1].device if members.parameters else torch.device("cpu")
        levels = CUDALevels(history, device) if device.type == "cuda" else None
        self._log = None
        if self._workspace:
            self._log = CPULog(history) if levels is None else CUDACounters(history, device, levels)
        self._adopt(members.owned())
        if self._optimizer is not None:
            self._adopt(owned_by_optimizer(self._optimizer, self._parameter_names))
            self._place_counters(self._optimizer)
        self._adopt(owned_inputs(self._inputs))
        self._adopted = self.event_count
        stack.callback(self._recognise_model)

        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._here.watch(stack)
        for _, parameter in members.parameters:
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                stack.callback(parameter.register_post_accumulate_grad_hook(self._accumulated).remove)
        for context in (watch_resizing(self._resized), levels, self._log):
            if context is not None:
                stack.enter_context(context)

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
        if self._interrupted and _this_thread() == self._here.thread:
            self._interrupt()
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
        task = _current_task()
        in_backward = in_formula or task != -1
        if in_backward and (evaluated := _current_node()) is not None:
            node, forward_op = nodes.find(evaluated, task, caller, thread)
            if in_formula and func is ADD and self._engine_accumulates(args, kwargs, evaluated, node):
                func = ADD_
        if in_formula:
            phase = BACKWARD
            if forward_op >= 0:
                line, module = flat[6 * forward_op + 2], flat[6 * forward_op + 3]
            elif (birthplace := self._birthplace(args)) is not None:  # such as of what accumulates into a .grad
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
                        self._meet(argument, number, phase, line)
                    else:
                        self._last_read[storage] = number
                        if forward_op >= 0 and phase is BACKWARD:
                            self._read_in_backward += (storage, forward_op)
                elif kind is list:
                    for item in argument:
                        if isinstance(item, Tensor):
                            self._meet(item, number, phase, line)

        if self._log is not None:
            result = self._log.run(number, func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)

        kind = _KINDS[type(result)]
        if kind is Tensor:
            try:
                storage = result.untyped_storage()
            except NotImplementedError:  # sparse
                self._note(result, number, phase, line)
            else:
                known = live.get(storage._cdata)
                if known is None or storage.nbytes() != self._sizes[known]:
                    self._note_storage(storage, result, number, phase, line)
        elif kind is list:
            self._note_all(result, number, phase, line)
        return result

    def _birthplace(self, args: tuple) -> tuple[int, str] | None:
        """Line and module of the op that made the first argument, a gradient; None if nobody saw that."""
        if args and isinstance(args[0], Tensor):
            for storage in storages_of(args[0]):
                number = self._live.get(storage._cdata)
                if number is not None and (born := self._history.births[number].op) >= 0:
                    return (op := self._ops[born]).line, op.module
        return None

    def _meet(self, tensor: Tensor, op: int, phase: str, line: int) -> None:
        """An op's argument: note that it was read, and that it is there if nobody saw it being born."""
        history = self._history
        for storage in storages_of(tensor):
            number = self._live.get(storage._cdata)
            if number is None:
                fresh = self._ops[op].func is LIFT_FRESH
                if fresh and self._imagined:
                    continue  # the real tensor of which an imagined one is made
                number = self._note_storage(storage, tensor, op, phase, line)
                if number >= 0 and not fresh:  # torch.tensor(...) makes it, and tells later
                    history.owners[number] = OUTSIDE
            else:
                history.last_read[number] = op
                if (forward_op := self._ops[op].forward_op) >= 0 and phase is BACKWARD:
                    history.read_in_backward += (number, forward_op)

    def _note_all(self, results: list | tuple, op: int, phase: str, line: int) -> None:
        """An op's results, in lists of any depth: all_gather's are in three."""
        for item in results:
            if isinstance(item, Tensor):
                self._note(item, op, phase, line)
            elif isinstance(item, (list, tuple)):
                self._note_all(item, op, phase, line)

    def _note(self, tensor: Tensor, op: int, phase: str, line: int) -> None:
        """An op's result: its storages are new, have another size, or are as they were."""
        for storage in storages_of(tensor):
            known = self._live.get(storage._cdata)
            if known is None or storage.nbytes() != self._sizes[known]:
                self._note_storage(storage, tensor, op, phase, line)

    def _note_storage(self, storage: UntypedStorage, tensor: Tensor | None, op: int, phase: str, line: int) -> int:
        """Note a storage as op number `op` (-1: before the first) left it. Returns its own number."""
        address = storage._cdata
        number = self._live.get(address)
        nbytes = storage.nbytes()
        if number is None:
            if (storage.device == META and not self._imagined) or is_lazy(tensor) or tensor._is_zerotensor():
                return -1  # a shape, and no bytes
            number = self._live[address] = self._history.born(tensor, nbytes, op, phase, line)
            if self._imagined and hasattr(storage, "in_main_memory"):
                self._history.moved(number, "cpu")
            self._deaths[number] = death = _Death(storage, self._died)
            death.address, death.number = address, number
        else:
            self._history.resized(number, nbytes, op, phase, line)
        if self._log is not None:
            self._log.placed(number, storage.data_ptr(), op)
        return number

    @uncompiled
    def _died(self, death: _Death) -> None:
        number = death.number
        if self._live.get(death.address) == number:
            del self._live[death.address]
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is ENGINE:
            phase, line = BACKWARD, self._ops.flat[-4] if len(self._ops) else -1  # by the node evaluated last
        elif self._here.in_torchs_step(caller):
            phase, line = OPTIMIZER, self._here.step_line
        else:
            phase, line = self._here.place(caller)
            if caller is not None and caller.f_code in BACKWARD_CALLS:  # the gradient that backward began with
                phase = BACKWARD
        self._history.resized(number, 0, len(self._ops) - 1, phase, line)
        self._deaths.pop(number, None)

    def _notice_interrupt(self) -> bool:
        """A Ctrl-C inside the meter. Returns whether it waits: the second one in a long op does not."""
        waits, self._interrupted = self._changing or not self._interrupted, True
        return waits

    def _interrupt(self) -> None:
        """Note the deaths that a Ctrl-C kept from being noted, and let it through."""
        self._interrupted = False
        for death in [death for death in self._deaths.values() if death() is None]:
            self._died(death)
        raise KeyboardInterrupt

    # ---- the engine's sum of two gradients (see accumulation.py)

    def _engine_accumulates(self, args, kwargs, evaluated, node: int) -> bool:
        """Whether this addition is the engine joining two gradients, which it would do in place if it were not watched.

        A node's own formula may add too, and may read the first operand again: so the first operand must be a
        gradient that another node made and that the present one has not read, or one of two that it made for the
        same input.
        """
        if kwargs or len(args) != 2 or evaluated is None or _grad_enabled():
            return False
        if not would_add_in_place(args, self._sole_owner):
            return False
        number = self._live.get(args[0].untyped_storage()._cdata)
        if number is None:
            return False
        birth, last_read = self._history.births[number].op, self._history.last_read[number]
        born_here = birth >= 0 and self._ops[birth].node == node
        if born_here:
            targets = [target for target in evaluated.next_functions if target[0] is not None]
            return len(set(targets)) < len(targets)
        return last_read < 0 or self._ops[last_read].node != node

    # ---- who owns what

    def _adopt(self, owned: Iterable[Owned]) -> None:
        """Note tensors that exist already, and whose they are."""
        for tensor, category, name in owned:
            for storage in storages_of(tensor):
                if (number := self._note_storage(storage, tensor, -1, BEFORE, -1)) >= 0:
                    self._history.owners.setdefault(number, (category, name))

    def _recognise(self, owned: Iterable[Owned]) -> None:
        """Storages seen being born turn out to belong to somebody: say to whom."""
        for tensor, category, name in owned:
            for storage in storages_of(tensor):
                number = self._live.get(storage._cdata)
                if number is not None and self._history.owners.get(number, OUTSIDE) == OUTSIDE:
                    self._history.owners[number] = (category, name)

    def _recognise_model(self) -> None:
        self._recognise(Members.of(named_roots(self._modules)).owned())

    @uncompiled
    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided:  # nearly all: _recognise, written out
            number = self._live.get(gradient.untyped_storage()._cdata)
            if number is not None and self._history.owners.get(number, OUTSIDE) == OUTSIDE:
                self._history.owners[number] = ("gradient", self._parameter_names.get(id(parameter), "a parameter"))
        else:
            self._recognise(gradients_of([parameter], self._parameter_names))

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        # An optimizer that steps inside backward frees a gradient before the meter's own hook comes to see it.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = {id(p) for p in parameters if self._parameter_names.get(id(p)) is None}
        if not unknown <= self._strangers:  # are they new in the model?
            self._parameter_names.learn_again()
            self._strangers |= unknown
        names = [(p, self._parameter_names.get(id(p))) for p in parameters if not is_lazy(p)]
        self._recognise(Owned(p, "parameter", name) for p, name in names if name is not None)  # for a conversion's end
        self._recognise(gradients_of(parameters, self._parameter_names))
        self._here.begin_step(optimizer)
        if _this_thread() == self._here.thread:  # another thread's step is another meter's
            self._meet_held(parameters, optimizer)

    def _meet_held(self, parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer holds from before, and nobody named to the meter, is there when its first step begins."""
        names = self._parameter_names
        outside = (Owned(parameter, *OUTSIDE) for parameter in parameters)
        held = itertools.chain(outside, gradients_of(parameters, names), owned_by_optimizer(optimizer, names))
        met = [(s, owned) for owned in held for s in storages_of(owned.tensor) if s._cdata not in self._live]
        if met:
            op, (phase, line) = self._note_op("step", sys._getframe())
            if self._log is not None:
                self._log.run(op, bool, (), {})  # nothing: only its marker, under which the log finds them
            for storage, (tensor, *whose) in met:
                if (number := self._note_storage(storage, tensor, op, phase, line)) >= 0:
                    self._history.owners.setdefault(number, tuple(whose))

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._recognise(owned_by_optimizer(optimizer, self._parameter_names))
        self._place_counters(optimizer)
        self._here.end_step(optimizer)

    def _place_counters(self, optimizer: torch.optim.Optimizer) -> None:
        """On a GPU torch's optimizers keep step counters in main memory, unless fused, and but for ASGD's: so here."""
        if self._imagined in (None, "cpu") or isinstance(optimizer, torch.optim.ASGD):
            return
        kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
        if not any(kind.__module__.startswith("torch.optim.") for kind in kinds):
            return
        for group in optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                for parameter in group["params"]:
                    step = optimizer.state.get(parameter, {}).get("step")
                    counts = isinstance(step, Tensor) and step.numel() == 1
                    number = self._live.get(step.untyped_storage()._cdata) if counts else None
                    if number is not None:  # else it is from before, of an optimizer that the meter was not given
                        self._history.moved(number, "cpu")

    # ---- sizes that change without an op (see resizing.py)

    @uncompiled
    def _resized(self, storage: UntypedStorage, resize: Callable[[], UntypedStorage], caller: FrameType):
        """Note a storage's other size under an op of its own, if it is known, or comes to have bytes only now."""
        known = storage._cdata in self._live
        if not known and (storage.nbytes() or _this_thread() != self._here.thread):
            return resize()
        op, (phase, line) = self._note_op("resize_", caller)
        result = resize() if self._log is None else self._log.run(op, resize, (), {})
        with _disable_current_modes():
            tensor = None if known else torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._note_storage(storage, tensor, op, phase, line)
        return result

    def _note_op(self, name: str, caller: FrameType) -> tuple[int, tuple[str, int]]:
        """Note something that is no op of PyTorch's as one. Returns its number, and its phase and line."""
        phase, line = self._here.place(caller)
        self._ops.flat += (name, phase, line, "", -1, -1)
        return len(self._ops) - 1, (phase, line)
