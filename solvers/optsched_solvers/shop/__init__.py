"""Solvers of job shops and job arrays: least makespan."""
