# SPDX-License-Identifier: Apache-2.0
"""Functions of other libraries are replaced for a time, or once until the engine is destroyed."""

import functools
import inspect

import pytest

from ds_mxfp8_moe.layers.patches import lent, patched, wrap


class Engine:
    """As DeepSpeed's: a class with methods, and a `destroy`."""

    destroyed = 0

    def step(self, size: int = 1) -> int:
        """Its text."""
        return size

    def destroy(self) -> None:
        self.destroyed += 1


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
    with lent(engine, "destroyed", 5), lent(engine, "__class__", Other):
        assert (engine.destroyed, type(engine)) == (5, Other)
    assert (vars(engine), type(engine)) == ({}, Engine)


def test_once_for_each_function_until_the_engine_is_destroyed():
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
    engine.destroy()
    assert vars(engine) == {"destroyed": 1} and engine.step(4) == 4 and other.step() == 7
    engine.destroy()
    assert engine.destroyed == 2


def test_what_others_have_wrapped_since_stays():
    engine = Engine()
    wrap(engine, "step", twice, until=engine)
    ours = engine.step
    engine.step = lambda: ours() + 1
    engine.destroy()
    assert engine.step() == 3


def test_a_class_is_wrapped_until_the_last_engine_is_destroyed():
    class Attention:
        def forward(self) -> int:
            return 1

    plain, first, second = Attention.forward, Engine(), Engine()
    assert [wrap(Attention, "forward", twice, until=engine) for engine in (first, second, second)] == [
        True, False, False]
    for engine in (first, first):
        engine.destroy()
        assert Attention().forward() == 2
    second.destroy()
    assert Attention.forward is plain
