"""Train on a token beyond the vocabulary. The stage `faults` starts this process, and reads its output.

The first such token is found on the host: the step is refused, and the next step must be right. The second token cannot be
found on the host, since it is computed from floats. Its error is not handled here.
"""

from __future__ import annotations

import sys

import torch

from .checkout import find_package

REFUSED = "the step is refused: "
DIFFERENCE = "difference of the next step: "


def main() -> None:
    find_package()
    import l2l_compile.backend

    from .transformer import Decoder, Size, build, token_batch

    class OfFloats(Decoder):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward((input_ids * 1.0).long(), labels)

    def compiled(kind: type[Decoder]):
        options = {"micro_batches": 2, "device": sys.argv[1], "block_compiler": "eager"}
        return torch.compile(build(kind, size), backend=l2l_compile.backend.l2l, options=options)

    size = Size(layers=2, hidden=64, intermediate=128, heads=4, groups=4, vocabulary=256, tokens=16)
    inputs = token_batch(size, 4)
    wrong = {name: value.clone() for name, value in inputs.items()}
    wrong["input_ids"][1, 3] = size.vocabulary + 7

    model = compiled(Decoder)
    expected = model(**inputs).item()
    try:
        model(**wrong)
    except IndexError as error:
        print(f"{REFUSED}{type(error).__name__}: {error}", flush=True)
    loss = model(**inputs)
    loss.backward()
    print(f"{DIFFERENCE}{abs(loss.item() - expected)}", flush=True)

    compiled(OfFloats)(**wrong).backward()
    print("no error")


if __name__ == "__main__":
    main()
