"""Collectives of a process with several threads, and of a process that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharing import Sharing

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


_FAILS = """
import os, sys
sys.path += {folders}
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import l2l_compile
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.ir import nodes
from l2l_compile.ranks import collectives
from l2l_compile.runtime import executor
from models import Stack

rank = int(os.fork() == 0)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=rank, world_size=2)
model = l2l_compile.shard(Stack(1), init_device_mesh("cpu", (2,)))
step = torch.compile(model, backend="l2l", fullgraph=True, options={{"device": "cpu", "block_compiler": "eager"}})
called = []

class Nccl:
    def name(self): return "nccl"
    def abort(self): called.append("abort")

class Group:
    def _get_backend(self, device): return Nccl()

def fail(*arguments):
    raise ValueError("a failure")

CpuDevice.await_ranks = lambda self, check: called.append("await")
recover = CpuDevice.recover
CpuDevice.recover = lambda self: called.append("recover") or recover(self)
loss = step(torch.randn(4, 5)).sum()
executor.HANDLERS[nodes.backward] = fail
abort = collectives.abort_on_device
collectives.abort_on_device = lambda group: abort(group) or abort(Group())
try:
    loss.backward()
except ValueError:
    if rank == 0:
        print(*called, flush=True)
os._exit(0)
"""


def test_collectives_of_nccl_end_before_a_device_recovers(launcher, tmp_path):
    """The device would wait for them. Those of gloo go on, since ranks poll them on the host."""
    done = launcher.run(_FAILS.format(folders=[str(Path(__file__).parents[1])], store=str(tmp_path / "store")), seconds=60)
    assert (done.returncode, done.stdout) == (0, "await abort recover\n"), done.stderr


class _Group:
    """A process group that NCCL serves on devices."""

    aborted = 0

    def _get_backend(self, device):
        return self

    def name(self):
        return "nccl"

    def abort(self):
        self.aborted += 1


@pytest.mark.parametrize("kind, name", [(Ranks, "device_group"), (Sharing, "sums_group")])
def test_ranks_end_the_groups_that_they_have(kind, name):
    """Ranks that share parallel layers alone have no group for weights."""
    ranks, group = object.__new__(kind), _Group()
    setattr(ranks, name, group)
    ranks.abort()
    assert group.aborted == 1
    del group
    ranks.abort()  # torch.distributed has ended since
