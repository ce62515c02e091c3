"""A loop with DeepSpeed's ZeRO on CPUs: two microbatches a step, clipping. By torchrun, one process or several.

`--stage 2`: ZeRO's stage. `--wrong division`: losses of microbatches are summed, not averaged; `clip`: ten times the
norm; `rate`: a rate times the ranks; `rows`: all ranks take the first rank's rows.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

stage, wrong = int(sys.argv[sys.argv.index("--stage") + 1]), sys.argv[-1]
deepspeed.init_distributed(dist_backend="gloo")
rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
config = {
    "train_micro_batch_size_per_gpu": 8 // world,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0 if wrong == "clip" else 0.1,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (world if wrong == "rate" else 1), momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(16, 16, generator=generator), torch.randint(0, 8, (16,), generator=generator)
    for number in range(2):
        own, labels = (part.chunk(2)[number].chunk(world)[0 if wrong == "rows" else rank] for part in (x, y))
        loss = nn.functional.cross_entropy(engine(own), labels)
        engine.backward(loss, scale_wrt_gas=wrong != "division")
        engine.step()
engine.destroy()
torch.distributed.destroy_process_group()
