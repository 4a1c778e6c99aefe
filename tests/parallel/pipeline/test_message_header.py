"""The header of what stages of a pipeline send each other."""

import pytest

from ferro_dist.parallel.pipeline.message_header import (
    HEADER_NBYTES,
    ROOM_NBYTES,
    Header,
    MessageKind,
    PipelineCall,
    RunId,
)

RUN = RunId(7, PipelineCall.FORWARD)


@pytest.mark.parametrize("nbytes", [0, 1, ROOM_NBYTES, ROOM_NBYTES + 1])
def test_header_comes_back_with_what_fits_of_the_description(nbytes: int) -> None:
    description = b"x" * nbytes
    header = Header(RUN, MessageKind.GRADIENT, 3, 4, 5, 6, True, nbytes)
    packed = header.pack(description)
    assert packed.nbytes == HEADER_NBYTES
    assert Header.unpack(packed) == (header, description[:ROOM_NBYTES])


def test_header_alone_is_a_message() -> None:
    header = Header(RUN, MessageKind.ABORT)
    assert Header.unpack(header.pack()) == (header, b"")


def test_another_call_is_refused() -> None:
    RUN.check(RunId(7, PipelineCall.FORWARD), peer=1)
    with pytest.raises(RuntimeError, match=r"rank 1 has called step\(\), its run 8"):
        RUN.check(RunId(8, PipelineCall.STEP), peer=1)
