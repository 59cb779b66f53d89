# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Their errors name the argument, what was given and what was expected.

`name` is the function and its argument: "permute: ep_degree".
"""

from collections.abc import Collection
from numbers import Integral
from typing import Any

import torch

HP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def described(x: Any) -> str:
    """A value in the words of an error."""
    if isinstance(x, torch.Tensor):
        layout = "" if x.layout == torch.strided else f" in {x.layout}"
        return f"a {type(x).__name__} of {x.dtype}, shape {list(x.shape)} on {x.device}{layout}"
    text = repr(x)
    return f"{text if len(text) < 80 else f'{text[:77]}...'}, of type {type(x).__name__}"


def check_tensor(name: str, x: Any, expected: str, dtypes: Collection = HP_DTYPES, ndim: int | None = None) -> None:
    """Raises an error unless x is a dense tensor as expected.

    Args:
        expected: the tensor in words, for the error.
        ndim: its number of axes. None: any.

    Raises:
        TypeError: x is no tensor, is sparse, or has another dtype.
        ValueError: it has another number of axes.
    """
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype not in dtypes:
        raise TypeError(f"{name} is {described(x)}; expected {expected}")
    if ndim not in (None, x.dim()):
        raise ValueError(f"{name} is {described(x)}; expected {expected}")


def check_int(name: str, value: Any, least: int) -> None:
    """Raises a TypeError unless value is an int, or a ValueError if it is below `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {described(value)}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def check_one_of(name: str, value: Any, choices: tuple) -> None:
    """Raises a ValueError unless value is one of the choices, and of their type: 32.0 is not 32."""
    if not isinstance(value, type(choices[0])) or value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
