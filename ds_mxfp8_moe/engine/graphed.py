# SPDX-License-Identifier: Apache-2.0
"""An attention module in CUDA graphs: their arguments, their capture, and what replays them."""

import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

WARM_UPS = 2  # runs before the capture, in which libraries choose and build their kernels


# ---- arguments ----------------------------------------------------------------------------------------------------


class TensorForm(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def make(self, device: torch.device) -> Tensor:
        """A tensor of this form. A mask of ones masks nothing."""
        fill = torch.ones if self.dtype == torch.bool else torch.zeros
        return fill(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


Form = tuple  # (name or None, constant, TensorForm, or tuple of them) of each argument
CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


def form_of(args: tuple, kwargs: dict) -> tuple[Form | None, list[Tensor]]:
    """What has to be the same in two calls for a graph of one to be a graph of the other, and the call's tensors.
    None: there are arguments of other kinds, such as caches, or leaves that get gradients. A leaf may keep the
    gradient that it is given, and a graph writes into that memory again."""
    tensors: list[Tensor] = []
    try:
        named = chain(((None, value) for value in args), kwargs.items())
        return tuple((name, _form_of_value(value, tensors)) for name, value in named), tensors
    except TypeError:
        return None, []


def _form_of_value(value: Any, tensors: list[Tensor]) -> Any:
    """Adds its tensors. It is no closure of `form_of`: one that calls itself waits for Python's garbage collector,
    with all tensors that it knows."""
    if isinstance(value, Tensor) and not (value.requires_grad and value.is_leaf):
        tensors.append(value)
        return TensorForm(value.shape, value.dtype, value.requires_grad)
    if isinstance(value, tuple):
        return tuple(_form_of_value(part, tensors) for part in value)
    if isinstance(value, CONSTANTS):
        return value
    raise TypeError(value)


def tensor_forms(form: Any) -> Iterator[TensorForm]:
    """Those of a call's tensors, in their order."""
    if isinstance(form, TensorForm):
        yield form
    elif isinstance(form, tuple):
        for part in form:
            yield from tensor_forms(part)


def without_grads(form: Any) -> Any:
    """The form of the same call under torch.no_grad."""
    if isinstance(form, TensorForm):
        return form._replace(requires_grad=False)
    return tuple(map(without_grads, form)) if isinstance(form, tuple) else form


def arguments(form: Form, tensors: Iterator[Tensor]) -> tuple[tuple, dict]:
    """A call's arguments of this form, with these tensors."""
    values = [(name, _filled(value, tensors)) for name, value in form]
    return (tuple(value for name, value in values if name is None),
            {name: value for name, value in values if name is not None})


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, TensorForm):
        return next(tensors)
    return tuple(_filled(part, tensors) for part in value) if isinstance(value, tuple) else value


class Call(NamedTuple):
    """A call of an attention module.

    Attributes:
        plain: the module's forward.
        tensors: of the arguments; None in place of those that get a gradient.
    """

    plain: Callable
    form: Form
    tensors: list[Tensor | None]


class Input:
    """Where graphs read a tensor of their arguments. Layers whose calls get the same tensor, such as the rotary
    embeddings, share one, so that it is copied once for all of them.

    Attributes:
        readers: forwards that read what is there, and whose backward is to come, which reads it again.
    """

    def __init__(self, static: Tensor):
        self.static, self._from, self._version = static, None, None
        self.readers: weakref.WeakSet[Pending] = weakref.WeakSet()

    def _holds(self, tensor: Tensor) -> bool:
        """Whether this tensor was copied last. It may have changed without a new version since an earlier micro-batch,
        so this counts only while there are readers."""
        return self._from is tensor and self._version == _version(tensor)

    def takes(self, tensor: Tensor) -> bool:
        return self._holds(tensor) or not self.readers

    def fill(self, tensor: Tensor) -> None:
        if not (self.readers and self._holds(tensor)):
            self.static.detach().copy_(tensor)
            self._from, self._version = tensor if not self.static.requires_grad else None, _version(tensor)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# ---- graphs -------------------------------------------------------------------------------------------------------

OUTPUT = object()  # the place of the output among what a module returns


class Capture:
    """Captures work on one stream and in one pool of memory, one graph after the other."""

    def __init__(self):
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What runs there leaves the random numbers of what follows as they are."""
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.random.fork_rng([torch.cuda.current_device()]), torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Work that waits for the device is an error, as in a capture. Behind a capture that failed, the process
        would go on with an allocator that still captures."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # it calls this a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that replays on the device what `work` does there. The capture itself computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, go on asking the device for events.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def result(self, tensor: Tensor) -> Tensor:
        """What a replay leaves in a tensor of its capture, to be copied at once. Later graphs may use the memory."""
        if not tensor.is_contiguous():
            return tensor.detach()
        interface = {"shape": (tensor.nbytes, ), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=tensor.device)
        return memory.view(tensor.dtype).view(tensor.shape)


class NoGraph(Exception):
    """Why a module cannot have graphs."""


class NoGraphYet(NoGraph):
    """Why it cannot have them now. It may have them after a later step."""


class Pending:
    """A forward whose backward is to come, and which reads `inputs` until then. It goes with the autograd node that
    holds it."""

    def __init__(self, index: int, inputs: list[Input]):
        self.index, self.inputs = index, inputs


class Forwards:
    """Those whose backward is to come, of all modules, in their order.

    Graphs are captured in the order in which they run, forward of all modules and then backward, and share memory as
    kernels of a step do. So they have to run in this order: forward of a module only while no later one is to come
    to, and backward from a later to an earlier one.
    """

    def __init__(self):
        self._open: list[weakref.ref[Pending]] = []

    def last(self) -> Pending | None:
        while self._open and self._open[-1]() is None:  # its loss was thrown away
            self._open.pop()
        return self._open[-1]() if self._open else None

    def before(self, index: int) -> bool:
        return (last := self.last()) is None or last.index < index

    def begin(self, index: int, inputs: list[Input]) -> Pending:
        pending = Pending(index, inputs)
        self._open.append(weakref.ref(pending))
        for each in inputs:
            each.readers.add(pending)
        return pending

    def end(self, pending: Pending) -> None:
        """Backward came. It may begin in the middle of a model, and does not come to the layers behind any more."""
        if not any(each() is pending for each in self._open):
            raise _out_of_order()
        while self._open.pop()() is not pending:
            pass
        for each in pending.inputs:
            each.readers.discard(pending)


def _out_of_order() -> RuntimeError:
    return RuntimeError("mxfp8_moe: backward comes to attention in another order than in the first steps, or to the "
                        'same attention again, and its CUDA graphs keep nothing for that: write "graph_attention": '
                        "false")


class Recomputed:
    """The last forward of modules that checkpointing runs again right before their backward.

    Their graphs share memory, which holds the activations of one forward. A forward saves its number as a tensor, as
    others save activations. So where checkpointing runs it again, backward gets the number of the second forward.
    """

    def __init__(self):
        self._last = 0

    def before(self, index: int) -> bool:
        return True

    def begin(self, index: int, inputs: list[Input]) -> Tensor:
        self._last += 1
        return torch.tensor(self._last, device="cpu")

    def end(self, number: Tensor) -> None:
        """Backward came."""
        if number.item() != self._last:  # it lies on the host
            raise _out_of_order()


class GraphedAttention:
    """The graphs of one attention module.

    Attributes:
        form: of its calls' arguments.
        recomputed: whether checkpointing runs forward again.
        index: the module's place in the order of forward.
        inputs: where the graphs read the arguments' tensors.
        params: those that are trained, in the order in which their gradients come without graphs.
        output, grad, input_grads, flat: where the graphs write the output, read its gradient, and write the gradients
            of the inputs and of `params`. What is there leaves it before the next layer's comes.
    """

    def __init__(self, module: nn.Module, call: Call, index: int, forwards: Forwards | Recomputed,
                 inputs: list[Input]):
        self.module, self.plain, self.form = module, call.plain, call.form
        self.recomputed, self._form_without_grads = isinstance(forwards, Recomputed), without_grads(call.form)
        self.index, self.forwards, self.inputs = index, forwards, inputs
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._aliases = {p: nn.Parameter(p.detach()) for p in self.params}
        self._all_params, self._parts = list(module.parameters()), [*module.modules()][1:]
        self._weights, self._held = self._weights_now(), self._held_now()
        if self._hooked() or any(p._backward_hooks for p in self.params):
            raise NoGraphYet(f"{type(module).__name__} has hooks")

    def _weights_now(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for p in self._all_params]

    def _held_now(self) -> list:
        """What the module and its parts hold but hooks: parameters, parts, attributes, and what is in dicts and lists
        among these. A graph computes with what was there at its capture, such as the scale of a LoRA adapter."""
        held = []
        for part in (self.module, *self._parts):
            for name, value in vars(part).items():
                if "hook" not in name:
                    held.append(value)
                    held += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return held

    def _holds_the_same(self) -> bool:
        held = self._held_now()
        return len(held) == len(self._held) and all(map(operator.is_, held, self._held))

    def _hooked(self) -> bool:
        return any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
                   for part in self._parts)

    def fits(self, form: Form | None, tensors: list[Tensor]) -> bool:
        """Whether the graphs may compute a call with these arguments now."""
        wanted = self.form if torch.is_grad_enabled() else self._form_without_grads
        return (form == wanted and self.forwards.before(self.index) and self._holds_the_same()
                and self._weights == self._weights_now() and not self._hooked()
                and all(map(Input.takes, self.inputs, tensors)))

    @contextmanager
    def _aliases_in_place(self) -> Iterator[None]:
        """Lets the module compute with other parameters over the same memory. DeepSpeed keeps the autograd nodes of
        its own, and a backward that reaches these would make the stream on which they were made part of a capture."""
        places = [(part._parameters, name, p) for part in self.module.modules()
                  for name, p in part._parameters.items() if p in self._aliases]
        for parameters, name, p in places:
            parameters[name] = self._aliases[p]
        try:
            yield
        finally:
            for parameters, name, p in places:
                parameters[name] = p

    # What is captured.

    def forward(self) -> None:
        args, kwargs = arguments(self.form, iter([each.static for each in self.inputs]))
        with self._aliases_in_place():
            results = self.plain(self.module, *args, **kwargs)
        all_of = results if type(results) is tuple else (results, )
        tensors = [value for value in all_of if isinstance(value, Tensor)]
        if len(tensors) != 1 or not tensors[0].requires_grad:
            raise NoGraph(f"{type(self.module).__name__} returns {len(tensors)} tensors, and a graph gives one")
        if others := [value for value in all_of if not isinstance(value, (Tensor, *CONSTANTS))]:
            raise NoGraph(f"{type(self.module).__name__} returns a {type(others[0]).__name__} beside its output")
        self.output, self._edge = tensors[0], get_gradient_edge(tensors[0])
        self.results = OUTPUT if results is self.output else tuple(
            OUTPUT if value is self.output else value for value in results)

    def backward(self) -> None:
        differentiable = [each.static for each in self.inputs if each.static.requires_grad]
        aliases = [self._aliases[p] for p in self.params]
        grads = torch.autograd.grad(self._edge, [*differentiable, *aliases], self.grad)
        self.input_grads = list(grads[:len(differentiable)])
        if self.params:
            torch.cat([grad.reshape(-1) for grad in grads[len(differentiable):]], out=self.flat)

    def warm_up(self, shared: dict) -> None:
        self.forward()
        key = "grad", self.output.shape, self.output.dtype
        self.grad = shared.setdefault(key, torch.zeros_like(self.output, requires_grad=False))
        self.flat = shared["flat"][:sum(p.numel() for p in self.params)] if self.params else None
        came: list[nn.Parameter] = []
        hooks = [alias.register_hook(lambda _, p=p: came.append(p)) for p, alias in self._aliases.items()]
        self.backward()
        for hook in hooks:
            hook.remove()
        self.params = came
        self.sizes = [p.numel() for p in came]

    def capture_forward(self, capture: Capture) -> None:
        self._replay_forward = capture(self.forward)
        self.output = capture.result(self.output)

    def capture_backward(self, capture: Capture) -> None:
        self._replay_backward = capture(self.backward)
        self.input_grads, self._edge = list(map(capture.result, self.input_grads)), None

    # What runs in their place.

    def __call__(self, tensors: list[Tensor]) -> Any:
        # Of nodes that get gradients at once, autograd runs the one first that was made last. ZeRO sends gradients in
        # the order in which they come, which has to be that of ranks without graphs.
        views = [p.view_as(p) for p in reversed(self.params)]
        output = _Replay.apply(self, *tensors, *reversed(views))
        if self.results is OUTPUT:
            return output
        return tuple(output if value is OUTPUT else value for value in self.results)  # type: ignore[attr-defined]

    def replay_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Pending | Tensor]:
        """The output, and what tells backward of which forward it is."""
        for each, tensor in zip(self.inputs, tensors, strict=True):
            each.fill(tensor)
        begun = self.forwards.begin(self.index, self.inputs)
        self._replay_forward()
        return self.output.clone(), begun

    def replay_backward(self, begun: Pending | Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments' tensors and of `params`."""
        self.forwards.end(begun)  # type: ignore[arg-type]
        self.grad.copy_(grad)
        self._replay_backward()
        inputs = iter(self.input_grads)
        grads = [next(inputs).clone() if each.static.requires_grad else None for each in self.inputs]
        parts = self.flat.clone().split(self.sizes) if self.params else ()  # autograd may keep them as gradients
        return *grads, *(part.view_as(p) for part, p in zip(parts, self.params, strict=True))


class _Replay(torch.autograd.Function):

    @staticmethod
    def forward(ctx, graphed: GraphedAttention, *tensors: Tensor) -> Tensor:
        ctx.graphed = graphed
        output, begun = graphed.replay_forward(tensors[:len(graphed.inputs)])
        if graphed.recomputed:
            ctx.save_for_backward(begun)
        else:
            ctx.begun = begun
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        begun, = ctx.saved_tensors if ctx.graphed.recomputed else (ctx.begun, )
        return None, *ctx.graphed.replay_backward(begun, grad)


def captured(calls: dict[nn.Module, Call], recomputed: set[nn.Module]) -> dict[nn.Module, GraphedAttention]:
    """Graphs of these calls, which are in the order of forward.

    `recomputed`: the modules that checkpointing runs again right before their backward.
    """
    once, again, statics, shared = Forwards(), Recomputed(), {}, {}
    made = [GraphedAttention(module, call, index, again if module in recomputed else once,
                             _inputs(call, statics, module in recomputed))
            for index, (module, call) in enumerate(calls.items())]
    if len({p.dtype for each in made for p in each.params}) > 1:
        raise NoGraph("attention has trained parameters of several dtypes")
    if params := max((each.params for each in made), key=lambda params: sum(p.numel() for p in params)):
        shared["flat"] = params[0].new_empty(sum(p.numel() for p in params), requires_grad=False)
    for groups in ([[each for each in made if not each.recomputed]], [[each] for each in made if each.recomputed]):
        _capture(groups, shared)
    return {each.module: each for each in made}


def _capture(groups: list[list[GraphedAttention]], shared: dict) -> None:
    """Captures forward and backward of each group. Groups use the same memory."""
    capture = Capture()
    with capture.on_stream(), torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM_UPS):
            for each in chain(*groups):
                each.warm_up(shared)
        with capture.without_waits():  # and with as much memory as the captures take
            for group in groups:
                for each in group:
                    each.forward()
                for each in reversed(group):
                    each.backward()
        get_accelerator().synchronize()
        for group in groups:
            for each in group:
                each.capture_forward(capture)
            for each in reversed(group):
                each.capture_backward(capture)


def _inputs(call: Call, statics: dict[tuple, Input], recomputed: bool) -> list[Input]:
    """Returns an Input for each tensor of such a call: a new one, or that of an earlier layer.

    Args:
        statics: what calls of earlier layers made, by a tensor's place in its call and the tensor itself. Tensors that
            get a gradient are not in it. Recomputed layers share inputs of the same form.
    """
    device, made = torch.device(get_accelerator().current_device_name()), []
    for i, (wanted, tensor) in enumerate(zip(tensor_forms(call.form), call.tensors, strict=True)):
        key = i, wanted if recomputed else tensor
        made.append(statics.get(key) or Input(wanted.make(device)))
        if recomputed or tensor is not None:
            statics[key] = made[-1]
    return made
