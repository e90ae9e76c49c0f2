"""Dynamo's reasons in plain words. The reasons are as Dynamo gives them."""

from __future__ import annotations

import pytest

from l2l_compile.frontend.dynamo.guard_failures import changes

CODE = '   # x = x * self.scale  # models/llama.py:11 in forward\nUser stack trace:\n  File "llama.py", line 11, in forward'


@pytest.mark.parametrize(
    ("reason", "change", "remedy"),
    [
        (
            "0/0: tensor 'x' size mismatch at index 1. expected 8, actual 9",
            "size 1 of x was 8",
            "torch._dynamo.mark_dynamic(x, 1)",
        ),
        ("0/0: x.size()[1] == 8" + CODE, "size 1 of x was 8", "pad x to a few sizes"),
        ("0/0: tensor 'x' rank mismatch. expected 2, actual 3", "rank of x was 2", "hold x constant"),
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", "dtype of x was Float", "hold x constant"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", "requires_grad of x was 0", "hold x constant"),
        (
            "0/0: tensor 'self._modules['head']._parameters['weight']' size mismatch at index 0. expected 8, actual 9. Guard failed on "
            "a parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False to allow dynamism on parameters.",
            "the size of self.head.weight was 8",
            "hold self.head.weight constant",
        ),
        (
            "0/0: expected type of 'x' to be a tensor type, ' but found <class 'NoneType'>",
            "x was of another type",
            "hold x constant",
        ),
        (
            "0/0: ___check_type_id(self._modules['act'], 123), type=<class 'ReLU'>" + CODE,
            "self.act was of another type",
            "hold self.act constant",
        ),
        (
            "0/0: ___check_obj_id(self.fn, 123), type=<class 'x'>" + CODE,
            "self.fn was another object",
            "give the same self.fn in each call",
        ),
        ("0/0: len(self.items) == 8" + CODE, "len(self.items) was 8", "hold len(self.items) constant"),
        ("1/12: self.scale == 0.5" + CODE, "self.scale was 0.5", "give self.scale as a tensor"),
        ("0/0: self.scale == -1e-05" + CODE, "self.scale was -1e-05", "give self.scale as a tensor"),
        ("0/0: self.flag == True" + CODE, "self.flag was True", "hold self.flag constant"),
        ("0/0: mode == 'a == 2'" + CODE, "mode was 'a == 2'", "hold mode constant"),
        ("0/0: mode == '" + 99 * "a" + "'", "mode was '" + 59 * "a" + "…", "hold mode constant"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "torch's global state was another: grad_mode", "no_grad"),
        (
            "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables.",
            "another call of torch.compile",
            "compile a model once",
        ),
        ("0/0: y is None" + CODE, "`y is None` holds no longer", "hold constant what this depends on"),
    ],
)
def test_reason(reason, change, remedy):
    (found,) = changes([reason])
    assert str(found).removesuffix(" (1 program)") == change
    assert remedy in found.remedy


def test_the_most_frequent_change_comes_first_and_modes_last():
    reasons = [*(3 * ["0/0: GLOBAL_STATE changed: grad_mode "]), "0/1: n == 1", "0/2: m == 'a'", "0/3: n == 2", "0/4: n == 2"]
    assert [str(c) for c in changes(reasons)] == [
        "n was 1, 2",
        "m was 'a'",
        "torch's global state was another: grad_mode (3 programs)",
    ]


def test_programs_without_a_known_reason_are_left_out():
    assert changes(["", "0/0: Unexpected recompilation: runtime guards failed even though they passed"]) == ()
