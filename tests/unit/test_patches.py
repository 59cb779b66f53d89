# SPDX-License-Identifier: Apache-2.0
"""Functions of other libraries are replaced for a time, or once until the engine ends."""

import functools
import inspect

import pytest

from ds_mxfp8_moe.compat.patches import lent, patched, undo_wraps, wrap


class Engine:
    """As DeepSpeed's: a class with methods."""

    steps = 0

    def step(self, size: int = 1) -> int:
        """Its text."""
        return size


def twice(plain, *args, **kwargs):
    return 2 * plain(*args, **kwargs)


def negative(plain, *args, **kwargs):
    return -plain(*args, **kwargs)


def test_for_a_time_on_a_class():
    plain, engine = Engine.step, Engine()
    with pytest.raises(KeyError), patched(Engine, "step", twice):
        with patched(Engine, "step", lambda plain, self, size: -plain(self, size)):
            assert engine.step(3) == -6 and engine.step.__doc__ == "Its text."
        assert engine.step(3) == 6
        raise KeyError
    assert Engine.step is plain


def test_values_for_a_time():
    class Other(Engine):
        pass

    engine = Engine()
    with lent(engine, "steps", 5), lent(engine, "__class__", Other):
        assert (engine.steps, type(engine)) == (5, Other)
    assert (vars(engine), type(engine)) == ({}, Engine)


def test_once_for_each_function_until_the_engine_ends():
    engine, other = Engine(), Engine()
    other.step = functools.partial(other.step, 7)
    for _ in range(2):
        assert [wrap(engine, "step", ours, until=engine) for ours in (twice, negative)] == [_ == 0] * 2
        wrap(other, "step", functools.partial(lambda engine, plain: plain() + engine.step(), engine), until=engine)
    assert engine.step(4) == -8 and other.step() == 7 - 2
    assert engine.step.__func__(engine, 4) == -8  # as torch's learning rate schedulers call it
    assert inspect.signature(engine.step) == inspect.signature(Engine().step)
    wrapped = functools.wraps(engine.step)(lambda *args: engine.step(*args))
    assert not wrap(type("Holder", (), {"step": staticmethod(wrapped)}), "step", twice)  # by others in between
    for _ in range(2):
        undo_wraps(engine)
        assert not vars(engine) and engine.step(4) == 4 and other.step() == 7


def test_what_others_have_wrapped_since_stays():
    engine = Engine()
    wrap(engine, "step", twice, until=engine)
    ours = engine.step
    engine.step = lambda: ours() + 1
    undo_wraps(engine)
    assert engine.step() == 3


def test_a_class_is_wrapped_until_the_last_engine_ends():
    class Attention:
        def forward(self) -> int:
            return 1

    plain, first, second = Attention.forward, Engine(), Engine()
    assert [wrap(Attention, "forward", twice, until=engine) for engine in (first, second, second)] == [
        True, False, False]
    for engine in (first, first):
        undo_wraps(engine)
        assert Attention().forward() == 2
    undo_wraps(second)
    assert Attention.forward is plain
