"""The commands and their arguments."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

from l2l_compile import __version__
from l2l_compile.command.asked import OPTIMIZERS, Settings
from l2l_compile.command.generation import CACHES, Generation
from l2l_compile.command.models import BATCH, LENGTH, check_sizes
from l2l_compile.command.quantized_models import QUANTIZED
from l2l_compile.errors import OptionError
from l2l_compile.ir.precision import DTYPES
from l2l_compile.options import Options
from l2l_compile.planner.search import DECIDED
from l2l_compile.simulation.machine import Machine, names
from l2l_compile.update_modes import MODES

_UNITS = {f"{prefix}{i}B": base**power for base, i in ((1000, ""), (1024, "i")) for power, prefix in enumerate("KMGT", 1)}
_OWN = {s.name: s.default for s in fields(Settings)}
_LIBRARY = {o.name: o.default for o in fields(Options)}


class _Parser(argparse.ArgumentParser):
    """Raises `OptionError` for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{' '.join(message.split())[:300]}; see {self.prog} --help")


def parser(commands: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The parser. `commands` are the functions of the commands by their names; `parse_args` sets one as `run`."""
    made = _Parser(prog="l2l", description="Look at a streamed training step without running it.", allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"l2l-compile {__version__}")
    added = made.add_subparsers(required=True, metavar="command", title="commands")

    explained = added.add_parser("explain", help="what would run, and whether its memory fits on a machine", allow_abbrev=False)
    _add_step(explained, machine_is_needed=False)
    simulated = added.add_parser("simulate", help="also how long a step would take on a machine", allow_abbrev=False)
    _add_step(simulated, machine_is_needed=True)
    _add_generation(simulated.add_argument_group("generation, in place of a training step (docs/generation.md)"))

    planned = added.add_parser("plan", help="the options with which a step is fastest on a machine", allow_abbrev=False)
    _add_step(planned, machine_is_needed=True, plans=True)

    covered = added.add_parser("coverage", help="one training step of tiny models, streamed and in eager", allow_abbrev=False)
    covered.add_argument("name", nargs="+", help="a class of transformers, such as BertForMaskedLM, or package.module:function")
    listed = added.add_parser("machines", help="the machines that come with the package", allow_abbrev=False)
    cached = added.add_parser(
        "cache", help="where traces, proofs and compiled updates are kept, and their size", allow_abbrev=False
    )
    cached.add_argument("--clear", action="store_true", help="delete them; the next process compiles anew")
    parsers = {
        "explain": explained,
        "simulate": simulated,
        "plan": planned,
        "coverage": covered,
        "machines": listed,
        "cache": cached,
    }
    for name, command in parsers.items():
        command.set_defaults(run=commands[name])
    return made


def _add_step(parser: argparse.ArgumentParser, machine_is_needed: bool, plans: bool = False) -> None:
    """The arguments of a step: machine, model, batch, options. A command that `plans` decides on what it is not given."""
    parser.add_argument(
        "config", help="a Hugging Face folder or config.json, or package.module:function that returns a model and its batch"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--machine", required=machine_is_needed, help=f"{', '.join(names())}, or the path of a machine file (docs/simulation.md)"
    )
    size = "such as 24GiB; GB is 10^9 bytes, GiB 2^30"
    machine.add_argument(
        "--device-memory", metavar="SIZE", type=_size, help=f"memory of the device in place of the machine's, {size}"
    )
    machine.add_argument(
        "--host-memory", metavar="SIZE", type=_size, help=f"memory of the host in place of the machine's, {size}"
    )
    if plans:
        machine.add_argument("--devices", type=int, default=1, help="how many devices, those of all hosts together (default: 1)")
        machine.add_argument("--hosts", type=int, default=1, help="how many hosts they are on, as many on each (default: 1)")
    else:
        machine.add_argument(
            "--html", metavar="FILE", help="write the page with pictures, of a step on the machine (default: h200)"
        )

    model = parser.add_argument_group("model and batch")
    rows = "the most that fit are told" if plans else BATCH
    model.add_argument("--batch", "--rows", type=int, help=f"rows of the batch (default: {rows})")
    model.add_argument("--length", type=int, help=f"tokens of a row (default: {LENGTH})")
    model.add_argument(
        "--lora", metavar="RANK", type=int, help="freeze the model, and train LoRA adapters of this rank (needs peft)"
    )
    model.add_argument(
        "--base",
        choices=(*DTYPES, *QUANTIZED),
        default=_OWN["base"],
        help="dtype of the frozen parameters, with --lora; nf4 (needs bitsandbytes) or int8 for linear layers with "
        "quantized weights (default: bf16)",
    )
    model.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), default=_OWN["optimizer"], help="of torch.optim (default: adamw)"
    )
    _add_options(parser.add_argument_group("options of the library (docs/options.md)"), DECIDED if plans else ())


def _add_generation(group: Any) -> None:
    group.add_argument(
        "--generate", metavar="N", type=int, help="simulate a text: prompts of --length tokens, and N new tokens for each row"
    )
    group.add_argument(
        "--cache", choices=CACHES, default=CACHES[0], help="keys and values: a static cache, or one that grows (default: static)"
    )
    group.add_argument(
        "--device-cache",
        metavar="SIZE",
        help="the most device memory of the cache that stays from token to token, such as 20GB (default: what is free)",
    )


def _add_options(group: Any, decided: Collection[str]) -> None:
    """Options of the library by its names. Help says where a default is another than the library's. A plan has those `decided`."""

    def add(name: str, help: str, **more: Any) -> None:
        own, theirs = _OWN[name], _LIBRARY[name]
        default = f"default: {own}" + (f"; the library's: {theirs}" if own != theirs else "")
        is_decided = name in decided
        default = "default: the plan decides" if is_decided else default
        group.add_argument(f"--{name.replace('_', '-')}", default=None if is_decided else own, help=f"{help} ({default})", **more)

    precisions = {"choices": ("fp32", "bf16", "fp16")}
    add("micro_batches", "slices of the batch that go through a layer before the next layer", type=int)
    add("precision", "on the link and on the device", **precisions)
    add("gradient_wire", "precision of gradients on the link; None: as --precision", **precisions)
    add("update", "when a layer is updated", choices=tuple(MODES))
    if decided:
        group.add_argument(
            "--delay", action="store_true", help="the plan may choose delay=1: updates a step late, hidden behind a whole step"
        )
    else:
        add("delay", "1: updates are a step late, and hidden behind a whole step", type=int, choices=(0, 1))
    add("accumulate", "backward calls in a step", type=int)
    add("max_grad_norm", "clip gradients to this norm, with --update in_forward", type=float)
    group.add_argument(
        "--no-compile-update",
        dest="compile_update",
        action="store_false",
        help="updates by the optimizer's own step (default: compiled)",
    )
    add("stash", "where inputs of layers wait for backward", choices=("host", "device", "disk"))
    add("keep", "device memory for what is computed inside of layers, such as 20GB, or auto: what is free", metavar="SIZE")
    add("keep_on_host", "host memory for it, or auto: what the link carries while the device computes", metavar="SIZE")
    of_texts = "" if decided else "; with --generate, from token to token, where the default is what is free"
    add(
        "resident",
        f"the most device memory for weights that stay, such as 20GB: from forward to backward{of_texts}",
        metavar="SIZE",
    )
    add("prefetch", "layers that are fetched ahead", type=int)
    add("outputs", "what is copied to the host", choices=("all", "loss"))
    add(
        "schedule",
        "the order of a step: 1f1b has each micro-batch go back as soon as it can",
        choices=("breadth_first", "1f1b"),
    )
    add(
        "disk",
        "a folder of the machine for parameters and optimizer state that do not fit into 0.8 of the host's memory; several times for disks "
        "whose rates add up",
        metavar="FOLDER",
        action=_OneOrSeveral,
    )
    if not decided:
        add("pinned_memory", "the most host memory that is page-locked, such as 8GB", metavar="SIZE")


class _OneOrSeveral(argparse.Action):
    """The value of a flag; a tuple of all, if it is given several times."""

    def __call__(self, parser: Any, given: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        before = getattr(given, self.dest)
        earlier = before if isinstance(before, tuple) else () if before is None else (before,)
        setattr(given, self.dest, (*earlier, value) if earlier else value)


def _size(text: str) -> float:
    """Bytes of a text such as "24GiB" or "128 GB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text)
    size = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no size such as 24GiB or 128GB")
    return size


def request_of(given: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """What a plan is asked for: settings, with defaults for what it decides, and the options among these that are given.

    Raises as `settings_of`.
    """
    fixed = {name: value for name in DECIDED if (value := getattr(given, name)) is not None}
    named = {name: getattr(given, name) for name in _OWN if hasattr(given, name) and name not in DECIDED}
    made = Settings(**{**named, "delay": 0, **fixed})
    made.check()
    return made, fixed


def settings_of(given: argparse.Namespace) -> Settings:
    """The settings of a command line. Raises `OptionError` for values that are out of range or do not go together."""
    made = Settings(**{name: getattr(given, name) for name in _OWN})
    made.check()
    return made


_FOR_TEXTS = ("batch", "length", "base", "micro_batches", "prefetch", "pinned_memory", "resident")


def generation_of(given: argparse.Namespace) -> Generation:
    """The text of a command line. Raises `OptionError` for values that are out of range, and for flags of training steps."""
    for name, default in _OWN.items():
        if name not in _FOR_TEXTS and getattr(given, name) != default:
            flag = "no-compile-update" if name == "compile_update" else name.replace("_", "-")
            raise OptionError(f"--{flag} is for training steps, and --generate simulates a text: leave one of them out")
    if given.html is not None:
        raise OptionError("--html shows a training step, and --generate simulates a text: leave one of them out")
    check_sizes(given.batch, given.length, None)
    options = {"micro_batches": given.micro_batches, "prefetch": given.prefetch, "pinned_memory": given.pinned_memory}
    options |= {name: getattr(given, name) for name in ("device_cache", "resident")}
    # parameters are in the format of --base already, so that they cross the link as they are
    made = Generation(given.config, given.generate, given.batch, given.length, given.base, given.cache, options)
    made.check()
    return made


def machine_of(given: argparse.Namespace) -> Machine | None:
    """The machine, with the memory that the command line gives; None without one. Raises `OptionError` for an unknown one."""
    changes = {name: getattr(given, name) for name in ("device_memory", "host_memory") if getattr(given, name) is not None}
    if given.machine is None:
        if changes:
            raise OptionError(f"--{next(iter(changes)).replace('_', '-')} changes a machine: give --machine as well")
        return None
    machine = Machine.load(given.machine)
    machine.flops_of(DTYPES[given.precision])
    return replace(machine, **changes)
