"""What a number of measurements says of a share, of a quantile and of the difference of two sides, and how surely.

::

    evidence.py   what two sides answered, as arrays        distributions.py  quantiles of distributions
    rates.py      bounds on shares                          blocks.py         resampling in blocks
    memory.py     how far requests depend on each other     slowdown.py       how much slower a quantile is
"""
