"""Milliseconds a token of `generate`: in eager, with l2l, and with the offload of accelerate if it is installed.

All of them continue the same prompts, and must give the same tokens. Where the host is the device, l2l and `cpu_offload` move no
weights, so that figures compare the cost of their code. `disk_offload` reads the weights of each layer from files in the page cache.

    pip install accelerate
    python examples/benchmarks/generation.py
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import statistics
import sys
import tempfile

import torch

from measuring import Limit, arguments, device_of, interleaved, llama, report, token_batch


def ways(model, options, device: torch.device, folder: str) -> dict:
    """The model, once for each way to run it."""
    streamed = copy.deepcopy(model)
    streamed.compile(backend="l2l", options={"micro_batches": options.micro_batches, "device": device})
    found = {"eager": copy.deepcopy(model).to(device), "l2l": streamed}
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate

        found["cpu_offload"] = accelerate.cpu_offload(copy.deepcopy(model), execution_device=device)
        found["disk_offload"] = accelerate.disk_offload(copy.deepcopy(model), folder, execution_device=device)
    return found


def main() -> int:
    parser = arguments(__doc__, layers=8, width=512, rows=8, prompt=64, new_tokens=32, micro_batches=4, repeats=9)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.width, options.repeats, options.new_tokens = 2, 64, 3, 8
    device = device_of(options.device)
    length = options.prompt + options.new_tokens
    model = llama(options.layers, options.width, 4 * options.width, options.width // 64, tokens=length).eval()
    ids, tokens = token_batch(options.rows, options.prompt), {}

    def generate(name: str, way) -> None:
        place = ids if name == "l2l" else ids.to(device)
        kind = {"cache_implementation": "static"} if options.cache == "static" else {}
        count = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}
        tokens[name] = way.generate(
            place,
            do_sample=False,
            use_cache=True,
            disable_compile=True,
            attention_mask=torch.ones_like(place),
            pad_token_id=0,
            **count,
            **kind,
        ).cpu()

    with tempfile.TemporaryDirectory() as folder:
        works = {name: functools.partial(generate, name, way) for name, way in ways(model, options, device, folder).items()}
        generate_once = works["l2l"]
        generate_once()  # programs of the prompt and of the tokens
        found = interleaved(works, options.repeats)
    if not all(torch.equal(each, tokens["eager"]) for each in tokens.values()):
        sys.exit(f"the tokens differ: {tokens}")
    median = {name: 1000 * statistics.median(each) / options.new_tokens for name, each in found.items()}
    rows = [{"way": name, "ms a token": each, "of eager": each / median["eager"]} for name, each in median.items()]
    limits = [Limit("l2l over eager", median["l2l"] / median["eager"], 1.15)]
    if "disk_offload" in median:
        limits.append(Limit("l2l over disk_offload of accelerate", median["l2l"] / median["disk_offload"], 0.5))
    return report(options, device, rows, limits)


if __name__ == "__main__":
    sys.exit(main())
