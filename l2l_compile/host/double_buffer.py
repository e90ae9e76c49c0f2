"""Wires in two versions, for updates that are a step late: a step reads the weights of one step before while the host updates them.

Forwards and backwards of training read the *front* of a wire. An update writes the parameters and the *back*. At the end of a
step, when the updates of the step before are done, front and back change places. Evaluation reads the newest version.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.wire import Copy, Ready, Wire, Wires, identity, no_waiter, same_samples, written_values
from l2l_compile.memory.address import address
from l2l_compile.memory.pages import PinnedMemory
from l2l_compile.races import Place, Unwatched
from l2l_compile.ranks.sharded import local, sharded_as

Previous = Mapping[torch.Tensor, Sequence[torch.Tensor]]  # by parameter: its weights of a step before, in the dtypes of its wires


class _BackCopy(Copy):
    """The copy that an update writes. Until then, its contents are older than the parameter."""

    def unchanged(self) -> bool:
        return False


class _Versions:
    """The two versions of one wire.

    owners    for each weight on the wire, the parameter that it is or that it is a part of
    identity  of each parameter when its newest version was copied
    ahead     positions of weights whose back is newer than their front
    behind    positions of weights whose back is older than their front
    used      the forward that used it last
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], owners: Sequence, memory: PinnedMemory):
        self.owners, self.parameters, self.dtypes = tuple(owners), tuple(parameters), tuple(dtypes)
        self.front, self.back = (Wire(parameters, dtypes, memory) for _ in range(2))
        # A place for each weight: updates write those that are trained, and forwards those that are frozen.
        names = ("the front of a wire", "the back of a wire")
        self.places = tuple([Place(name) for _ in parameters] for name in names)
        self.identity: list[tuple[int, ...] | None] = [None] * len(parameters)
        self.ahead: set[int] = set()
        self.behind: set[int] = set()
        self.used = 0

    def newest(self, position: int) -> torch.Tensor:
        """The copy of a weight that equals its parameter now."""
        return (self.back if position in self.ahead else self.front).views[position]

    def set(self, position: int, newest: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Write the newest version of a weight, and its version of a step before. Without `before`, both are the newest."""
        self.front.views[position].copy_(newest if before is None else before)
        self.back.views[position].copy_(newest)
        self.behind.discard(position)
        (self.ahead.discard if before is None else self.ahead.add)(position)
        self.identity[position] = identity(self.parameters[position])

    def written(self, position: int) -> None:
        """The back of a weight has been written together with its parameter."""
        self.ahead.add(position)
        self.behind.discard(position)
        self.identity[position] = identity(self.parameters[position])

    def complete(self) -> None:
        """Bring the back of every weight up to date."""
        for position in self.behind:
            self.back.views[position].copy_(self.front.views[position])
        self.behind.clear()

    def turn(self) -> None:
        """Exchange front and back, if an update has written the back."""
        if self.ahead:
            self.complete()
            self.front, self.back = self.back, self.front
            self.places = self.places[::-1]
            self.behind, self.ahead = self.ahead, set()


class DelayedWires(Wires):
    """The wires of all segments, in two versions.

    wait      blocks until the updates of parameters are done; set by the updates
    updating  parameters whose update is under way or to come
    """

    def __init__(self, memory: PinnedMemory, accesses: Unwatched):
        super().__init__(memory)
        self._accesses = accesses
        self._versions: dict[tuple, _Versions] = {}
        self._by_owner: defaultdict[torch.Tensor, list[tuple[_Versions, int]]] = defaultdict(list)
        self._unchecked: set[_Versions] = set()
        self._previous: Previous = {}
        self._updated: set[torch.Tensor] = set()  # parameters that an update has written
        self.updating: frozenset[torch.Tensor] = frozenset()
        self.wait: Callable[[Iterable[Any]], None] = lambda parameters: None

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._turn += 1
        self._unchecked = set(self._versions.values())

    def turn(self) -> None:
        """End a step, while no update is under way: the next step reads the weights as they are now."""
        for versions in self._versions.values():
            self._check(versions, sampled=False)
            for place in (*versions.places[0], *versions.places[1]):
                self._accesses.write(place)
            versions.turn()
        self._previous = {}

    def find_writes(self) -> None:
        """Take parameters that PyTorch has recorded a write into: both versions have it then. No update is under way."""
        for versions in self._versions.values():
            self._check(versions, sampled=False)

    def is_ahead(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is newer than the weights that the next step will read."""
        return any(i in versions.ahead for versions, i in self._by_owner.get(parameter, ()))

    def previous(self, but: Container[torch.Tensor] = ()) -> dict[torch.Tensor, list[torch.Tensor]]:
        """Copies of the weights that the next step will read, for every parameter that is newer, except some. No update is under way."""
        found = {p: list(kept) for p, kept in self._previous.items() if p not in but}
        for owner, places in [item for item in list(self._by_owner.items()) if item[0] not in but]:  # a lane may add some
            whole: dict[torch.dtype, torch.Tensor] = {}
            for versions, i in places:
                if i in versions.ahead:
                    dtype = versions.dtypes[i]
                    if dtype not in whole:
                        kept = self._restored(owner, owner, dtype)
                        whole[dtype] = (written_values(owner) if kept is None else kept).to(dtype, copy=True)
                    _part_of(whole[dtype], versions.parameters[i], owner).copy_(versions.front.views[i])
            if whole:
                found[owner] = [sharded_as(tensor, owner) for tensor in whole.values()]
        return found

    def restore(self, previous: Previous) -> None:
        """Have the next step read these weights. The step after it reads the parameters as they are when that step begins."""
        self._previous = previous
        for versions in self._versions.values():
            versions.identity = [None] * len(versions.identity)

    @contextlib.contextmanager
    def moving(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within it, parameters get other memory and keep their values: the next step still reads the weights of a step before.

        No update is under way. Slices of a parameter are other tensors behind it, so their wires are made anew.
        """
        self.find_writes()
        sliced = {v for p in parameters for v, i in self._by_owner.get(p, ()) if v.parameters[i] is not p}
        owners = {owner for versions in sliced for owner in versions.owners}
        before = self.previous(but={*self._previous, *self._by_owner} - owners)
        yield
        self._previous = {**self._previous, **before}
        self._drop(sliced)
        for parameter in parameters:
            for versions, i in self._by_owner.get(parameter, ()):
                versions.identity[i] = identity(parameter)

    def _drop(self, dropped: Container[_Versions]) -> None:
        self._versions = {key: versions for key, versions in self._versions.items() if versions not in dropped}
        self._unchecked.intersection_update(self._versions.values())
        for owner, places in self._by_owner.items():
            self._by_owner[owner] = [(versions, i) for versions, i in places if versions not in dropped]

    # ---- called on the h2d lane --------------------------------------------------------------------------------------

    def load(
        self,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        owners: Sequence[torch.Tensor] = (),
        *,
        keep: bool = True,
        newest: bool = True,
        ready: Ready = no_waiter,
    ) -> Wire:
        key = tuple(zip(map(id, parameters), dtypes, strict=True))
        versions = self._versions.get(key)
        if versions is None:
            self.wait(owners)
            versions = self._versions[key] = self._new(parameters, dtypes, owners)
        elif versions in self._unchecked:
            self._check(versions)
        self._unchecked.discard(versions)
        versions.used = self._turn
        for places in versions.places if newest else versions.places[:1]:
            for place in places:
                self._accesses.read(place)
        if newest and versions.ahead:
            versions.complete()
        wire = versions.back if newest and versions.ahead else versions.front
        ready(wire, 0, wire.buffer.numel())
        return wire

    def _new(
        self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], owners: Sequence[torch.Tensor]
    ) -> _Versions:
        versions = _Versions(parameters, dtypes, owners, self._memory)
        self._accesses.read_parameters(owners)
        for position, (parameter, owner, dtype) in enumerate(zip(parameters, owners, dtypes, strict=True)):
            before = self._before(parameter, owner, dtype)
            versions.set(position, written_values(parameter), before)
            self._by_owner[owner].append((versions, position))
        return versions

    def _before(self, parameter: torch.Tensor, owner: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The version of a weight that the next step must read, None for the newest. Raises `L2LError` if it is not kept."""
        known = self._by_owner.get(owner, ())
        for versions in self._unchecked.intersection(v for v, _ in known):
            self._check(versions)
            self._unchecked.discard(versions)
        ahead = [(v, i) for v, i in known if i in v.ahead]
        for other, position in ahead:
            if other.dtypes[position] is dtype and _has_same_entries(other.parameters[position], parameter):
                return other.front.views[position]
        if not ahead or owner in self._previous:
            return self._restored(parameter, owner, dtype)
        if all(other.dtypes[position] is dtype for other, position in ahead):  # it is another part of its owner than those
            [whole] = self.previous(but={*self._previous, *self._by_owner} - {owner})[owner]
            return _part_of(local(whole), parameter, owner)
        other, position = next((v, i) for v, i in ahead if v.dtypes[i] is not dtype)
        raise L2LError(
            f"a parameter of shape {tuple(parameter.shape)} crosses the link in {dtype} for the first time while delay=1 trains it in "
            f"{other.dtypes[position]}, and its weights of one step before are kept in that alone. Run a step with "
            "this input before the first update, or leave out the option delay"
        )

    def _restored(self, parameter: torch.Tensor, owner: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The version of a weight a step before, from a checkpoint; None if there is none."""
        kept = self._previous.get(owner, ())
        found = next((t for t in kept if t.dtype is dtype), next(iter(kept), None))
        return _part_of(local(found), parameter, owner) if found is not None else None

    def _check(self, versions: _Versions, sampled: bool = True) -> None:
        """Copy parameters that were written outside of updates. Both versions then have the new values.

        With `sampled`, finds writes that PyTorch does not record as well (see `Copy.refresh`). Parameters that no update has
        written are copied in every forward.
        """
        updating = self.updating  # other threads may end the updates meanwhile
        known = self._known(versions, updating, sampled)
        for position, (parameter, owner) in enumerate(zip(versions.parameters, versions.owners, strict=True)):
            if owner in updating or not (sampled or owner in self._updated) or position in known:
                continue
            self._accesses.read_parameters([owner])
            for places in versions.places:
                self._accesses.write(places[position])
            before = self._restored(parameter, owner, versions.dtypes[position])
            versions.set(position, written_values(parameter), before)

    def _known(self, versions: _Versions, updating: Container[torch.Tensor], sampled: bool) -> set[int]:
        """Positions of the parameters that nothing but updates has written, by all that is looked at."""
        pairs = {
            position: (versions.newest(position), parameter)
            for position, (parameter, owner) in enumerate(zip(versions.parameters, versions.owners, strict=True))
            if owner in self._updated and owner not in updating and versions.identity[position] == identity(parameter)
        }
        if not sampled:
            return set(pairs)
        return {position for position, is_same in zip(pairs, same_samples(pairs.values(), self._turn), strict=True) if is_same}

    # ---- called by updates -------------------------------------------------------------------------------------------

    def latest(self, parameter: torch.Tensor) -> Copy | None:
        """The copy that an update of a parameter writes together with it."""
        own = [(v, i) for v, i in self._by_owner.get(parameter, ()) if v.parameters[i] is parameter]
        if not own:
            return None
        versions, position = max(own, key=lambda place: place[0].used)
        return _BackCopy(parameter, versions.back.views[position])

    def written(self, parameter: torch.Tensor) -> None:
        """A parameter has been written, together with its latest copy."""
        latest = self.latest(parameter)
        self._carry(parameter, latest.view if latest is not None else None)

    def carry(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters have been written: write their backs as well, where that has not been done yet."""
        for parameter in parameters:
            if any(versions.identity[i] != identity(versions.parameters[i]) for versions, i in self._by_owner.get(parameter, ())):
                self._carry(parameter, None)

    def _carry(self, parameter: torch.Tensor, written: torch.Tensor | None) -> None:
        self._updated.add(parameter)
        for versions, position in self._by_owner.get(parameter, ()):
            self._accesses.write(versions.places[1][position])
            view = versions.back.views[position]
            if written is None or address(view) != address(written):
                part = versions.parameters[position]
                same = part is parameter and written is not None and written.dtype is view.dtype
                source = written if same else written_values(part)
                assert source is not None
                view.copy_(source)
            versions.written(position)


def _has_same_entries(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same part of a parameter: each program takes slices of its own."""
    one, other = local(one), local(other)
    return address(one) == address(other) and (one.shape, one.stride()) == (other.shape, other.stride())


def _part_of(whole: torch.Tensor, part: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """The part of `whole` that `part` is of the parameter `owner`; `whole` has the owner's shape."""
    if part is owner:
        return whole
    return whole.as_strided(part.shape, part.stride(), part.storage_offset() - local(owner).storage_offset())
