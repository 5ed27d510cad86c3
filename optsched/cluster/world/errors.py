"""What can go wrong in a simulation by the fault of a policy."""

from __future__ import annotations

from optsched.errors import InputError


class PolicyError(InputError):
    """A decision that breaks a rule; the message names the job and the rule."""


class Stalled(InputError):
    """Jobs are pending for ever.

    Nothing runs and no event is left that could change it; or those that are started are always
    stopped before they get anywhere.
    """
