"""The ranks among which a model is sharded: their process groups, one for each thread that issues collectives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError
from l2l_compile.ranks import collectives as exchange
from l2l_compile.ranks.announced import Announced
from l2l_compile.ranks.announcements import ActionKind, Path
from l2l_compile.ranks.collectives import BorrowedGroup, finish, own_store
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.ranks.watch import Watch

_TOLD = 5  # whole numbers that an announcement carries beside its path
# Bytes of the buffer in which gradients are summed (ZeRO's C_B, arXiv 1910.02054, section 6.2): a row of 2 MiB for each rank,
# within bounds for the buffer. The transfer of such a row takes longer than the latency of a hop.
_ROW_BYTES, _LEAST_REDUCED, _MOST_REDUCED = 2 << 20, 16 << 20, 128 << 20


class Ranks:
    """The ranks of a mesh. All of them must call each collective method, in the same order.

    shard_mesh_size, shard_mesh_rank          how many ranks the model is sharded over, and which one this is: the mesh, or its
                                              second dimension of two ("replicate", "shard"), or its first of ("dp", "tp")
    replicate_mesh_size, replicate_mesh_rank  how many times the mesh has the whole model, and in which copy this rank is: the
                                              first dimension of ("replicate", "shard")
    tp_size, tp_rank                          how many ranks share parallel layers, and which one this is: the second dimension
                                              of ("dp", "tp")
    pipeline                                  the ranks that run the other stages for the same rows, if the model is a pipeline
    world_size, world_rank                    how many ranks run the model together, and which one this is: those of the mesh, or
                                              of the mesh and the pipeline, each pipeline's behind one another

    Each thread has process groups of its own, so that collectives of different threads cannot be mixed up: `device` for weights
    and gradients (the lane `comm`), `sums` for sums of parallel layers (the lane `compute`), `host` for the thread that updates
    (and `replicate` for the same shard in all replicas), `control` for the caller. The groups of the mesh belong to the user.
    """

    replicate_mesh_size = tp_size = 1
    replicate_mesh_rank = tp_rank = 0
    device_group, replicate_group, control_group, host_group = (BorrowedGroup() for _ in range(4))
    tp_group, sums_group = BorrowedGroup(), BorrowedGroup()
    shares = "share parallel layers"  # what ranks with the same rows do
    compares_settings = True  # whether the groups of all ranks' optimizers are alike
    compares_inputs = True  # whether ranks with the same rows compare their inputs
    shards = True  # whether `shard` has sharded a model among them
    forwards = steps = 0
    described = ""  # the mesh, as text
    settings: tuple[str, ...] = ()  # of the last step of an optimizer
    pipeline: Ranks | None = None
    within: Ranks | None = None  # of the ranks of a pipeline: all ranks, if each stage is sharded among ranks of its own
    _watch: Watch | None = None
    _connected = 0  # of the groups on devices, in their order

    def __init__(self, mesh: DeviceMesh, parallel: DeviceMesh | None = None, pipeline: Ranks | None = None):
        """`parallel` has two dimensions: the ranks of `mesh`, and the ranks that share parallel layers. `pipeline` has this rank."""
        shards = shards_of(mesh)
        self.shard_mesh_size, self.shard_mesh_rank = shards.size(), shards.get_local_rank()
        self._made_for = weakref.ref(shards.get_group())
        members = dist.get_process_group_ranks(shards.get_group())
        self.device_group = own_group(shards.get_group())
        if replicates(mesh):
            self.replicate_mesh_size, self.replicate_mesh_rank = mesh.size(0), mesh.get_local_rank(0)
            self.replicate_group = dist.new_group(mesh.mesh[:, self.shard_mesh_rank].tolist(), use_local_synchronization=True)
            members = mesh.mesh.flatten().tolist()
        if parallel is not None:
            self.tp_size, self.tp_rank = parallel.size(1), parallel.get_local_rank(1)
            self.tp_group = parallel.get_group(1)
            self.sums_group = own_group(self.tp_group)
            members = parallel.mesh.flatten().tolist()
        if pipeline is not None:
            self.pipeline, self.shares, self.compares_settings = pipeline, pipeline.shares, pipeline.compares_settings
            of_stages = exchange.gather_objects(members, pipeline.control_group)
            if exchange.is_fake(pipeline.control_group):  # nobody answers for the other stages, which are beside this one
                stages = dist.get_process_group_ranks(pipeline.control_group)
                of_stages = [[member + stage - dist.get_rank() for member in members] for stage in stages]
            members = [rank for row in zip(*of_stages, strict=True) for rank in row]
            pipeline.close()
            pipeline.within = self
        self.described = str(mesh)  # text, since the mesh itself would keep its process groups alive
        self.world_size, self.world_rank = len(members), members.index(dist.get_rank())
        self.control_group, self.host_group = (dist.new_group(members, use_local_synchronization=True) for _ in range(2))

    @property
    def same_rows(self) -> int:
        """How many consecutive ranks of the world compute with the same rows."""
        return self.pipeline.world_size if self.pipeline is not None else self.tp_size

    @property
    def shares_layers(self) -> bool:
        """Whether ranks compute parts of the same layers. In a call without gradients, each may have a cache of its own."""
        return self.tp_size > 1

    def made_for(self, group: dist.ProcessGroup) -> bool:
        """Whether these ranks were made for this process group. False after `torch.distributed` was initialized again."""
        return self._made_for() is group

    @property
    def watch(self) -> Watch:
        """The watch over the other ranks, which begins at the first use."""
        if self._watch is None:
            name = "/".join(map(str, dist.get_process_group_ranks(self.control_group)))
            self._watch = Watch(own_store(f"l2l/{name}"), self.world_rank, self.world_size)
            weakref.finalize(self.control_group, self._watch.groups_are_gone).atexit = False
        return self._watch

    def check(self) -> None:
        """Raises `RankError` if a rank has failed."""
        self.watch.check()

    def close(self) -> None:
        """End the watch: the process groups are gone."""
        if self._watch is not None:
            self._watch.close()

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed within a joint action."""
        self.watch.tell(error)

    def _device_groups(self) -> list[dist.ProcessGroup]:
        """The groups of collectives on devices, in an order in which all ranks can connect them."""
        names = ("device_group", "sums_group")
        return [getattr(self, name) for name in names if hasattr(self, name)]  # weights are sharded, layers are parallel, or both

    def connect(self, device: torch.device) -> None:
        """Connect the groups of collectives on devices that are new. All ranks must call this at the same place."""
        groups = self._device_groups()
        for group in groups[self._connected :]:
            exchange.connect(group, device)
        self._connected = len(groups)
        if self.pipeline is not None and self.pipeline is not self:
            self.pipeline.connect(device)

    def abort(self) -> None:
        """After a failure: end the collectives on devices, which would wait for a rank that will not come."""
        with suppress(L2LError):  # torch.distributed has ended, and they with it
            for group in self._device_groups():
                exchange.abort_on_device(group)
        if self.pipeline is not None:
            self.pipeline.abort()

    # ---- the caller ----------------------------------------------------------------------------------------------------

    def announce(
        self,
        kind: ActionKind,
        collectives: tuple[str, ...] = (),
        train: bool = False,
        told: Sequence[int] = (),
        refuse: Callable[[list[list[int]]], None] | None = None,
        options: tuple[tuple[str, str], ...] = (),
    ) -> list[list[int]]:
        """Announce an action that all ranks begin. Returns the numbers `told` of each rank: five, filled up with zeros.

        Every rank raises `RankError` if the announced actions differ. If all ranks begin the same action, and before their collectives
        and settings are compared, `refuse` is called with these numbers, and may raise: other rows make other collectives.
        """
        return self.announce_soon(kind, collectives, train, told, refuse, options).told()

    def announce_soon(
        self,
        kind: ActionKind,
        collectives: tuple[str, ...] = (),
        train: bool = False,
        told: Sequence[int] = (),
        refuse: Callable[[list[list[int]]], None] | None = None,
        options: tuple[tuple[str, str], ...] = (),
    ) -> Announced:
        """As `announce`, without a wait for the other ranks: the result has what they announce."""
        path = Path(kind, collectives, self.forwards, self.steps, train, self.settings, options)
        mine = torch.tensor([*path.numbers(), *told, *[0] * (_TOLD - len(told))])
        gathered = mine.new_empty((self.world_size, len(mine)))
        if self.tp_size > 1:
            _begun[self.tp_group] = self
        waiting, works = self.watch.waiting(str(path)), list[dist.Work]()
        group = self.control_group
        exchange.all_gather(gathered, mine, group, works.append)
        return Announced(path, gathered, works[0], lambda work: finish(work, waiting, self.watch.explain), refuse, group)

    def sum_on_host(self, values: Sequence[float]) -> list[float]:
        """Sums of `values` over all ranks, in float64 and in rank order, so with the same bits on each rank (host lane)."""
        return self._summed(values, self.host_group)

    def _summed(self, values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = mine.new_empty((self.world_size, *mine.shape))
        exchange.all_gather(gathered, mine, group, self.finish)
        return exchange.in_order(gathered).tolist()

    def average_replicas(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace gradients of this rank's shards by their means over the replicas, with the same bits in each (host lane).

        The means are computed in a buffer of bounded size, in at least float32.
        """
        for gradient in gradients:
            if gradient is not None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                for part in gradient.view(-1).split(reduced_entries(self.replicate_mesh_size, wide)):
                    gathered = part.new_empty((self.replicate_mesh_size, len(part)), dtype=wide)
                    exchange.all_gather(gathered, part.to(wide), self.replicate_group, self.finish)
                    part.copy_(exchange.in_order(gathered) / self.replicate_mesh_size)

    def finish(self, work: dist.Work) -> None:
        """Wait for a collective on the host. Raises `RankError` if a rank has failed."""
        finish(work, self.check, self.watch.explain)

    # ---- the lane comm -------------------------------------------------------------------------------------------------

    def gather(self, wholes: Sequence[torch.Tensor]) -> None:
        """Complete contiguous tensors in place, all together. Each rank has filled its own shard of each tensor."""
        filled = [whole for whole in wholes if whole.numel()]
        self._all_gather_each(filled, [whole.view(self.shard_mesh_size, -1)[self.shard_mesh_rank] for whole in filled])

    def all_gather_rows(self, own: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, concatenated along `dim`; rank r has `rows[r]` rows."""
        mine = own.movedim(dim, 0)
        padded = mine.new_zeros((max(rows), *mine.shape[1:]))
        padded[: len(mine)] = mine
        gathered = mine.new_empty((self.shard_mesh_size, *padded.shape))
        self._all_gather(gathered, padded)
        parts = [part[:count] for part, count in zip(gathered, rows, strict=True)]
        return torch.cat(parts).movedim(0, dim).contiguous()

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, computed in at least float32, with the same bits on each rank."""
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        return self._sum_everywhere(wide).to(part.dtype)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """As `collectives.all_gather`."""
        exchange.all_gather(whole, shard, self.device_group, self.finish)

    def _all_gather_each(self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """As `collectives.all_gather_each`."""
        exchange.all_gather_each(wholes, shards, self.device_group, self.finish)

    def _sum_to_owners(self, rows: torch.Tensor) -> torch.Tensor:
        """As `collectives.sum_to_owners`."""
        return exchange.sum_to_owners(rows, self.device_group, self.finish)

    def _sum_everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Every rank gathers all values and adds them in rank order, so each rank has the same bits."""
        gathered = values.new_empty((self.shard_mesh_size, *values.shape))
        self._all_gather(gathered, values.contiguous())
        return exchange.in_order(gathered)

    def local_shard(
        self, gradients: Sequence[torch.Tensor | None], specs: Sequence[ShardSpec | None]
    ) -> list[torch.Tensor | None]:
        """Copies of this rank's shards of gradients that are equal on all ranks."""
        found: list[torch.Tensor | None] = []
        for gradient, spec in zip(gradients, specs, strict=True):
            mine = gradient
            if gradient is not None and spec is not None and not spec.replicated:
                span = spec.span(self.shard_mesh_rank)
                mine = gradient[span.start : span.stop]
            found.append(mine.clone(memory_format=torch.contiguous_format) if mine is not None else None)
        return found

    def reduce_scatter(
        self, gradients: Sequence[torch.Tensor | None], specs: Sequence[ShardSpec | None], mean: bool
    ) -> list[torch.Tensor | None]:
        """This rank's shard of the sum (with `mean`, of the mean) of each gradient over all ranks, in at least float32.

        Gradients go through a buffer of bounded size. If one rank lacks a gradient, all do: they run the same program.
        """
        there = [(g, p) for g, p in zip(gradients, specs, strict=True) if g is not None and p is not None]
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(torch.promote_types(g.dtype, torch.float32) for g, _ in there):
            mine = [(g, p) for g, p in there if torch.promote_types(g.dtype, torch.float32) == dtype]
            shared = [(g, p) for g, p in mine if p.replicated]
            sharded = [(g, p) for g, p in mine if not p.replicated]
            found |= self._sum_shared([g for g, _ in shared], dtype) | self._sum_sharded(sharded, dtype)
        result = [None if g is None else found[id(g)] for g in gradients]
        return [g / self.shard_mesh_size if mean and g is not None else g for g in result]

    def _sum_shared(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Sums of gradients of parameters that every rank has whole, by `id` of the gradient."""
        if not gradients:
            return {}
        joined = torch.cat([g.reshape(-1).to(dtype) for g in gradients])
        total = self._sum_everywhere(joined)
        parts = total.split([g.numel() for g in gradients])
        return {id(g): part.view(g.shape) for g, part in zip(gradients, parts, strict=True)}

    def _sum_sharded(self, gradients: Sequence[tuple[torch.Tensor, ShardSpec]], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """This rank's shards of the sums of gradients of sharded parameters, by `id` of the gradient.

        The gradients form a matrix: row r is the shards of rank r, concatenated. The buffer takes some columns at a time.
        """
        total = sum(p.entries for _, p in gradients)
        if not total:
            return {id(g): g.new_empty(p.shape_of(self.shard_mesh_rank), dtype=dtype) for g, p in gradients}
        width = min(total, reduced_entries(self.shard_mesh_size, dtype))
        some, _ = gradients[0]
        buffer, mine = some.new_zeros((self.shard_mesh_size, width), dtype=dtype), some.new_empty(total, dtype=dtype)
        for first in range(0, total, width):
            columns = buffer[:, : min(width, total - first)]
            self._fill(columns, first, gradients)
            rows = columns.contiguous()
            mine[first : first + rows.shape[1]] = self._sum_to_owners(rows)
        found, start = {}, 0
        for gradient, spec in gradients:
            shape = spec.shape_of(self.shard_mesh_rank)
            found[id(gradient)] = mine[start : start + torch.Size(shape).numel()].view(shape)
            start += spec.entries
        return found

    def _fill(self, columns: torch.Tensor, first: int, gradients: Sequence[tuple[torch.Tensor, ShardSpec]]) -> None:
        """Copy the columns of the matrix, from `first` on, into the buffer; padding is zero.

        The rows that a gradient fills completely take one copy, and the row that it fills in part takes another. On a device,
        one copy for each rank would take longer to launch than to run.
        """
        start, end = 0, first + columns.shape[1]
        columns.zero_()
        for gradient, spec in gradients:
            low, high = max(start, first), min(start + spec.entries, end)
            if low < high:
                flat = gradient.reshape(-1)
                whole = len(flat) // spec.entries
                inside, here = slice(low - start, high - start), slice(low - first, high - first)
                columns[:whole, here] = flat[: whole * spec.entries].view(whole, spec.entries)[:, inside]
                part = flat[whole * spec.entries :][inside]
                if len(part):
                    columns[whole, here][: len(part)] = part
            start += spec.entries


def reduced_entries(ranks: int, dtype: torch.dtype) -> int:
    """How many entries of `dtype` a row of the buffer of a reduction has: the buffer has a row for each rank."""
    return max(1, min(max(_ROW_BYTES * ranks, _LEAST_REDUCED), _MOST_REDUCED) // (ranks * dtype.itemsize))


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group of the same ranks. All of them must call this."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def numbers_of(values: Sequence[float]) -> list[int]:
    """Numbers in float64 as whole numbers with the same bits, for an announcement."""
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def floats_of(numbers: Sequence[int]) -> list[float]:
    """The inverse of `numbers_of`."""
    return torch.tensor(numbers, dtype=torch.int64).view(torch.float64).tolist()


def replicates(mesh: DeviceMesh) -> bool:
    """Whether a mesh has two dimensions whose names end in "replicate" (copies of the model) and "shard" (its shards)."""
    names = mesh.mesh_dim_names
    return mesh.ndim == 2 and names is not None and names[0].endswith("replicate") and names[1].endswith("shard")


def shards_of(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension of a mesh over which a model is sharded."""
    if not replicates(mesh):
        return mesh
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[1]]


_known: dict[DeviceMesh, Ranks] = {}
# The `Ranks` that made the last announcement, by the process group of the ranks that share parallel layers.
_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh, make: bool = False, parallel: DeviceMesh | None = None, pipeline: Ranks | None = None) -> Ranks:
    """The ranks of a mesh; `make` makes them if needed.

    Raises `L2LError` for none, for another number of parallel ranks, and for another pipeline.
    """
    known = _known.get(mesh)
    if make and (known is None or not known.made_for(shards_of(mesh).get_group())):
        if known is not None:
            del _known[mesh]  # also drops the key, an earlier mesh that compares equal and keeps its process groups alive
            known.close()
        known = _known[mesh] = Ranks(mesh, parallel, pipeline)
    elif known is not None and parallel is not None and known.tp_size != parallel.size(1):
        raise L2LError(
            f"another model was sharded over {mesh}: pass the mesh of two dimensions, {parallel}, to l2l_compile.shard for both models"
        )
    elif make and known is not None and known.pipeline is not pipeline:
        raise L2LError(
            f"another model was sharded over {mesh}, {'and is no pipeline' if known.pipeline is None else 'within another pipeline'}: make a "
            "mesh of the same ranks with other names"
        )
    if known is None:
        raise L2LError(f"a parameter is a DTensor on {mesh}, which l2l_compile.shard has not seen: shard the model with it")
    return acting_for(known)


def sums_of(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, exchange.Finish]:
    """For the group of a mesh of parallel layers: the group in which its ranks sum, and a wait that ends if a rank fails."""
    ranks = _begun.get(group)
    return (ranks.sums_group, ranks.finish) if ranks is not None else (group, dist.Work.wait)  # a rank alone announces nothing


class _StandIns(threading.local):
    """What stands in for ranks on a thread."""

    def __init__(self) -> None:
        self.of: Mapping[Ranks, Ranks] = {}


_stand_ins = _StandIns()


@contextmanager
def standing_in(others: Mapping[Ranks, Ranks]) -> Iterator[None]:
    """A context in which, on this thread, the values of `others` replace the keys."""
    before, _stand_ins.of = _stand_ins.of, {**_stand_ins.of, **others}
    try:
        yield
    finally:
        _stand_ins.of = before


def acting_for(ranks: Ranks) -> Ranks:
    """The ranks that stand in for these on this thread; mostly themselves."""
    return _stand_ins.of.get(ranks, ranks)


def is_known(mesh: DeviceMesh) -> bool:
    """Whether `shard` has sharded a model among the ranks of a mesh."""
    return mesh in _known


def tp_size_of(mesh: DeviceMesh) -> int:
    """How many ranks share parallel layers, for models that `shard` has sharded over a mesh; 0 if there are none."""
    known = _known.get(mesh)
    return known.tp_size if known is not None and known.made_for(shards_of(mesh).get_group()) else 0


def anything_is_sharded() -> bool:
    """Whether a model of this process is sharded over several ranks."""
    return dist.is_available() and dist.is_initialized() and any(ranks.world_size > 1 for ranks in _known.values())
