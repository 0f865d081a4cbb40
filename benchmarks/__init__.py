"""How fast the library is, as ratios against a peer measured in the same run.

    python -m benchmarks                  # all
    python -m benchmarks fit_speed        # one

These machines are noisy: only ratios of medians count. Each line shows the bound that the ratio should keep.
"""
