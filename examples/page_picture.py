"""Take the picture of a report's page that README shows, in a headless chromium.

    pip install playwright                # chromium: `apt install chromium`, or its path in the variable CHROMIUM
    python examples/page_picture.py       # writes docs/page.png: look at it

The step is a step of a transformer with eight layers, as wide as the layers of an 8 B model, simulated on an H200. The model is
on the meta device: nothing is computed, so no memory is needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from l2l_compile.ir.program import Program

PIXELS = 1000  # the width of the picture


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """A language model: tokens [batch, length] to the mean loss of the next token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def report_of_a_step() -> l2l_compile.Report:
    """The report of a step with bf16 on the link and update="in_forward"."""
    with torch.device("meta"):
        model, tokens = Transformer(layers=8, width=4096, heads=32, vocabulary=32_000), torch.zeros(32, 2048, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"micro_batches": 8, "precision": "bf16", "optimizer": optimizer, "update": "in_forward", "device": "cpu"}
    return l2l_compile.explain(model, options)(tokens, tokens.clone())


def program_of_a_small_step() -> Program:
    """The program of a step of two layers, with update="in_backward" (printed in docs/programs.md)."""
    with torch.device("meta"):
        model, tokens = Transformer(layers=2, width=64, heads=2, vocabulary=256), torch.zeros(8, 32, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"micro_batches": 4, "optimizer": optimizer, "update": "in_backward", "device": "cpu"}
    return l2l_compile.explain(model, options)(tokens, tokens.clone()).programs[0]


def chromium() -> str:
    """The path of an installed browser."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if found is None:
        raise SystemExit("no chromium is installed (its path may be in the variable CHROMIUM)")
    return found


def take_picture(browser: Any, page: Path, picture: Path) -> None:
    """Save a page as PNG, from its title to the curve of the host's memory."""
    shown = browser.new_page(viewport={"width": PIXELS, "height": 1200})
    shown.goto(page.resolve().as_uri())
    end = shown.evaluate("byId('host').getBoundingClientRect().bottom") + 12
    shown.screenshot(path=picture, clip={"x": 0, "y": 0, "width": PIXELS, "height": end})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "docs" / "page.png")
    output = parser.parse_args().output
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        report_of_a_step().save(page, machine="h200")
        arguments = ["--no-sandbox", "--headless=shell", "--single-process", "--no-zygote", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        take_picture(browser, page, output)
        browser.close()


if __name__ == "__main__":
    main()
