import io

import pytest
from rich.console import Console

from perf import compare

from .runs import made


def test_what_moves_beyond_the_spread_is_named():
    found = compare.rows(made(factor=1.5), made(factor=1.2))
    assert len(found) == 16
    assert {verdict for *_, verdict in found} == {"faster"}
    assert {what for _, what, *_ in found} == {"time / fill"}
    assert {v for *_, v in compare.rows(made(factor=1.2), made(factor=1.21, spread=0.05))} == {"same"}
    assert {v for *_, v in compare.rows(made(factor=1.2), made(factor=1.5))} == {"slower"}


def test_without_a_common_floor_times_are_compared():
    found = compare.rows(made(factor=1.5), made(factor=1.2, against=("copy",)))
    assert {what for _, what, *_ in found} == {"us"}


def test_only_common_cases_are_compared():
    old = made()
    old.rows = old.rows[:3]
    assert len(compare.rows(old, made())) == 3


def test_another_operator_is_an_error():
    with pytest.raises(ValueError, match="measured mamba_segsum, but must have measured hyena_block"):
        compare.rows(made(), made("hyena_block"))


def test_the_table_counts_what_moved():
    console = Console(file=io.StringIO(), width=120)
    console.print(compare.table_of(made(factor=1.5), made(factor=1.2)))
    text = " ".join(console.file.getvalue().split())
    assert "16 of 16 cases moved beyond the spread since 2026-01-02 (abc1234)" in text
