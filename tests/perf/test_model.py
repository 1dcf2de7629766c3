import pytest

from perf import model
from perf.occupancy import blocks_per_sm, occupancy


def work(n):
    return {"dram_bytes": 6.6e6 * n, "instructions": 0.5e6 * n, "mma": 3e7 * n, "special": 6e5 * n}


def test_a_fit_finds_the_numbers_that_made_the_times():
    true = model.Model(4.0, 0.8)
    sizes = [work(n) for n in (1, 2, 4, 8, 16, 64)]
    us = [true.us(model.H200, w) for w in sizes]
    found = model.fit(model.H200, sizes, us)
    assert found.fixed_us == pytest.approx(4.0, rel=1e-3)
    assert found.efficiency == pytest.approx(0.8, rel=1e-3)
    assert max(map(abs, model.errors_left_out(model.H200, sizes, us))) < 1e-3


def test_the_slowest_resource_decides():
    assert max(model.H200.seconds(work(1)).items(), key=lambda item: item[1])[0] == "dram_bytes"
    busy = work(1) | {"instructions": 1e9}
    assert model.Model(0.0, 1.0).us(model.H200, busy) == pytest.approx(1e6 * 1e9 / (4 * 132 * 1.98e9))


def test_two_cases_are_too_few():
    with pytest.raises(ValueError, match="three cases"):
        model.fit(model.H200, [work(1), work(2)], [5.0, 6.0])


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [(64, 41984, 256, 4), (48, 9232, 256, 5), (32, 0, 32, 32), (255, 0, 256, 1), (32, 200 << 10, 128, 1)],
)
def test_blocks_of_an_sm(registers, shared, threads, blocks):
    assert blocks_per_sm(registers, shared, threads) == blocks
    assert occupancy(registers, shared, threads) == blocks * threads / 2048
