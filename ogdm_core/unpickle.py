"""Pickles read as data: tensors, arrays, numbers, texts and containers.

A pickle is a program: it names functions and classes, calls them and sets attributes of what they
return. Here a name is never looked up. A call returns what the table MAKERS has for its name, or an
`Object`, which only keeps what the file said. So every value on the reader's stack is of a type
that this module picks, and none of them runs anything of the file's.
"""

import contextlib
import io
import pickle
import re
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.storage import TypedStorage

from . import trust


@dataclass(frozen=True)
class Name:
    """A function or class that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        home = "numpy" if self.module.startswith("numpy.") else self.module.replace("__builtin__", "builtins")
        return f"{home}.{self.name}"


class Object:
    """What a pickle wants `maker` to return for `args`, and the state it wants to set. Plain data."""

    def __init__(self, maker: Name, args: tuple):
        self.maker, self.args, self.state = maker, args, None


def _expect(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is out of place")
    return value


def _storage(content: bytes) -> TypedStorage:
    """torch's function of that place unpickles its bytes without any check."""
    return _expect(trust.load(io.BytesIO(_expect(content, bytes)), weights_only=True), TypedStorage)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, *hooks: Any) -> torch.Tensor:
    parts = _expect(storage, TypedStorage), _expect(offset, int), _expect(size, tuple), _expect(stride, tuple)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if all(size) and last >= storage._size():  # torch would enlarge the storage
        raise ValueError(f"a tensor of shape {size} does not fit its storage of {storage._size()} numbers")
    return torch._utils._rebuild_tensor_v2(*parts, _expect(requires_grad, bool), OrderedDict())


def _parameter(data: Any, requires_grad: Any, *hooks: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_expect(data, torch.Tensor), _expect(requires_grad, bool))


def _text(value: Any) -> str:
    """Python 2's texts are bytes."""
    return value.decode("ascii") if isinstance(value, bytes) else _expect(value, str)


def _dtype(code: Any, *align_and_copy: Any) -> np.dtype:
    """Numbers only: an array of objects could hold anything."""
    if not re.fullmatch(r"[biufc]\d+", _text(code)):
        raise TypeError(f"{code!r} is no dtype of numbers")
    return np.dtype(_text(code), False, True)


def _scalar(dtype: Any, content: Any) -> Any:
    return np.frombuffer(_expect(content, bytes), _expect(dtype, np.dtype), count=1)[0]


def _bytes(text: Any, encoding: Any) -> bytes:
    """Protocol 2 writes bytes as a call of an encoder, always of this one."""
    if encoding != "latin1":
        raise ValueError(f"{encoding!r} is not the encoding of bytes")
    return _expect(text, str).encode("latin1")


MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": lambda content=b"": bytearray(_expect(content, bytes)),
    "builtins.complex": lambda real, imag: complex(_expect(real, float), _expect(imag, float)),
    "builtins.frozenset": lambda items=(): frozenset(_expect(items, (list, tuple))),
    "builtins.set": lambda items=(): set(_expect(items, (list, tuple))),
    "collections.Counter": lambda items=(): dict(_expect(items, (dict, tuple))),
    "collections.OrderedDict": lambda items=(): OrderedDict(_expect(items, (list, tuple))),
    "collections.defaultdict": lambda factory=None: {},
    "numpy._reconstruct": lambda kind, shape, code: np.empty(0, np.int8),
    "numpy.dtype": _dtype,
    "numpy.scalar": _scalar,
    "torch.Size": lambda sizes: torch.Size(_expect(sizes, (list, tuple))),
    "torch.device": lambda kind, index=None: torch.device(_expect(kind, str), index),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
}
ARGUMENTS = {"numpy.ndarray", *(f"builtins.{n}" for n in ("dict", "float", "int", "list", "tuple"))}  # of makers
DTYPES = {f"torch.{n}": value for n, value in vars(torch).items() if isinstance(value, torch.dtype)}


@contextlib.contextmanager
def sense() -> Iterator[None]:
    """Turns the errors of a program that makes no sense into UnpicklingError."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, MemoryError, TypeError, struct.error) as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


Reader: Any = pickle._Unpickler  # Python's own, in Python


class Unpickler(Reader):
    """Returns data, or raises UnpicklingError; RefusedError where the file asks for any other name."""

    makers = MAKERS

    def admits(self, name: Name) -> bool:
        """Whether an `Object` may stand for what `name` makes; a subclass decides what becomes of it."""
        return False

    def load(self) -> Any:
        """What the file holds."""
        with sense():
            return super().load()

    def find_class(self, module: str, name: str) -> Any:
        """A dtype of torch's, which is a constant, or a `Name`."""
        found = Name(module, name)
        if str(found) in DTYPES:
            return DTYPES[str(found)]
        if str(found) in self.makers or str(found) in ARGUMENTS or self.admits(found):
            return found
        raise trust.refusal(f"{module}.{name}, which the file asks for,")

    def _instantiate(self, maker: Any, args: Iterable[Any]) -> None:
        """Puts what a call returns on the stack. Also Python's own opcodes INST and OBJ end here."""
        if type(maker) is not Name:
            raise pickle.UnpicklingError(f"it calls a {type(maker).__name__}")
        make = self.makers.get(str(maker))
        self.append(make(*args) if make else Object(maker, tuple(args)))

    def _call(self) -> None:
        args, maker = self.stack.pop(), self.stack.pop()
        self._instantiate(maker, _expect(args, tuple))

    def _call_with_keywords(self) -> None:
        keywords = _expect(self.stack.pop(), dict)
        self.stack[-1] = (*_expect(self.stack[-1], tuple), keywords)  # no maker takes a dict at its end
        self._call()

    def _set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        kind = type(target)
        if kind is Object:
            target.state = state
        elif kind is OrderedDict and type(state) is dict and {*state} <= {"_metadata"}:  # of a state_dict
            vars(target).update(state)
        elif kind is np.ndarray and not target.size:  # a full one may be in use
            version, shape, dtype, fortran, content = state
            checked = _expect(shape, tuple), _expect(dtype, np.dtype), bool(fortran), _expect(content, bytes)
            target.__setstate__((1, *checked))
        elif issubclass(kind, np.dtype) and state[2:5] == (None, None, None):
            target.__setstate__((3, _text(state[1]), None, None, None, -1, -1, 0))
        elif kind is not dict or state:
            raise pickle.UnpicklingError(f"it sets the state of a {kind.__name__}")

    def _fill(self, kind: type, items: list) -> None:
        target = self.stack[-1]
        if type(target) is Object:
            return
        _expect(target, kind)
        if kind is dict:
            target.update(zip(items[::2], items[1::2], strict=True))
        else:
            (target.extend if kind is list else target.update)(items)

    def _fill_last(self, kind: type, count: int) -> None:
        items = self.stack[-count:]
        del self.stack[-count:]
        self._fill(kind, items)

    dispatch = Reader.dispatch | {
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_keywords,
        pickle.BUILD[0]: _set_state,
        pickle.APPEND[0]: lambda self: self._fill_last(list, 1),
        pickle.APPENDS[0]: lambda self: self._fill(list, self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._fill_last(dict, 2),
        pickle.SETITEMS[0]: lambda self: self._fill(dict, self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._fill(set, self.pop_mark()),
    }
    for opcode in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
        del dispatch[opcode[0]]  # objects from elsewhere


def pickle_module(unpickler: type[Unpickler]) -> Any:
    """What torch.load wants of a pickle module."""

    def load(file: Any, **kwargs: Any) -> Any:
        return unpickler(file, **kwargs).load()

    return types.SimpleNamespace(__name__="pickle", Unpickler=unpickler, load=load)
