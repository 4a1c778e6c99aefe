# What arrays need to hand themselves out in a DLPack capsule: the reference that an export
# holds to its array, and its end.

from cpython.mem cimport PyMem_Free
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF

from ferro_dist._native.dlpack cimport DLManagedTensor


# A deleter, of a tensor from PyMem_Malloc whose context is a reference to the array.
cdef inline void delete_managed(DLManagedTensor* managed) noexcept with gil:
    Py_DECREF(<object> managed.manager_context)
    PyMem_Free(managed)


# A capsule that nobody took; one that was taken has another name.
cdef inline void drop_capsule(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_managed(<DLManagedTensor*> PyCapsule_GetPointer(capsule, "dltensor"))
