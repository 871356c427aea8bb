"""Single modules of other trainers where their distributions are installed (make test-peers), without the rest.

Importing the packages would need ray, deepspeed and flash-attn. What a module imports but its log-probs never touch is
stubbed while it loads; flash-attn counts as missing, so that the peers' own PyTorch code answers.
"""

import importlib.metadata
import importlib.util
import inspect
import sys
import types
from unittest.mock import MagicMock

import pytest


class _Stub(types.ModuleType):
    """A module that has every public attribute."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def load(distribution, path, stubs=()):
    """The module at `path` of an installed distribution; skips the caller where there is none."""
    try:
        file = importlib.metadata.distribution(distribution).locate_file(path)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed (make test-peers)")
    spec = importlib.util.spec_from_file_location("peer_" + path.removesuffix(".py").replace("/", "_"), file)
    module = importlib.util.module_from_spec(spec)
    # Not patch.dict, which would also forget every other module that is first imported meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        for name in stubs:
            patch.setitem(sys.modules, name, _Stub(name))
        patch.setitem(sys.modules, "flash_attn", None)
        spec.loader.exec_module(module)
    return module


def parameters(function):
    """(name, kind, default) of each, without annotations."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
