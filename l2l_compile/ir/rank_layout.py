"""How ranks divide a model among them: shards, replicas, and the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of a mesh, and what each of them has.

    shards        over how many ranks the parameters of a stage are sharded
    replicas      how many times the ranks have each shard, for rows of their own
    depth         how many ranks a pipeline has, all for the same rows
    loops         how many stages each rank of a pipeline has; None for as many as there are layers for each
    across_hosts  whether neighbours in a pipeline are on different hosts, and the ranks of a shard on the same one. With one host,
                  it makes no difference
    """

    shards: int = 1
    replicas: int = 1
    depth: int = 1
    loops: int | None = None
    across_hosts: bool = False

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas * self.depth

    @property
    def batches(self) -> int:
        """How many ranks, or pipelines, have rows of their own."""
        return self.shards * self.replicas

    def member(self, replica: int, shard: int, stage: int) -> int:
        """The number of a rank among all, host by host."""
        of_stage = replica * self.shards + shard
        return stage * self.batches + of_stage if self.across_hosts else of_stage * self.depth + stage

    def shards_of(self, stage: int) -> list[int]:
        """The numbers of the ranks over which a stage is sharded, in the first replica."""
        return [self.member(0, shard, stage) for shard in range(self.shards)]

    def replicas_of(self, stage: int) -> list[int]:
        """The numbers of the ranks that have the first shard of a stage."""
        return [self.member(replica, 0, stage) for replica in range(self.replicas)]

    @property
    def stages(self) -> list[int]:
        """The numbers of the ranks of the first pipeline."""
        return [self.member(0, 0, stage) for stage in range(self.depth)]

    def __str__(self) -> str:
        parts = (
            [f"pipeline of {self.depth}" + (f", loops={self.loops}" if self.loops is not None else "")] if self.depth > 1 else []
        )
        parts += [f"{self.shards} shards"] if self.shards > 1 else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        return (" x ".join(parts) or "one rank") + " (stages on different hosts)" * self.across_hosts
