# SPDX-License-Identifier: Apache-2.0
"""Shows by running it that an expert computes a formula.

It runs a copy of the module, made around random float32 parameters on the CPU, and compares outputs and gradients with
the formula, in training and in eval mode, for DeepSpeed's input shape [g, 1, c, H]. The user's module is never called
and never changed.

Big experts are proven at small sizes: what they do there carries over to their own sizes because a dry run on the meta
device shows the same operations with the same arguments at both. Where it does not, they are proven at full size.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .experts import ExpertFormula, NotRecognised, evaluate
from .watch import TORCH_OWN

# float32 in any order of operations stays below 1e-6; gelu and its tanh form lie 2e-4 apart on the proof's rows.
_TOLERANCE = 2e-5
# bf16 is good to about 1e-2 here: the run in the experts' own dtype looks for another formula, not for last bits.
_HALF_TOLERANCE = 5e-2
# The last weights times it make outputs overflow that nothing before them does.
_LARGE = 256
# Up to this many weights an expert is proven at its own sizes: that is as cheap.
_FULL_SIZE_WEIGHTS = 1 << 18


@contextmanager
def isolated() -> Iterator[None]:
    """Keeps the caller's modes out of the proof, and the proof out of the caller's random states."""
    mkldnn, threads = torch.backends.mkldnn, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    # float32 products in full: oneDNN may round to bf16 or tf32 after torch.set_float32_matmul_precision().
    enabled, *_ = mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    # The products are small, and where ranks share cores, threads that wait for each other cost 10 times more.
    torch.set_num_threads(1)
    try:
        with (torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.autocast("cpu", enabled=False),
              torch.compiler.set_stance("force_eager")):
            yield
    finally:
        torch.set_num_threads(threads)
        mkldnn.set_flags(_enabled=enabled, _fp32_precision=None)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class _Watch(TorchDispatchMode):
    """Sees each operation of an expert before it runs; stops random ones (on any device) and collectives."""

    refusal: NotRecognised | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refusal = NotRecognised(f"the expert draws random numbers ({func}): dropout?")
        elif func.namespace in ("c10d", "_c10d_functional"):
            self.refusal = NotRecognised(f"the expert communicates between ranks ({func})")
        if self.refusal is not None:
            raise self.refusal
        return func(*args, **(kwargs or {}))


class _Trace(_Watch):
    """Also writes down the program: operations, arguments, shapes, and which tensor went where."""

    def __init__(self, params: Iterable[torch.Tensor]):
        super().__init__()
        self.steps: list = []
        self._seen: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # else ids would be used again
        for param in params:
            self._number(param)

    def _number(self, tensor: torch.Tensor) -> str:
        self._alive.append(tensor)
        return f"tensor {self._seen.setdefault(id(tensor), len(self._seen))}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.steps.append(func)
        for leaf in tree_leaves((args, kwargs, out)):
            self.steps += [self._number(leaf), *leaf.shape] if isinstance(leaf, torch.Tensor) else [leaf]
        return out


def same_state(one: nn.Module, other: nn.Module) -> bool:
    """Whether two experts of the same structure hold equal attributes: then they run the same code alike."""
    for pair in zip(one.modules(), other.modules(), strict=True):
        a, b = ({k: v for k, v in vars(m).items() if k not in TORCH_OWN} for m in pair)
        try:
            if a.keys() != b.keys() or any(type(a[k]) is not type(b[k]) or not bool(a[k] == b[k]) for k in a):
                return False
        except Exception:  # such as two tensors of several elements: not plainly equal
            return False
    return True


def _clone(expert: nn.Module, params: Mapping[str, nn.Parameter], sizes: Mapping[int, int]) -> nn.Module:
    """A copy of the expert around other parameters: no weight is copied, and nothing it does reaches the original.

    Integer attributes that equal one of the replaced sizes (in_features, hidden_size and the like) follow them.
    """
    memo = {id(p): params[name] for name, p in expert.named_parameters()}
    clone = copy.deepcopy(expert, memo)
    if any(p is not params[name] for name, p in clone.named_parameters()):
        raise NotRecognised("copy.deepcopy of the expert does not give the same module around copied parameters")
    for module in clone.modules():
        for key, value in vars(module).items():
            if type(value) is int and value in sizes:
                vars(module)[key] = sizes[value]
    return clone


class _Outcome(NamedTuple):
    y: torch.Tensor
    grads: dict[str, torch.Tensor | None]


def _differentiate(fn: Callable, params: Mapping[str, nn.Parameter], x: torch.Tensor,
                   upstream: torch.Tensor | None) -> _Outcome:
    """fn(x), and with an upstream gradient the gradients of input and parameters by name; without, under no_grad."""
    x = x.clone().requires_grad_(upstream is not None)
    for param in params.values():
        param.grad = None
    with torch.set_grad_enabled(upstream is not None):
        y = fn(x)
        y = y[0] if isinstance(y, tuple) and y else y  # as DeepSpeed's Experts does
        if not isinstance(y, torch.Tensor):
            raise NotRecognised(f"the expert returns a {type(y).__name__}, not a tensor")
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise NotRecognised(f"for an input of {list(x.shape)} {x.dtype} the expert returns {list(y.shape)} "
                                f"{y.dtype}")
        if upstream is None:
            return _Outcome(y, {})
        if not y.requires_grad:
            raise NotRecognised("the expert's output carries no gradient: detach() or no_grad() inside?")
        y.backward(upstream)
    return _Outcome(y.detach(), {"its input": x.grad, **{name: p.grad for name, p in params.items()}})


def _state(module: nn.Module) -> dict[str, list]:
    """What each attribute of a module holds; of torch's own ones which object it is."""
    return {key: [value] if key in TORCH_OWN else list(_inside(value, set())) for key, value in vars(module).items()}


def _inside(value: Any, seen: set[int]) -> Iterator:
    """An object and all objects in it; of tensors and arrays the bytes."""
    yield value
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value._version  # all that there is of it on the meta device
        if not value.is_meta:
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, numpy.ndarray):
        yield value.tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _inside(item, seen)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from _inside(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType)):
        yield from _inside(vars(value), seen)


def _unchanged(old: list, new: list) -> bool:
    return len(old) == len(new) and all(a is b or type(a) is type(b) in (bytes, int) and a == b
                                        for a, b in zip(old, new, strict=True))


def brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _run(clone: nn.Module, params: Mapping[str, nn.Parameter], x: torch.Tensor, upstream: torch.Tensor | None = None,
         training: bool = False, watch: _Watch | None = None) -> _Outcome:
    """Runs a cloned expert, watched. Whatever it raises becomes NotRecognised."""
    clone.train(training)
    watch = watch or _Watch()
    before = [(module, _state(module)) for module in clone.modules()]
    try:
        with watch:
            outcome = _differentiate(clone, params, x, upstream)
    except NotRecognised:
        raise
    except Exception as error:
        raise watch.refusal or NotRecognised(f"running the expert raised {brief(error)}") from error
    if watch.refusal is not None:  # raised in there, and caught by the expert
        raise watch.refusal
    for module, old in before:
        new = _state(module)
        for key in old.keys() | new.keys():
            if not _unchanged(old.get(key, []), new.get(key, [])):
                raise NotRecognised(f"the expert's forward changes the attribute {key} of its "
                                    f"{type(module).__name__}: it keeps state")
    return outcome


class _Batch(NamedTuple):
    rows: str  # in words
    x: torch.Tensor
    upstream: torch.Tensor


def _batches(hidden_size: int, generator: torch.Generator) -> list[_Batch]:
    """Ordinary rows, and rows of very different size: clamps show only on these. In DeepSpeed's shape [g, 1, c, H]."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    scale = torch.tensor([0, 1e-4, 1e-2, 1, 10, 100, 1e3, 1e4], device="cpu", dtype=torch.float32).view(1, 1, 8, 1)
    return [_Batch("ordinary rows", randn(3, 1, 4, hidden_size), randn(3, 1, 4, hidden_size)),
            _Batch("very small and very large rows", randn(1, 1, 8, hidden_size) * scale,
                   randn(1, 1, 8, hidden_size) * scale.clamp(min=1))]


def _parameters(expert: nn.Module, sizes: Mapping[int, int], make: Callable) -> dict[str, nn.Parameter]:
    """For each of the expert's parameters a fresh one, by name: make(shape), in the sizes of the proof."""
    return {name: nn.Parameter(make([sizes.get(size, size) for size in p.shape]))
            for name, p in expert.named_parameters()}


def _random_weight(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """float32, such that normal rows give pre-activations of about +-4."""
    count = torch.Size(shape).numel()
    # Drawing each number of a big weight takes seconds; a period that is a prime keeps its rows different.
    period = torch.randn(min(count, 65537), generator=generator, device="cpu", dtype=torch.float32)
    values = period.repeat(-(-count // len(period)))[:count].view(shape)
    return values * (2 / shape[1]**0.5 if len(shape) == 2 else 0.5)


def _small_sizes(formula: ExpertFormula) -> dict[int, int]:
    """Own size -> small size for H, F and 2F; sizes equal to each other stay equal."""
    hidden, ffn = formula.hidden_size, formula.ffn_size
    small_hidden = 96
    small_ffn = small_hidden if ffn == hidden else small_hidden // 2 if 2 * ffn == hidden else 160
    return {hidden: small_hidden, ffn: small_ffn, 2 * ffn: 2 * small_ffn}


def _same_at_small_sizes(expert: nn.Module, hidden_size: int, sizes: Mapping[int, int]) -> bool:
    """Whether the expert runs the same program at its own sizes and at small ones: same but for the sizes in it."""

    def empty(shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.float32)

    programs = []
    for shrink in ({}, sizes):
        params = _parameters(expert, shrink, empty)
        x = empty([3, 1, 4, shrink.get(hidden_size, hidden_size)])
        trace = _Trace(params.values())
        try:
            clone = _clone(expert, params, shrink)
            _run(clone, params, x, watch=trace)
            _run(clone, params, x, torch.empty_like(x), training=True, watch=trace)
        except NotRecognised:
            return False  # the run with numbers says why, if it fails too
        programs.append(trace.steps)
    at_own, at_small = programs
    # Strides are sizes times rows: of the 3 x 1 x 4 rows, any product.
    own_size = {rows * small: rows * own for own, small in sizes.items() for rows in (1, 3, 4, 12)}
    return at_own == [own_size.get(leaf, leaf) if type(leaf) is int else leaf for leaf in at_small]


def prove(expert: nn.Module, candidates: list[ExpertFormula]) -> ExpertFormula:
    """The one candidate that the expert computes."""
    hidden_size, sizes = candidates[0].hidden_size, {}
    if sum(p.numel() for p in expert.parameters()) > _FULL_SIZE_WEIGHTS:
        small = _small_sizes(candidates[0])
        if _same_at_small_sizes(expert, hidden_size, small):
            sizes = small
    generator = torch.Generator("cpu").manual_seed(0)
    params = _parameters(expert, sizes, lambda shape: _random_weight(shape, generator))
    batches = _batches(sizes.get(hidden_size, hidden_size), generator)
    clone = _clone(expert, params, sizes)

    formula = _choose(clone, candidates, params, batches[0].x)
    for batch in batches:
        _compare(clone, formula, params, batch)
    dtype = next(expert.parameters()).dtype
    if dtype != torch.float32:
        own = {name: nn.Parameter(p.detach().to(dtype)) for name, p in params.items()}
        _compare_roughly(_clone(expert, own, sizes), formula, own, batches[0].x.to(dtype))
    for computed_in in dict.fromkeys((torch.float32, dtype)):
        large = {name: nn.Parameter((p.detach() * (_LARGE if name == (formula.down or formula.up) else 1))
                                    .to(computed_in)) for name, p in params.items()}
        _compare_overflow(_clone(expert, large, sizes), formula, large, batches[0].x)
    return formula


def _error(actual: torch.Tensor | None, expected: torch.Tensor, by_row: bool) -> float:
    """|actual - expected| / |expected|, NaN if not finite; by row: the largest among the rows (the last axis)."""
    if actual is None:
        return float("inf")
    dim = -1 if by_row else None
    difference = torch.linalg.vector_norm(actual - expected, dim=dim)
    return (difference / torch.linalg.vector_norm(expected, dim=dim).clamp(min=1e-30)).max().item()


def _choose(clone: nn.Module, candidates: list[ExpertFormula], params: Mapping[str, nn.Parameter],
            x: torch.Tensor) -> ExpertFormula:
    """The one candidate that gives the expert's output."""
    y = _run(clone, params, x).y
    with torch.no_grad():
        errors = [_error(y, evaluate(candidate, x, params), by_row=True) for candidate in candidates]
    matches = [candidate for error, candidate in zip(errors, candidates, strict=True) if error <= _TOLERANCE]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotRecognised(f"{' and '.join(map(str, matches))} cannot be told apart")
    if not _error(_run(clone, params, x[:1, :, :2]).y, y[:1, :, :2], by_row=True) <= _TOLERANCE:
        raise NotRecognised("the output of a row depends on the other rows")
    error = min(errors)
    raise NotRecognised(f"the output differs from the nearest recognised formula, {candidates[errors.index(error)]} "
                        f"(relative error {error:.1g}): another activation, a residual connection, a scale?")


def _compare(clone: nn.Module, formula: ExpertFormula, params: Mapping[str, nn.Parameter], batch: _Batch) -> None:
    """Outputs in both modes, and gradients in training mode, against the formula's."""
    expected = _differentiate(lambda x: evaluate(formula, x, params), params, batch.x, batch.upstream)
    for training in (False, True):
        outcome = _run(clone, params, batch.x, batch.upstream if training else None, training)
        error = _error(outcome.y, expected.y, by_row=True)
        if not error <= _TOLERANCE:
            raise NotRecognised(f"in {'training' if training else 'eval'} mode the output differs from {formula} on "
                                f"{batch.rows} (relative error {error:.1g})")
        for name, grad in outcome.grads.items():
            error = _error(grad, expected.grads[name], by_row=name == "its input")
            if not error <= _TOLERANCE:
                raise NotRecognised(f"the gradient of {name} differs from that of {formula} on {batch.rows} (relative "
                                    f"error {error:.1g}): detach() or a custom backward inside?")


def _compare_roughly(clone: nn.Module, formula: ExpertFormula, params: Mapping[str, nn.Parameter],
                     x: torch.Tensor) -> None:
    """The output in the experts' own dtype: code may branch on it, or return another one."""
    y = _run(clone, params, x).y
    with torch.no_grad():
        expected = evaluate(formula, x.float(), {name: p.float() for name, p in params.items()})
    error = _error(y.float(), expected, by_row=True)
    if not error <= _HALF_TOLERANCE:
        raise NotRecognised(f"in {x.dtype} the output differs from {formula} (relative error {error:.1g})")


def _compare_overflow(clone: nn.Module, formula: ExpertFormula, params: Mapping[str, nn.Parameter],
                      x: torch.Tensor) -> None:
    """What overflows the parameters' dtype, at the last product alone, and NaN must leave the expert as such: a guard
    against them (clamp, nan_to_num) shows nowhere else."""
    dtype = params[formula.up].dtype
    exact, most = {name: p.detach().double() for name, p in params.items()}, torch.finfo(dtype).max
    # Outputs grow with x, or with its square; from below it is not far to where half of them overflow.
    x = x.double() * (most / _LARGE**2)**(0.5 if formula.kind == "gated" else 1)
    # Not much beyond: terms that overflow by themselves, with both signs, add up to NaN, which clamp() leaves.
    while evaluate(formula, x[:1, :, :1], exact).abs().median() < 2 * most:
        x *= 1.25
    x = x.to(dtype)
    x[-1, -1, -1] = torch.nan
    beyond = ~(evaluate(formula, x.double(), exact).abs() <= 1.5 * most)
    for training in (False, True):
        if _run(clone, params, x, training=training).y[beyond].isfinite().any():
            raise NotRecognised(f"what overflows {dtype} or is NaN in {formula} is finite in the expert's output: "
                                "clamp() or nan_to_num() inside?")
