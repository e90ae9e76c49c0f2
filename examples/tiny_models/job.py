"""A class to train, and the sizes that all libraries share."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 6  # of a batch
LAYERS = 4  # of a stack, at most
MOST_PARAMETERS = 60_000_000  # a model of more has a size that no rule knows


@dataclass(frozen=True)
class Job:
    """A class or a builder function of a library, what it is trained for, and what the library's module needs to find it."""

    library: str
    name: str
    task: str
    source: str = ""

    @property
    def key(self) -> str:
        """Unique over the libraries: both torchvision and timm have a `resnet18`."""
        return f"{self.library}/{self.name}"
