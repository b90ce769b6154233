"""`python -m accel_parallel` is `accel-parallel`."""

from accel_parallel.cli import main

if __name__ == "__main__":
    main()
