"""What a rehearsal runs: launches of a file on CPU processes, really sharded, and what can be seen of them.

`python -m accel_parallel.train.rehearse FOLDER` reads the tasks there and writes the facts beside them; it judges
nothing (`accel_parallel.rehearsal` does).
"""
