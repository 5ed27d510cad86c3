"""The one place that holds the version."""

__version__ = "0.1.0"

_LIBRARIES = (
    "numpy", "msgspec", "numba", "ortools", "typer", "joblib", "torch", "safetensors",
    "transformers", "peft", "scikit-learn", "matplotlib", "pandas", "optuna", "fastapi", "dask",
)  # fmt: skip


def show_versions() -> None:
    """Print the versions of optsched, Python and the libraries that it uses, for a bug report.

    Examples
    --------
    >>> optsched.show_versions()  # doctest: +ELLIPSIS
    optsched      0...
    python        3...
    """
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    rows = {
        "optsched": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
    }
    for name in _LIBRARIES:
        try:
            rows[name] = version(name)
        except PackageNotFoundError:
            rows[name] = "not installed"
    print("\n".join(f"{name:13} {value}" for name, value in rows.items()))
