"""Fixtures of the tests against other libraries, which may be missing: every test file skips then, with the reason."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared and the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
