import os
import signal
import threading

import django

django.setup()

import confluent_kafka
from shop.settling import PAUSE, settle

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
client = confluent_kafka.Consumer(
    {
        "bootstrap.servers": os.environ["KAFKA_SERVERS"],
        "group.id": "billing",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "max.poll.interval.ms": 600_000,  # longer than the slowest handler and its retries
    }
)
new = set()  # partitions whose first message the process before us may have begun


def assigned(_, partitions):
    new.update((each.topic, each.partition) for each in partitions)


def receive(message):
    partition = message.topic(), message.partition()
    redelivered = partition in new
    new.discard(partition)
    place = f"{partition[0]}/{partition[1]}/{message.offset()}"
    while not settle(message.value() or b"", place, redelivered=redelivered):
        redelivered = True
        if stop.wait(PAUSE):
            return  # its offset is not committed: it is delivered again
    try:
        client.commit(message=message, asynchronous=False)
    except confluent_kafka.KafkaException as error:
        print("The partition has another owner, which finds a duplicate:", error)


if __name__ == "__main__":
    client.subscribe(["billing"], on_assign=assigned)
    while not stop.is_set():
        message = client.poll(1)
        if message is not None and message.error() is None:
            receive(message)
    client.close()
