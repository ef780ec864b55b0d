import base64
import json
import os
import signal
import threading

import django

django.setup()

import boto3
from shop.settling import PAUSE, settle

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
sqs = boto3.client("sqs")
url = os.environ["QUEUE_URL"]


def body_of(message):
    """What was sent as it is, or what the outbox has sent in the envelope of kombu."""
    text = message["Body"]
    try:
        return base64.b64decode(json.loads(base64.b64decode(text, validate=True))["body"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.encode()


def receive(message):
    handle = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    redelivered = int(message["Attributes"]["ApproximateReceiveCount"]) > 1
    if settle(body_of(message), message["MessageId"], redelivered=redelivered):
        sqs.delete_message(**handle)
    else:  # a FIFO queue keeps the order: the rest of its group waits for this message
        sqs.change_message_visibility(**handle, VisibilityTimeout=PAUSE)


if __name__ == "__main__":
    while not stop.is_set():
        response = sqs.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=1,
            WaitTimeSeconds=5,
            AttributeNames=["ApproximateReceiveCount"],
        )
        for message in response.get("Messages", ()):
            receive(message)
