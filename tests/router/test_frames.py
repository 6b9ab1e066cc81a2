"""What a connection's bytes come to; no connection."""

from router import frames
from router.frames import Frames, Kind


def test_frames_come_out_of_any_pieces() -> None:
    """Byte by byte, all at once, and none after one that is too long."""
    heard: list[tuple[int, int, bytes]] = []

    class Transport:
        aborted = False

        def is_closing(self) -> bool:
            """Whether it was aborted."""
            return self.aborted

        def abort(self) -> None:
            """It was."""
            self.aborted = True

    class Seen(Frames):
        def heard(self, kind: int, number: int, payload: bytes) -> None:
            """Notes it."""
            heard.append((kind, number, payload))

    said = [(Kind.ASK, 2**40, b"abc"), (Kind.PING, 0, b""), (Kind.ANSWER, 7, b"x" * 300)]
    stream = b"".join(frames._HEAD.pack(len(p), kind, n) + p for kind, n, p in said)
    for size in (1, 7, len(stream)):
        heard.clear()
        seen = Seen(most=300)
        seen.transport = Transport()  # type: ignore[assignment]
        for at in range(0, len(stream), size):
            seen.data_received(stream[at : at + size])
        assert heard == said
    seen.data_received(frames._HEAD.pack(301, 1, 1) + b"y" * 301 + stream)
    assert heard == said
    assert seen.transport.is_closing()
