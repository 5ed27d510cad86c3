"""Random subset choices; see `optsched.testing.subset_problems`."""

from optsched.testing.subset_problems import *  # noqa: F403
