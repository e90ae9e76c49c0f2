"""Experts that work on sorted entries: proven as a whole, and refused where one piece does not fit the others."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers grouped_mm_fallback
from batch_rule_cases import X
from batch_rule_checker import proven, states_of

from l2l_compile.passes.batching.batch_rules import Mixing, Partial, Rows

TOKENS, WIDTH, EXPERTS, CHOSEN = 3, 4, 5, 2
SPECS = X("B", TOKENS, WIDTH), X(WIDTH, EXPERTS), X(EXPERTS, WIDTH, WIDTH), X(EXPERTS, WIDTH)

grouped_mm = torch.ops.transformers.grouped_mm_fallback


class Experts:
    """A layer in pieces, each of which a test may replace."""

    descending, bins, most, accumulate = False, EXPERTS, EXPERTS - 1, False

    def __call__(self, x, router, matrices, bias):
        flat = x.reshape(-1, WIDTH)
        weights, ids = (flat @ router).softmax(-1).topk(CHOSEN, -1)
        ids = self.numbers(ids.reshape(-1))
        self.sorted, self.order = ids.sort(descending=self.descending)
        rows = self.rows(flat)
        counts = torch.histc(self.counted(ids).float(), self.bins, 0, self.most)
        out = grouped_mm(rows, matrices[: self.bins], counts.cumsum(0, dtype=torch.int32)) + bias[self.sorted]
        out = self.activation(out) * weights.reshape(-1)[self.order].unsqueeze(-1)
        return self.back(out, ids).view(-1, CHOSEN, WIDTH).sum(1).view(x.shape)

    def numbers(self, ids):
        return ids

    def rows(self, flat):
        return flat[self.order // CHOSEN]

    def counted(self, ids):
        return self.sorted

    def activation(self, out):
        return torch.nn.functional.silu(out)

    def back(self, out, ids):
        inverse = torch.empty_like(self.order)
        inverse.index_put_((self.order,), torch.arange(self.order.size(0)), accumulate=self.accumulate)
        return out[inverse]


class SortedTwice(Experts):
    def back(self, out, ids):
        return out[self.order.argsort()]


class WithNorm(Experts):
    def activation(self, out):
        a, b = out.view(-1, 2, WIDTH // 2).unbind(1)
        gated = (a.softmax(-1) * b).unsqueeze(1).expand(-1, 2, -1).reshape(-1, WIDTH)
        return (gated - gated.mean(-1, keepdim=True)).to(torch.float32).to(out.dtype)


@pytest.mark.parametrize("layer", [Experts, SortedTwice, WithNorm])
def test_experts_are_row_wise(layer):
    assert proven(layer(), *SPECS) == [Rows(0)]


def test_sums_over_sorted_entries():
    def function(*inputs):
        layer = Experts()
        layer(*inputs)
        return layer.rows(inputs[0].reshape(-1, WIDTH)).sum(0), layer.rows(inputs[0].reshape(-1, WIDTH)).mean(0)

    assert proven(function, *SPECS) == [Partial("sum"), Partial("mean")]


class OfAnyNumbers(Experts):
    def numbers(self, ids):
        return ids - 1


class Descending(Experts):
    descending = True


class TooFewBins(Experts):
    bins, most = EXPERTS - 1, EXPERTS - 2


class OtherBins(Experts):
    most = EXPERTS


class CountsOthers(Experts):
    def counted(self, ids):
        return ids.flip(0).sort()[0]


class CountsMoved(Experts):
    """Numbers of other entries, in the order of these."""

    def counted(self, ids):
        return (EXPERTS - 1 - ids)[self.order]


class Unsorted(Experts):
    def rows(self, flat):
        return flat.repeat_interleave(CHOSEN, 0)


class OfOtherRows(Experts):
    def rows(self, flat):
        return flat.repeat_interleave(CHOSEN, 0)[self.order // CHOSEN]


class NotPutBack(Experts):
    def back(self, out, ids):
        return out


class OnceMoreMoved(Experts):
    def back(self, out, ids):
        return out[self.order]


class PutBackByOthers(Experts):
    def back(self, out, ids):
        self.order = ids.sort(stable=True)[1]  # ties may stand in another order
        return super().back(out, ids)


class Accumulates(Experts):
    accumulate = True


class AcrossEntries(Experts):
    def activation(self, out):
        return out.cumsum(0)


class OfPlaces(Experts):
    def activation(self, out):
        return out * self.order.unsqueeze(-1)


class OfNumbersOfPlaces(Experts):
    def activation(self, out):
        return out * torch.arange(out.shape[0]).unsqueeze(-1)


class WithRows(Experts):
    """Sorted entries next to entries that stand as they came."""

    def activation(self, out):
        return out + self.other

    def numbers(self, ids):
        self.other = ids.unsqueeze(-1)
        return ids


@pytest.mark.parametrize(
    "layer",
    [
        OfAnyNumbers,
        Descending,
        TooFewBins,
        OtherBins,
        CountsOthers,
        CountsMoved,
        Unsorted,
        OfOtherRows,
        NotPutBack,
        OnceMoreMoved,
        PutBackByOthers,
        Accumulates,
        AcrossEntries,
        OfPlaces,
        OfNumbersOfPlaces,
        WithRows,
    ],
)
def test_what_is_not_is_refused(layer):
    (state,) = states_of(layer(), SPECS)
    assert isinstance(state, Mixing), state


def test_numbers_that_are_written_are_of_any_range():
    class Written(Experts):
        def numbers(self, ids):
            return ids.clone().add_(1)

    class ViewWritten(Experts):
        def numbers(self, ids):
            own = ids.clone()
            own[:] = own + 1
            return own

    assert all(isinstance(states_of(layer(), SPECS)[0], Mixing) for layer in (Written, ViewWritten))
