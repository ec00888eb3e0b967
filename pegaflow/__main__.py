"""``python -m pegaflow``: the command ``pegaflow``, for where the environment's scripts are not on the path."""

from pegaflow.cli import main

if __name__ == "__main__":
    main()
