"""`l2l simulate --generate N`: how long a text takes, in virtual time: its prompt, and each of its tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from l2l_compile.command.configs import read_config
from l2l_compile.command.failures import failing_as
from l2l_compile.command.models import BATCH, LENGTH, check_length
from l2l_compile.command.progress import Progress
from l2l_compile.command.quantized_models import QUANTIZED, entries, quantize_linears
from l2l_compile.command.transformers_models import build, transformers_library
from l2l_compile.errors import OptionError
from l2l_compile.ir.precision import DTYPES
from l2l_compile.lanes import AT_WORK, Lane
from l2l_compile.object_copies import tensors_within
from l2l_compile.options import Options
from l2l_compile.planner.fit import Need
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.simulate import simulate
from l2l_compile.units import format_bytes, format_count

MOST_TOKENS = 10**6
CACHES = ("static", "dynamic")


@dataclass(frozen=True)
class Generation:
    """A text that a model continues, for several rows at once.

    given    a folder or `config.json` of transformers
    tokens   new tokens of each row
    batch    rows; None for a default
    length   tokens of each row's prompt; None for a default
    base     the dtype of the parameters; "nf4" or "int8" for quantized linear layers
    cache    "static", which the host writes into, or "dynamic", which it joins anew for each token
    options  of the backend
    """

    given: str
    tokens: int
    batch: int | None
    length: int | None
    base: str
    cache: str
    options: dict[str, Any]

    def check(self) -> None:
        """Raise `OptionError` for values that are out of range."""
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise OptionError(f"--generate must be between 1 and {MOST_TOKENS:,}, got {self.tokens}")
        Options.build({**self.options, "device": "cpu"})

    def on(self, machine: Machine, under_way: Progress) -> Text:
        """The text on a machine, in virtual time. Raises `OptionError` for a model that does not continue texts."""
        if not Path(self.given).exists():
            raise OptionError(f"--generate needs a folder or a config.json of transformers, got {self.given!r}")
        rows, length = self.batch or BATCH, self.length or LENGTH
        under_way("building the model")
        model = self._model(self.base)
        check_length(model.config, length + self.tokens, "--length and --generate")
        prompt = {"input_ids": _tokens(rows, length), "use_cache": True, **_last_logits(model)}
        cache = self._cache(rows, length)
        token = {"input_ids": _tokens(rows, 1), _name_of_cache(model): cache, "use_cache": True}
        cached = sum(tensor.nbytes for tensor in tensors_within(cache))
        with failing_as(f"a text of {type(model).__name__} cannot be simulated"), torch.no_grad():
            run = simulate(model, machine, self.options)
            under_way("simulating the prompt")
            of_prompt = run(**prompt)
            under_way("simulating a token")
            of_token = run(**token)
        parameters = sum(p.nbytes for p in model.parameters())
        return Text(self, type(model).__name__, entries(model), parameters, cached, rows, length, of_prompt, of_token)

    def _model(self, base: str) -> Any:
        content = read_config(Path(self.given))
        model = build(content, self.given)
        if getattr(model.config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
            raise OptionError(f"{self.given}: --generate simulates models that continue a text, not {type(model).__name__}")
        if not _name_of_cache(model):
            raise OptionError(f"{self.given}: {type(model).__name__} takes no cache of keys and values")
        model.config.use_cache = True
        model.to(DTYPES.get(base, torch.bfloat16)).eval().requires_grad_(False)
        if base in QUANTIZED:
            quantize_linears(model, base)
        return model

    def _cache(self, rows: int, length: int) -> Any:
        """The cache in the middle of the new tokens, as the model itself fills it, without memory."""
        transformers, model = transformers_library(), self._model("bf16" if self.base in QUANTIZED else self.base)
        with failing_as(f"{type(model).__name__} fills no cache"), torch.device("meta"), torch.no_grad():
            if self.cache == "static":
                made = transformers.StaticCache(config=model.config, max_cache_len=length + self.tokens)
            else:
                made = transformers.DynamicCache(config=model.config)
            before = _tokens(rows, length + self.tokens // 2)
            model(input_ids=before, use_cache=True, **{_name_of_cache(model): made}, **_last_logits(model))
        return made


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.long, device="meta")


def _taken(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _name_of_cache(model: Any) -> str:
    """The argument for keys and values; "" for a model that takes none."""
    return next((name for name in ("cache", "past_key_values") if name in _taken(model)), "")


def _last_logits(model: Any) -> dict[str, int]:
    """As `generate` does: of a prompt, the logits of its last token alone."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _taken(model) else {}


@dataclass(frozen=True)
class Text:
    """The result.

    name        of the model's class
    entries     parameters of the model
    parameters  their bytes on the host
    cached      bytes of the cache on the host; of a dynamic one, after half of the tokens
    prompt      a call with the prompts of all rows
    token       a call with a token of all rows, in the middle of the text
    """

    asked: Generation
    name: str
    entries: int
    parameters: int
    cached: int
    rows: int
    length: int
    prompt: Simulation
    token: Simulation

    @property
    def machine(self) -> Machine:
        return self.token.machine

    @property
    def seconds(self) -> float:
        """Seconds of the whole text: the call of the prompt gives the first token."""
        return self.prompt.seconds + (self.asked.tokens - 1) * self.token.seconds

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it needs of the memories of the machine. The host joins a dynamic cache, and has it twice meanwhile."""
        tokens, cached = self.asked.tokens, self.cached
        if self.asked.cache == "dynamic":
            cached = 2 * cached * (self.length + tokens) // (self.length + tokens // 2)
        host = self.parameters + max(self.prompt.taken_bytes, cached + self.token.taken_bytes)
        reserve = (int(self.machine.host_reserve), "the operating system, Python and PyTorch")
        of_host = Need("host memory", host, self.machine.host_room, reserve)
        if not self.machine.overlaps:
            return (of_host,)
        device = max(self.prompt.peak_device_bytes, self.token.peak_device_bytes)
        for_driver = (int(self.machine.device_reserve), "driver, context and libraries")
        return (Need("device memory", device, self.machine.device_room, for_driver), of_host)

    @property
    def fits(self) -> bool:
        return not any(need.excess for need in self.needs)

    def __str__(self) -> str:
        token, stats = self.token, self.token.stats
        lane = max(AT_WORK, key=token.busy)
        lines = [
            f"{self.name}: {format_count(self.entries)} parameters, {self.rows} rows, prompts of {self.length} tokens, "
            f"{self.asked.tokens} new tokens each, {self.asked.cache} cache",
            f"on {self.machine.name}:",
            *(f"  {need}" for need in self.needs),
            f"  prompt: {self.prompt.seconds:.3g} s",
            f"  a token of all rows: {token.seconds:.3g} s, {self.rows / token.seconds:,.4g} tokens/s; bound by {lane.work}, at work in "
            f"{token.busy(lane):.0%} of it",
            f"  the whole text: {self.seconds:.3g} s, {self.rows * self.asked.tokens / self.seconds:,.4g} tokens/s",
        ]
        if self.machine.overlaps:
            half = " after half of the tokens" * (self.asked.cache == "dynamic")
            lines += [
                f"  weights: {format_bytes(self.parameters)}, of which {format_bytes(stats.fetched_bytes)} cross the link for a token; "
                f"{format_bytes(stats.resident_bytes)} stay on the device",
                f"  cache: {format_bytes(self.cached)}{half}, of which {format_bytes(stats.restored_bytes)} go up and "
                f"{format_bytes(stats.offloaded_bytes)} come down, with the logits",
                f"  without l2l, layers copied one by one from memory that is not page-locked, and nothing meanwhile: {self.unoverlapped:.3g} s "
                "a token",
            ]
        return "\n".join(lines)

    @property
    def unoverlapped(self) -> float:
        """Seconds of a token as `cpu_offload` of accelerate has it: each weight from pageable memory, then the layer; the cache stays."""
        return self.parameters / self.machine.pageable + self.token.timeline.busy(Lane.COMPUTE)
