"""All errors share a base, and the config's error is also what Python calls a wrong value."""

from __future__ import annotations

import inspect

from zeroweave import errors


def test_every_error_is_a_zeroweave_error_with_a_docstring() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(classes) == 14
    for error in classes:
        assert issubclass(error, errors.ZeroweaveError)
        assert error.__doc__ and error.__doc__ != RuntimeError.__doc__
        assert str(error("what happened")) == "what happened"


def test_errors_can_be_caught_as_what_they_are() -> None:
    assert issubclass(errors.ZeroweaveError, RuntimeError)
    assert issubclass(errors.ConfigError, ValueError)
