import os
import signal
import time

import django

django.setup()

import kombu
from kombu.mixins import ConsumerMixin
from shop.settling import PAUSE, settle

queue = kombu.Queue("billing", queue_arguments={"x-queue-type": "quorum"})


class Worker(ConsumerMixin):
    def __init__(self, connection):
        self.connection = connection
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *args):
        self.should_stop = True  # after the message in hand

    def get_consumers(self, Consumer, channel):
        return [Consumer([queue], on_message=self.receive, prefetch_count=1)]

    def receive(self, message):
        body = message.body if isinstance(message.body, bytes) else str(message.body).encode()
        redelivered = bool(message.delivery_info.get("redelivered"))
        while not settle(body, "billing", redelivered=redelivered):
            if self.should_stop:
                return  # not acknowledged: the broker delivers it again
            redelivered = True
            time.sleep(PAUSE)
        message.ack()  # what it asked for is committed

    def on_decode_error(self, message, error):
        self.receive(message)  # as it came: it is no event, and becomes a dead letter


if __name__ == "__main__":
    options = {"visibility_timeout": 60}  # of Redis: until it delivers a dead process' message
    with kombu.Connection(os.environ["BROKER_URL"], transport_options=options) as connection:
        Worker(connection).run()
