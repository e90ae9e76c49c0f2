"""Collectives on tensors of the host and of devices: one adapter for the names of PyTorch 2.11 and 2.13.

On the host, a collective is asynchronous and is polled. If a rank fails, the ranks that wait for it stop waiting.

Only one thread at a time issues a collective. PyTorch's flight recorder stores the Python stack of each collective under a
mutex (`PythonTraceback::gather`). Under the same mutex it drops earlier stacks. That may free the last reference to a function,
and a finalizer may release the GIL. If another thread then takes the GIL and waits for the mutex, the process hangs forever.
Issuing a collective never waits for the threads of other ranks: on the host it is queued, and on devices one thread of each
rank issues all.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from l2l_compile.errors import L2LError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_giving = threading.Lock()
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two looks at a collective

Group = dist.ProcessGroup
Finish = Callable[[dist.Work], object]  # waits for a collective on the host


def own_store(prefix: str) -> dist.Store:
    """The store of the default process group, through a connection of its own and under a name of its own."""
    store: Any = distributed_c10d._get_default_store()  # PyTorch's stubs lack `clone`
    return dist.PrefixStore(prefix, store.clone())


def is_fake(group: Group) -> bool:
    """Whether a group is PyTorch's `fake` one: one process, which stands for all ranks."""
    return dist.get_backend(group) == "fake"


def gather_objects(mine: Any, group: Group) -> list[Any]:
    """An object of each rank of a group. All of them must call this. In a fake group, all ranks have the same."""
    if is_fake(group):
        return [mine] * dist.get_world_size(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def group_named(name: str) -> Group:
    """The process group with this `group_name`. Raises `RuntimeError` if there is none."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str


class BorrowedGroup:
    """A descriptor that holds a process group by a weak reference: `destroy_process_group` can end the group and its threads.

    Reading the attribute after that raises `L2LError`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __set__(self, holder: object, group: Group) -> None:
        setattr(holder, self._name, weakref.ref(group))

    def __get__(self, holder: object, owner: type | None = None) -> Group:
        group: Group | None = getattr(holder, self._name)()
        if group is None:
            raise L2LError(
                "torch.distributed has ended (destroy_process_group) since the model was sharded: shard it again in the new process group"
            )
        return group


def finish(work: dist.Work, check: Callable[[], None], explain: Callable[[Exception], Exception]) -> None:
    """Wait for a collective on the host. Errors of `check` pass through; `explain` converts an error of the collective."""
    pause = _SHORTEST
    while not work.is_completed():
        check()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    try:
        work.wait()
    except RuntimeError as error:
        raise explain(error) from error


def connect(group: Group, device: torch.device) -> None:
    """Let the ranks of a group on GPUs find each other; all of them must call this.

    Else NCCL does so in the first collective, whose call then waits for the other ranks: two ranks whose first messages are of two
    groups would wait for each other.
    """
    if device.type == "cuda" and dist.get_world_size(group) > 1 and not is_fake(group):
        with _giving:
            dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), group=group, group_src=0)


def abort_on_device(group: Group) -> None:
    """End the collectives of a group in NCCL; a stream that waits for one goes on. Those on the host are polled, and need no end."""
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has none
        return
    if backend.name() == "nccl":
        backend.abort()


_left: list[Group] = []


def leave(group: Group) -> None:
    """Never wait for the messages of a group again: their ranks have failed.

    Gloo cannot end a message, and a group that is destroyed waits for its messages. Two ranks that wait so for a message of each other
    would wait until the timeout. So the group stays until the process ends.
    """
    abort_on_device(group)
    _left.append(group)


def all_gather(whole: torch.Tensor, shard: torch.Tensor, group: Group, done: Finish) -> None:
    """Fill the contiguous tensor `whole` with the shards of all ranks, in rank order; `shard` may be a view of `whole`."""
    if whole.device.type != "cpu":
        with _giving:
            _all_gather(_bytes_of(whole), _bytes_of(shard), group=group)  # NCCL lacks some of the dtypes
        return
    with _giving:
        work = _all_gather(_bytes_of(whole), _bytes_of(shard), group=group, async_op=True)
    done(work)


def all_gather_each(wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: Group, done: Finish) -> None:
    """`all_gather` of several tensors. All are in flight at the same time, so the latency of the hops is paid once."""
    if not wholes:
        return
    if wholes[0].device.type != "cpu":
        all_gather_in_one(wholes, shards, group)
        return
    works = []
    for whole, shard in zip(wholes, shards, strict=True):
        with _giving:
            works.append(_all_gather(_bytes_of(whole), _bytes_of(shard), group=group, async_op=True))
    for work in works:
        done(work)


def all_gather_in_one(wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: Group) -> None:
    """`all_gather` of several tensors in one NCCL launch, without a copy: the results arrive in `wholes` directly."""
    with _giving, distributed_c10d._coalescing_manager(group):
        for whole, shard in zip(wholes, shards, strict=True):
            _all_gather(_bytes_of(whole), _bytes_of(shard), group=group)


def sum_to_owners(rows: torch.Tensor, group: Group, done: Finish) -> torch.Tensor:
    """Reduce-scatter: `rows[r]` goes to rank r, and each rank returns the sum of the rows that were sent to it.

    On the host, each rank adds the received rows in rank order, so every run gives the same bits.
    """
    if rows.device.type != "cpu":
        mine = torch.empty_like(rows[0])
        with _giving:
            _reduce_scatter(mine, rows, group=group)
        return mine
    received = torch.empty_like(rows)
    with _giving:
        work = dist.all_to_all_single(_bytes_of(received), _bytes_of(rows), group=group, async_op=True)
    done(work)
    return in_order(received)


def all_reduce(values: torch.Tensor, group: Group, done: Finish) -> None:
    """Replace a contiguous tensor, in place, by its sum over all ranks, with the same bits on each rank."""
    if values.device.type != "cpu":
        with _giving:
            dist.all_reduce(values, group=group)
        return
    with _giving:
        work = dist.all_reduce(values, group=group, async_op=True)
    done(work)


def arrives_in_order(device: torch.device) -> bool:
    """Whether a message is an operation of the lane that asks for it, as on devices. On the host, it comes while the lane goes on."""
    return device.type != "cpu"


def message(tensor: torch.Tensor, source: int, group: Group) -> dist.Work | None:
    """Send a contiguous tensor from rank `source` of the world to the other rank of a group of two, which fills its own with it.

    On the host, the returned work is to be waited for. On devices, the current stream is behind the message.
    """
    if not tensor.numel():
        return None
    with _giving:
        if arrives_in_order(tensor.device):
            dist.broadcast(_bytes_of(tensor), source, group=group)
            return None
        return dist.broadcast(_bytes_of(tensor), source, group=group, async_op=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of `parts[r]` over ranks r, added in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
