"""Clusters, their hosts, links and states, and rules for choices."""
