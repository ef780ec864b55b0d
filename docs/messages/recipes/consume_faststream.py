import asyncio
import os

import django

django.setup()

from asgiref.sync import sync_to_async
from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitMessage, RabbitQueue
from shop.settling import PAUSE, settle

broker = RabbitBroker(os.environ["BROKER_URL"], default_channel=Channel(prefetch_count=1))
app = FastStream(broker)
queue = RabbitQueue("billing", queue_type=QueueType.QUORUM, durable=True)


def undecoded(message: RabbitMessage) -> bytes:
    return message.body  # what it says is for settle() to judge


@broker.subscriber(queue, ack_policy=AckPolicy.MANUAL, decoder=undecoded)
async def receive(message: RabbitMessage) -> None:
    redelivered = bool(message.raw_message.redelivered)
    while not await sync_to_async(settle)(message.body, "billing", redelivered=redelivered):
        redelivered = True
        await asyncio.sleep(PAUSE)
    await message.ack()  # what it asked for is committed


if __name__ == "__main__":
    asyncio.run(app.run())
