"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import argparse
import importlib
import os

NAMES = ("import_time", "fit_speed", "saving", "clipping")


def main() -> None:
    """Runs and prints; the exit status says whether all bounds were kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all by default")
    names = parser.parse_args().names or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(NAMES)}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    kept = [importlib.import_module(f"benchmarks.{name}").main() for name in names]
    raise SystemExit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
