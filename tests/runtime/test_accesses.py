"""Two accesses to one place are ordered by what is waited for, or they are a race; the order in which they ran says nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from l2l_compile import RaceError
from l2l_compile.races import Accesses, Place


@pytest.fixture
def accesses():
    return Accesses()


def on(accesses, actor, access):
    """Give an actor an access as its work, done at once."""
    work, order = accesses.give(actor, access)
    work()
    return order


def test_an_actor_is_in_order_with_itself(accesses):
    place = Place()
    for access in (accesses.write, accesses.read, accesses.write, accesses.write):
        on(accesses, "compute", lambda access=access: access(place))


@pytest.mark.parametrize(
    ("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")], ids=lambda access: access
)
def test_two_actors_race_unless_one_waits(accesses, first, second):
    place = Place("a slab")
    accesses.begins("fetch_weights_1")
    on(accesses, "h2d", lambda: getattr(accesses, first)(place))
    accesses.begins("forward_1")
    with pytest.raises(RaceError, match=rf"compute {second}s a slab for 'forward_1', and h2d {first}s it for 'fetch_weights_1'"):
        on(accesses, "compute", lambda: getattr(accesses, second)(place))
    accesses.hold("compute", accesses.reached("h2d"))
    on(accesses, "compute", lambda: getattr(accesses, second)(place))


def test_two_readers_race_with_nobody(accesses):
    place = Place()
    for actor in ("compute", "h2d"):
        on(accesses, actor, lambda: accesses.read(place))


def test_a_write_waits_for_every_reader(accesses):
    place = Place()
    for actor in ("h2d", "d2h"):
        on(accesses, actor, lambda: accesses.read(place))
    accesses.hold("compute", accesses.reached("h2d"))
    with pytest.raises(RaceError, match="d2h reads"):
        on(accesses, "compute", lambda: accesses.write(place))


def test_an_event_knows_what_was_given_before_it_only(accesses):
    early, late = Place(), Place()
    on(accesses, "h2d", lambda: accesses.write(early))
    event = accesses.reached("h2d")
    on(accesses, "h2d", lambda: accesses.write(late))
    accesses.hold("compute", event)
    on(accesses, "compute", lambda: accesses.read(early))
    with pytest.raises(RaceError):
        on(accesses, "compute", lambda: accesses.read(late))


def test_what_an_event_knows_is_handed_on(accesses):
    place = Place()
    on(accesses, "h2d", lambda: accesses.write(place))
    accesses.hold("compute", accesses.reached("h2d"))
    accesses.hold("d2h", accesses.reached("compute"))
    on(accesses, "d2h", lambda: accesses.write(place))


def test_work_comes_after_what_its_giver_knows_and_did(accesses):
    mine, place = Place(), Place()
    accesses.write(mine)
    on(accesses, "h2d", lambda: (accesses.read(mine), accesses.write(place)))
    with pytest.raises(RaceError, match="the caller's thread reads"):
        accesses.read(place)
    accesses.follow(accesses.reached("h2d"))
    accesses.read(place)
    on(accesses, "compute", lambda: accesses.write(place))


def test_what_the_giver_does_later_is_not_known(accesses):
    place = Place()
    work, _ = accesses.give("h2d", lambda: accesses.read(place))
    accesses.write(place)
    with pytest.raises(RaceError):
        work()


def test_waiting_at_work_is_known_to_work_given_before(accesses):
    place = Place()
    updated = on(accesses, "host", lambda: accesses.write(place))
    waiting, _ = accesses.give("h2d", lambda: accesses.follow(updated))
    reading, _ = accesses.give("h2d", lambda: accesses.read(place))
    waiting()
    reading()


def test_the_order_of_work_is_known_when_it_is_over(accesses):
    place = Place()
    copied = on(accesses, "d2h", lambda: accesses.write(place))
    over = on(accesses, "host", lambda: accesses.follow(copied))
    accesses.follow(over)
    accesses.read(place)


def test_work_that_is_dropped_comes_after_work_before_it(accesses):
    """After a failure: who waits for it waits for the work that failed."""
    place = Place()
    on(accesses, "host", lambda: accesses.write(place))
    _, dropped = accesses.give("host", lambda: None)
    accesses.follow(dropped)
    accesses.read(place)


def test_the_user_is_one_actor_in_all_threads(accesses):
    """Who calls a model from several threads has them wait for each other: one step at a time."""
    place, raised = Place(), []

    def elsewhere():
        try:
            accesses.write(place)
        except RaceError as error:
            raised.append(error)

    accesses.write(place)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not raised


def test_a_parameter_is_a_place_as_long_as_it_lives(accesses):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    on(accesses, "host", lambda: accesses.write_parameters(parameters[:1]))
    accesses.read_parameters(parameters[1:])
    with pytest.raises(RaceError, match=r"a parameter of shape \(2,\)"):
        accesses.read_parameters(parameters)
    parameters.clear()
    assert not accesses._parameters
