"""An SGLang plugin of the engine test: breaks page tables while a file with that name exists.

`wrong-draft`: the assistant reads the pages of its neighbour in the batch.
`out-of-range`: the target reads a page that does not exist.
"""

import os
from pathlib import Path


def register():
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend as Backend

    folder = Path(os.environ["MEDDLER_FLAGS"])
    real = Backend._get_layer_page_table

    def meddle(self, layer, forward_batch):
        table = real(self, layer, forward_batch)
        draft = type(forward_batch.spec_info).__name__ == "FrozenKVMTPDraftInput"
        if draft and (folder / "wrong-draft").exists():
            return table.roll(1, 0)
        if not draft and (folder / "out-of-range").exists():
            table = table.clone()
            table[0, 0] = 10**6
        return table

    Backend._get_layer_page_table = meddle
