# The head of NumPy's array and dtype objects. NumPy's own macros (PyArray_DATA and
# the like) compile these offsets into every extension built for it, so they are
# fixed for 1.x and 2.x alike; reading them costs 2 ns where the buffer protocol
# costs 36. Its headers are not used: they would make NumPy a build requirement.

from cpython.object cimport PyObject, PyTypeObject

cdef enum:
    NPY_C_CONTIGUOUS = 0x1
    NPY_WRITEABLE = 0x400

cdef enum TypeNumber:
    NPY_BOOL = 0
    NPY_BYTE = 1
    NPY_UBYTE = 2
    NPY_SHORT = 3
    NPY_USHORT = 4
    NPY_INT = 5
    NPY_UINT = 6
    NPY_LONG = 7
    NPY_ULONG = 8
    NPY_LONGLONG = 9
    NPY_ULONGLONG = 10
    NPY_FLOAT = 11
    NPY_DOUBLE = 12
    NPY_CFLOAT = 14
    NPY_CDOUBLE = 15
    NPY_HALF = 23
    NPY_FIRST_USER_TYPE = 256  # dtypes that other packages register: ml_dtypes' are some

cdef struct NumpyDtype:
    PyObject head
    PyTypeObject* scalar_type
    char kind
    char type_character
    char byte_order
    char former_flags
    int type_number

cdef struct NumpyArray:
    PyObject head
    void* data
    int ndim
    Py_ssize_t* shape
    Py_ssize_t* strides
    PyObject* base
    NumpyDtype* dtype
    int flags
