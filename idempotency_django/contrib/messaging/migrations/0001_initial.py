from typing import Any

import idempotency_django.models
from django.db import migrations, models

# Made in the database only: MySQL and MariaDB have no partial indexes, and an index declared on the
# model would make them warn. There, and on SQLite, whose planner does not see what a condition
# implies, an index has all rows. A message that is done is in none of the queue's indexes else.
UNFINISHED = "state IN ('pending', 'dead')"
QUEUE = [
    # Leads to what is due.
    ('due', ['process_after'], 'process_after IS NOT NULL'),
    # Counts what waits, by topic or source, and knows the oldest; the admin finds what was discarded.
    # Its condition keeps PostgreSQL from it when it looks for the next message of a group, where this
    # index would lead to all that wait.
    ('waiting', ['state', '{place}', '{since}'], "state <> 'done' AND {place} > ''"),
    ('purge', ['purge_at'], 'purge_at IS NOT NULL'),
    # Finds what an operation has caused.
    ('cause', ['caused_by'], "caused_by > ''"),
]
OUTBOX = [
    *QUEUE,
    # Finds the messages before and after one of a group.
    ('order', ['state', 'stream', 'sequence'], f"{UNFINISHED} AND stream > ''"),
    # Knows whether a group has any messages. PostgreSQL could take a group for rare that it does not
    # know yet, and prefer an index of its name only to that of the order.
    ('stream', ['stream', 'state', 'sequence'], "stream > ''"),
]
COLUMNS = {
    'inbox': {'place': 'source', 'since': 'received_at'},
    'outbox': {'place': 'topic', 'since': 'created_at'},
}


def add_indexes(apps: Any, schema_editor: Any) -> None:
    is_partial = schema_editor.connection.vendor == 'postgresql'
    for table, indexes in (('inbox', QUEUE), ('outbox', OUTBOX)):
        for name, columns, condition in indexes:
            named = [column.format(**COLUMNS[table]) for column in columns]
            where = f' WHERE {condition}'.format(**COLUMNS[table]) if is_partial else ''
            schema_editor.execute(
                f'CREATE INDEX idempotency_{table}_{name}_idx '
                f'ON idempotency_messaging_{table}message ({", ".join(named)}){where}'
            )


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='OutboxStream',
            fields=[
                ('stream', idempotency_django.models.ExactCharField(max_length=255, primary_key=True, serialize=False, verbose_name='stream')),
                ('last_sequence', models.BigIntegerField(default=0, verbose_name='last sequence')),
            ],
        ),
        migrations.CreateModel(
            name='StreamPosition',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('stream', idempotency_django.models.ExactCharField(max_length=255, unique=True, verbose_name='stream')),
                ('epoch', models.BigIntegerField(default=0, verbose_name='epoch')),
                ('position', models.BigIntegerField(default=-1, verbose_name='position')),
                ('updated_at', models.DateTimeField(verbose_name='updated')),
            ],
            options={
                'verbose_name': 'stream position',
                'verbose_name_plural': 'stream positions',
            },
        ),
        migrations.CreateModel(
            name='RunningProcess',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=255, verbose_name='name')),
                ('process', models.CharField(max_length=255, verbose_name='process')),
                ('started_at', models.DateTimeField(verbose_name='started')),
                ('beat_at', models.DateTimeField(verbose_name='last sign of life')),
            ],
            options={
                'verbose_name': 'running process',
                'verbose_name_plural': 'running processes',
            },
        ),
        migrations.CreateModel(
            name='InboxMessage',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('source', idempotency_django.models.ExactCharField(max_length=150, verbose_name='source')),
                ('message_id', idempotency_django.models.ExactCharField(max_length=255, verbose_name='message id')),
                ('type', models.CharField(blank=True, default='', max_length=255, verbose_name='type')),
                ('headers', models.TextField(blank=True, default='[]', verbose_name='headers')),
                ('body', models.BinaryField(verbose_name='body')),
                ('digest', idempotency_django.models.ExactCharField(max_length=64, verbose_name='digest')),
                ('unique_digest', idempotency_django.models.ExactCharField(blank=True, max_length=64, null=True, verbose_name='unique digest')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('done', 'done'), ('dead', 'dead'), ('discarded', 'discarded')], default='pending', max_length=16, verbose_name='state')),
                ('attempts', models.PositiveIntegerField(default=0, verbose_name='attempts')),
                ('process_after', models.DateTimeField(blank=True, null=True, verbose_name='process after')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('caused_by', idempotency_django.models.ExactCharField(blank=True, default='', max_length=511, verbose_name='caused by')),
                ('received_at', models.DateTimeField(verbose_name='received')),
                ('processed_at', models.DateTimeField(blank=True, null=True, verbose_name='processed')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
            ],
            options={
                'verbose_name': 'inbox message',
                'verbose_name_plural': 'inbox messages',
                'permissions': [('view_body', 'Can see the bodies, headers and errors of inbox messages'), ('settle_message', 'Can retry, discard and reprocess inbox messages')],
                'constraints': [models.UniqueConstraint(fields=('source', 'message_id'), name='idempotency_inbox_message_uniq'), models.UniqueConstraint(fields=('unique_digest', 'source'), name='idempotency_inbox_digest_uniq')],
            },
        ),
        migrations.CreateModel(
            name='OutboxMessage',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('message_id', idempotency_django.models.ExactCharField(max_length=255, unique=True, verbose_name='message id')),
                ('topic', idempotency_django.models.ExactCharField(max_length=100, verbose_name='topic')),
                ('stream', idempotency_django.models.ExactCharField(blank=True, default='', max_length=255, verbose_name='stream')),
                ('sequence', models.BigIntegerField(default=0, verbose_name='sequence')),
                ('type', models.CharField(max_length=255, verbose_name='type')),
                ('group', idempotency_django.models.ExactCharField(blank=True, default='', max_length=255, verbose_name='group')),
                ('payload', models.TextField(verbose_name='payload')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('done', 'done'), ('dead', 'dead'), ('discarded', 'discarded')], default='pending', max_length=16, verbose_name='state')),
                ('attempts', models.PositiveIntegerField(default=0, verbose_name='attempts')),
                ('process_after', models.DateTimeField(blank=True, null=True, verbose_name='process after')),
                ('token', idempotency_django.models.ExactCharField(blank=True, default='', max_length=32, verbose_name='owner token')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('caused_by', idempotency_django.models.ExactCharField(blank=True, default='', max_length=511, verbose_name='caused by')),
                ('dedup', idempotency_django.models.ExactCharField(blank=True, max_length=64, null=True, unique=True, verbose_name='dedup id')),
                ('created_at', models.DateTimeField(verbose_name='created')),
                ('sent_at', models.DateTimeField(blank=True, null=True, verbose_name='sent')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
            ],
            options={
                'verbose_name': 'outbox message',
                'verbose_name_plural': 'outbox messages',
                'permissions': [('view_outbox_payload', 'Can see the payloads of outbox messages'), ('settle_outbox', 'Can retry, discard and resend outbox messages')],
            },
        ),
        # MySQL and MariaDB change no tables within transactions. Going back deletes the tables.
        migrations.RunPython(
            add_indexes,
            migrations.RunPython.noop,
            atomic=False,
            hints={'model_name': 'inboxmessage'},
        ),
    ]
