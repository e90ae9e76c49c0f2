"""The store of lowered blocks keeps as many codes as it may, those that were used last."""

from l2l_compile.lowering.code_cache import Code, Store
from l2l_compile.lowering.sizes import Guards


def code(size):
    return Code(None, print, Guards.exactly((size,)))


def test_the_store_keeps_the_codes_that_were_used_last():
    store = Store(3)
    for key, size in (("a", 1), ("b", 1), ("a", 2)):
        store.add((key,), code(size))
    assert store.find(("b",), (1,)) is not None
    store.add(("c",), code(1))  # one too many: "a", with both of its codes, was used before "b"
    assert [store.find((key,), (1,)) is not None for key in "abc"] == [False, True, True]
    store.add(("d",), code(1))
    assert all(store.find((key,), (1,)) for key in "bcd")
    store.clear()
    assert store.find(("b",), (1,)) is None
    for key in "efg":
        store.add((key,), code(1))
    assert all(store.find((key,), (1,)) for key in "efg")
