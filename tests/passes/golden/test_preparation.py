"""Each preparation pass on a captured graph of a few lines: text before, text after."""

from __future__ import annotations

import pytest
import torch
from captured_text import compile_text, lines, shown

from l2l_compile import L2LError
from l2l_compile.passes.compilation import Pass
from l2l_compile.passes.preparation.drop_outputs import DropOutputs
from l2l_compile.passes.preparation.loss_terms import GatherLossTerms
from l2l_compile.passes.preparation.narrow import Narrow


def after(step: Pass, before: str, **options) -> list[str]:
    """The graph that a pass leaves, line by line."""
    return shown(compile_text(before, step, **options).captured)


# ---- drop_outputs -------------------------------------------------------------------------------------------------------

LOSS_AND_SCORES = """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%scores = F.linear(%x, %w)  float32[B, 4], grad
%shares = torch.softmax(%scores, 1)  float32[B, 4], grad
%loss = torch.mean(%scores)  float32[], grad
return (%loss, %scores, %shares)
"""


def test_drop_outputs_leaves_the_loss_and_what_it_reads():
    """The scores are still made, because the loss reads them; the shares are not."""
    found = compile_text(LOSS_AND_SCORES, DropOutputs(), outputs="loss")
    assert shown(found.captured) == lines("""
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%scores = F.linear(%x, %w)  float32[B, 4], grad
%loss = torch.mean(%scores)  float32[], grad
return (%loss, None, None)""")
    assert list(found.captured.dropped) == [1, 2]


def test_without_the_option_no_output_is_dropped():
    assert after(DropOutputs(), LOSS_AND_SCORES) == lines(LOSS_AND_SCORES)


def test_without_a_loss_no_output_is_dropped():
    """A mean that has no gradient is no loss."""
    no_loss = LOSS_AND_SCORES.replace(", grad", "")
    assert after(DropOutputs(), no_loss, outputs="loss") == lines(no_loss)


# ---- gather_loss_terms --------------------------------------------------------------------------------------------------

CROSS_ENTROPY = """
%x = value  float32[B, 4]
%target = value  int64[B]
%w = parameter  float32[5, 4], grad
%scores = F.linear(%x, %w)  float32[B, 5], grad
%loss = F.cross_entropy(%scores, %target, ignore_index=2)  float32[], grad
return (%loss,)
"""


def test_gather_loss_terms_writes_terms_of_rows_and_a_reduction():
    """Class 2 is ignored in the terms; the reduction ignores -100, which is where class 2 was."""
    assert after(GatherLossTerms(), CROSS_ENTROPY) == lines("""
%x = value  float32[B, 4]
%target = value  int64[B]
%w = parameter  float32[5, 4], grad
%scores = F.linear(%x, %w)  float32[B, 5], grad
%log_softmax = F.log_softmax(%scores, 1)  float32[B, 5], grad
%eq = operator.eq(%target, 2)  bool[B]
%nll_loss = F.nll_loss(%log_softmax, %target, ignore_index=2, reduction='none')  float32[B], grad
%zeros_like = torch.zeros_like(%target)  int64[B]
%masked_fill = torch.masked_fill(%zeros_like, %eq, -100)  int64[B]
%neg = operator.neg(%nll_loss)  float32[B], grad
%unsqueeze = torch.unsqueeze(%neg, 1)  float32[B, 1], grad
%nll_loss_1 = F.nll_loss(%unsqueeze, %masked_fill, ignore_index=-100, reduction='mean')  float32[], grad
return (%nll_loss_1,)""")


def test_one_micro_batch_needs_no_terms():
    assert after(GatherLossTerms(), CROSS_ENTROPY, micro_batches=1) == lines(CROSS_ENTROPY)


def test_in_16_bits_a_loss_of_small_scores_stays():
    """The scores have five entries a row and another value has eight, which then decides the memory."""
    larger = CROSS_ENTROPY.replace("%x = value  float32[B, 4]", "%x = value  float32[B, 8]").replace("[5, 4]", "[5, 8]")
    assert after(GatherLossTerms(), larger, precision="bf16") == lines(larger)
    assert after(GatherLossTerms(), larger) != lines(larger)
    assert after(GatherLossTerms(), CROSS_ENTROPY, precision="bf16") != lines(CROSS_ENTROPY)


def test_class_weights_multiply_terms_and_divide_the_mean():
    assert after(
        GatherLossTerms(),
        """
%scores = value  float32[B, 5]
%target = value  int64[B]
%classes = buffer  float32[5]
%loss = F.nll_loss(%scores, %target, weight=%classes)  float32[]
return (%loss,)
""",
    ) == lines("""
%scores = value  float32[B, 5]
%target = value  int64[B]
%classes = buffer  float32[5]
%eq = operator.eq(%target, -100)  bool[B]
%nll_loss = F.nll_loss(%scores, %target, ignore_index=-100, reduction='none')  float32[B]
%masked_fill = torch.masked_fill(%target, %eq, 0)  int64[B]
%getitem = operator.getitem(%classes, %masked_fill)  float32[B]
%masked_fill_1 = torch.masked_fill(%getitem, %eq, 0.0)  float32[B]
%mul = operator.mul(%nll_loss, %masked_fill_1)  float32[B]
%sum_1 = torch.sum(%mul)  float32[]
%sum_2 = torch.sum(%masked_fill_1)  float32[]
%truediv = operator.truediv(%sum_1, %sum_2)  float32[]
return (%truediv,)""")


def test_scores_that_fold_time_and_batch_are_taken_unfolded():
    """The folded values are still there, and nothing reads them."""
    assert after(
        GatherLossTerms(),
        """
%scores = value  float32[7, B, 5]
%target = value  int64[7, B]
%flat = torch.flatten(%scores, 0, 1)  float32[7*B, 5]
%flat_target = torch.flatten(%target)  int64[7*B]
%loss = F.cross_entropy(%flat, %flat_target, reduction='sum')  float32[]
return (%loss,)
""",
    ) == lines("""
%scores = value  float32[7, B, 5]
%target = value  int64[7, B]
%flat = torch.flatten(%scores, 0, 1)  float32[7*B, 5]
%flat_target = torch.flatten(%target)  int64[7*B]
%log_softmax = F.log_softmax(%scores, 2)  float32[7, B, 5]
%transpose = torch.transpose(%log_softmax, 1, 2)  float32[7, 5, B]
%eq = operator.eq(%target, -100)  bool[7, B]
%nll_loss = F.nll_loss(%transpose, %target, ignore_index=-100, reduction='none')  float32[7, B]
%zeros_like = torch.zeros_like(%target)  int64[7, B]
%masked_fill = torch.masked_fill(%zeros_like, %eq, -100)  int64[7, B]
%neg = operator.neg(%nll_loss)  float32[7, B]
%unsqueeze = torch.unsqueeze(%neg, 1)  float32[7, 1, B]
%nll_loss_1 = F.nll_loss(%unsqueeze, %masked_fill, ignore_index=-100, reduction='sum')  float32[]
return (%nll_loss_1,)""")


# ---- narrow -------------------------------------------------------------------------------------------------------------

WIDE = """
%ids = value  int64[B]
%mask = value  float32[B, 1]
%table = parameter  float32[9, 4], grad
%w = parameter  float32[4, 4], grad
%b = parameter  float32[4], grad
%kept = operator.mul(%mask, 2)  float32[B, 1]
%rows = F.embedding(%ids, %table)  float32[B, 4], grad
%scale = torch.sum(%b)  float32[], grad
%y = F.linear(%rows, %w, %b)  float32[B, 4], grad
%z = operator.mul(%y, %kept)  float32[B, 4], grad
return (%z, %scale)
"""


def test_narrow_gives_16_bits_to_matrices_and_to_activations():
    """In fp32 remain the bias, the mask and its double, the sum without rows, and the output."""
    found = compile_text(WIDE, Narrow(), precision="bf16")
    assert shown(found.captured) == lines("""
%ids = value  int64[B]
%mask = value  float32[B, 1]
%table = parameter  bfloat16[9, 4], computes in float32, grad
%w = parameter  bfloat16[4, 4], computes in float32, grad
%b = parameter  float32[4], grad
%kept = operator.mul(%mask, 2)  float32[B, 1]
%rows = F.embedding(%ids, %table)  bfloat16[B, 4], computes in float32, grad
%scale = torch.sum(%b)  float32[], grad
%y = F.linear(%rows, %w, %b)  bfloat16[B, 4], computes in float32, grad
%z = operator.mul(%y, %kept)  float32[B, 4], grad
return (%z, %scale)""")
    assert found.captured.autocast is torch.bfloat16
    assert {node.name: str(spec) for node, spec in found.captured.lookups.items()} == {
        "table": "float16[9, 4]",
        "w": "float16[4, 4]",
    }


def test_terms_of_a_loss_are_not_narrowed():
    """Behind the scores, the operations are those that `gather_loss_terms` has written."""
    found = compile_text(CROSS_ENTROPY, GatherLossTerms(), Narrow(), precision="bf16")
    assert shown(found.captured)[2:7] == lines("""
%w = parameter  bfloat16[5, 4], computes in float32, grad
%scores = F.linear(%x, %w)  bfloat16[B, 5], computes in float32, grad
%log_softmax = F.log_softmax(%scores, 1)  float32[B, 5], grad
%eq = operator.eq(%target, 2)  bool[B]
%nll_loss = F.nll_loss(%log_softmax, %target, ignore_index=2, reduction='none')  float32[B], grad""")


def test_in_fp32_nothing_is_narrowed():
    found = compile_text(WIDE, Narrow())
    assert shown(found.captured) == lines(WIDE) and found.captured.autocast is None


def test_a_parameter_in_float64_is_not_narrowed():
    with pytest.raises(L2LError, match="parameter 'w' is float64, but the option precision='fp16' keeps float32 on the host"):
        compile_text(
            """
%x = value  float64[B, 4]
%w = parameter  float64[4, 4], grad
%y = F.linear(%x, %w)  float64[B, 4], grad
return (%y,)
""",
            Narrow(),
            precision="fp16",
        )
