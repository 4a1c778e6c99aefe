# The libnccl that this process has loaded, and what is passed to it by value: identifiers and
# configurations.

from operator import index

cimport cython
from libc.limits cimport INT_MAX
from libc.string cimport memcmp, memcpy

from ferro_dist._native.libnccl cimport (
    ncclConfig_t, ncclGetErrorString, ncclGetLastError, ncclGetUniqueId, ncclGetVersion,
    ncclResult_t, ncclSuccess, NCCL_CONFIG_UNDEF_INT, NCCL_UNIQUE_ID_BYTES,
)

from ferro_dist._native.cuda_libraries import OLDEST_NCCL
from ferro_dist.errors import BackendUnavailable, Io

__all__ = ["CONFIG_OPTIONS", "UniqueId", "get_last_error", "get_unique_id", "get_version"]


def get_version():
    """Return the version of the NCCL that is loaded: ``(2, 27, 3)``."""
    cdef int code = 0
    CHECK_NCCL(ncclGetVersion(&code), "ncclGetVersion")
    if code < 10000:  # up to 2.8
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def get_unique_id():
    """Make an identifier, for one rank to give to all others of a communicator."""
    cdef UniqueId unique_id = UniqueId.__new__(UniqueId)
    cdef ncclResult_t result
    with nogil:
        result = ncclGetUniqueId(&unique_id._id)
    CHECK_NCCL(result, "ncclGetUniqueId")
    return unique_id


def get_last_error():
    """Return NCCL's own words for what went wrong last in this process, "" if nothing did."""
    cdef const char* text = ncclGetLastError(NULL)
    return "" if text == NULL else text.decode("utf-8", "replace")


cdef str result_name(ncclResult_t result):
    return ncclGetErrorString(result).decode()


cdef int CHECK_NCCL(ncclResult_t result, str function) except -1:
    if result == ncclSuccess:
        return 0
    raise Io(f"{function} failed: {result_name(result)}: {get_last_error()}.")


@cython.final
cdef class UniqueId:
    """What the ranks of one communicator share to find each other: 128 bytes.

    Parameters
    ----------
    data : bytes
        As ``bytes(unique_id)`` gives on another rank.
    """

    def __init__(self, data):
        if data is None or isinstance(data, (int, str)):  # bytes(128) would be that many zeros
            raise TypeError(f"A unique id is made of {NCCL_UNIQUE_ID_BYTES} bytes, not of {data!r:.50}.")
        cdef bytes given = bytes(data)
        if len(given) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(
                f"A unique id has {NCCL_UNIQUE_ID_BYTES} bytes, and this has {len(given)}.")
        memcpy(self._id.internal, <const char*> given, NCCL_UNIQUE_ID_BYTES)

    def __bytes__(self):
        return self._id.internal[:NCCL_UNIQUE_ID_BYTES]

    def __eq__(self, other):
        if type(other) is not UniqueId:
            return NotImplemented
        return memcmp(self._id.internal, (<UniqueId> other)._id.internal, NCCL_UNIQUE_ID_BYTES) == 0

    def __hash__(self):
        return hash(bytes(self))

    def __reduce__(self):
        return UniqueId, (bytes(self),)

    def __repr__(self):
        return f"<UniqueId {bytes(self)[:16].hex()}...>"


# ---- Configuration -------------------------------------------------------------------

# Each option's place in ncclConfig_t, and the first NCCL that has it.
cdef dict _config_fields():
    cdef ncclConfig_t c
    cdef char* start = <char*> &c
    return {
        "blocking": (<char*> &c.blocking - start, (2, 14)),
        "cga_cluster_size": (<char*> &c.cgaClusterSize - start, (2, 17)),
        "min_ctas": (<char*> &c.minCTAs - start, (2, 17)),
        "max_ctas": (<char*> &c.maxCTAs - start, (2, 17)),
        "net_name": (<char*> &c.netName - start, (2, 17)),
        "split_share": (<char*> &c.splitShare - start, (2, 18)),
        "traffic_class": (<char*> &c.trafficClass - start, (2, 26)),
        "comm_name": (<char*> &c.commName - start, (2, 27)),
        "collnet_enable": (<char*> &c.collnetEnable - start, (2, 27)),
        "cta_policy": (<char*> &c.CTAPolicy - start, (2, 27)),
        "shrink_share": (<char*> &c.shrinkShare - start, (2, 27)),
        "nvls_ctas": (<char*> &c.nvlsCTAs - start, (2, 27)),
        "n_channels_per_net_peer": (<char*> &c.nChannelsPerNetPeer - start, (2, 28)),
        "nvlink_centric_sched": (<char*> &c.nvlinkCentricSched - start, (2, 28)),
        "graph_usage_mode": (<char*> &c.graphUsageMode - start, (2, 29)),
        "num_rma_ctx": (<char*> &c.numRmaCtx - start, (2, 29)),
        "max_p2p_peers": (<char*> &c.maxP2pPeers - start, (2, 30)),
        "graph_stream_ordering": (<char*> &c.graphStreamOrdering - start, (2, 30, 7)),
        "launch_order_implicit": (<char*> &c.launchOrderImplicit - start, (2, 31)),
        "num_rma_sig": (<char*> &c.numRmaSig - start, (2, 31)),
        "rma_eager_init": (<char*> &c.rmaEagerInit - start, (2, 31)),
        "host_cft_mode": (<char*> &c.hostCftMode - start, (2, 31)),
        "nvls_host_mode": (<char*> &c.nvlsHostMode - start, (2, 32)),
    }

cdef dict CONFIG_FIELDS = _config_fields()

CONFIG_OPTIONS = tuple(CONFIG_FIELDS)


cdef ncclConfig_t config_of(dict options) except *:
    """Fill in what is given; texts must live in `options` until the communicator has copied them."""
    cdef ncclConfig_t config  # of C++: its fields are initialized
    cdef char* place
    # Its calls then return at once, and we wait for them as long as the timeout says.
    config.blocking = 0
    for name, value in options.items():
        if name not in CONFIG_FIELDS:
            raise TypeError(f"There is no option {name!r}. Options are {', '.join(CONFIG_OPTIONS)}.")
        offset, since = CONFIG_FIELDS[name]
        _require_version(f"The option {name}", since)
        place = <char*> &config + <Py_ssize_t> offset
        if name in ("net_name", "comm_name"):
            options[name] = _text_of(name, value)
            (<const char**> place)[0] = <const char*> options[name]
        else:
            (<int*> place)[0] = _number_of(name, value)
    # NCCL takes a maximum that is not given for less than any minimum, and one that is too large for its own.
    if config.minCTAs != NCCL_CONFIG_UNDEF_INT and config.maxCTAs == NCCL_CONFIG_UNDEF_INT:
        config.maxCTAs = INT_MAX
    return config


cdef bytes _text_of(str name, value):
    text = value.encode() if isinstance(value, str) else value
    if not isinstance(text, bytes) or b"\0" in text:
        raise TypeError(f"The option {name} must be a text without null characters, not {value!r:.50}.")
    return text


cdef int _number_of(str name, value) except? -1:
    try:
        return index(value)
    except (TypeError, OverflowError):
        raise TypeError(f"The option {name} must be an integer of 32 bits, not {value!r:.50}.") from None


cdef int _require_version(str what, tuple since) except -1:
    version = get_version()
    if version < since:
        raise BackendUnavailable(
            f"{what} came with NCCL {'.'.join(map(str, since))}, and this process has loaded "
            f"{'.'.join(map(str, version))}.\nUpgrade nvidia-nccl-cu12 or nvidia-nccl-cu13.")
    return 0


if get_version() < OLDEST_NCCL:
    raise BackendUnavailable(
        f"NCCL {'.'.join(map(str, get_version()))} is loaded, and "
        f"{'.'.join(map(str, OLDEST_NCCL))} is the oldest that works here. "
        "Upgrade nvidia-nccl-cu12 or nvidia-nccl-cu13.")
