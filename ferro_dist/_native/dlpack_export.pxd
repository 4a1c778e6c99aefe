# What arrays need to hand themselves out in a DLPack capsule: the code of their dtype, and an export that
# holds a reference to its array.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF, Py_INCREF

from ferro_dist._native.dlpack cimport (
    BFLOAT, BOOL, COMPLEX, DLDataType, DLManagedTensor, FLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2, INT, UINT,
)


# `dtype` is one of NumPy or ml_dtypes.
cdef inline DLDataType dlpack_dtype_of(object dtype) except *:
    kinds = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}
    extensions = {
        "bfloat16": BFLOAT, "float8_e4m3fn": FLOAT8_E4M3FN, "float8_e5m2": FLOAT8_E5M2,
    }
    code = extensions.get(dtype.name, kinds.get(dtype.kind))
    if code is None or not dtype.isnative:
        raise TypeError(f"DLPack has no name for {dtype}")
    return DLDataType(code, dtype.itemsize * 8, 1)


# The deleter of what new_managed() makes.
cdef inline void delete_managed(DLManagedTensor* managed) noexcept with gil:
    Py_DECREF(<object> managed.manager_context)
    PyMem_Free(managed)


# An export that keeps `array` alive; its tensor is the caller's to fill in.
cdef inline DLManagedTensor* new_managed(object array) except NULL:
    cdef DLManagedTensor* managed = <DLManagedTensor*> PyMem_Malloc(sizeof(DLManagedTensor))
    if managed == NULL:
        raise MemoryError
    managed.manager_context = <void*> array
    managed.deleter = delete_managed
    Py_INCREF(array)
    return managed


# Frees a capsule that nobody took; one that was taken has been renamed.
cdef inline void drop_capsule(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_managed(<DLManagedTensor*> PyCapsule_GetPointer(capsule, "dltensor"))
