"""A stand-in for an accelerator: its tensors are of another device type than the host's, and it needs no hardware.

PyTorch lets Python register an accelerator. Here, a tensor of the device wraps a tensor of the host, its memory, and each
operation runs on that memory. Copies alone may read tensors of both devices: any other operation that is given a tensor of the
host beside one of the device raises, as it would on a GPU. The lanes, the copies and the NaN in freed memory are those of
`ThreadedDevice`.

Without a counterpart on the host are kernels that PyTorch has for accelerators alone, such as those of a `GRUCell`. An operation
that changes the sizes of its operand in place leaves those of the wrapper as they were (`torch.hann_window` does so inside).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from l2l_compile.devices.device import DeviceKind
from l2l_compile.devices.host import HOST
from l2l_compile.testing.strict_device import ThreadedDevice

NAME = "standin"
MISSING = (
    None
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    else f"PyTorch {torch.__version__} cannot register an accelerator from Python"
)
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)

_ATEN = torch.ops.aten
UNDER_A_MODE = (  # of real tensors while blocks are traced, such as sizes; there, PyTorch does not look for a fallback
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.copy_.default, _ATEN._local_scalar_dense.default,
    _ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.div.Tensor_mode, _ATEN.remainder.Tensor,
)  # fmt: skip


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `memory` is the tensor of the host behind it."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device(NAME, 0),
        )
        made.memory = memory
        return made

    def untyped_storage(self):
        return self.memory.untyped_storage()

    def data_ptr(self):
        return self.memory.data_ptr()

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self.memory})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})


class Generators:
    """Random numbers of the device: a default generator, and others that were made for it."""

    def __init__(self):
        self.default, self._lock = torch.Generator().manual_seed(0), threading.Lock()
        self._seeds: set[int] = set()

    def new(self, seed: int) -> torch.Generator:
        """PyTorch has none of this type of device: it is known by its seed."""
        self._seeds.add(seed)
        return torch.Generator().manual_seed(seed)

    def check(self, generator: torch.Generator) -> None:
        """Raises `RuntimeError` for a generator that was not made for the device."""
        if generator.initial_seed() not in self._seeds:
            raise RuntimeError(f"a generator of the host is given to an operation of {NAME}")

    @contextmanager
    def in_place_of_the_hosts(self) -> Iterator[None]:
        """An operation that is given no generator draws from the default one of the device."""
        with self._lock, torch.random.fork_rng([]):
            torch.default_generator.set_state(self.default.get_state())
            yield
            self.default.set_state(torch.default_generator.get_state())


generators = Generators()


def run(operation, args, kwargs):
    """Run an operation on the memory of its operands. Raises `RuntimeError` where tensors of host and device meet.

    A tensor of the host without dimensions is a number, which may meet any tensor, as on a GPU.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    foreign = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
    if foreign and operation not in COPIES:
        shape = tuple(foreign[0].shape)
        raise RuntimeError(f"{operation} is given a tensor of {foreign[0].device} beside one of {NAME}: shape {shape}")
    wrappers = {id(t.memory): t for t in tensors if isinstance(t, DeviceTensor)}
    there = kwargs.get("device")
    result_on_host = there is not None and torch.device(there).type == HOST.type
    own_args, own_kwargs = pytree.tree_unflatten(map(_on_host, leaves), structure)
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if generator is not None:
        generators.check(generator)
    draws = torch.Tag.nondeterministic_seeded in operation.tags and generator is None
    with generators.in_place_of_the_hosts() if draws else nullcontext():
        found = operation(*own_args, **own_kwargs)
    if result_on_host:
        return found
    return pytree.tree_map_only(torch.Tensor, lambda t: wrappers[id(t)] if id(t) in wrappers else DeviceTensor(t), found)


def _on_host(leaf):
    if isinstance(leaf, DeviceTensor):
        return leaf.memory
    return HOST if isinstance(leaf, torch.device) else leaf


class _Module:
    """What PyTorch asks of `torch.standin`."""

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: generators.default.manual_seed(seed))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@functools.cache
def register() -> tuple[torch.library.Library, torch.library.Library]:
    """Make the device known to this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(lambda operation, *args, **kwargs: run(operation, args, kwargs), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for operation in UNDER_A_MODE:
        aten.impl(operation.name(), lambda *args, operation=operation, **kwargs: run(operation, args, kwargs), "PrivateUse1")
    for operation, kernel in _with_autocast():
        aten.impl(operation.name(), kernel, "AutocastPrivateUse1")
    _is_no_subclass_to_a_trace()
    return every, aten


def _is_no_subclass_to_a_trace() -> None:
    """Constants of a block are real tensors of the device. A trace takes them as it takes those of a GPU."""
    is_subclass = fake_tensor._check_for_subclass_arg
    fake_tensor._check_for_subclass_arg = lambda x: type(x) is not DeviceTensor and is_subclass(x)
    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, DeviceTensor)


def _with_autocast() -> Iterator[tuple[OpOverload, Callable]]:
    """The operations that autocast casts the operands of, each with a kernel: those of a GPU, as a header of PyTorch lists them."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    for policy, kernel in POLICIES.items():
        listed = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)+.*\n)", header)
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", listed[1]):
            operation = getattr(getattr(torch.ops.aten, name), overload or "default")
            yield operation, functools.partial(_autocast, kernel, operation)


def _autocast(kernel, operation, *args, **kwargs):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return kernel(operation, args, kwargs)


def _is_cast(value) -> bool:
    is_there = isinstance(value, torch.Tensor) and value.device.type == NAME
    return is_there and value.is_floating_point() and value.dtype is not torch.float64


def _in(dtype: torch.dtype, operation, args, kwargs):
    args, kwargs = pytree.tree_map(lambda value: value.to(dtype) if _is_cast(value) else value, (args, kwargs))
    return operation(*args, **kwargs)


def _in_sixteen_bits(operation, args, kwargs):
    return _in(torch.get_autocast_dtype(NAME), operation, args, kwargs)


def _result_in_float32(operation, args, kwargs):
    position = [argument.name for argument in operation._schema.arguments].index("dtype")
    chosen = args[position] if position < len(args) else kwargs.get("dtype")
    if chosen is None and _is_cast(args[0]):
        args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
    return operation(*args, **kwargs)


def _in_the_widest(operation, args, kwargs):
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)}
    return _in(max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32), operation, args, kwargs)


POLICIES = {  # by their names in the header
    "LOWER_PRECISION_FP": _in_sixteen_bits,
    "FP32": functools.partial(_in, torch.float32),
    "FP32_SET_OPT_DTYPE": _result_in_float32,
    "PROMOTE": _in_the_widest,
}


class StandIn(ThreadedDevice):
    """`ThreadedDevice` with tensors of the registered type, and random numbers of its own."""

    assertions_are_final = True

    def __init__(self, device: torch.device, pinned_memory: int | None = None):
        super().__init__(delay=0.0, pinned_memory=pinned_memory, torch_device=device)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = generators.default.get_state()
        generators.default.manual_seed(seed)
        try:
            yield
        finally:
            generators.default.set_state(before)

    def generator(self, seed: int) -> torch.Generator:
        return generators.new(seed)


STAND_IN = DeviceKind(
    name=NAME,
    open=StandIn,
    complaint=lambda: MISSING,
    resolve=lambda device: torch.device(NAME, 0),
    pins_memory=True,
    identity=lambda device: (),
)
