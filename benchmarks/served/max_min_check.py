"""The check of seed PR #3, written anew to be measured: max and min of the table in every layer.

It calls ``.item()`` twice, and so waits for the device twice, in every attention layer of every
forward. It is off while a CUDA graph is captured, so it sees nothing in replays. It also checks
cells past a row's length. SGLang loads it as a plugin of its own, see ``measuring/servers.py``.
"""


def register() -> None:
    import torch
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend as Backend

    unchecked = Backend._get_layer_page_table

    def checked(self, layer, forward_batch):
        table = unchecked(self, layer, forward_batch)
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            pool = forward_batch.token_to_kv_pool
            pages = pool.get_key_buffer(layer.layer_id).shape[0] // self.page_size
            if table.numel() and (table.max().item() >= pages or table.min().item() < 0):
                raise RuntimeError(f"page table of layer {layer.layer_id} is out of range")
        return table

    Backend._get_layer_page_table = checked
