"""A fixture for tests whose models are tiny."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared and the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
