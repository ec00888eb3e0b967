"""What a cache of some size would find under some policy: requests of a trace replayed, with no bytes behind them."""
