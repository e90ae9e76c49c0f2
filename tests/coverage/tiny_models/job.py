"""A class to train, and the sizes that all libraries share."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 6  # rows of a batch
LAYERS = 4  # layers of a stack, at most
MOST_PARAMETERS = 60_000_000  # a larger model has a size argument that no rule shrinks


@dataclass(frozen=True)
class Job:
    """A class or a builder function of a library, its task, and the `source` by which the library's module finds it."""

    library: str
    name: str
    task: str
    source: str = ""

    @property
    def key(self) -> str:
        """A name that is unique over all libraries: both torchvision and timm have a `resnet18`."""
        return f"{self.library}/{self.name}"
