"""Turns Dynamo's graph into a `Captured` graph: inputs sorted by kind, one batch symbol, a spec for every tensor.

`REWRITES` lists the way from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from l2l_compile.devices.host import HOST
from l2l_compile.devices.registry import KINDS
from l2l_compile.disk.disk_store import is_in_place, is_on_disk
from l2l_compile.errors import L2LError
from l2l_compile.frontend.draft import Draft, DraftFact, Rewrite, rewrite
from l2l_compile.frontend.dynamo import adapter, inference_marks
from l2l_compile.frontend.index_checks.indices import IndexCheck
from l2l_compile.frontend.inputs import describe, symbols_of
from l2l_compile.frontend.refusals import check_on_host, refuse, refuse_written_constants
from l2l_compile.frontend.rewrites.inline import inline_subgraphs
from l2l_compile.frontend.rewrites.parallel_layers import make_local
from l2l_compile.frontend.rewrites.part_results import take_parts
from l2l_compile.frontend.rewrites.placed_weights import find_owners
from l2l_compile.frontend.rewrites.sharded_weights import make_whole
from l2l_compile.frontend.rewrites.simplify import simplify
from l2l_compile.frontend.rewrites.stacked_weights import take_slices_apart
from l2l_compile.frontend.rewrites.view_outputs import take_views
from l2l_compile.frontend.rewrites.wrapped_weights import is_wrapper, take_wrappers_apart
from l2l_compile.frontend.rewrites.writes import settle_writes
from l2l_compile.ir.captured import Captured, Mesh, Owners
from l2l_compile.ir.fx_types import attribute, name_of
from l2l_compile.ir.values import TensorSpec
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import count_steps
from l2l_compile.ranks.sharing import ranks_sharing

_CLONES = ("clone", torch.clone, torch.ops.aten.clone.default)


def capture(gm: fx.GraphModule) -> tuple[Captured, Ranks | None]:
    """Rewrite Dynamo's graph module in place, and describe it for the passes. Also returns the ranks that run it together.

    Raises `DeviceError` if an input is not on the host, and `L2LError` for a graph that cannot be streamed.
    """
    draft = rewrite(Draft(gm), REWRITES)
    return _captured(draft), draft.world


def inline(draft: Draft) -> None:
    """Graphs of checkpoints and nested compile regions become part of the graph."""
    inline_subgraphs(draft.module)


def name_owner(draft: Draft) -> None:
    adapter.name_the_owner_self(draft.graph)


def unshard(draft: Draft) -> None:
    """Placeholders of sharded parameters stand for the whole parameter: a program gathers a layer itself."""
    draft.sharded, draft.ranks = make_whole(draft.graph)


def localise(draft: Draft) -> None:
    """Layers of `parallelize_module` compute with this rank's parts, and with sums over ranks."""
    draft.parallel_layer, mesh = make_local(draft.graph)
    if draft.ranks is None and mesh is not None:
        count_steps()
        draft.ranks = ranks_sharing(mesh)


def find_stages(draft: Draft) -> None:
    """Parameters of a pipeline are on the ranks that run their layers."""
    draft.placed, ranks = find_owners(draft.graph)
    if ranks is None:
        return
    if draft.ranks is None:
        draft.ranks = ranks
    elif draft.ranks.pipeline is not ranks:
        raise L2LError(
            "a pipeline whose layers are parallel is not supported yet: use l2l_compile.pipeline, and l2l_compile.shard"
        )


def note_clones(draft: Draft) -> None:
    """The user may write into a cloned input between forward and backward. Behind `simplify`, a clone that nothing reads is gone."""
    placeholders = draft.graph.find_nodes(op="placeholder")
    draft.cloned = frozenset(n for n in placeholders if any(user.target in _CLONES for user in n.users))


def make_explicit(draft: Draft) -> None:
    simplify(draft.graph)


def settle(draft: Draft) -> None:
    settle_writes(draft.graph)


def take_views_out(draft: Draft) -> None:
    draft.views = take_views(draft.graph, draft.inputs)


def take_parts_out(draft: Draft) -> None:
    if not torch.is_grad_enabled() and not draft.placed:
        draft.parts = take_parts(draft.graph, draft.inputs)


def take_slices(draft: Draft) -> None:
    draft.derived = take_slices_apart(draft.graph, draft.inputs)


def unwrap(draft: Draft) -> None:
    """Inner tensors of quantized weights are weights of their own."""
    draft.derived += take_wrappers_apart(draft.graph, draft.inputs, len(draft.inputs) + len(draft.derived))


def specify(draft: Draft) -> None:
    numbers = {i.node for i in draft.inputs if i.kind == "symbol"}
    draft.specs = {
        node: TensorSpec.of(node.meta["example_value"], draft.batch)
        for node in draft.graph.nodes
        if isinstance(value := node.meta.get("example_value"), torch.Tensor) and node not in numbers and not is_wrapper(value)
    }


def _of(*facts: DraftFact) -> frozenset[DraftFact]:
    return frozenset(facts)


REWRITES = (
    Rewrite(inline, provides=_of(DraftFact.INLINED)),
    Rewrite(name_owner, provides=_of(DraftFact.NAMED)),
    Rewrite(unshard, requires=_of(DraftFact.INLINED, DraftFact.NAMED), provides=_of(DraftFact.UNSHARDED)),
    Rewrite(localise, requires=_of(DraftFact.UNSHARDED), provides=_of(DraftFact.LOCAL)),
    Rewrite(find_stages, requires=_of(DraftFact.LOCAL)),
    Rewrite(refuse, requires=_of(DraftFact.INLINED, DraftFact.LOCAL), provides=_of(DraftFact.ACCEPTED)),
    Rewrite(note_clones, requires=_of(DraftFact.INLINED), provides=_of(DraftFact.CLONES_NOTED)),
    Rewrite(
        make_explicit, requires=_of(DraftFact.LOCAL, DraftFact.ACCEPTED, DraftFact.CLONES_NOTED), provides=_of(DraftFact.EXPLICIT)
    ),
    Rewrite(settle, requires=_of(DraftFact.EXPLICIT), provides=_of(DraftFact.WRITES_SETTLED)),
    Rewrite(refuse_written_constants, requires=_of(DraftFact.EXPLICIT)),
    Rewrite(check_on_host, requires=_of(DraftFact.NAMED)),
    Rewrite(
        describe, requires=_of(DraftFact.NAMED, DraftFact.UNSHARDED, DraftFact.WRITES_SETTLED), provides=_of(DraftFact.INPUTS)
    ),
    Rewrite(take_views_out, requires=_of(DraftFact.INPUTS, DraftFact.WRITES_SETTLED), provides=_of(DraftFact.VIEWS_TAKEN)),
    Rewrite(take_parts_out, requires=_of(DraftFact.INPUTS, DraftFact.VIEWS_TAKEN), provides=_of(DraftFact.PARTS_TAKEN)),
    Rewrite(take_slices, requires=_of(DraftFact.INPUTS, DraftFact.VIEWS_TAKEN), provides=_of(DraftFact.SLICES_APART)),
    Rewrite(unwrap, requires=_of(DraftFact.INPUTS, DraftFact.SLICES_APART), provides=_of(DraftFact.UNWRAPPED)),
    Rewrite(
        specify,
        requires=_of(DraftFact.INPUTS, DraftFact.VIEWS_TAKEN, DraftFact.PARTS_TAKEN, DraftFact.UNWRAPPED),
        provides=_of(DraftFact.SPECS),
    ),
)


def _captured(draft: Draft) -> Captured:
    symbol_at, hints = symbols_of(draft.inputs)
    captured = Captured(
        draft.graph,
        draft.module,
        draft.inputs,
        draft.specs,
        draft.batch,
        draft.why_static,
        hints,
        symbol_at,
        grad_enabled=torch.is_grad_enabled(),
        autocast=_autocast(),
        break_reason=draft.break_reason,
        derived=draft.derived,
        views=draft.views,
        parts=draft.parts,
        fixed_sizes=inference_marks.sizes_are_fixed(),
        mesh=_mesh(draft.world),
        owners=_owners(draft),
        parallel_layer=draft.parallel_layer,
        stored=_parameters(draft, is_on_disk),
        in_place=_parameters(draft, is_in_place),
        snapshots=frozenset(i.index for i in draft.inputs if i.node in draft.cloned and i.kind in ("buffer", "value")),
    )
    _lift_constants(captured)
    captured.indices = IndexCheck(captured)
    return captured


def _parameters(draft: Draft, is_so: Callable[[torch.Tensor], bool]) -> frozenset[int]:
    """Indices of the parameters of which something is so."""
    values = {i.index: adapter.value_of(i.node) for i in draft.inputs if i.kind == "parameter"}
    return frozenset(index for index, value in values.items() if isinstance(value, torch.nn.Parameter) and is_so(value))


def _mesh(ranks: Ranks | None) -> Mesh | None:
    return Mesh(ranks.shard_mesh_size, ranks.replicate_mesh_size, ranks.shards, ranks.described) if ranks is not None else None


def _owners(draft: Draft) -> Owners | None:
    pipeline = draft.world.pipeline if draft.world is not None else None
    if pipeline is None:
        return None
    places = {i.index: draft.placed[i.node] for i in draft.inputs if i.node in draft.placed}
    of = {index: place.rank for index, place in places.items()}
    unread = frozenset(index for index, place in places.items() if not place.was_read)
    return Owners(pipeline.world_rank, pipeline.world_size, of, unread)


def _autocast() -> torch.dtype | None:
    for name in KINDS:
        if name != HOST.type and torch.is_autocast_enabled(name):
            raise L2LError(
                f"torch.autocast({name!r}) is on, but the model is traced on the host, where it has no effect. Use "
                f"torch.autocast({HOST.type!r}), which holds for the device that the layers run on"
            )
    return torch.get_autocast_dtype(HOST.type) if torch.is_autocast_enabled(HOST.type) else None


def _lift_constants(captured: Captured) -> None:
    """Tensor constants of the graph become buffers of the segments that read them."""
    for node in captured.graph.find_nodes(op="get_attr"):
        value = attribute(captured.module, node)
        if isinstance(value, torch.Tensor):
            captured.constants[name_of(node)] = value
            captured.specs[node] = TensorSpec.of(value, None)
