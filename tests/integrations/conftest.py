"""Fixtures of the tests against other libraries, which may be missing: every test file skips then, with the reason."""

from one_thread import one_thread  # noqa: F401
