"""Tests with several processes on one pool: sharing, killing, forking."""
