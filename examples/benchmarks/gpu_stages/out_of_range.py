"""Train one step on a token beyond the vocabulary, and do nothing about what comes of it. The stage `faults` starts it."""

from __future__ import annotations

import sys

import torch

from .checkout import find_package


def main() -> None:
    find_package()
    import l2l_compile.backend

    from .transformer import Decoder, Size, build, token_batch

    size = Size(layers=2, hidden=64, intermediate=128, heads=4, groups=4, vocabulary=256, tokens=16)
    inputs = token_batch(size, 4)
    inputs["input_ids"][1, 3] = size.vocabulary + 7
    options = {"micro_batches": 2, "device": sys.argv[1], "block_compiler": "eager"}
    model = torch.compile(build(Decoder, size), backend=l2l_compile.backend.l2l, options=options)
    model(**inputs).backward()
    print("no error")


if __name__ == "__main__":
    main()
