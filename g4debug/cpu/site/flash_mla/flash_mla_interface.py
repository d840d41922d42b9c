"""The plan of a decode, as SGLang hands it on to the kernel."""

from dataclasses import dataclass

import torch


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor
