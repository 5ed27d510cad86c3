"""Routing: which server, width and batch every request of a slimmable network gets."""

from optsched.problems.routing.problem import Contention, Link, Routing, Server

__all__ = ["Contention", "Link", "Routing", "Server"]
