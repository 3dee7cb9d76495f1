"""Save a checkpoint while the kernel lets no file grow beyond a few kilobytes: the process dies in the middle of it."""

import resource
import signal
import sys

import torch

from hydra_parallelism import save

model = torch.nn.Linear(64, 64)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python makes an error of it
save(sys.argv[1], model, extra={"step": 2}, overwrite=True)
