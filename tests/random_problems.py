"""Random problems of the library, under the name by which tests know them."""

from optsched.testing.random_problems import *  # noqa: F403
