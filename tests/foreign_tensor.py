"""A tensor of a library that ferro_dist has never heard of, which speaks DLPack alone."""

from __future__ import annotations

import ctypes
from typing import Any

CPU = (1, 0)
FLOAT32 = (2, 32, 1)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class ForeignTensor:
    """Counts how often its exports were given back."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        address: int = 4096,
        strides: tuple[int, ...] | None = None,
        dtype: tuple[int, int, int] = FLOAT32,
        device: tuple[int, int] = CPU,
        byte_offset: int = 0,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
    ) -> None:
        self.device = device
        self.version = version
        self.flags = flags
        self.deleted = 0
        self.asked_stream: Any = None
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides or ())
        self._tensor = _Tensor(
            address,
            *device,
            len(shape),
            *dtype,
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            None if strides is None else ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)),
            byte_offset,
        )
        self._delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._count_deletion)

    def _count_deletion(self, _: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.asked_stream = stream
        deleter = ctypes.cast(self._delete, ctypes.c_void_p)
        if self.version is None:
            if options:
                raise TypeError("max_version: this library is older than DLPack 1.0")
            self._managed: Any = _Managed(self._tensor, None, deleter)
            return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)
        self._managed = _Versioned(*self.version, None, deleter, self.flags, self._tensor)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor_versioned", None)
