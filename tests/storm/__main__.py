"""``python -m tests.storm --requests 100000 --seed 7``."""

from tests.storm.command import main

main()
