# SPDX-License-Identifier: Apache-2.0
"""Attention in CUDA graphs.

The attention of a layer is about a hundred small kernels of other libraries, forward and backward. The host takes
longer to launch them than the device takes to run them. Here it launches two graphs in their place, with the same
bits.

Graphs are captured between two steps, once every call of a step had arguments of the same form: shapes, dtypes and
constants. Calls of other forms run as before. So do evaluation, compiled models, a forward under checkpointing, and a
second forward before the backward of the first one, whose activations a graph would overwrite.

With "graph_attention": false there are no graphs. Without the key, those of transformers' own attention are made if
memory allows it. With true, those of every module whose class is called Attention.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ..config import MXFP8MoEConfig
from ..layers.patches import wrap
from ..layers.say import print_on_rank_0
from .keeping import MOST_OF_FREE, free_bytes

WARM_UPS = 3  # runs before the capture, in which libraries choose and build their kernels
PATIENCE = 20  # steps without a form that lasts, after which attention is left as it is


# The graphs of an attention module's engine. A copy of the module has none.
_GRAPHS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttentionGraphs]]" = weakref.WeakKeyDictionary()


def graph_attention(engine: DeepSpeedEngine, config: MXFP8MoEConfig, converted: int) -> None:
    """Applies the key of that name to an engine with converted layers. A second call replaces the first."""
    asked = config.graph_attention
    attentions = [module for module in engine.module.modules() if type(module).__name__.endswith("Attention")
                  and (asked or type(module).__module__.startswith("transformers."))]
    engine._mxfp8_graphs = None
    if not config.enabled or not converted or asked is False:
        return
    if obstacle := _obstacle(engine, attentions):
        if asked:
            print_on_rank_0(f'mxfp8_moe: "graph_attention" has no effect: {obstacle}')
        return
    engine._mxfp8_graphs = AttentionGraphs(asked)
    wrap(engine, "destroy", partial(_destroy, engine), until=engine)
    for module in attentions:
        _GRAPHS[module] = weakref.ref(engine._mxfp8_graphs)
        wrap(type(module), "forward", _attend)


def _obstacle(engine: DeepSpeedEngine, attentions: list[nn.Module]) -> str | None:
    if not has_graphs():
        return "CUDA graphs need a GPU"
    if engine.zero_optimization_partition_weights():
        return "ZeRO-3 frees the weights after each call"
    if engine.autotp_size() > 1 or engine.sequence_parallel_size > 1:
        return "ranks share the work of an attention module"
    if not attentions:
        return "no module of the model has a class whose name ends with Attention"
    return None


def has_graphs() -> bool:
    return get_accelerator().device_name() == "cuda"


def _destroy(engine: DeepSpeedEngine, plain: Callable) -> None:
    engine._mxfp8_graphs = None
    plain()


def _attend(plain: Callable, module: nn.Module, *args, **kwargs) -> Any:
    """The forward of an attention module."""
    if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled() or (
            torch.is_autocast_enabled() or _tensors_are_watched()):
        return plain(module, *args, **kwargs)
    graphs = _GRAPHS.get(module, lambda: None)()
    return plain(module, *args, **kwargs) if graphs is None else graphs.run(module, plain, args, kwargs)


def _tensors_are_watched() -> bool:
    """Whether somebody wants to see each tensor that this forward saves, such as checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


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
    None: there are arguments of other kinds, such as caches."""
    tensors: list[Tensor] = []

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TensorForm(value.shape, value.dtype, value.requires_grad)
        if isinstance(value, tuple):
            return tuple(map(told, value))
        if isinstance(value, CONSTANTS):
            return value
        raise TypeError(value)

    try:
        named = chain(((None, value) for value in args), kwargs.items())
        return tuple((name, told(value)) for name, value in named), tensors
    except TypeError:
        return None, []


def arguments(form: Form, tensors: Iterator[Tensor]) -> tuple[tuple, dict]:
    """A call's arguments of this form, with these tensors."""
    def filled(value: Any) -> Any:
        if isinstance(value, TensorForm):
            return next(tensors)
        return tuple(map(filled, value)) if isinstance(value, tuple) else value

    values = [(name, filled(value)) for name, value in form]
    return (tuple(value for name, value in values if name is None),
            {name: value for name, value in values if name is not None})


class Input:
    """Where a graph reads a tensor of its arguments. All layers share one whose tensor has no gradient, such as the
    rotary embeddings, so that it is copied once for all of them."""

    def __init__(self, static: Tensor):
        self.static, self._from, self._version = static, None, None

    def fill(self, tensor: Tensor) -> None:
        if self._from is not tensor or self._version != tensor._version:
            self.static.detach().copy_(tensor)
            self._from, self._version = tensor if not self.static.requires_grad else None, tensor._version


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
        with torch.random.fork_rng([torch.cuda.current_device()]), torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that replays on the device what `work` does there. The capture itself computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, go on asking the device for events.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class NoGraph(Exception):
    """Why a module cannot have graphs."""


class Pending:
    """A forward whose backward is to come. It goes with the autograd node that holds it."""


class GraphedAttention:
    """The graphs of one attention module.

    Attributes:
        form: of its calls' arguments.
        inputs: where the graphs read them.
        params: those that are trained.
        output, grad, input_grads, flat: where the graphs write the output, read its gradient, and write the gradients
            of the inputs and of `params`. All layers share `grad` and `flat`: what is there leaves it before the next
            layer's comes.
    """

    def __init__(self, module: nn.Module, plain: Callable, form: Form, inputs: list[Input]):
        self.module, self.plain, self.form, self.inputs = module, plain, form, inputs
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.params]
        self._aliases = {p: nn.Parameter(p.detach()) for p in self.params}
        self._all_params, self._parts = list(module.parameters()), [*module.modules()][1:]
        self._weights, self._pending = self._weights_now(), lambda: None
        if self._hooked() or any(p._backward_hooks for p in self.params):
            raise NoGraph(f"{type(module).__name__} has hooks")

    def _weights_now(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for p in self._all_params]

    def _hooked(self) -> bool:
        return any(part._forward_hooks or part._forward_pre_hooks for part in self._parts)

    def fits(self, form: Form | None) -> bool:
        """Whether the graphs may compute a call of this form now."""
        return self._pending() is None and form == self.form and self._weights == self._weights_now() and (
            not self._hooked())

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
        all_of = results if isinstance(results, tuple) else (results, )
        tensors = [value for value in all_of if isinstance(value, Tensor)]
        if len(tensors) != 1 or not tensors[0].requires_grad:
            raise NoGraph(f"{type(self.module).__name__} returns {len(tensors)} tensors, and a graph gives one")
        self._output = tensors[0]
        self.results = OUTPUT if results is self._output else tuple(
            OUTPUT if value is self._output else value for value in results)

    def backward(self) -> None:
        differentiable = [each.static for each in self.inputs if each.static.requires_grad]
        grads = torch.autograd.grad(self._output, [*differentiable, *self._aliases.values()], self.grad)
        self.input_grads = grads[:len(differentiable)]
        if self.params:
            torch.cat([grad.reshape(-1) for grad in grads[len(differentiable):]], out=self.flat)

    def warm_up(self, shared: dict) -> None:
        for _ in range(WARM_UPS):
            self.forward()
            key = "grad", self._output.shape, self._output.dtype
            self.grad = shared.setdefault(key, torch.zeros_like(self._output, requires_grad=False))
            self.flat = shared["flat"][:sum(self.sizes)] if self.params else None
            self.backward()

    def capture_forward(self, capture: Capture) -> None:
        self._replay_forward = capture(self.forward)
        self.output = self._output.detach()

    def capture_backward(self, capture: Capture) -> None:
        self._replay_backward = capture(self.backward)
        self._output = None

    # What runs in their place.

    def __call__(self, tensors: list[Tensor]) -> Any:
        output = _Replay.apply(self, *tensors, *self.params)
        if self.results is OUTPUT:
            return output
        return tuple(output if value is OUTPUT else value for value in self.results)

    def replay_forward(self, tensors: tuple[Tensor, ...]) -> Pending:
        for each, tensor in zip(self.inputs, tensors, strict=True):
            each.fill(tensor)
        self._replay_forward()
        pending = Pending()
        self._pending = weakref.ref(pending)
        return pending

    def replay_backward(self, pending: Pending, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments' tensors and of `params`."""
        if self._pending() is not pending:
            raise RuntimeError("mxfp8_moe: backward comes to the same attention again, and its CUDA graph keeps "
                               'nothing for that: write "graph_attention": false')
        self._pending = lambda: None
        self.grad.copy_(grad)
        self._replay_backward()
        inputs = iter(self.input_grads)
        grads = [next(inputs).detach() if each.static.requires_grad else None for each in self.inputs]
        parts = self.flat.clone().split(self.sizes) if self.params else ()  # autograd may keep them as gradients
        return *grads, *(part.view_as(p) for part, p in zip(parts, self.params, strict=True))


class _Replay(torch.autograd.Function):

    @staticmethod
    def forward(ctx, graphed: GraphedAttention, *tensors: Tensor) -> Tensor:
        ctx.graphed, ctx.pending = graphed, graphed.replay_forward(tensors[:len(graphed.inputs)])
        return graphed.output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphed.replay_backward(ctx.pending, grad)


class AttentionGraphs:
    """All attention modules of an engine. `asked`: by the key."""

    def __init__(self, asked: bool | None):
        self._asked, self._steps = asked, 0
        self._calls: dict[tuple[nn.Module, Form | None], Callable] = {}  # of the step that is running, in their order
        self._graphed: dict[nn.Module, GraphedAttention] = {}

    def run(self, module: nn.Module, plain: Callable, args: tuple, kwargs: dict) -> Any:
        graphed = self._graphed.get(module)
        if graphed is None and (self._graphed or self._steps >= PATIENCE):
            return plain(module, *args, **kwargs)
        form, tensors = form_of(args, kwargs)
        if graphed is None:
            self._calls[module, form] = plain
        elif graphed.fits(form):
            return graphed(tensors)
        return plain(module, *args, **kwargs)

    def after_step(self) -> None:
        """Captures graphs once a step has shown one form of each module's calls. The first step shows nothing, since
        other things are decided in it."""
        calls, self._calls = self._calls, {}
        self._steps += 1
        if self._graphed or self._steps == 1 or self._steps > PATIENCE:
            return
        if not calls or len({module for module, _ in calls}) < len(calls) or any(form is None for _, form in calls):
            if self._steps == PATIENCE:
                self._give_up(f"in none of {PATIENCE} steps did every call of attention have arguments of the same "
                              "form. Micro-batches need the same shape, checkpointing has to be off, and "
                              "model.config.use_cache False")
            return
        device = get_accelerator()
        device.empty_cache()
        free, before = free_bytes(), device.memory_reserved()
        try:
            graphed = _captured(calls)
        except NoGraph as reason:
            self._give_up(str(reason))
            return
        except Exception as error:  # of any library
            self._steps = PATIENCE
            print_on_rank_0(f"mxfp8_moe: attention runs without CUDA graphs, since there was an error: {error!r}")
            return
        held = device.memory_reserved() - before
        if self._asked or held <= MOST_OF_FREE * free:
            self._graphed = graphed
            print_on_rank_0(f"mxfp8_moe: attention of {len(graphed)} layers runs in CUDA graphs, whose memory is "
                            f"{held / 2**30:.2f} GiB on this rank")
        else:
            self._steps = PATIENCE
            print_on_rank_0("mxfp8_moe: attention runs without CUDA graphs: they would take more than half of the "
                            f"memory that a step leaves free ({held / 2**30:.2f} of {free / 2**30:.2f} GiB on this "
                            'rank). "graph_attention": true makes them anyway')

    def _give_up(self, reason: str) -> None:
        self._steps = PATIENCE
        if self._asked:
            print_on_rank_0(f'mxfp8_moe: "graph_attention" has no effect: {reason}')


def _captured(calls: dict[tuple[nn.Module, Form], Callable]) -> dict[nn.Module, GraphedAttention]:
    """Graphs of these calls. They are captured in the order in which they run, forward of all and then backward, so
    that they share memory as the kernels of a step do."""
    shared: dict = {}
    made = [GraphedAttention(module, plain, form, _inputs(form, shared)) for (module, form), plain in calls.items()]
    if params := max((each.params for each in made), key=lambda params: sum(p.numel() for p in params)):
        shared["flat"] = params[0].new_empty(sum(p.numel() for p in params), requires_grad=False)
    capture = Capture()
    with capture.on_stream(), torch.autograd.set_multithreading_enabled(False):
        for each in made:
            each.warm_up(shared)
        get_accelerator().synchronize()
        for each in made:
            each.capture_forward(capture)
        for each in reversed(made):
            each.capture_backward(capture)
    return {each.module: each for each in made}


def _inputs(form: Form, shared: dict) -> list[Input]:
    """Where graphs of this form read their tensors."""
    device, made = torch.device(get_accelerator().current_device_name()), []

    def visit(value: Any) -> None:
        if isinstance(value, TensorForm):
            key = len(made), value
            made.append(shared.get(key) or Input(value.make(device)))
            if not value.requires_grad:
                shared[key] = made[-1]
        elif isinstance(value, tuple):
            for part in value:
                visit(part)

    visit(tuple(value for _, value in form))
    return made
