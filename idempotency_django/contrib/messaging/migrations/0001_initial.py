from typing import Any

import idempotency_django.models
from django.db import migrations, models

# For the messages before and after one of a group.
ORDER = models.Index(
    fields=['group', 'source', 'state', 'id'], name='idempotency_inbox_order_idx'
)

# They lead to the dead letters, and cost other messages nothing.
DEAD = {
    'OutboxMessage': 'idempotency_outbox_dead_idx',
    'InboxMessage': 'idempotency_inbox_dead_idx',
}


def add_order(apps: Any, schema_editor: Any) -> None:
    """On PostgreSQL with an expression that the primary key cannot serve; see queue.Unkeyed."""
    if schema_editor.connection.vendor == 'postgresql':
        schema_editor.execute(
            f'CREATE INDEX {ORDER.name} ON idempotency_messaging_inboxmessage '
            '("group", source, state, (id + 0))'
        )
    else:
        schema_editor.add_index(apps.get_model('idempotency_messaging', 'InboxMessage'), ORDER)


def add_dead(apps: Any, schema_editor: Any) -> None:
    """In the database only: MySQL and MariaDB have no partial indexes, and an index declared on the
    model would make them warn. There, the index has all states.
    """
    partial = schema_editor.connection.features.supports_partial_indexes
    condition = models.Q(state='dead') if partial else None
    for model, name in DEAD.items():
        index = models.Index(fields=['state'], condition=condition, name=name)
        schema_editor.add_index(apps.get_model('idempotency_messaging', model), index)


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
            options={
                'verbose_name': 'outbox stream',
                'verbose_name_plural': 'outbox streams',
            },
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
                'permissions': [('reset_streamposition', 'Can reset the positions of streams')],
            },
        ),
        migrations.CreateModel(
            name='InboxMessage',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('source', idempotency_django.models.ExactCharField(max_length=150, verbose_name='source')),
                ('message_id', idempotency_django.models.ExactCharField(max_length=255, verbose_name='message id')),
                ('type', models.CharField(blank=True, default='', max_length=255, verbose_name='type')),
                ('group', idempotency_django.models.ExactCharField(blank=True, default='', max_length=255, verbose_name='group')),
                ('headers', models.TextField(blank=True, default='[]', verbose_name='headers')),
                ('body', models.BinaryField(verbose_name='body')),
                ('digest', idempotency_django.models.ExactCharField(max_length=64, verbose_name='digest')),
                ('unique_digest', idempotency_django.models.ExactCharField(blank=True, max_length=64, null=True, verbose_name='unique digest')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('done', 'done'), ('dead', 'dead'), ('discarded', 'discarded'), ('external', 'left to others')], default='pending', max_length=16, verbose_name='state')),
                ('attempts', models.PositiveIntegerField(default=0, verbose_name='attempts')),
                ('process_after', models.DateTimeField(blank=True, null=True, verbose_name='process after')),
                ('ended', models.PositiveIntegerField(db_default=0, default=0, verbose_name='last attempt that ended')),
                ('fingerprint', idempotency_django.models.ExactCharField(blank=True, default='', max_length=64, verbose_name='fingerprint')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('is_suspect', models.BooleanField(db_default=False, default=False, verbose_name='must be accepted')),
                ('received_at', models.DateTimeField(verbose_name='received')),
                ('processed_at', models.DateTimeField(blank=True, null=True, verbose_name='processed')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
            ],
            options={
                'verbose_name': 'inbox message',
                'verbose_name_plural': 'inbox messages',
                'permissions': [('view_body', 'Can see the bodies, headers and errors of inbox messages'), ('settle_message', 'Can retry, discard, accept and reprocess inbox messages')],
                'indexes': [models.Index(fields=['process_after'], name='idempotency_inbox_due_idx'), models.Index(fields=['purge_at'], name='idempotency_inbox_purge_idx'), models.Index(fields=['received_at'], name='idempotency_inbox_received_idx')],
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
                ('is_base64', models.BooleanField(db_default=False, default=False, verbose_name='payload is Base64')),
                ('headers', models.TextField(blank=True, default='{}', verbose_name='headers')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('done', 'done'), ('dead', 'dead'), ('discarded', 'discarded'), ('external', 'left to others')], default='pending', max_length=16, verbose_name='state')),
                ('attempts', models.PositiveIntegerField(default=0, verbose_name='attempts')),
                ('process_after', models.DateTimeField(blank=True, null=True, verbose_name='process after')),
                ('token', idempotency_django.models.ExactCharField(blank=True, default='', max_length=32, verbose_name='owner token')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('caused_by', idempotency_django.models.ExactCharField(blank=True, default='', max_length=511, verbose_name='caused by')),
                ('dedup', idempotency_django.models.ExactCharField(blank=True, max_length=64, null=True, unique=True, verbose_name='dedup id')),
                ('dedup_until', models.DateTimeField(blank=True, null=True, verbose_name='window ends')),
                ('created_at', models.DateTimeField(verbose_name='created')),
                ('sent_at', models.DateTimeField(blank=True, null=True, verbose_name='sent')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
            ],
            options={
                'verbose_name': 'outbox message',
                'verbose_name_plural': 'outbox messages',
                'permissions': [('view_outbox_payload', 'Can see the payloads of outbox messages'), ('settle_outbox', 'Can retry, discard and resend outbox messages')],
                'indexes': [models.Index(fields=['process_after'], name='idempotency_outbox_due_idx'), models.Index(fields=['stream', 'state', 'sequence'], name='idempotency_outbox_order_idx'), models.Index(fields=['purge_at'], name='idempotency_outbox_purge_idx'), models.Index(fields=['caused_by'], name='idempotency_outbox_cause_idx')],
            },
        ),
        # MySQL and MariaDB change no tables within transactions. Going back deletes the tables.
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunPython(
                    add_order,
                    migrations.RunPython.noop,
                    atomic=False,
                    hints={'model_name': 'inboxmessage'},
                ),
            ],
            state_operations=[migrations.AddIndex('InboxMessage', ORDER)],
        ),
        migrations.RunPython(
            add_dead,
            migrations.RunPython.noop,
            atomic=False,
            hints={'model_name': 'inboxmessage'},
        ),
    ]
