"""Which optimizers allow overlapped updates, and whether they then train as with update="at_step".

Every optimizer of `torch.optim`, and of `pytorch_optimizer` if it is installed, trains a small model for 40 steps in each way:
in_backward and in_forward, by a compiled update and by the optimizer's own step, in float32 and float64. A second run is resumed
by `state_dict` and `load_state_dict` after 20 steps. The results must be those of "at_step": to the last bit with the
optimizer's own step, to 1e-6 relative with a compiled update. Otherwise the optimizer must be refused, and a refused attempt must
leave all that the optimizer holds as it was.

A training may make any difference of a last bit grow. If a compiled update exceeds 1e-6 in float32, the verdict is "grows" if

- the same training in float64 is equal to 1e-6,
- each of its steps is, if it begins with the state of "at_step",
- "at_step" itself differs as much if every step moves the parameters by a last bit.

    python examples/benchmarks/optimizers.py                        # all; about an hour on two cores
    python examples/benchmarks/optimizers.py --only madgrad,soap
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l2l_compile
from l2l_compile.host.step.small_copies import held_attributes
from l2l_compile.object_copies import copied, same

STEPS, RESUMED_AT = 40, 20
COMPILED = 1e-6  # relative difference that a compiled update may have, as docs/updates.md says
_WAYS = tuple(itertools.product(("in_backward", "in_forward"), (False, True)))  # update, and whether it is compiled
TOKENS, WIDTH, WIDER = 13, 8, 12  # PyTorch multiplies smaller matrices with other last bits if several are multiplied at once

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Layer(nn.Module):
    """Matrices, vectors, and a parameter of four dimensions. No convolution: the last bits of its gradients vary from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.mix = nn.Parameter(0.1 * torch.randn(2, 3, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x * (1 + self.mix.square().sum((0, 1, 2)))


class Net(nn.Module):
    """A table of embeddings, three layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def groups_of(model: nn.Module, **of_matrices: Any) -> list[dict[str, Any]]:
    """Two param_groups: matrices of layers, and all other parameters."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("layers") and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [{"params": matrices, **of_matrices}, {"params": others, **dict.fromkeys(of_matrices, False)}]


def optimizers() -> dict[str, Make]:
    """A function for each optimizer, which makes it for a model."""
    found: dict[str, Make] = {}
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[f"torch {name}"] = _maker(kind)
    found["torch AdamW fused"] = lambda model: torch.optim.AdamW(groups_of(model), fused=True)
    found["torch AdamW foreach"] = lambda model: torch.optim.AdamW(groups_of(model), foreach=True)
    found["torch AdamW tensor lr"] = lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    found["torch AdamW names"] = lambda model: torch.optim.AdamW(model.named_parameters())
    found["torch SGD momentum"] = lambda model: torch.optim.SGD(groups_of(model), lr=1e-2, momentum=0.9, nesterov=True)
    found["torch SGD maximize"] = lambda model: torch.optim.SGD(groups_of(model), lr=1e-4, maximize=True)
    try:
        import pytorch_optimizer
    except ImportError:
        return found
    for name in pytorch_optimizer.get_supported_optimizers():
        kind = pytorch_optimizer.load_optimizer(name)
        if getattr(torch.optim, kind.__name__, None) is not kind:  # else it is found above
            found[name] = _maker(kind)
    inner = torch.optim.SGD
    found["lookahead"] = lambda model: pytorch_optimizer.Lookahead(inner(model.parameters(), lr=1e-2))
    found["sam"] = lambda model: pytorch_optimizer.SAM(model.parameters(), inner, lr=1e-2)
    found["orthograd"] = lambda model: pytorch_optimizer.OrthoGrad(inner(model.parameters(), lr=1e-2))
    return found


def _maker(kind: Any) -> Make:
    """Tries the ways in which optimizers are made."""
    arguments: list[Callable[[nn.Module], tuple[tuple, dict]]] = [
        lambda model: ((groups_of(model),), {}),
        lambda model: ((groups_of(model, use_muon=True),), {}),
        lambda model: ((list(model.parameters()),), {}),
        lambda model: ((list(model.parameters()),), {"num_data": 64}),
        lambda model: ((list(model.parameters()),), {"num_iterations": STEPS}),
        lambda model: (([p for p in model.layers.parameters() if p.dim() == 2],), {}),  # type: ignore[union-attr]
        lambda model: ((model,), {}),
    ]

    @functools.cache
    def works() -> Callable[[nn.Module], tuple[tuple, dict]]:
        """The first way in which the optimizer can be made and can step; else the first in which it can be made."""
        errors, made = [], []
        for way in arguments:
            with torch.random.fork_rng([]):
                model = Net()
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                try:
                    given, named = way(model)
                    optimizer = kind(*given, **named)
                    made.append(way)
                    optimizer.step()
                    return way
                except Exception as error:  # noqa: BLE001  # each class has its own
                    errors.append(error)
        if made:
            return made[0]
        if not torch.distributed.is_initialized():  # the optimizer may ask for its rank
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            return works()
        raise errors[-1]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        given, named = works()(model)
        return kind(*given, **named)

    return make


class Training:
    """A model in training by one way."""

    def __init__(self, make: Make, dtype: torch.dtype, **options: Any):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Net().to(dtype)
        self.optimizer = make(self.model)
        self.options = options
        self._compile()

    def _compile(self) -> None:
        options = {"micro_batches": 2, "block_compiler": "eager", "device": "cpu", **self.options}
        if "update" in options:
            options["optimizer"] = self.optimizer
        self.step = torch.compile(self.model, backend="l2l", options=options)

    def train(self, numbers: Iterable[int], after_step: Callable[[], None] = lambda: None) -> None:
        for number in numbers:
            tokens = torch.randint(TOKENS, (4, 5), generator=torch.Generator().manual_seed(number))
            logits = self.step(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after_step()
        l2l_compile.synchronize(self.step)

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of the model and of the optimizer."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> Training:
        """Go on from a checkpoint. Returns this training."""
        of_model, of_optimizer = copy.deepcopy(saved)
        self.model.load_state_dict(of_model)
        self.optimizer.load_state_dict(of_optimizer)
        return self

    def holds(self) -> Any:
        """Copies of the parameters, and of all that the optimizer holds."""
        parameters = [p.detach() for p in self.model.parameters()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        order = {p: number for number, p in enumerate(self.model.parameters())}
        state = {
            order.get(k, k) if isinstance(k, torch.Tensor) else k: dict(v) if isinstance(v, dict) else v
            for k, v in self.optimizer.state.items()
        }
        return copied([parameters, groups, {str(k): state[k] for k in sorted(state, key=str)}])


def difference(a: Training, b: Training) -> float:
    """The largest relative difference of a parameter, in the norm."""
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    errors = [((p - q).double().norm() / q.double().norm().clamp_min(1e-30)).item() for p, q in pairs]
    return max(float("inf") if e != e else e for e in errors)


@dataclass
class Row:
    """What one optimizer did in one way. `verdict` is equal, refused, or WRONG with the reason."""

    optimizer: str
    dtype: str
    update: str
    compiled: bool
    resumed: bool
    verdict: str
    error: float = 0.0
    reason: str = ""


def rows_of(name: str, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)) -> list[Row]:
    """All ways of one optimizer."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make = optimizers()[name]
    rows: list[Row] = []
    for dtype in dtypes:
        rows += _rows_in(name, make, dtype, rows)
    return rows


def _rows_in(name: str, make: Make, dtype: torch.dtype, wider: Sequence[Row]) -> list[Row]:
    """All ways in one dtype; `wider` has the rows of a wider one."""
    described = str(dtype).removeprefix("torch.")
    try:
        straight = Training(make, dtype)
        straight.train(range(RESUMED_AT))
        saved = straight.checkpoint()
        resumed = Training(make, dtype).load(saved)
        straight.train(range(RESUMED_AT, STEPS))
        resumed.train(range(RESUMED_AT, STEPS))
    except Exception as error:  # noqa: BLE001  # each class has its own
        return [_attempt(name, make, dtype, update, compiled, error) for update, compiled in _WAYS]
    found = []
    for update, compiled in _WAYS:
        options = {"update": update, "compile_update": compiled}
        for is_resumed in (False, True):
            row = Row(name, described, update, compiled, is_resumed, "")
            expected, start = (resumed, saved) if is_resumed else (straight, None)
            row.verdict, row.error, row.reason = _verdict(Training(make, dtype, **options), expected, start)
            if row.verdict == "WRONG" and compiled and not row.reason:
                row.verdict, row.reason = _growth(row, make, dtype, expected, start, wider)
            found.append(row)
    if len({row.verdict == "refused" for row in found}) > 1:
        for row in found:
            row.verdict += ", but not in every way: WRONG"
    return found


def _attempt(name: str, make: Make, dtype: torch.dtype, update: str, compiled: bool, at_step: Exception) -> Row:
    """A step of an optimizer that cannot train the model at all: it must be refused, or fail as "at_step" does."""
    row = Row(name, str(dtype).removeprefix("torch."), update, compiled, False, "WRONG: trains, where at_step fails")
    try:
        training = Training(make, dtype, update=update, compile_update=compiled)
        verdict, _, row.reason = _verdict(training, training, None, steps=1)
        row.verdict = row.verdict if verdict == "equal" else verdict
    except type(at_step) as error:  # it cannot be made
        row.reason = f"{type(error).__name__}: {_short(error)}"
    if row.reason == f"{type(at_step).__name__}: {_short(at_step)}":
        row.verdict = "fails at step as well"
    return row


def _growth(row: Row, make: Make, dtype: torch.dtype, expected: Training, saved: Any, wider: Sequence[Row]) -> tuple[str, str]:
    """Verdict and reason of a compiled training that differs: whether the training itself makes last bits grow."""
    in_float64 = [r for r in wider if (r.update, r.compiled, r.resumed) == (row.update, row.compiled, row.resumed)]
    exact = max((r.error for r in in_float64), default=float("inf"))
    alone = _each_step_alone(make, dtype, row.update, saved)
    grown = max(_grown(make, dtype, expected, saved, seed) for seed in range(3))
    is_grown = exact <= COMPILED and alone <= COMPILED and row.error <= grown
    reason = f"{exact:.1e} in float64, {alone:.1e} in a step by itself, {grown:.1e} at_step with a last bit moved in each step"
    return "grows" if is_grown else "WRONG", reason


def _each_step_alone(make: Make, dtype: torch.dtype, update: str, saved: Any) -> float:
    """The largest difference of a compiled step which begins with the state that "at_step" has there."""
    expected, training = Training(make, dtype), Training(make, dtype, update=update, compile_update=True)
    if saved is not None:
        expected.load(saved)
    found = 0.0
    for number in range(RESUMED_AT if saved is not None else 0, STEPS):
        training.load(expected.checkpoint())
        for each in (expected, training):
            each.train([number])
        found = max(found, difference(training, expected))
    return found


def _grown(make: Make, dtype: torch.dtype, expected: Training, saved: Any, seed: int) -> float:
    """The difference that it makes if every step moves all parameters by a last bit, up or down."""
    training, generator = Training(make, dtype), torch.Generator().manual_seed(seed)
    if saved is not None:
        training.load(saved)

    @torch.no_grad()
    def move() -> None:
        for parameter in training.model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, signs * float("inf")))

    training.train(range(RESUMED_AT if saved is not None else 0, STEPS), move)
    return difference(training, expected)


def _verdict(training: Training, expected: Training, saved: Any, steps: int = STEPS) -> tuple[str, float, str]:
    """Verdict, error and reason of a training from the beginning, or from a checkpoint."""
    if saved is not None:
        training.load(saved)
    attributes = copied(held_attributes(training.optimizer))
    held = training.holds()
    try:
        training.train(range(RESUMED_AT if saved is not None else 0, steps))
    except l2l_compile.L2LError as error:
        unchanged = same(held, training.holds()) and same(attributes, copied(held_attributes(training.optimizer)))
        return "refused" if unchanged else "WRONG: refused, but changed", 0.0, _short(error)
    except Exception as error:  # noqa: BLE001  # each class has its own
        return "WRONG: raises", 0.0, f"{type(error).__name__}: {_short(error)}"
    error = difference(training, expected)
    if any(t.is_meta for t in torch.utils._pytree.tree_leaves(training.holds()) if isinstance(t, torch.Tensor)):
        return "WRONG: state without data", error, ""
    if training.options["compile_update"]:
        return ("equal" if error <= COMPILED else "WRONG"), error, ""
    is_same = same(training.holds(), expected.holds())
    return ("equal" if is_same else "WRONG"), error, "" if error else "" if is_same else "state or param_groups differ"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def summary(rows: Sequence[Row]) -> str:
    """A line for an optimizer: its worst error, or why it is refused."""
    wrong = [row for row in rows if "WRONG" in row.verdict]
    if wrong:
        kinds = dict.fromkeys(
            (row.dtype, row.update, row.compiled, row.resumed, row.verdict, f"{row.error:.1e}", row.reason) for row in wrong
        )
        return "\n      ".join([f"WRONG in {len(wrong)} of {len(rows)} ways", *map(str, list(kinds)[:4])])
    growing = [row for row in rows if row.verdict == "grows"]
    if growing:
        worst = max(growing, key=lambda row: row.error)
        return f"equal; compiled to {worst.error:.1e} in {worst.dtype}, where last bits grow ({worst.reason})"
    if rows[0].verdict == "equal":
        return f"equal; compiled to {max(row.error for row in rows):.1e}"
    return f"{rows[0].verdict}: {rows[0].reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, default=Path("runs/optimizers.json"))
    options = parser.parse_args()
    names = [n.strip() for n in options.only.split(",")] if options.only else list(optimizers())
    rows: list[Row] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    # An executor with `max_tasks_per_child` may end its last process, and begin no other one.
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=24) as pool:
        for name, found in zip(names, pool.imap(rows_of, names), strict=True):
            rows += found
            print(f"{name:24} {summary(found)}", flush=True)
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    wrong = sorted({row.optimizer for row in rows if "WRONG" in row.verdict})
    by_verdict = {name: {row.verdict for row in rows if row.optimizer == name} for name in names}
    for verdict in ("equal", "grows", "refused", "fails at step as well"):
        print(f"{sum(verdict in found for found in by_verdict.values())} optimizers: {verdict}")
    print(f"wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
