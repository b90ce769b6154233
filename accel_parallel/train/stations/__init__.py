"""What each key of an accelerate YAML file becomes, from the file over the launcher to a worker's state.

Nothing is known here about any key: a copy of the file in which one value is another goes through Accelerate's own code
(1.15), and what then differs is what the key does. A key whose every change leaves the processes and their state as
they were is dead.
"""

from accel_parallel.train.stations.keys import Station, stations
from accel_parallel.train.stations.launcher import Launch, launched, processes_started
from accel_parallel.train.stations.worker import state_of

__all__ = ["Launch", "Station", "launched", "processes_started", "state_of", "stations"]
