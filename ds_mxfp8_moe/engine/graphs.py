# SPDX-License-Identifier: Apache-2.0
"""Attention in CUDA graphs.

The attention of a layer is about a hundred small kernels of other libraries, forward and backward. The host takes
longer to launch them than the device takes to run them. Here it launches two graphs in their place, with the same
bits. Where more than attention reads the same hidden values, as in FlexOlmo and Cohere2-MoE, their gradient is added
up in another order.

Graphs are captured between two steps, once all calls of both had arguments of the same form: shapes, dtypes and
constants. Calls of other forms run as before. So do evaluation, compiled models, a module that was changed, and a
second forward before the backward of the first one, whose activations a graph would overwrite. Other ranks may do
either, since gradients come to ZeRO in the same order. Graphs that no call uses any more are freed.

Where checkpointing runs a layer again right before its backward, one graph serves both forwards, and all such layers
share the memory of one layer's activations.

With "graph_attention": false there are no graphs. Without the key, those of transformers' own attention are made if
memory allows it. With true, every module whose class name ends in Attention gets one.
"""

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..compat.patches import wrap
from ..compat.private_names import say_if_missing
from ..config import MXFP8MoEConfig, is_tensor_parallel
from ..ops.log import log_on_rank_0
from ..routing.routes import is_recomputed
from .graphed import Call, Form, GraphedAttention, NoGraph, NoGraphYet, captured, form_of
from .keeping import MOST_OF_FREE, free_bytes

# After so many steps without a form that lasts, attention is left as it is. Graphs that so many did not use are freed.
PATIENCE = 20
# What comes to a module in a step. A forward may run within a backward (again), while somebody wants to see all that
# it saves (watched), or without gradients (unsaved).
FORWARD, AGAIN, WATCHED, UNSAVED, BACKWARD = "forward", "again", "watched", "unsaved", "backward"

# The graphs of an attention module's engine. A copy of the module has none.
_GRAPHS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttentionGraphs]]" = weakref.WeakKeyDictionary()


def graph_attention(engine: DeepSpeedEngine, config: MXFP8MoEConfig, converted: int) -> None:
    """Applies the key of that name to an engine with converted layers. A second call replaces the first."""
    asked = config.graph_attention
    attentions = [module for module in engine.module.modules() if type(module).__name__.endswith("Attention")
                  and (asked or type(module).__module__.startswith("transformers."))]
    engine._mxfp8.put("graphs", None)
    if not config.enabled or not converted or asked is False or say_if_missing("graph_attention"):
        return
    if obstacle := _obstacle(engine, attentions):
        if asked:
            log_on_rank_0(f'mxfp8_moe: "graph_attention" has no effect: {obstacle}')
        return
    graphs = AttentionGraphs(asked)
    engine._mxfp8.put("graphs", graphs)
    for module in attentions:
        _GRAPHS[module] = weakref.ref(graphs)
        wrap(type(module), "forward", _attend, until=engine)


def _obstacle(engine: DeepSpeedEngine, attentions: list[nn.Module]) -> str | None:
    if not has_graphs():
        return "CUDA graphs need a GPU"
    if engine.zero_optimization_stage() == 3:
        return "ZeRO-3 frees the weights after each call"
    if is_tensor_parallel(engine) or engine.sequence_parallel_size > 1:
        return "ranks share the work of an attention module"
    if not attentions:
        return "no module of the model has a class whose name ends with Attention"
    return None


def has_graphs() -> bool:
    return get_accelerator().device_name() == "cuda"


def _attend(plain: Callable, module: nn.Module, *args, **kwargs) -> Any:
    """The forward of an attention module."""
    of_a_base = getattr(type(module).forward, "__wrapped__", None) is not plain  # called by the module's own forward
    if of_a_base or torch.compiler.is_compiling() or not module.training or torch.is_autocast_enabled():
        return plain(module, *args, **kwargs)
    if is_in_torch_dispatch_mode():  # which looks for operators: selective checkpointing keeps their results
        return plain(module, *args, **kwargs)
    graphs = _GRAPHS.get(module, lambda: None)()
    return plain(module, *args, **kwargs) if graphs is None else graphs.run(module, plain, args, kwargs)


def _kind_of_forward() -> str:
    """WATCHED and UNSAVED are the first forwards of the two ways of checkpointing, but may have other reasons."""
    if not torch.is_grad_enabled():
        return UNSAVED
    if is_recomputed():
        return AGAIN
    watched = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return WATCHED if watched else FORWARD


class AttentionGraphs:
    """All attention modules of an engine. `asked`: by the key."""

    def __init__(self, asked: bool | None):
        self._asked = asked
        self._steps = 0  # since the start, or since the graphs were used
        self._graphed: dict[nn.Module, GraphedAttention] = {}
        self._forms: dict[nn.Module, Form] = {}  # of the last step's calls
        self._forget()

    def _forget(self) -> None:
        """Begins the notes of a step: each module's call, in their order; what came to which module; and whether the
        calls of each module have had one form."""
        self._calls: dict[nn.Module, Call] = {}
        self._passes: list[tuple[nn.Module, str]] = []
        self._alike = True

    def run(self, module: nn.Module, plain: Callable, args: tuple, kwargs: dict) -> Any:
        graphed, kind = self._graphed.get(module), _kind_of_forward()
        if graphed is None and (self._graphed or self._steps >= PATIENCE or not self._alike or kind == UNSAVED) or (
                graphed is not None and graphed.recomputed == (kind == FORWARD)):
            return plain(module, *args, **kwargs)
        form, tensors = form_of(args, kwargs)
        if graphed is not None:
            if not graphed.fits(form, tensors):
                return plain(module, *args, **kwargs)
            self._steps = 0
            return graphed(tensors)
        results = plain(module, *args, **kwargs)
        output = next((value for value in (results if isinstance(results, tuple) else (results, ))
                       if isinstance(value, Tensor) and value.requires_grad), None)
        if output is not None:
            self._note(module, kind, plain, form, tensors, output)
        return results

    def _note(self, module: nn.Module, kind: str, plain: Callable, form: Form | None, tensors: list[Tensor],
              output: Tensor) -> None:
        if form is None or module in self._calls and form != self._calls[module].form:
            self._forget()
            self._alike = False
            return
        self._calls[module] = Call(plain, form, [None if tensor.requires_grad else tensor for tensor in tensors])
        passes = self._passes
        passes.append((module, kind))
        output.register_hook(lambda _: passes.append((module, BACKWARD)))

    def after_step(self) -> None:
        """Captures graphs once two steps in a row have shown one form of each module's calls. A form that comes in one
        step alone would have graphs for nothing."""
        calls, last_forms = self._calls, self._forms
        self._forms = {module: call.form for module, call in calls.items()}
        lasting = self._forms == last_forms and self._alike and lasts(self._passes)
        recomputed = {module for module, kind in self._passes if kind == AGAIN}
        self._forget()
        self._steps += 1
        if self._graphed and self._steps > PATIENCE:
            self._free()
        if self._graphed or self._steps > PATIENCE:
            return
        if not calls or not lasting:
            if self._steps == PATIENCE:
                self._give_up(f"of {PATIENCE} steps, there were no two in a row in which every call of attention had "
                              "arguments of the same form, and backward came to each call once, the last one first. "
                              "Micro-batches need the same shape, checkpointing has to recompute whole layers, one by "
                              "one, and model.config.use_cache to be False")
            return
        device = get_accelerator()
        device.empty_cache()
        free, before = free_bytes(), device.memory_reserved()
        try:
            graphed = captured(calls, recomputed)
        except NoGraph as reason:
            if not isinstance(reason, NoGraphYet) or self._steps == PATIENCE:
                self._give_up(str(reason))
            return
        except Exception as error:  # of any library
            self._steps = PATIENCE
            log_on_rank_0(f"mxfp8_moe: attention runs without CUDA graphs, since there was an error: {error!r}")
            return
        held = max(0, device.memory_reserved() - before)  # the capture also frees what torch had cached
        if self._asked or held <= MOST_OF_FREE * free:
            self._graphed, self._steps = graphed, 0
            log_on_rank_0(f"mxfp8_moe: attention of {len(graphed)} layers runs in CUDA graphs, whose memory is "
                            f"{held / 2**30:.2f} GiB on this rank")
        else:
            self._steps = PATIENCE
            log_on_rank_0("mxfp8_moe: attention runs without CUDA graphs: they would take more than half of the "
                            f"memory that a step leaves free ({held / 2**30:.2f} of {free / 2**30:.2f} GiB on this "
                            'rank). "graph_attention": true makes them anyway')

    def _free(self) -> None:
        """Begins anew, without graphs."""
        self._graphed, self._steps = {}, 0
        get_accelerator().empty_cache()
        log_on_rank_0(f"mxfp8_moe: {PATIENCE} steps did not use the CUDA graphs of attention. Their memory is free "
                      "again")

    def _give_up(self, reason: str) -> None:
        self._steps = PATIENCE
        if self._asked:
            log_on_rank_0(f'mxfp8_moe: "graph_attention" has no effect: {reason}')


def lasts(passes: list[tuple[nn.Module, str]]) -> bool:
    """Whether graphs can keep activations from forward to backward, if all steps go as this one.

    Of modules that are not recomputed, forward begins with the first, and each backward comes to the last forward to
    which none has come. Those that are, are recomputed right before their backward.
    """
    recomputed, forwards = {module for module, kind in passes if kind == AGAIN}, []
    if any(each[1] == AGAIN and following != (each[0], BACKWARD) for each, following in pairwise([*passes, None])):
        return False
    others = [(module, kind) for module, kind in passes if module not in recomputed]
    for module, kind in others:
        if kind == WATCHED or kind == FORWARD and not forwards and module is not others[0][0]:
            return False
        if kind == FORWARD:
            forwards.append(module)
        elif not forwards or forwards.pop() is not module:
            return False
    return True
