# SPDX-License-Identifier: Apache-2.0
"""`@operation`: functions of tensors that run kernels on a GPU, and plain torch elsewhere. Calls can be watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable)
_watch: Callable | None = None


def operation(function: _Function) -> _Function:
    """Decorates a function. Calls that are replayed from C++ (recorded.py) do not come here."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _watch is None else _watch(function, *args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def watched(watch: Callable) -> Iterator[None]:
    """Inside the context, a call of an operation, in any thread, is a call of `watch(function, ...)`."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None
