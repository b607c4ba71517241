import importlib

import pytest
import torch


@pytest.fixture(params=["pytorch_lightning", "lightning.pytorch"])
def pl(request):
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """These nets are too small for threads, which only wait for each other where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
