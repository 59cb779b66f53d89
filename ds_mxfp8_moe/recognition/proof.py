# SPDX-License-Identifier: Apache-2.0
"""Shows by one run with random numbers that an expert computes a formula.

A copy of the module runs on the CPU, around small random float32 parameters. Its outputs in eval and training mode and
its gradients must be those of the formula. The user's module is never called and never changed.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch import nn

from ..compute.formula import ACTIVATIONS, GATED_ONLY, SWIGLU_OAI, Activation, ExpertFormula, NotRecognized, evaluate

# float32 stays below 1e-6 in any order of operations. gelu and its tanh form differ by 2e-4 on these rows.
TOLERANCE = 2e-5
# The sizes of the rows. A clamp shows only on the large ones.
_ROW_SCALES = (1, 1, 1, 1, 1, 1, 1, 1, 1e-2, 10, 100, 1e5)


def constants(module: nn.Module) -> list[float]:
    """The numbers that may be a constant of an activation in the module: each float of its modules, what is named a
    limit or an alpha in them or in the config, and gpt-oss' constants."""
    found = {SWIGLU_OAI.alpha, SWIGLU_OAI.limit}
    config = getattr(module, "config", None)
    for holder in (*module.modules(), *([] if config is None else [config])):
        for name, x in vars(holder).items():
            named = "limit" in name or "alpha" in name
            if type(x) in (int, float) and (named or (type(x) is float and holder is not config)):
                found.add(float(x))
    return sorted(x for x in found if x > 0 and math.isfinite(x))


def activations(numbers: Sequence[float], gated: bool) -> Iterator[Activation]:
    """Activations without constants first: no limit that the values do not reach is taken for one."""
    names = [name for name in ACTIVATIONS if name not in GATED_ONLY]
    yield from map(Activation, names)
    if gated:
        for name, limit in itertools.product(names, numbers):
            yield Activation(name, limit=limit)
        for name, alpha, limit in itertools.product(GATED_ONLY, numbers, numbers):
            yield Activation(name, alpha, limit)


def prove(expert: nn.Module, candidates: Sequence[ExpertFormula]) -> ExpertFormula:
    """The one candidate that the expert computes.

    The run uses small sizes, and takes about 10 ms. An expert that raises an error at small sizes, for example because
    a size is written into its code, runs at its own sizes.

    Raises:
        NotRecognized: the expert computes none of the candidates.
    """
    hidden, ffn = candidates[0].hidden_size, candidates[0].ffn_size
    # Sizes that are equal stay equal.
    small_ffn = 96 if ffn == hidden else 48 if 2 * ffn == hidden else 160
    small = {hidden: 96, ffn: small_ffn, 2 * ffn: 2 * small_ffn}
    with isolated():
        for sizes in (small, {}):
            try:
                return _compare(expert, candidates, sizes)
            except NotRecognized:
                raise
            except Exception as error:
                failure = error
    message = ": ".join([type(failure).__name__, *str(failure).strip().splitlines()[:1]])
    raise NotRecognized(f"running a copy of the expert raised {message}") from failure


@contextmanager
def isolated() -> Iterator[None]:
    """Keeps the caller's modes out of the run, and the run out of torch's random state."""
    mkldnn, threads = torch.backends.mkldnn, torch.get_num_threads()
    # oneDNN may round float32 products to bf16 or tf32 after torch.set_float32_matmul_precision().
    enabled, *_ = mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    # Where ranks share cores, threads that wait for each other take 10 times as long as one thread.
    torch.set_num_threads(1)
    try:
        with (torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(),
              torch.autocast("cpu", enabled=False), torch.compiler.set_stance("force_eager"),
              # Activation checkpointing would count what a first forward saves here, and a recomputation does not.
              torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
            yield
    finally:
        torch.set_num_threads(threads)
        mkldnn.set_flags(_enabled=enabled, _fp32_precision=None)


def _compare(expert: nn.Module, candidates: Sequence[ExpertFormula], sizes: Mapping[int, int]) -> ExpertFormula:
    """`prove` at one choice of sizes: each of the expert's sizes that is a key of `sizes` becomes its value."""
    generator = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    params = {}
    for name, p in expert.named_parameters():
        value = randn(*(sizes.get(size, size) for size in p.shape))
        # Ordinary rows then have pre-activations of about +-4.
        params[name] = nn.Parameter(value * (2 / value.shape[1]**0.5 if value.dim() == 2 else 0.5))
    scale = torch.tensor(_ROW_SCALES, device="cpu", dtype=torch.float32).view(3, 1, 4, 1)
    hidden = sizes.get(candidates[0].hidden_size, candidates[0].hidden_size)
    x = randn(3, 1, 4, hidden) * scale  # the shape that DeepSpeed's Experts hand to an expert
    upstream = randn(3, 1, 4, hidden) / scale.clamp(min=1)

    clone = _copy(expert, params, sizes)
    with torch.no_grad():
        y = _run(clone.eval(), x.clone())
        errors: list[float] = []
        for candidate in candidates:
            errors.append(relative_error(y, evaluate(candidate, x, params), by_row=True))
            if errors[-1] <= TOLERANCE:
                break
    error, formula = min(zip(errors, candidates, strict=False), key=itemgetter(0))
    if not error <= TOLERANCE:
        raise NotRecognized(f"the output differs from the nearest recognized formula, {formula} (relative error "
                            f"{error:.1g}): another activation or none, another order of rows, a residual "
                            "connection, a scale?")
    expected = _differentiate(lambda x: evaluate(formula, x, params), params, x, upstream)
    actual = _differentiate(clone.train(), params, x, upstream)
    for name, value in expected.items():
        error = relative_error(actual[name], value, by_row=name in ("output", "gradient of its input"))
        if not error <= TOLERANCE:
            reason = "dropout?" if name == "output" else "detach() or a custom backward inside?"
            raise NotRecognized(f"in training mode the {name} differs from {formula} (relative error {error:.1g}): "
                                f"{reason}")
    return formula


def _copy(expert: nn.Module, params: Mapping[str, nn.Parameter], sizes: Mapping[int, int]) -> nn.Module:
    """A copy of the expert around other parameters: no weight is copied, and nothing it does reaches the original.

    Integer attributes that equal a key of `sizes` (in_features, hidden_size) follow the parameters.
    """
    clone = copy.deepcopy(expert, {id(p): params[name] for name, p in expert.named_parameters()})
    for module in clone.modules():
        for key, value in vars(module).items():
            if type(value) is int and value in sizes:
                vars(module)[key] = sizes[value]
    return clone


def _run(fn: Callable, x: torch.Tensor) -> torch.Tensor:
    y = fn(x)
    y = y[0] if isinstance(y, tuple) and y else y  # as DeepSpeed's Experts do
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        returned = f"{list(y.shape)} {y.dtype}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise NotRecognized(f"for an input of {list(x.shape)} {x.dtype} the expert returns {returned}")
    return y


def _differentiate(fn: Callable, params: Mapping[str, nn.Parameter], x: torch.Tensor,
                   upstream: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The output of fn(x), and the gradients of the input and of each parameter, which it leaves in `params`."""
    x = x.clone().requires_grad_()
    for param in params.values():
        param.grad = None
    y = _run(fn, x)
    if not y.requires_grad:
        raise NotRecognized("the expert's output carries no gradient: detach() or no_grad() inside?")
    y.backward(upstream)
    gradients = {f"gradient of {name}": param.grad for name, param in params.items()}
    return {"output": y.detach(), "gradient of its input": x.grad, **gradients}


def relative_error(actual: torch.Tensor | None, expected: torch.Tensor, by_row: bool) -> float:
    """|actual - expected| / |expected|. `by_row`: the largest among the rows, which are the last axis."""
    if actual is None:
        return float("inf")
    dim = -1 if by_row else None
    difference = torch.linalg.vector_norm(actual - expected, dim=dim)
    return (difference / torch.linalg.vector_norm(expected, dim=dim).clamp(min=1e-30)).max().item()
