"""A prediction by the fields of a setup."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sim.setup.prediction import Prediction, require_known
from sim.setup.setup import Setup

P = ParamSpec("P")
R = TypeVar("R")


def _of_fields(setup: Callable[P, Setup]) -> Callable[[Callable[[Setup], R]], Callable[P, R]]:
    """Return a decorator that turns a function of a setup into one of the setup's fields, which so stand once."""

    def decorated(function: Callable[[Setup], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **fields: P.kwargs) -> R:
            require_known(fields, inspect.signature(setup).parameters)
            return function(setup(*args, **fields))

        returns = inspect.signature(function).return_annotation
        vars(called)["__signature__"] = inspect.signature(setup).replace(return_annotation=returns)
        return called

    return decorated


@_of_fields(Setup)
def predict(setup: Setup) -> Prediction:
    """Return the prediction of one step; the arguments are the fields of ``Setup``, the first is the schedule.

    Raises InputError for a value that cannot be used, with what is allowed.

    >>> p = predict("zigzag", model="llama3-8b", seq="64K", cluster="hgx-h100", gpus=4, layers=2)
    >>> p.report.evidence.profile
    'h100-sxm'
    """
    return setup.predicted()
