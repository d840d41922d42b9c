"""An SGLang plugin of the engine test: the server opens its port a second after SGLang's thread for
the warm-up was started, so that no chance decides which of them is first."""

import asyncio
import multiprocessing


def register():
    if multiprocessing.parent_process() is not None:
        return  # a scheduler or a detokenizer has no port
    from uvicorn.lifespan.on import LifespanOn

    startup = LifespanOn.startup

    async def late(self):
        await startup(self)
        await asyncio.sleep(1)

    LifespanOn.startup = late
