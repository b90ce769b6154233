"""Imported once by a pool's fork server; nothing here may start threads or touch a process group."""

import accelerate  # noqa: F401
import torch
import torch._dynamo  # building an optimizer imports it: a second in each worker
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict  # noqa: F401

import accel_parallel.train.checkpoint.reader
import accel_parallel.train.session  # noqa: F401
