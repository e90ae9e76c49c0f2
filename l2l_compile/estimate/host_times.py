"""The host side of a step in virtual time: wires, the ring, gradients as they arrive, and updates in each mode. Sizes alone, no tensors.

It spends what `host/` spends: of each piece of work the bytes that it reads and writes, on the thread that does it. What is not known
from sizes is given: the optimizer's bytes of state, or the seconds of its own step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from l2l_compile.devices.staging import SLOTS, ring_bytes
from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.estimate.optimizer_times import OptimizerTimes
from l2l_compile.estimate.rank_links import RankLinks
from l2l_compile.host.disk_placement import SMALL
from l2l_compile.host.disk_plan import DiskPlan
from l2l_compile.host.server import segments_in_flight
from l2l_compile.host.wire import CHUNK, STRIDE, is_locked, on_wire, shape_on_host
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.lanes import Lane
from l2l_compile.memory.in_place import PAGE
from l2l_compile.memory.layout import aligned, joined
from l2l_compile.options import Options
from l2l_compile.simulation.ring import Ring
from l2l_compile.simulation.simulated_device import Clock, Clocks, SimulatedEvent
from l2l_compile.simulation.simulated_disk import DiskRing, chunks, fetched_beside_updates
from l2l_compile.update_modes import UpdatePlace

Owner = tuple[int, int]  # a parameter: the number of its program, and its index among the arguments


@dataclass(frozen=True)
class HostWeight:
    """A weight of a segment on the host.

    entries            their number, in this shape
    dtype              on the link
    on_link, on_host   bytes of an entry
    gradient           bytes of an entry of its gradient on the link; 0 for none
    is_part            whether it is a part of its owner
    """

    owner: Owner
    shape: tuple[int, ...]
    entries: int
    dtype: torch.dtype
    on_link: int
    on_host: int
    gradient: int
    locked: bool
    is_part: bool


@dataclass(frozen=True)
class _Gradient:
    """The gradient of a parameter on the host: bytes of an entry now, and whether a device has taken its norm.

    It has not if several were added up.
    """

    weight: HostWeight
    width: int
    has_norm: bool = False


@dataclass(eq=False)
class OfStep:
    """The gradients of a step.

    pushes   how many are still to come for each parameter
    arrived  those that are there
    order    parameters of each segment, in the order of backward
    """

    pushes: Counter[Owner] = field(default_factory=Counter)
    arrived: dict[Owner, _Gradient] = field(default_factory=dict)
    order: list[list[Owner]] = field(default_factory=list)


@dataclass(eq=False)
class _Wire:
    """The weights of a segment that cross the link as copies, those of them whose copies are on disk, and the others, in the order of the segment."""

    copied: list[tuple[int, HostWeight]]
    stored: list[tuple[int, HostWeight]]
    others: list[tuple[int, HostWeight]]

    def __post_init__(self) -> None:
        self.spans, end = [], 0
        for _, weight in self.copied:
            size = weight.entries * weight.on_link
            self.spans.append((end, end + size))
            end += aligned(size)
        self.bytes = end


class HostTimes:
    """The host side of the steps of one model: its threads, and the events that they wait for."""

    def __init__(
        self, clocks: Clocks, options: Options, optimizer: OptimizerTimes, links: RankLinks, disk: DiskPlan | None = None
    ):
        self._disk = DiskTimes(clocks, disk, options) if disk is not None else None
        self.clocks, self.options, self.optimizer, self.machine = clocks, options, optimizer, clocks.machine
        self.links = links
        self.worker, self.updating = Clock(Lane.HOST), Clock(Lane.UPDATE)
        if not options.delay:
            self.updating = self.worker
        self._wires: dict[tuple[int, int], _Wire] = {}
        self._stale: set[_Wire] = set()
        self._updated: set[Owner] = set()
        self._copies: defaultdict[Owner, list[torch.dtype]] = defaultdict(list)  # of a parameter on wires, the latest one first
        self._done: dict[Owner, SimulatedEvent] = {}
        self._later: list[list[Owner]] = []  # whose updates are late, in the order of backward
        self._in_flight: deque[list[SimulatedEvent]] = deque()
        self._of_step = OfStep()
        self._ring = _Ring(clocks)

    # ---- calls of the caller ------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._stale = set(self._wires.values())
        if self.options.mode.place is UpdatePlace.AFTER_PUSH and not self._has_late:
            self.clocks.thread.wait(self.worker.event())

    def begin_backward(self, pushed: Iterable[Sequence[HostWeight]]) -> None:
        self._of_step.pushes = Counter(weight.owner for weights in pushed for weight in weights)
        if self._disk is not None and self.options.mode.place is UpdatePlace.AFTER_PUSH:
            if self._has_late:
                self.clocks.thread.wait(self.worker.event())
            self._disk.begin()

    def end_backward(self) -> None:
        """Gradients that go to `p.grad` are waited for."""
        if not self.options.mode.is_overlapped:
            self.clocks.thread.wait(self.worker.event())
            if self.options.optimizer is not None:  # their norm
                self._spend(sum(g.weight.entries * g.weight.on_host for g in self._of_step.arrived.values()))
                self.links.meet(self.clocks)

    def step(self) -> None:
        """`optimizer.step()`."""
        if not self.options.mode.is_overlapped:
            if self.options.optimizer is not None:
                self.clocks.spend(self.optimizer.own_step())
        elif self.options.mode.place is UpdatePlace.AFTER_PUSH:
            self.clocks.thread.wait(self.worker.event())
            if not self._has_late:
                self._finish_writes()
            self.links.meet(self.clocks)
            self._go_on_in_forward(self._of_step)
        else:
            for thread in (self.worker, self.updating):
                self.clocks.thread.wait(thread.event())
            self._done.clear()
            self._end_step(self._of_step)
        self._of_step = OfStep()

    @property
    def _has_late(self) -> bool:
        """Whether some updates go on in the next forward, in a mode that updates in backward."""
        return self._disk is not None and self._disk.has_late

    def _go_on_in_forward(self, of_step: OfStep) -> None:
        """The updates that are late, in the order of the next forward."""
        self._done.clear()
        while self._later:
            mine = self._later.pop()
            done = self._submit(self.worker, lambda mine=mine: self._update(of_step, mine))  # type: ignore[misc]
            self._done |= dict.fromkeys(mine, done)

    def _finish_writes(self) -> None:
        if self._disk is not None:
            self._disk.ring.finish()

    def begin_turns(self) -> OfStep:
        """Some gradients of the step come later: with turns that are in flight. Returns the step that they belong to."""
        raise NotImplementedError("only a step without a flush has turns in flight")

    def end_turns(self, of_step: OfStep | None) -> None:
        """All turns of a step are back; None for one in which none were left."""

    def _end_step(self, of_step: OfStep) -> None:
        """A look at the norm over all ranks, and updates of the step, in the order of the next forward."""
        self.links.meet(self.clocks)
        if self._disk is not None:
            self._disk.begin()
        self._submit(self.updating, lambda: self.links.meet(self.clocks))
        for mine in self._in_order_of_forward(of_step):
            done = self._submit(self.updating, lambda mine=mine: self._update(of_step, mine))  # type: ignore[misc]
            self._done |= dict.fromkeys(mine, done)

    def _in_order_of_forward(self, of_step: OfStep) -> Iterator[list[Owner]]:
        taken: set[Owner] = set()
        for segment in reversed(of_step.order):
            mine = [owner for owner in segment if owner in of_step.arrived and owner not in taken]
            taken.update(mine)
            yield mine

    # ---- weights (h2d lane) -------------------------------------------------------------------------------------------

    def weights_of(self, program: int, segment: Segment, bindings: Bindings) -> list[HostWeight]:
        """The weights of a segment, on the host."""
        found: list[HostWeight] = []
        for weight, spec in zip(segment.weights, segment.block.weights, strict=True):
            link = gradient_dtype(spec, self.options.gradients_on_link).itemsize
            is_trained = spec.differentiable and weight.index >= 0
            shape = shape_on_host(weight, spec, bindings)
            found.append(
                HostWeight(
                    (program, weight.owner if weight.index >= 0 else -1 - len(found)),
                    tuple(shape),
                    math.prod(shape),
                    spec.dtype,
                    spec.dtype.itemsize,
                    (spec.compute_dtype or spec.dtype).itemsize,
                    link if is_trained else 0,
                    weight.kind == "parameter" and is_locked(spec, self.options, to_train=True),
                    weight.slice is not None,
                )
            )
        return found

    def load(self, program: int, segment: Segment, bindings: Bindings, unread: frozenset[int]) -> None:
        """Fetch the weights of a segment, but for those in `unread`."""
        wire = self._wire(program, segment, bindings)
        self._await_updates([weight for _, weight in (*wire.copied, *wire.stored, *wire.others)])
        if segment.sharded:
            self._load_shards(wire)
            return
        spans = joined([span for (i, _), span in zip(wire.copied, wire.spans, strict=True) if i not in unread])

        def send(start: int, end: int) -> None:
            for first, last in spans:
                if first < end and start < last:
                    self._copy(min(last, end) - max(first, start))

        if wire in self._stale:
            self._stale.discard(wire)
            self._refresh(wire, send)
        elif wire.copied:
            send(0, wire.bytes)
        if self.machine.overlaps:
            self._load_others(wire, unread)

    def _load_others(self, wire: _Wire, unread: frozenset[int]) -> None:
        for position, weight in wire.others:
            if position not in unread:
                self._send_weight(weight)
        for position, weight in wire.stored:
            if position not in unread:
                self._fetch_stored(weight.entries * weight.on_link)

    def _load_shards(self, wire: _Wire) -> None:
        """Fetch this rank's shards, each by itself: those on the wire when all of it is up to date, the others through the ring."""
        if wire in self._stale:
            self._stale.discard(wire)
            self._refresh(wire, lambda start, end: None)
        if self.machine.overlaps:
            on_wire = dict(wire.copied)
            for position, weight in sorted((*wire.copied, *wire.others), key=lambda placed: placed[0]):
                size = weight.entries * (weight.on_link if position in on_wire else weight.on_host)
                if position in on_wire:
                    self._copy(size)
                else:
                    self._ring.send(size)

    def _wire(self, program: int, segment: Segment, bindings: Bindings) -> _Wire:
        key = (program, segment.index)
        if key not in self._wires:
            positions, weights = set(on_wire(segment, bindings, self.options)), self.weights_of(program, segment, bindings)
            placed = list(enumerate(weights))
            stored = {i for i, w in placed if i in positions and self._disk is not None and self._disk.of(w).copy}
            wire = _Wire(
                [(i, w) for i, w in placed if i in positions and i not in stored],
                [(i, w) for i, w in placed if i in stored],
                [(i, w) for i, w in placed if i not in positions],
            )
            self._wires[key] = wire
            for _, weight in (*wire.copied, *wire.stored):
                self._copies[weight.owner].append(weight.dtype)
            self._stale.add(wire)
        return self._wires[key]

    def _await_updates(self, weights: Iterable[HostWeight]) -> None:
        if not self.options.delay:
            for weight in weights:
                if (done := self._done.get(weight.owner)) is not None:
                    self.clocks.thread.wait(done)

    def _refresh(self, wire: _Wire, send: Callable[[int, int], None]) -> None:
        """Copy the parameters, but for those that an update has written together with their copies: of these, a sample is compared."""
        sent = 0
        for (_, weight), (start, end) in zip(wire.copied, wire.spans, strict=True):
            for now in self._copied(weight, start, end):
                if now - sent >= CHUNK:
                    send(sent, now)
                    sent = now
        send(sent, wire.bytes)

    def _copied(self, weight: HostWeight, start: int, end: int) -> Iterator[int]:
        if weight.owner in self._updated:
            if not self.options.delay:  # else they are being updated, and not looked at
                cast = weight.on_host + weight.on_link if weight.on_host != weight.on_link else 0
                if weight.entries > 16 * STRIDE:  # else all entries, as they are
                    self._spend(weight.entries // STRIDE * (2 * weight.on_link + 2 * weight.on_host + cast))
                else:
                    self._spend(weight.entries * cast)
            yield end
            return
        size = end - start
        if self.options.delay:
            self._spend(size // weight.on_link * 2 * (weight.on_host + weight.on_link))
            yield end
            return
        for first in range(0, size, CHUNK):
            now = min(size, first + CHUNK)
            self._spend((now - first) // weight.on_link * (weight.on_host + weight.on_link))
            yield start + now

    def _send_weight(self, weight: HostWeight) -> None:
        """A weight crosses the link from its own memory, page-locked in place or through the ring."""
        size = weight.entries * weight.on_host
        if self._disk is not None and self._disk.of(weight).master:
            self._fetch_stored(size)
        elif weight.locked and size > 2 * PAGE:
            self._copy(size - PAGE)
            for _ in range(2):
                self._spend(PAGE)
                self._copy(PAGE // 2)
        else:
            self._ring.send(size)

    def _fetch_stored(self, size: int) -> None:
        self.clocks.copy_from_disk(whole_pages(size), ring_bytes(None) // SLOTS, SLOTS)

    def upload(self, size: int, pinned: bool) -> None:
        """Copy a tensor of the host to the device."""
        if not self.machine.overlaps:
            return
        if pinned:
            self._copy(size)
        else:
            self._ring.send(size)

    def _copy(self, size: int) -> None:
        if self.machine.overlaps:
            self.clocks.copy(size, self.machine.h2d, asynchronous=True)

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def collect(
        self,
        weights: Sequence[HostWeight],
        pushed: SimulatedEvent | None,
        with_norms: bool = False,
        of_step: OfStep | None = None,
    ) -> None:
        """The gradients of a segment are on the host after an event, `with_norms` if the device has taken them.

        They belong to the present step, or to `of_step`.
        """
        into = of_step or self._of_step
        while len(self._in_flight) >= segments_in_flight(self.options):
            self.clocks.thread.wait(self._in_flight.popleft()[-1])

        def work() -> None:
            if pushed is not None:
                self.clocks.thread.wait(pushed)
            self._take(into, weights, with_norms)

        self._in_flight.append([self._submit(self.worker, work)])

    def _take(self, of_step: OfStep, weights: Sequence[HostWeight], with_norms: bool) -> None:
        """Add up gradients of shared parameters; the norms of complete ones, or the copies that go to `p.grad`."""
        mode = self.options.mode
        if self.links.of_replicas is not None:
            self._average(weights, self.links.of_replicas)
        of_step.order.append(list(dict.fromkeys(weight.owner for weight in weights)))
        for weight in weights:
            of_step.pushes[weight.owner] -= 1
            of_step.arrived[weight.owner] = self._sum(weight, of_step.arrived.get(weight.owner), with_norms)
            if mode.keeps_gradients and of_step.pushes[weight.owner] == 0:
                self._norm_of_single(of_step.arrived[weight.owner])

    def _average(self, weights: Sequence[HostWeight], ring: Ring) -> None:
        """As `Ranks.average_replicas`: in float32 at least, on the host."""
        size = ring.ranks * sum(weight.entries * max(4, weight.gradient) for weight in weights)
        self.clocks.spend(ring.seconds(size))
        self._spend(size)

    def _sum(self, weight: HostWeight, so_far: _Gradient | None, with_norms: bool) -> _Gradient:
        """A gradient of a parameter, added to those that have come before."""
        n, wide, came = weight.entries, weight.on_host, weight.gradient
        if not self.options.mode.is_overlapped and came < wide:  # widened, as `p.grad` is
            self._spend(n * (came + wide))
            came = wide
        if so_far is None and not weight.is_part:
            return _Gradient(weight, came, has_norm=with_norms)
        if so_far is not None and so_far.width < wide:
            self._spend(n * (so_far.width + wide))
        self._spend(n * (2 * wide + came))
        return _Gradient(weight, wide)

    def _norm_of_single(self, gradient: _Gradient) -> None:
        """The norm of a gradient, unless a device has taken it."""
        if not gradient.has_norm:
            self._norm(gradient)

    def _norm(self, gradient: _Gradient) -> None:
        """The norm of a gradient, in the dtype of its parameter."""
        n, wide = gradient.weight.entries, gradient.weight.on_host
        self._spend(n * ((gradient.width + wide if gradient.width < wide else 0) + wide))

    def update(self, weights: Sequence[HostWeight]) -> None:
        """The gradients of a segment were pushed: its parameters are updated where the mode does so in backward."""
        if self.options.mode.place is not UpdatePlace.AFTER_PUSH:
            return
        of_step = self._of_step
        mine = [w.owner for w in weights if of_step.pushes[w.owner] == 0]
        late = [owner for owner in mine if self._disk is not None and self._disk.is_late(of_step.arrived[owner].weight)]
        if late:
            self._later.append(late)
            mine = [owner for owner in mine if owner not in late]
        done = self._submit(self.worker, lambda: self._update(of_step, mine))
        if self._in_flight:
            self._in_flight[-1].append(done)

    def _update(self, of_step: OfStep, owners: Iterable[Owner]) -> None:
        through_disk: list[tuple[int, int]] = []  # entries of parameters, and bytes that their updates read and write
        for owner in owners:
            gradient = of_step.arrived[owner]
            weight, n = gradient.weight, gradient.weight.entries
            if not self.options.mode.keeps_gradients:
                self._norm_of_single(gradient)
            if self.optimizer.state is None:  # the copy on the wire is made when the next forward reads it
                self._spend(n * (gradient.width + weight.on_host) if gradient.width < weight.on_host else 0)
                self._by_own_step(weight)
                continue
            copies = self._copies[owner]
            moved = n * (gradient.width + 2 * weight.on_host + 2 * self.optimizer.state + sum(c.itemsize for c in copies[:1]))
            for dtype in copies[1:]:
                moved += n * (dtype.itemsize + (dtype.itemsize if dtype is copies[0] else weight.on_host))
            if self._disk is not None and (on_disk := sum(self._disk.of(weight))):
                through_disk.append((on_disk, moved))
            else:
                self._spend(moved)
            self._updated.add(owner)
        if self._disk is not None:
            self._disk.update((size, moved / self.machine.host_bandwidth) for size, moved in through_disk)

    def _by_own_step(self, weight: HostWeight) -> None:
        """The optimizer's own step on a parameter."""
        seconds = self.optimizer.of_shape(weight.shape)
        if self._disk is None:
            self.clocks.spend(seconds)
        else:
            on_disk = self._disk.of(weight)
            self._disk.ring.whole(on_disk.master + on_disk.state, on_disk.copy, lambda: self.clocks.spend(seconds))

    # ---- threads ------------------------------------------------------------------------------------------------------

    def _submit(self, thread: Clock, work: Callable[[], None]) -> SimulatedEvent:
        with self.clocks.on_thread(thread):
            work()
        return thread.event()

    def _spend(self, size: float) -> None:
        if size:
            self.clocks.spend(size / self.machine.host_bandwidth)


class OnDisk(NamedTuple):
    """Bytes on disk of a parameter, of its state, and of its copy for the link."""

    master: int
    state: int
    copy: int


class DiskTimes:
    """The ring of a disk, and what of each parameter is on disk.

    A plan has parameters, and the nodes of a program have sizes: of as many entries, the first weight is the first parameter, and so on. A
    weight that is a part of a parameter has an even share of all that is on disk.
    """

    def __init__(self, clocks: Clocks, plan: DiskPlan, options: Options):
        self.ring = DiskRing(clocks, plan.buffer, fetched=fetched_beside_updates(plan, options))
        # by the bytes of a master, in order: what is on disk, and whether its update is late
        self._left: defaultdict[int, deque[tuple[OnDisk, bool]]] = defaultdict(deque)
        self.has_late = bool(plan.late)
        placed = plan.placement
        for p, size, master, state, copy in zip(
            plan.parameters, plan.sizes, placed.masters, placed.states, placed.copies, strict=True
        ):
            self._left[size.master].append((OnDisk(size.master * master, size.state * state, size.copy * copy), p in plan.late))
        large = sum(size.master for size in plan.sizes if size.leaves) or 1
        self._share = plan.masters / large, plan.states / large, plan.copies / large
        self._of: dict[Owner, OnDisk] = {}
        self._late: set[Owner] = set()  # of those in `_of`

    def begin(self) -> None:
        self.ring.begin()

    def of(self, weight: HostWeight) -> OnDisk:
        """Bytes on disk of a weight."""
        size = weight.entries * weight.on_host
        if not weight.gradient or size < SMALL:
            return _NOTHING
        if weight.is_part:
            return OnDisk(*(int(size * share) for share in self._share))
        if weight.owner not in self._of:
            left = self._left[size]
            self._of[weight.owner], is_late = left.popleft() if left else (_NOTHING, False)
            if is_late:
                self._late.add(weight.owner)
        return self._of[weight.owner]

    def is_late(self, weight: HostWeight) -> bool:
        """Whether a weight is updated in the next forward. A part of a parameter is not."""
        return bool(sum(self.of(weight))) and weight.owner in self._late

    def update(self, tensors: Iterable[tuple[int, float]]) -> None:
        """Updates of parameters on disk, by their bytes there and their seconds."""
        for size, seconds in chunks(tensors, self.ring.size):
            self.ring.update(size, seconds)


_NOTHING = OnDisk(0, 0, 0)


class _Ring:
    """`devices/staging.py` in virtual time."""

    def __init__(self, clocks: Clocks):
        self._clocks, self._size = clocks, ring_bytes(None) // SLOTS
        self._events: list[SimulatedEvent | None] = [None] * SLOTS
        self._slot = self._filled = 0

    def send(self, size: int) -> None:
        clocks = self._clocks
        for start in range(0, size, self._size):
            part = min(size - start, self._size)
            if self._filled + part > self._size:
                assert clocks.lane is not None
                self._events[self._slot] = clocks.lane.event()
                self._slot, self._filled = (self._slot + 1) % SLOTS, 0
                if (event := self._events[self._slot]) is not None:
                    clocks.thread.wait(event)
            self._filled += aligned(part)
            clocks.spend(2 * part / clocks.machine.host_bandwidth)
            clocks.copy(part, clocks.machine.h2d, asynchronous=True)
