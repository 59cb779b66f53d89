# SPDX-License-Identifier: Apache-2.0
"""The functions between an expert's two GEMMs and their derivatives, as parts of the kernels in activation.py.

ds_mxfp8_moe/compute/formula.py writes the same in PyTorch, and says what alpha and limit are. They are constants: as
arguments of a launch, they make the kernel that writes columns spill registers. A model has one pair of them.
"""

import triton
import triton.language as tl


@triton.jit
def _inverse(y):
    """1 / y for y >= 1, to 2 ulp, in two instructions. A division takes six more to handle subnormals."""
    root = tl.rsqrt(y)
    return root * root


@triton.jit
def _sigmoid(x):
    return _inverse(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def value_and_slope(x, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """act(x) and act'(x). NaN and Inf are treated as in torch."""
    if LIMIT is not None:
        beyond = x > LIMIT
        x = tl.where(beyond, LIMIT, x)
    if ACT == "relu":
        value = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "relu_squared":
        positive = tl.where(x <= 0.0, 0.0, x)
        value = positive * positive
        slope = positive + positive
    elif ACT == "silu":
        share = _sigmoid(x)
        value = x * share
        slope = share * (1.0 + x * (1.0 - share))
    elif ACT == "swiglu_oai":
        scaled = ALPHA * x
        share = _sigmoid(scaled)
        value = x * share
        slope = share * (1.0 + scaled * (1.0 - share))
    elif ACT == "gelu":
        # The normal distribution at -|x| is exp(-x^2 / 2) t P(t). The polynomial P minimises the error, which is below
        # 2e-7. For x > -5 it is also small relative to the value, which 1 + erf(x) in float32 is not.
        exp = tl.exp2(x * x * -0.7213475204444817)
        t = _inverse(1.0 + 0.2545584440231323 * tl.abs(x))
        tail = -0.08221585303544998 * t + 0.2836698591709137
        tail = tail * t - 0.18034574389457703
        tail = tail * t + 0.2164188176393509
        tail = tail * t + 0.052873700857162476
        tail = tail * t + 0.10851520299911499
        tail = (tail * t + 0.10108400881290436) * t * exp
        share = tl.where(x > 0.0, 1.0 - tail, tail)
        value = x * share
        slope = share + x * (exp * 0.3989422804014327)
    else:
        tl.static_assert(ACT == "gelu_tanh")
        share = _sigmoid(1.5957691216057308 * (x + 0.044715 * (x * x * x)))  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        value = x * share
        slope = share + value * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * (x * x)))
    if LIMIT is not None:
        slope = tl.where(beyond, 0.0, slope)
    return value, slope


@triton.jit
def up_value(up, ACT: tl.constexpr, LIMIT: tl.constexpr):
    """The factor of act(gate)."""
    if LIMIT is not None:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACT == "swiglu_oai":
        up += 1.0
    return up


@triton.jit
def up_slope(value, up, LIMIT: tl.constexpr):
    """value times the derivative of `up_value`."""
    if LIMIT is not None:
        value = tl.where(tl.abs(up) > LIMIT, 0.0, value)
    return value
