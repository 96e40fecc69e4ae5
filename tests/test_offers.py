"""Prices and limits: what may be launched, and what it costs at most."""

from __future__ import annotations

import pytest
from burst import offers
from burst.errors import NothingFits
from burst.offers import Limits, Offer
from hypothesis import given
from hypothesis import strategies as st

CHEAP, DEAR = Offer("lambda/us-east-1", "A100:1", 1.29, True), Offer("lambda/europe-central-1", "A100:1", 9.99, True)
SLURM = Offer("slurm/lab", "A100:1", 0.0, False)


def test_cheapest_first_and_the_dearest_is_the_quote() -> None:
    assert offers.chosen([DEAR, CHEAP], without_autodown=False) == [CHEAP, DEAR]
    limit = offers.limits([CHEAP, DEAR], None, 1.0)
    assert (limit.run_s, limit.hourly_usd) == (3600, 9.99)
    start, setup, idle, to_be_killed = 600, 1800, 900, 60
    assert limit.worst_usd == pytest.approx(9.99 * (start + setup + 3600 + 2 * to_be_killed + idle) / 3600)


def test_machines_that_cannot_delete_themselves_need_a_word() -> None:
    assert offers.chosen([SLURM, CHEAP], without_autodown=False) == [CHEAP]
    assert offers.chosen([SLURM, CHEAP], without_autodown=True) == [SLURM], "one autostop for all of a task"
    assert offers.chosen([SLURM, CHEAP, DEAR], without_autodown=False) == [CHEAP, DEAR]
    with pytest.raises(NothingFits, match="slurm/lab cannot delete an idle machine"):
        offers.chosen([SLURM], without_autodown=False)
    with pytest.raises(NothingFits, match="reaches no machine"):
        offers.chosen([], without_autodown=True)


def test_too_little_money_is_said_with_what_would_do() -> None:
    with pytest.raises(NothingFits) as caught:
        offers.limits([CHEAP], 1.0, None)
    allowed = float(caught.value.fix.split("--max-cost ")[1].split()[0])
    assert offers.limits([CHEAP], allowed, None).run_s == pytest.approx(3600, abs=30)


def test_a_free_machine_has_a_time_limit_too() -> None:
    assert offers.limits([SLURM], 5.0, None) == Limits(1800, 6 * 3600, 15, 0.0)


def test_exports_and_stores_are_paid_for_too() -> None:
    plain = offers.limits([CHEAP], 10.0, None)
    more = offers.limits([CHEAP], 10.0, None, exports=True, stores=True)
    assert (more.export_s, more.store_s) == (3600, 600)
    assert more.worst_s - more.run_s == plain.worst_s - plain.run_s + (3600 + 60) + 2 * (600 + 60) + 900
    assert more.run_s < plain.run_s


@given(st.floats(0.05, 100), st.floats(0.5, 1000), st.none() | st.floats(0.2, 100), st.booleans())
def test_no_run_costs_more_than_it_may(hourly: float, cost: float, hours: float | None, more: bool) -> None:
    try:
        limit = offers.limits([Offer("x/y", "A100:1", hourly, True)], cost, hours, exports=more, stores=more)
    except NothingFits:
        return
    assert limit.worst_usd <= cost * 1.0001
    assert hours is None or limit.run_s <= hours * 3600
