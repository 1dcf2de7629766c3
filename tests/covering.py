"""Few of many cases by default: such that every combination of a few of their values is among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def covering(cases: Sequence[Any], values: Callable[[Any], Iterable[Hashable]], together: int) -> list[Any]:
    """A few of the cases, with every combination of `together` of a case's values between them."""

    def combinations(case):
        return set(itertools.combinations(enumerate(values(case)), together))

    of = [combinations(case) for case in cases]
    missing = set().union(*of)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(of[i] & missing))
        chosen.append(cases[best])
        missing -= of[best]
    return chosen


def parametrize(axes: Mapping[str, Iterable[Any]], together: int = 2, **options: Any):
    """As pytest.mark.parametrize, over the product of the axes ({"a": [1, 2], "b, c": [(3, 4), ...]}).

    The cases that no combination of values of `together` axes needs are marked `exhaustive`. `options`: of pytest.
    """
    names = [name.replace(" ", "").split(",") for name in axes]
    lists = [list(values) for values in axes.values()]
    cases = list(itertools.product(*map(range, map(len, lists))))
    chosen = set(covering(cases, tuple, together))
    parameters = []
    for case in cases:
        values = [values[i] for values, i in zip(lists, case, strict=True)]
        flat = [part for v, n in zip(values, names, strict=True) for part in (v if len(n) > 1 else (v,))]
        marks = () if case in chosen else pytest.mark.exhaustive
        parameters.append(pytest.param(*flat, id="-".join(map(str, flat)), marks=marks))
    return pytest.mark.parametrize(list(itertools.chain(*names)), parameters, **options)
