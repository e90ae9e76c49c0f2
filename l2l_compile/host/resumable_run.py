"""A training run that continues from its last complete step after a kill (option `resumable`): its count of steps, and its commits.

    optimizer.step()      the step is over
    the loop              may still change what belongs to it: learning rates, weights, `extra`
    commit, or the next forward that trains (the user's thread)    takes hyperparameters, buffers and `extra`
    behind the step's updates (the host lane)                      takes small tensors and counts, and begins the commit
    behind its writes (a disk thread)                              makes the file durable, and replaces the manifest

A kill at any time leaves the last manifest, those of versions that are kept, and the file as they name it. Of several ranks, each has its own,
and all continue from the same step (`disk/found_run.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.found_run import FoundRun
from l2l_compile.disk.versioned_range import VersionedRange
from l2l_compile.disk.versions import VersionedStore
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_placement import SMALL
from l2l_compile.host.run_contents import Contents, Earlier, OfTheLoop, check_fits, plain, put_back
from l2l_compile.host.watched_parameters import unwatched
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.agreement import Agreement
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import local

Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class Resumed:
    """Where a training run continues.

    steps  complete steps, calls of `optimizer.step()`; 0 for a run that begins
    extra  what `l2l_compile.commit` got behind the last of them, None if it was not called
    """

    steps: int = 0
    extra: Any = None


class ResumableRun:
    """The run of one optimizer in a folder, or striped over several.

    folder   the first one, which has the manifest
    resumed  where it continues
    steps    complete steps so far
    is_over  whether a step is over that was not committed

    Of several ranks, all have to make this at the same place. If one raises an error, all do, and nothing is changed.
    """

    def __init__(
        self,
        folders: Sequence[str],
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        version: str | None = None,
        ranks: Ranks | None = None,
    ):
        found = FoundRun(folders, version, Agreement(ranks) if ranks is not None else None)
        self.folder = found.folders[0]
        self._earlier: Earlier = {}
        self._optimizer, self._model = weakref.ref(optimizer), weakref.ref(model) if model is not None else None
        self._names = _names_in(optimizer, model)
        self._trained: set[Parameter] = set()  # up to now
        buffers = self._buffers()
        self._as_built = {name: (weakref.ref(b), b._version) for name, b in buffers.items()}
        contents = found.begin["contents"] if found.begin is not None else None
        where = self.folder if version is None else f"version {version!r} in {self.folder}"

        def check() -> None:
            found.check_parts()
            if contents is not None:
                check_fits(where, contents, optimizer, self._names, buffers)

        for step in (check, found.settle):
            found.together(step)
        self.store = found.together(lambda: VersionedStore(found=found))
        if contents is not None:
            self._earlier = put_back(self.store, contents, optimizer, buffers)
            entries = zip(contents["parameters"], parameters_of(optimizer), strict=True)
            self._trained = {p for entry, p in entries if entry["value"][1] is not None}
        self.resumed = Resumed() if contents is None else Resumed(contents["steps"], contents["extra"])
        self.steps, self.is_over = self.resumed.steps, False
        _runs[optimizer] = self

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def end_step(self) -> None:
        """`optimizer.step()` has ended a step. Raises `L2LError` if another compiled model has ended one in the same call."""
        if self.is_over:
            raise L2LError(
                "two compiled models train parameters of one optimizer, and a resumable run is one of them alone: compile one module that holds "
                "both, or leave out the option 'resumable'"
            )
        self.steps, self.is_over = self.steps + 1, True

    def take(self, extra: Any) -> OfTheLoop:
        """What the loop has left of the step that is over. Raises `L2LError` for values that a manifest cannot hold."""
        groups = [
            {
                name: plain(v, f"param_groups[{number}][{name!r}]")
                for name, v in group.items()
                if name not in ("params", "param_names")
            }
            for number, group in enumerate(self.optimizer.param_groups)
        ]
        buffers = {name: plain(b, f"buffer {name!r}") for name, b in self._buffers().items() if self._is_kept(name, b)}
        made = OfTheLoop(self.steps, groups, buffers, plain(extra, "extra"))
        self.is_over = False
        return made

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def commit(self, of_loop: OfTheLoop, add_counts: Callable[[Contents], None], before: Earlier) -> None:
        """Begin the commit of a step whose updates were made, with the counts that they have left.

        before  with `delay=1`, the weights that the next step reads, of parameters in memory
        """
        self._trained.update(p for p in parameters_of(self.optimizer) if p.requires_grad)
        kept = {p for p in parameters_of(self.optimizer) if p in self._trained or local(p).nbytes < SMALL}
        with unwatched():
            contents = Contents(self.optimizer, self._names, kept, of_loop, before)
        add_counts(contents)
        self.store.begin_commit(contents.ranges, contents.at)

    # ---- weights of a step before (`delay=1`) ------------------------------------------------------------------------

    def take_earlier(self) -> Earlier:
        """The weights that the first step reads, as far as they are not the newest ones."""
        taken, self._earlier = self._earlier, {}
        return taken

    def reserve_before(self) -> None:
        """Give each parameter on disk a place for its weights of a step before. Raises `DiskError` on a full disk."""
        for place in self.masters().values():
            place.reserve_before()

    def keep_before(self) -> None:
        """The updates of a step begin: the next step reads the weights as they are now, and the commit of this one keeps them."""
        for place in self.masters().values():
            place.keep_before()

    def drop_before(self, is_ahead: Callable[[Parameter], bool]) -> None:
        """The next step reads the newest weights of the parameters that are not ahead."""
        for parameter, place in self.masters().items():
            if not is_ahead(parameter):
                place.drop_before()

    def end_before(self) -> None:
        """The run goes on without `delay`: it keeps no weights of a step before."""
        self._earlier = {}
        for place in self.masters().values():
            place.end_before()

    def masters(self) -> dict[Parameter, VersionedRange]:
        """The places of the parameters on disk, frozen or not."""
        with unwatched():
            found = {p: range_of(local(p)) for p in parameters_of(self.optimizer)}
        return {p: each for p, each in found.items() if isinstance(each, VersionedRange) and each.store is self.store}

    # ---- what belongs to the run -------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "its updates hold it"
        return optimizer

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the model that its `state_dict` has, by name."""
        model = self._model() if self._model is not None else None
        if model is None:
            return {}
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def _is_kept(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a manifest has a buffer: not if it is large, such as a mask, and as the user has built it."""
        built, version = self._as_built.get(name, (lambda: None, 0))
        return buffer.nbytes < SMALL or built() is not buffer or buffer._version != version


_runs: weakref.WeakKeyDictionary[torch.optim.Optimizer, ResumableRun] = weakref.WeakKeyDictionary()


def run_of(optimizer: torch.optim.Optimizer) -> ResumableRun | None:
    """The run that was begun with an optimizer."""
    return _runs.get(optimizer)


def run_for(optimizer: torch.optim.Optimizer) -> ResumableRun:
    """As `run_of`. Raises `L2LError` if there is none."""
    if (found := run_of(optimizer)) is None:
        raise L2LError(
            "the option 'resumable' needs to know where the run continues: call l2l_compile.resume(model) behind torch.compile, before the first "
            "forward; it returns the number of complete steps"
        )
    return found


def _names_in(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> dict[Parameter, str]:
    """Names of parameters, as far as they are known."""
    names: dict[Parameter, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    if model is not None:
        names.update({p: name for name, p in model.named_parameters()})
    return names
