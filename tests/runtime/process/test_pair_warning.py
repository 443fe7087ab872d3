"""Of what torch prints, only its warning of a communicator for two ranks is dropped; no result, no error is."""

import warnings

import pytest

from auto3d.runtime.process.world import without_pair_warning


def warn(message: str) -> int:
    warnings.warn(message, stacklevel=1)
    return 3


def test_only_the_warning_of_a_pair_is_dropped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_pair_warning(lambda: warn("An unbatched P2P op (send/recv) was called on this group")) == 3
    with pytest.warns(UserWarning, match="another one"):
        assert without_pair_warning(lambda: warn("another one")) == 3


def test_an_error_passes_unchanged():
    error = ConnectionResetError("a peer is gone")

    def fail() -> None:
        raise error

    with pytest.raises(ConnectionResetError) as raised:
        without_pair_warning(fail)
    assert raised.value is error
