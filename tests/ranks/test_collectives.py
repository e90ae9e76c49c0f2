"""Collectives of a process with several threads."""

from __future__ import annotations

import pytest

_TWO_LANES = """
import os, threading, time, weakref
os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "4"  # stacks that the flight recorder keeps
import torch, torch.distributed as dist
from l2l_compile.ranks import collectives

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def give(group):
    ended = []
    for _ in range(100):
        names = {}
        exec(compile("def call(function, *arguments): function(*arguments)", "a function that lives no more", "exec"), names)
        call = names.pop("call")
        ended.append(weakref.ref(call.__code__, lambda _: time.sleep(1e-3)))  # lets go of the GIL
        rows = torch.ones(1, 4)
        call(collectives.all_gather, torch.empty(1, 4), rows, group, dist.Work.wait)
        call(collectives.sum_to_owners, rows, group, dist.Work.wait)
    print(sum(code() is None for code in ended) > 50)

lanes = [threading.Thread(target=give, args=(dist.new_group([0]),)) for _ in range(2)]
for lane in lanes:
    lane.start()
for lane in lanes:
    lane.join()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_threads_give_collectives_while_earlier_ones_end(launcher):
    done = launcher.run(_TWO_LANES, seconds=20)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr
