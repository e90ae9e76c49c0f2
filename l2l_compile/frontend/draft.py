"""A graph of Dynamo on its way to a `Captured` graph, and the rewrites on that way."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Input, View
from l2l_compile.ir.replay import PartResults
from l2l_compile.ir.values import TensorSpec
from l2l_compile.ranks.placement import Placed
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.shard_spec import ShardSpec


class DraftFact(enum.StrEnum):
    """What later rewrites rely on."""

    INLINED = "inlined"  # no node calls another graph
    NAMED = "named"  # every placeholder has the name that the user knows
    UNSHARDED = "unsharded"  # no node gathers a sharded parameter
    LOCAL = "local"  # no DTensor is left
    ACCEPTED = "accepted"  # no node does what the backend refuses
    CLONES_NOTED = "clones_noted"  # the inputs that the model clones are known
    EXPLICIT = "explicit"  # sizes are nodes, no operation writes into its operand, nothing is dead
    WRITES_SETTLED = "writes_settled"  # which inputs are written, and with what
    INPUTS = "inputs"  # every input has a kind, and the batch its symbol
    VIEWS_TAKEN = "views_taken"  # no output is a view of an input or of another output
    PARTS_TAKEN = "parts_taken"  # no output repeats entries of an input
    SLICES_APART = "slices_apart"  # every slice of a stacked parameter is a weight of its own
    UNWRAPPED = "unwrapped"  # every inner tensor of a subclass is a weight of its own
    SPECS = "specs"  # every tensor has a `TensorSpec`


@dataclass(eq=False)
class Draft:
    """A graph that is rewritten in place, and what the rewrites learn of it. Each fills in the attributes that it provides.

    sharded         how placeholders are sharded over ranks                 unshard
    ranks           ranks that share the model; None for one process         unshard, localise, find_stages
    placed          where inputs are that one rank of a pipeline has         find_stages
    parallel_layer  text that names a parameter of a tensor parallel layer   localise
    break_reason    why Dynamo ended the graph early, if it did              refuse
    cloned          placeholders that the model clones                       note_clones
    inputs          the placeholders by kind                                 describe
    batch           the symbol of the batch size                             describe
    why_static      why there is none                                        describe
    views           outputs that are views, by position                      take_views
    parts           outputs and writes that the host makes itself            take_parts
    derived         slices of parameters, and inner tensors of subclasses    take_slices, unwrap
    specs           a spec for each node that holds a tensor                 specify
    """

    module: fx.GraphModule
    sharded: dict[fx.Node, ShardSpec] = field(default_factory=dict)
    ranks: Ranks | None = None
    placed: dict[fx.Node, Placed] = field(default_factory=dict)
    parallel_layer: str = ""
    break_reason: str | None = None
    cloned: frozenset[fx.Node] = frozenset()
    inputs: tuple[Input, ...] = ()
    batch: sympy.Symbol | None = None
    why_static: str = ""
    views: dict[int, View] = field(default_factory=dict)
    parts: PartResults = field(default_factory=PartResults)
    derived: tuple[Input, ...] = ()
    specs: dict[fx.Node, TensorSpec] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def world(self) -> Ranks | None:
        """The ranks, if there are several."""
        return self.ranks if self.ranks is not None and self.ranks.world_size > 1 else None


@dataclass(frozen=True)
class Rewrite:
    """A step from Dynamo's graph to a `Captured` graph: a function of a draft, the facts that it requires and provides."""

    apply: Callable[[Draft], None]
    requires: frozenset[DraftFact] = frozenset()
    provides: frozenset[DraftFact] = frozenset()

    @property
    def name(self) -> str:
        return self.apply.__name__


def rewrite(draft: Draft, rewrites: Sequence[Rewrite]) -> Draft:
    """Apply rewrites in order. Raises `L2LError` if one requires a fact that none before it provides."""
    facts: set[DraftFact] = set()
    for each in rewrites:
        if missing := each.requires - facts:
            raise L2LError(f"rewrite '{each.name}' requires {', '.join(sorted(missing))}, which no rewrite before it provides")
        each.apply(draft)
        facts |= each.provides
    return draft
