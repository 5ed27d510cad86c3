"""The problem classes: immutable values that know their graph, their bound and their objective."""
