"""The ranks of a pipeline in virtual time: each runs its own program with its own clocks, and messages join the clocks.

A message takes a latency, and its bytes at the bandwidth of the link. It begins when its sender has made it and sent all earlier ones,
and its receiver has asked for it and received all earlier ones from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.simulation.alone_in_time import AloneInTime
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import Clock, Clocks, SimulatedEvent, mark
from l2l_compile.simulation.turns import Turns


@dataclass(frozen=True)
class MessageCost:
    """What a message between two ranks costs: seconds, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


def cost_between(machine: Machine, one: int, other: int) -> MessageCost:
    """The link between two devices, numbered host by host. Raises `OptionError` for a figure that the machine lacks."""
    devices = int(machine.known("devices"))
    if one // devices == other // devices:
        return MessageCost(machine.known("link_latency"), machine.known("link"))
    return MessageCost(machine.known("network_latency"), machine.known("network"))


@dataclass
class _Channel:
    """The messages from one rank to another, in order.

    sent   from when on each could begin for its sender, and how long it takes
    asked  from when on each could begin for its receiver
    times  when each begins and ends
    """

    sent: list[tuple[float, float]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)

    def has(self, number: int) -> bool:
        """Whether it is known when a message begins."""
        for (ready, seconds), asked in itertools.islice(zip(self.sent, self.asked, strict=False), len(self.times), None):
            begins = max(ready, asked, self.times[-1][1] if self.times else 0.0)
            self.times.append((begins, begins + seconds))
        return number < len(self.times)


@dataclass(frozen=True)
class _Message:
    """A message under way: its channel and its number there, and the rank that it comes from; None for one that leaves."""

    channel: _Channel
    number: int
    source: int | None


class Messages:
    """The messages of a pipeline under way, and the turns of its ranks."""

    def __init__(self, machine: Machine, members: Sequence[int], parameters: int = 0):
        """`members` are the numbers of its ranks among all devices, host by host; `parameters` is how many they have in all."""
        self.machine, self.members, self.parameters = machine, members, parameters
        self.turns = Turns(len(self.members))
        self._channels: dict[tuple[int, int, int], _Channel] = {}

    def channel(self, source: int, target: int, number: int) -> _Channel:
        return self._channels.setdefault((source, target, number), _Channel())

    def cost(self, source: int, target: int) -> MessageCost:
        return cost_between(self.machine, self.members[source], self.members[target])


class SimulatedPipeline(AloneInTime, PipelineRanks):
    """A rank of a pipeline. Actions that ranks announce begin when the last rank has come."""

    def __init__(self, messages: Messages, rank: int, clocks: Clocks):
        self.members, self.parameters = list(messages.members), messages.parameters
        self.shard_mesh_size, self.shard_mesh_rank = 1, 0
        self.world_size, self.world_rank = len(messages.members), rank
        self.forwards = self.steps = self._meetings = 0
        self.pipeline, self._announced = self, None
        self._messages, self._clocks = messages, clocks
        others = [other for other in range(self.world_size) if other != rank]
        self._latency = max(messages.cost(rank, other).latency for other in others)

    def meet(self, latency: float | None = None) -> None:
        """The running thread waits for the other ranks."""
        thread = self._clocks.thread
        self._meetings += 1
        last = self._messages.turns.meet(self.world_rank, self._meetings, thread.now)
        thread.wait(SimulatedEvent(last, "another rank"))
        self._clocks.spend(self._latency if latency is None else latency)

    def sum_on_host(self, values: Sequence[float]) -> list[float]:
        """This rank's values: no simulated value is real."""
        self.meet()
        return list(values)

    def sum_of_callers(self, values: Sequence[float]) -> list[float]:
        return self.sum_on_host(values)

    def open_channels(self, count: int) -> None:
        """Does nothing: they open at their first message."""

    def number_of_first(self, mine: int, channel: int) -> Callable[[], int]:
        return lambda: mine

    def send(self, tensor: torch.Tensor, to: int, channel: int = 0) -> _Message:  # type: ignore[override]  # `finish_message` waits for it
        """Send a tensor (lane `send`)."""
        return self.send_bytes(tensor.nbytes, to, channel)

    def send_bytes(self, size: int, to: int, channel: int = 0) -> _Message:
        """Send a tensor of a size (lane `send`)."""
        seconds = self._messages.cost(self.world_rank, to).seconds(size)
        self._clocks.queue(seconds)
        sent = self._messages.channel(self.world_rank, to, channel)
        sent.sent.append((self._lane().now - seconds, seconds))
        return _Message(sent, len(sent.sent) - 1, None)

    def receive(self, tensor: torch.Tensor, source: int, channel: int = 0) -> _Message:  # type: ignore[override]
        """Ask for a tensor (lane `recv`)."""
        mark(tensor)
        return self.ask(source, channel)

    def ask(self, source: int, channel: int = 0) -> _Message:
        """Ask for the next tensor of a rank (lane `recv`)."""
        self._clocks.spend(self._clocks.machine.launch)
        asked = self._messages.channel(source, self.world_rank, channel)
        asked.asked.append(max(self._clocks.thread.now, self._lane().now))
        return _Message(asked, len(asked.asked) - 1, source)

    def finish_message(self, message: _Message | None) -> None:  # type: ignore[override]
        """The lane waits until a message has come, or left."""
        assert message is not None
        self._messages.turns.wait(self.world_rank, lambda: message.channel.has(message.number))
        begins, ends = message.channel.times[message.number]
        if message.source is None:
            self._lane().wait(SimulatedEvent(ends, "a rank that receives"))
        else:
            self._clocks.arrive(begins, ends - begins, f"message of rank {message.source}")

    def _lane(self) -> Clock:
        assert self._clocks.lane is not None, "messages are work of lanes"
        return self._clocks.lane
