"""
A CUDA device that is not there: its tensors keep their numbers on the CPU, or nowhere, and refuse what CUDA refuses.

Import it first, in a process of its own, with the library made from `fake_cuda.cpp` in `FAKE_CUDA_LIBRARY`. Then
`torch.cuda.is_available()`, and

- an operation that mixes tensors of host and device raises;
- `WAITS` counts by line where code of this package waits for the device: numbers read by the host, copies that block;
- a copy by a stream of its own happens when some stream waits for it, and not before. Until then it holds NaN;
- `PROBLEMS` lists what a GPU would not report: memory read before it is written, or given away before it is read, and
  copies of pageable memory that claim not to block.

Timing, CUDA's own arithmetic, its allocator, its errors and NCCL are not there.
"""

import contextlib
import ctypes
import linecache
import math
import os
import sys
from collections import Counter
from types import SimpleNamespace

from repository import ROOT

ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)  # before torch asks who its CUDA is

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  while it still finds no CUDA, of which it would ask more
import torch.distributed.fsdp  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

CUDA = torch.device("cuda", 0)
STORAGE = os.environ.get("FAKE_CUDA_STORAGE", "cpu")  # or meta: no numbers at all
PACKAGE = str(ROOT / "troll_trl")
WAITS: Counter[str] = Counter()
PROBLEMS: list[str] = []

# Operations whose result the host must know: their sizes depend on numbers of the device
_READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "bincount"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_DRAW = {"uniform_", "normal_", "bernoulli", "bernoulli_", "random_", "exponential_", "multinomial", "native_dropout"}
# A number of the host may enter other operations as an argument of their kernel
_NO_HOST_SCALAR = {"index_select", "gather", "scatter", "scatter_", "index_copy", "index_copy_", "embedding"}


def _line() -> str | None:
    """The line of this package that is running, unless what it has called is another's."""
    frame = sys._getframe(1)
    own = ("/torch/", "fake_cuda.py")
    while frame is not None and any(part in frame.f_code.co_filename for part in own):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(PACKAGE):
        return None
    name = frame.f_code.co_filename.removeprefix(PACKAGE + "/")
    return f"{name}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"


def _waits() -> None:
    if (line := _line()) is not None:
        WAITS[line] += 1


# -- Streams and memory ------------------------------------------------------------------------------------------------


class Stream:
    """Copies that are still to be made; everything else happens at once."""

    device, device_type, device_index = CUDA, 1, 0

    def __init__(self, *_, **__):
        self.copies = []
        self.stream_id = self.cuda_stream = id(self)

    def catch_up(self):
        copies, self.copies = self.copies, []
        for to, source in copies:
            to.copy_(source)
            memory_of(to).writer = None

    def wait_stream(self, other):
        other.catch_up()

    def synchronize(self):
        _waits()
        self.catch_up()


_DEFAULT = Stream()
_streams = [_DEFAULT]


@contextlib.contextmanager
def _stream(stream):
    _streams.append(stream or _streams[-1])
    yield
    _streams.pop()


class Memory:
    """Of one storage: the stream that it belongs to, who else reads it, and who is promised that it stays."""

    def __init__(self):
        self.owner, self.readers, self.promised, self.writer, self.line = _streams[-1], set(), set(), None, _line()

    def freed(self):
        if self.readers - self.promised:
            PROBLEMS.append(
                f"memory is freed while another stream may read it, for want of `record_stream`: {self.line}"
            )


_memory: dict[int, tuple[StorageWeakRef, Memory]] = {}


def memory_of(numbers: torch.Tensor) -> Memory:
    storage = numbers.untyped_storage()
    held = _memory.get(storage._cdata)
    if held is not None and held[0].expired():
        held[1].freed()
        held = None
    if held is None:
        held = _memory[storage._cdata] = (StorageWeakRef(storage), Memory())
    return held[1]


def collect() -> None:
    """Look at what has been freed."""
    for key, (storage, memory) in list(_memory.items()):
        if storage.expired():
            memory.freed()
            del _memory[key]


def _touched(tensor: "CudaTensor", what: str) -> None:
    memory, current = memory_of(tensor.numbers), _streams[-1]
    if memory.writer not in (None, current):
        PROBLEMS.append(f"{what} reads memory that another stream is still to write: {_line()}")
    if memory.owner is not current:
        memory.readers.add(current)


# -- Tensors -----------------------------------------------------------------------------------------------------------


class CudaTensor(torch.Tensor):
    """A tensor of the device around its `numbers`, a plain tensor."""

    @staticmethod
    def __new__(cls, numbers, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            layout=numbers.layout, device=CUDA, requires_grad=requires_grad,
        )  # fmt: skip
        tensor.numbers = numbers
        memory_of(numbers)
        return tensor

    def __repr__(self, *, tensor_contents=None):
        return f"CudaTensor({self.numbers})"

    def __reduce_ex__(self, protocol):
        return _load, (self.detach().numbers.clone(), self.requires_grad)

    def record_stream(self, stream):
        memory_of(self.numbers).promised.add(stream)

    def untyped_storage(self):
        return self.detach().numbers.untyped_storage()

    def tolist(self):
        _waits()
        return self.detach().numbers.tolist()

    def numpy(self, *_, **__):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first."
        )

    __array__ = numpy

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        return _tensor(data, dtype=dtype or self.dtype, device=device or CUDA, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


def _load(numbers, requires_grad):
    return CudaTensor(numbers, requires_grad)


torch.serialization.add_safe_globals([_load])


def _numbers(x):
    if isinstance(x, CudaTensor):
        return x.numbers
    return x.to("meta") if STORAGE == "meta" and isinstance(x, torch.Tensor) else x


def _dispatch(func, args, kwargs):
    name = func._overloadpacket.__name__
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not func.is_view and name != "detach":
        for x in tensors:
            if isinstance(x, CudaTensor):
                _touched(x, str(func))
    if name == "_to_copy":
        return _to_copy(func, args[0], dict(kwargs))
    if name == "copy_":
        return _copy_into(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))

    indices = [x for x in (args[1] if name in _INDEXING else ()) if x is not None]
    for x in tensors:
        if isinstance(x, CudaTensor) or x.device.type == "meta" or (x.dim() == 0 and name not in _NO_HOST_SCALAR):
            continue
        if not any(x is index for index in indices):  # which PyTorch copies to the device
            raise RuntimeError(f"{func}: expected all tensors on one device, found cuda:0 and cpu {tuple(x.shape)}.")
        _waits()
    if name in _READ or any(x.dtype == torch.bool for x in indices):
        _waits()

    device = kwargs.get("device")
    leaves = device is not None and torch.device(device).type == "cpu"
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("meta" if torch.device(device).type == "meta" else STORAGE)}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    known = {id(x.numbers): x for x in tensors if isinstance(x, CudaTensor)}
    args, kwargs = tree_map(_numbers, (args, kwargs))
    if "dtype" in func._overloadname and name in ("mm", "addmm"):  # bfloat16 products added to a float32 sum
        result = _mixed_product(name, args, kwargs)
    else:
        with _device_generator() if name in _DRAW else contextlib.nullcontext():
            result = func(*args, **kwargs)

    def wrapped(x):
        if not isinstance(x, torch.Tensor) or leaves or (x.device.type == "meta" and STORAGE != "meta"):
            return x
        return known[id(x)] if id(x) in known else CudaTensor(x)

    return tree_map(wrapped, result)


def _mixed_product(name, args, kwargs):
    *added, a, b = args[: 2 + (name == "addmm")]
    assert a.dtype == b.dtype != torch.float32 and all(x.dtype == torch.float32 for x in added)
    product = a.float() @ b.float()
    result = kwargs.get("beta", 1) * added[0] + kwargs.get("alpha", 1) * product if added else product
    out = kwargs.get("out")
    return result if out is None else out.copy_(result)


def _to_copy(func, source, options):
    """From the device: to it, in another dtype or layout, or to the host, which waits."""
    to = torch.device(options.pop("device", None) or CUDA)
    options.pop("non_blocking", None)
    result = func(source.numbers, **options)
    if to.type == "cuda":
        return CudaTensor(result)
    _waits()
    return result


def _copy_into(to, source, non_blocking):
    if isinstance(to, CudaTensor) and not isinstance(source, CudaTensor):
        _from_host(to.numbers, source, non_blocking)
    elif isinstance(to, CudaTensor):
        to.numbers.copy_(source.numbers)
    else:
        _waits()
        to.copy_(source.numbers)
    return to


def _from_host(to, source, non_blocking):
    if STORAGE == "meta":
        return
    stream = _streams[-1]
    if not non_blocking:
        _waits()
    elif not source.is_pinned() and source.numel() > 0:
        _waits()
        PROBLEMS.append(f"a copy that claims not to block takes pageable memory, and blocks: {_line()}")
    elif stream is not _DEFAULT:
        to.fill_(math.nan if to.is_floating_point() else 85)
        memory_of(to).writer = stream
        stream.copies.append((to, source))
        return
    to.copy_(source)


# -- What makes tensors, and what torch.cuda says ----------------------------------------------------------------------


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return CudaTensor(
        torch.empty(size, dtype=dtype, device=STORAGE, memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return CudaTensor(torch.empty_strided(size, stride, dtype=dtype, device=STORAGE))


_library = torch.library.Library("aten", "IMPL")  # the two that all others end in
_library.impl("empty.memory_format", _empty, "CUDA")
_library.impl("empty_strided", _empty_strided, "CUDA")

_plain_tensor, _plain_as_tensor = torch.tensor, torch.as_tensor


def _tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """`torch.tensor`, which keeps subclasses out: made on the host and copied, as CUDA's is."""
    if isinstance(data, list | tuple):
        data = [x.item() if isinstance(x, CudaTensor) else x for x in data]
    if device is None or torch.device(device).type != "cuda":
        return _plain_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory)
    return _plain_tensor(data, dtype=dtype).to(CUDA).requires_grad_(requires_grad)


def _as_tensor(data, dtype=None, device=None):
    if isinstance(data, torch.Tensor):
        return data.to(device=device or data.device, dtype=dtype or data.dtype)
    return _tensor(data, dtype=dtype, device=device)


torch.tensor, torch.as_tensor = _tensor, _as_tensor
torch.__future__.set_swap_module_params_on_conversion(True)

_generator = torch.Generator().manual_seed(0)


@contextlib.contextmanager
def _device_generator():
    """The device draws from a generator of its own."""
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    yield
    _generator.set_state(torch.get_rng_state())
    torch.set_rng_state(host)


def _synchronize(*_):
    _waits()
    for stream in _streams:
        stream.catch_up()


def nothing(*_, **__):
    return None


H100 = SimpleNamespace(
    name="an H100 that is not there", major=9, minor=0, total_memory=85 * 10**9, multi_processor_count=132,
    L2_cache_size=50 * 2**20, warp_size=32,
)  # fmt: skip
SAID = {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "is_bf16_supported": True,
    "get_device_capability": (9, 0), "get_device_properties": H100, "get_device_name": H100.name, "memory_stats": {},
    "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 2**30, "max_memory_reserved": 2**30,
    "mem_get_info": (80 * 10**9, 85 * 10**9), "is_current_stream_capturing": False, "_is_in_bad_fork": False,
    "_lazy_init": None, "init": None, "set_device": None, "empty_cache": None, "ipc_collect": None,
    "reset_peak_memory_stats": None,
}  # fmt: skip
for _name, _value in SAID.items():
    setattr(torch.cuda, _name, lambda *_, value=_value, **__: value)
torch.cuda.Stream, torch.cuda.stream, torch.cuda.StreamContext = Stream, _stream, _stream
torch.cuda.current_stream = lambda *_: _streams[-1]
torch.cuda.default_stream = lambda *_: _DEFAULT
torch.cuda.synchronize = torch.accelerator.synchronize = _synchronize
torch.cuda.device = lambda *_: contextlib.nullcontext()
torch.cuda.manual_seed = torch.cuda.manual_seed_all = _generator.manual_seed
for _module in (torch.cuda, torch.cuda.random):
    _module.get_rng_state = lambda *_: _generator.get_state()
    _module.set_rng_state = lambda state, *_: _generator.set_state(state)
    _module.get_rng_state_all = lambda: [_generator.get_state()]
    _module.set_rng_state_all = lambda states: _generator.set_state(states[0])
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.empty_cache = nothing
for _name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice"):
    setattr(torch._C, f"_cuda_{_name}", lambda *_: 0)
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_isInBadFork = lambda: False
torch.version.cuda = "13.0"


def interpret_kernels() -> None:
    """Let Triton's interpreter see the numbers."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def launched(self, *arguments, **options):
        for x in (*arguments, *options.values()):
            if isinstance(x, CudaTensor):
                _touched(x, f"the kernel {self.fn.__name__}")
            elif isinstance(x, torch.Tensor):
                raise ValueError(f"Pointer argument of {self.fn.__name__} cannot be accessed from Triton (cpu tensor?)")
        return call(self, *map(_numbers, arguments), **{name: _numbers(x) for name, x in options.items()})

    GridExecutor.__call__ = launched
