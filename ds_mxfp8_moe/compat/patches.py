# SPDX-License-Identifier: Apache-2.0
"""The one way in which this package replaces functions of other libraries, in two forms.

    with patched(DeepSpeedEngine, "destroy", ours):       # for a time
        ...
    wrap(model, "generate", ours, until=engine)           # once, until undo_wraps(engine)

`ours` gets the plain function, followed by the arguments of the call. A wrapped function is marked with the names of
the functions that wrap it. A second wrap by the same function changes nothing. What several engines wrap, such as a
method of a class, stays wrapped until this was called for all of them.

PATCHES lists all that is replaced. An object that gets a class of ours, a subclass of its own, counts too.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """Attributes:
        by: the file that replaces something.
        name: of the attribute.
        of: what has it.
        until: when it is as before. If it stays, why.
    """

    by: str
    name: str
    of: str
    until: str


PATCHES = tuple(Patch(*row) for row in (
    ("hook/__init__.py", "__init__", "DeepSpeedEngine",
     "stays: it acts if a config has the section alone. DS_MXFP8_MOE_AUTO=0 leaves it out"),
    ("engine/start.py", "__init__", "DeepSpeedEngine", "initialize returns; after enable(): disable()"),
    ("engine/spreading.py", "AutoEP", "deepspeed.module_inject.auto_ep", "the experts are spread"),
    ("engine/moe_engine.py", "__class__", "an engine", "stays: its model has one rank's experts"),
    ("engine/convert.py", "__class__", "DeepSpeed's MOELayer", 'a section with "enabled": false'),
    ("layers/classic.py", "min_capacity", "DeepSpeed's TopKGate", "the gate's forward returns"),
    ("layers/experts.py", "__class__", "a MoE block of transformers, and its experts",
     "stays: the whole experts do not exist any more"),
    ("compat/expert_groups.py", "ZERO_SUPPORTED_OPTIMIZERS", "deepspeed.runtime.zero.utils",
     "the engine has its optimizer"),
    ("compat/zero.py", "__class__", "an optimizer of ZeRO-1 or 2", "a section without batch_gradients"),
    ("compat/clipping.py", "unscale_and_clip_grads", "an optimizer of ZeRO-0", "engine.destroy()"),
    ("compat/sequences.py", "load_balancing_loss_func", "modules of transformers' models", "engine.destroy()"),
    ("compat/waiting.py", "generate", "a model of transformers", "engine.destroy()"),
    ("engine/graphs.py", "forward", "classes of attention", "engine.destroy()"),
    *(("checkpoint/saving.py", name, of, "stays: a model outlives its engine, and still has one rank's experts. Other "
       "models are saved as before") for name, of in (
           ("get_state_dict", "Accelerator"), ("save_model", "Accelerator"), ("save_pretrained", "PreTrainedModel"),
           ("save_pretrained", "PeftModel"))),
    *(("checkpoint/from_pretrained.py", name, of, "from_pretrained returns") for name, of in (
        ("_load_pretrained_model", "PreTrainedModel"), ("supports_quant_method", "AutoHfQuantizer"),
        ("_hf_deepspeed_config_weak_ref", "transformers.integrations.deepspeed"))),
    ("parallel_style.py", "__class__", "a module to which MXFP8ExpertParallel is applied",
     "stays, as torch's own parallel styles do"),
))

_WRAPPED_BY = "mxfp8_moe"  # of a function: the names of the functions that wrap it
_UNDO = "_mxfp8_undo"  # of an engine: what takes its wraps back
_UNTIL = "mxfp8_moe_until"  # of a wrapped function: what takes the wrap back


@contextmanager
def lent(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the context, `owner.name` is `value`."""
    restore = _restoring(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        restore()


@contextmanager
def patched(owner: Any, name: str, ours: Callable) -> Iterator[None]:
    """Inside the context, a call of `owner.name` is a call of `ours(plain, ...)`."""
    with lent(owner, name, _calling(ours, getattr(owner, name))):
        yield


def wrap(owner: Any, name: str, ours: Callable, until: Any = None) -> bool:
    """From now on, a call of `owner.name` is a call of `ours(plain, ...)`. A second wrap by `ours` changes nothing.

    `until`: the engine for which `undo_wraps` takes the wrap back, unless somebody else has wrapped the function
    since, or another engine needs it. None: it stays as long as its owner. Returns whether the function was not
    wrapped by `ours` yet.
    """
    plain = getattr(owner, name)
    new = _name(ours) not in getattr(plain, _WRAPPED_BY, ())
    if new:
        wrapped, restore = _calling(ours, plain), _restoring(owner, name)
        setattr(owner, name, wrapped)
        if until is not None:
            setattr(getattr(wrapped, "__func__", wrapped), _UNTIL, _Until(owner, name, wrapped, restore))
    if until is not None and (end := getattr(getattr(owner, name), _UNTIL, None)) is not None:
        end.engines.add(until)
        vars(until).setdefault(_UNDO, []).append(functools.partial(end, until))
    return new


def undo_wraps(engine: Any) -> None:
    """Takes back what is wrapped until the end of this engine."""
    for undo in reversed(vars(engine).pop(_UNDO, ())):
        undo()


class _Until:
    """Called with an engine that ends, it takes a wrap back if no other engine needs it."""

    def __init__(self, owner: Any, name: str, wrapped: Callable, restore: Callable[[], None]):
        self._owner, self._name, self._wrapped, self._restore = owner, name, wrapped, restore
        self.engines: weakref.WeakSet = weakref.WeakSet()

    def __call__(self, engine: Any) -> None:
        self.engines.discard(engine)
        if not self.engines and vars(self._owner).get(self._name) is self._wrapped:
            self._restore()


def _restoring(owner: Any, name: str) -> Callable[[], None]:
    """A function that gives `owner` back the attribute that it has now."""
    if name in vars(owner):
        return functools.partial(setattr, owner, name, vars(owner)[name])
    if hasattr(inspect.getattr_static(type(owner), name, None), "__set__"):  # such as __class__
        return functools.partial(setattr, owner, name, getattr(owner, name))
    return functools.partial(delattr, owner, name)  # its class has it


def _calling(ours: Callable, plain: Any) -> Callable:
    method = inspect.ismethod(plain)  # stays one: torch's learning rate schedulers read `optimizer.step.__func__`

    @functools.wraps(plain.__func__ if method else plain)
    def wrapped(*args, **kwargs):
        return ours(plain, *args[method:], **kwargs)

    setattr(wrapped, _WRAPPED_BY, (*getattr(plain, _WRAPPED_BY, ()), _name(ours)))
    return wrapped.__get__(plain.__self__) if method else wrapped  # type: ignore[attr-defined]


def _name(function: Callable) -> str:
    function = getattr(function, "func", function)  # of a partial
    return f"{function.__module__}.{function.__qualname__}"
