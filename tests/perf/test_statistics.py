import pytest

from perf.statistics import Ratio, Sample, geomean, moved


def test_a_sample_is_its_median_and_quartiles():
    sample = Sample.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert sample == Sample(3.0, 2.0, 4.0, 5)
    assert sample.spread == 2.0


def test_a_sample_of_one_has_no_spread():
    assert Sample.of([7.0]) == Sample(7.0, 7.0, 7.0, 1)


def test_relative_spreads_add_up_in_squares():
    ratio = Ratio.of(Sample(20.0, 19.0, 22.0, 9), Sample(10.0, 9.0, 11.0, 9))
    assert ratio.value == 2.0
    assert ratio.spread == pytest.approx(2.0 * (0.15**2 + 0.2**2) ** 0.5)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (Sample(10, 9.5, 10.5, 40), Sample(10.9, 10.8, 11.0, 40), "same"),  # within the old run's spread
        (Sample(10, 9.9, 10.1, 40), Sample(11, 10.9, 11.1, 40), "slower"),
        (Sample(10, 9.9, 10.1, 40), Sample(9, 8.9, 9.1, 40), "faster"),
        (Ratio(1.5, 0.01), Ratio(1.4, 0.02), "faster"),
        (Ratio(1.5, 0.01), Ratio(1.4, 0.2), "same"),
    ],
)
def test_moved_is_beyond_the_larger_spread(old, new, verdict):
    assert moved(old, new) == verdict


def test_the_geometric_mean_of_a_factor_and_its_inverse_is_one():
    assert geomean([4.0, 0.25]) == pytest.approx(1.0)
