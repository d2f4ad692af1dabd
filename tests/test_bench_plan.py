"""Schedules: the right rate, the right spread, the same times for the same seed."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest

from penstock.bench.load.arrivals import Pace, check, offsets
from penstock.errors import UserError


def gaps(pace: Pace) -> list[float]:
    times = [0.0, *offsets(pace)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_poisson_and_gamma_have_the_rate_and_one_over_k_of_variation(burstiness: float) -> None:
    arrival = "poisson" if burstiness == 1 else "gamma"
    pace = Pace(rate=50.0, n_requests=40_000, arrival=arrival, burstiness=burstiness, seed=2)
    found = numpy.array(gaps(pace))
    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    assert (found.std() / found.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_constant_is_constant_and_a_ramp_rises_to_its_rate() -> None:
    times = list(offsets(Pace(rate=10.0, arrival="ramp", duration_s=10.0)))
    assert len(times) in (50, 51)
    assert times[20] == pytest.approx(math.sqrt(40))
    assert len(list(offsets(Pace(rate=1.0, rate_from=9.0, arrival="ramp", n_requests=50)))) == 50
    assert list(offsets(Pace(rate=2.0, rate_from=2.0, arrival="ramp", n_requests=3))) == [0.0, 0.5, 1.0]
    assert list(offsets(Pace(rate=4.0, arrival="constant", duration_s=1.0))) == [0.0, 0.25, 0.5, 0.75]
    by_count = list(offsets(Pace(rate=10.0, rate_from=2.0, arrival="ramp", n_requests=60)))
    assert len(by_count) == 60 and by_count[-1] == pytest.approx(10.0, rel=0.02)
    assert list(offsets(Pace(arrival="replay", n_requests=2), [1.0, 2.0, 3.0])) == [1.0, 2.0]
    first, again, other = (list(offsets(Pace(rate=5.0, n_requests=9, seed=seed))) for seed in (7, 7, 8))
    assert first == again != other


def test_what_has_no_time_cannot_be_replayed_and_a_pace_that_cannot_be_kept_is_refused() -> None:
    check(Pace(arrival="replay", n_requests=2, concurrency=1), [0.0, 1.0])
    with pytest.raises(UserError, match="requests without one"):
        check(Pace(arrival="replay", n_requests=2), [0.0, None])
    for pace in (
        *(Pace(n_requests=1), Pace(rate=0.0, n_requests=1), Pace(rate=1e9, n_requests=1)),
        Pace(rate=1.0, n_requests=1, arrival="replay"),
        Pace(rate=1.0, n_requests=1, arrival="gamma", burstiness=0.0),
        *(Pace(rate=1.0, n_requests=1, arrival="ramp", rate_from=-1.0), Pace(rate=1.0, n_requests=1, rate_from=0.5)),
    ):
        with pytest.raises(UserError):
            check(pace)
