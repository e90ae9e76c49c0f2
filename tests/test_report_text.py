"""The text of a report: figures first, no line beyond 100 columns, each reason once."""

from __future__ import annotations

import torch
from torch import nn

import l2l_compile
from l2l_compile.report.report_text import WIDTH
from models import Stack, rows


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).softmax(0)


class LongNames(nn.Module):
    """Segments with long names that mix rows for one reason."""

    def __init__(self):
        super().__init__()
        self.a_name_that_is_longer_than_anybody_would_like_to_read_in_a_table_of_a_terminal = nn.ModuleList(
            [nn.Sequential(Mixes(), nn.Linear(8, width), nn.Linear(width, 8)) for width in (8, 9, 10, 11, 12)]
        )

    def forward(self, x):
        for layer in self.a_name_that_is_longer_than_anybody_would_like_to_read_in_a_table_of_a_terminal:
            x = layer(x)
        return x


def text_of(model, x, **options) -> str:
    return str(l2l_compile.explain(model, {"micro_batches": 2, "device": "cpu", **options})(x))


def test_lines_fit_a_terminal_and_each_reason_is_said_once():
    text = text_of(LongNames(), torch.randn(6, 8))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("softmax") == 1 and "and 2 more" in text
    assert text.count("whole batch [1]") == 1 and "x5" in text


def test_figures_that_a_user_can_act_on_come_before_the_table():
    text = text_of(Stack(), rows(6, dtype=torch.float32))
    order = [
        "device memory at its peak",
        "host memory",
        "whole batch at once: none",
        "outputs copied",
        "graph breaks",
        "program 0",
    ]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    assert text.startswith(order[0]) and "2 micro-batches" in text
