"""Few of many cases by default: such that every combination of a few of their values is among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def covering(cases: Sequence[Any], values: Callable[[Any], Iterable[Hashable]], together: int) -> list[Any]:
    """A few of the cases, with every combination of `together` of a case's values between them, evenly."""
    having = [list(enumerate(values(case))) for case in cases]
    combinations = [set(itertools.combinations(pairs, together)) for pairs in having]
    missing = set().union(*combinations)
    used: Counter[Any] = Counter()
    chosen = []
    while missing:
        new = (len(of & missing) for of in combinations)
        worth = [(n, -sum(used[pair] for pair in pairs)) for n, pairs in zip(new, having, strict=True)]
        best = worth.index(max(worth))
        chosen.append(cases[best])
        missing -= combinations[best]
        used.update(having[best])
    return chosen


def parametrize(
    axes: Mapping[str, Iterable[Any]], together: int = 2, where: Callable[..., bool] = lambda *_: True, **options: Any
):
    """As pytest.mark.parametrize, over the product of the axes ({"a": [1, 2], "b, c": [(3, 4), ...]}).

    The cases that no combination of values of `together` axes needs are marked `exhaustive`. `where`: called with a
    case's values, says whether there is such a case. `options`: of pytest.
    """
    names = [name.replace(" ", "").split(",") for name in axes]
    lists = [list(values) for values in axes.values()]
    cases = {}  # the places of a case's values on the axes: the values
    for places in itertools.product(*map(range, map(len, lists))):
        chosen = [values[i] for values, i in zip(lists, places, strict=True)]
        flat = [part for v, n in zip(chosen, names, strict=True) for part in (v if len(n) > 1 else (v,))]
        if where(*flat):
            cases[places] = flat
    default = set(covering(list(cases), tuple, together))
    parameters = [
        pytest.param(*flat, id="-".join(map(str, flat)), marks=() if places in default else pytest.mark.exhaustive)
        for places, flat in cases.items()
    ]
    return pytest.mark.parametrize(list(itertools.chain(*names)), parameters, **options)
