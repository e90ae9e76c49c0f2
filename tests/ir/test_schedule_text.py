"""Schedules as text: what is read, what is printed, and which orders are refused, with the rank, the turn and the rule."""

from __future__ import annotations

import pytest

from l2l_compile import OptionError, Schedule, ScheduleError
from l2l_compile.ir.schedule import one_forward_one_back, without_flush
from l2l_compile.options import Options

SIZES = [(1, 3), (2, 2), (2, 5), (3, 4), (4, 4), (4, 16), (8, 32)]


@pytest.mark.parametrize(("stages", "turns"), SIZES)
@pytest.mark.parametrize("made_by", [one_forward_one_back, without_flush])
def test_a_printed_schedule_is_read_back(made_by, stages, turns):
    made = made_by(stages, turns)
    assert Schedule.parse(str(made)) == made
    assert made.turns == turns and made.flushes == (made_by is one_forward_one_back or stages == 1)
    assert [made.in_flight(rank) for rank in range(stages)] == [min(stages - rank, turns) for rank in range(stages)]


def test_turns_in_flight_are_those_of_the_paper():
    """Figure 3 of PipeDream-2BW, with four stages: the first one is three turns ahead."""
    assert str(without_flush(4, 4)).splitlines()[0] == "0F0,0B1@-1,0F1,0B2@-1,0F2,0B3@-1,0F3,0B0"
    assert str(one_forward_one_back(2, 3)).splitlines() == ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]


def test_files_of_pytorch_are_read():
    """Empty cells, where a rank is idle, and messages, which follow from the program."""
    text = "0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0B1\n0UNSHARD,,1F0,1B0,1F1,1REDUCE_GRAD,1B1\n"
    assert str(Schedule.parse(text)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


def test_a_schedule_of_pytorch_loads():
    """GPipe, written by PyTorch itself."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    action = schedules._Action.from_str
    lines = [[f"{rank}{kind}{turn}" for kind in "FB" for turn in range(3)] for rank in range(2)]
    written = "\n".join(",".join(str(action(cell)) for cell in line) for line in lines)
    assert Schedule.parse(written).in_flight(0) == 3


REFUSED = {
    "a missing turn": ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "turn", 1, "1B1"),
    "fewer turns": ("0F0,0F1,0B0,0B1\n1F0,1B0", "turn", 1, None),
    "twice": ("0F0,0F0,0B0", "turn", 0, "0F0"),
    "back first": ("0B0,0F0", "turn", 0, "0B0"),
    "sums out of order": ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1", "turn", 0, "0B1"),
    "another stage": ("0F0,0B0\n0F1,0B1", "stage", 1, "0F1"),
    "a third version": ("0F0,0B0@-2\n1F0,1B0", "version", 0, "0B0@-2"),
    "forward late": ("0F0@-1,0B0", "version", 0, "0F0@-1"),
    "a cycle": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "progress", 0, "0B0"),
    "a cycle of calls": ("0F0,0F1,0B0,0B1\n1F0,1B0@-1,1F1,1B1@-1", "progress", 0, "0B0"),
    "half a backward": ("0F0,0I0,0W0", "text", 0, "0I0"),
    "no turn": ("0F0,zero", "text", 0, None),
    "nothing": ("\n", "text", 0, None),
}


@pytest.mark.parametrize(("text", "rule", "rank", "turn"), REFUSED.values(), ids=REFUSED.keys())
def test_a_schedule_that_cannot_run_is_refused(text, rule, rank, turn):
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert (caught.value.rule, caught.value.rank, caught.value.turn) == (rule, rank, turn)


def test_a_file_is_an_option(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(str(one_forward_one_back(2, 3)))
    for given in (str(path), path, one_forward_one_back(2, 3)):
        assert Options.build({"schedule": given, "micro_batches": 3}).schedule == one_forward_one_back(2, 3)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedule": "nowhere.csv"}, "names a file that does not exist: 'nowhere.csv'"),
        ({"schedule": "/nowhere/turns"}, "names a file that does not exist: '/nowhere/turns'"),
        ({"schedule": "gpipe"}, "must be one of 'breadth_first', '1f1b', a file"),
        ({"schedule": "\n 0F0, 0B0\n 1F0, 1B0"}, r"is a text of turns, '0F0, 0B0.*Schedule\.parse"),
        ({"schedule": 3}, "must be one of"),
        ({"schedule": one_forward_one_back(2, 3)}, "is for 3 micro-batches, and option 'micro_batches' is 1"),
        ({"schedule": without_flush(2, 3), "micro_batches": 3}, "rank 0: 0B2@-1 goes back in the next call.*delay=1"),
        (
            {"schedule": one_forward_one_back(2, 3), "micro_batches": 3, "keep": 1},
            "'keep' does not go with a schedule of one's own",
        ),
    ],
    ids=["no file", "no folder", "no name", "a text", "a number", "turns", "no delay", "keep"],
)
def test_settings_that_do_not_go_with_a_schedule_are_named(settings, match):
    with pytest.raises((OptionError, ScheduleError), match=match):
        Options.build(settings)
