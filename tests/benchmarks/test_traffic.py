"""Bytes a logit, counted: 4 for our kernels, where the peers' two launches move 6."""

import pytest

from benchmarks import traffic

pytest.importorskip("triton")


def test_bytes_of_a_logit():
    counted = traffic.counted()
    assert counted["triton"]["device"] == pytest.approx(4, abs=0.01)
    assert counted["triton"]["asked"] == pytest.approx(6, abs=0.01)  # the second sweep of a row finds it in L2
    if "cuda" in counted:
        assert counted["cuda"]["device"] == counted["cuda"]["asked"] == 4
    for peer in {"trl", "liger"} & counted.keys():
        assert counted[peer]["device"] == pytest.approx(6, abs=0.05), peer
