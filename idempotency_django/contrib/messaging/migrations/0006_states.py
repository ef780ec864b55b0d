from typing import Any

import idempotency_django.models
from django.db import migrations, models
from django.db.models import F

NO_HANDLER = 'There is no handler for its type.'
UNTOLD = {
    'held': (
        'There is another message with this id or this body. Accept it if the sender says that '
        'both are genuine.'
    ),
    'parked': 'Its attempts were used up.',
    'blocked': 'Its attempts were used up.',
}
"""What is said of messages that had no error."""

# They lead to the dead letters, and cost other messages nothing. They are made in the database only:
# MySQL and MariaDB have no partial indexes, and an index declared on the model would make them warn.
# There, the index has all states. (`0004_stopped` made those before them.)
BEFORE = {
    'OutboxMessage': ('idempotency_outbox_stopped_idx', models.Q(state='blocked')),
    'InboxMessage': (
        'idempotency_inbox_stopped_idx', models.Q(state='parked') | models.Q(state='held')
    ),
}
AFTER = {
    'OutboxMessage': ('idempotency_outbox_dead_idx', models.Q(state='dead')),
    'InboxMessage': ('idempotency_inbox_dead_idx', models.Q(state='dead')),
}


def adder(indexes: dict[str, tuple[str, models.Q]]) -> Any:
    def add(apps: Any, schema_editor: Any) -> None:
        partial = schema_editor.connection.features.supports_partial_indexes
        for model, (name, condition) in indexes.items():
            index = models.Index(
                fields=['state'], condition=condition if partial else None, name=name
            )
            schema_editor.add_index(apps.get_model('idempotency_messaging', model), index)

    return add


def remover(indexes: dict[str, tuple[str, models.Q]]) -> Any:
    def remove(apps: Any, schema_editor: Any) -> None:
        for model, (name, _condition) in indexes.items():
            index = models.Index(fields=['state'], name=name)
            schema_editor.remove_index(apps.get_model('idempotency_messaging', model), index)

    return remove


def rows(apps: Any, schema_editor: Any, model: str) -> Any:
    manager = apps.get_model('idempotency_messaging', model)._default_manager
    return manager.using(schema_editor.connection.alias)


def rename(apps: Any, schema_editor: Any) -> None:
    inbox, outbox = (rows(apps, schema_editor, name) for name in ('InboxMessage', 'OutboxMessage'))
    for of, names in ((inbox, ('held', 'parked')), (outbox, ('blocked',))):
        for state in names:
            of.filter(state=state, error='').update(error=UNTOLD[state])
    inbox.update(ended=F('attempts'))
    # Such a message held up no other one of its group. It has its group again once it is accepted.
    inbox.filter(state='held').update(state='dead', is_suspect=True, group='')
    inbox.filter(state='parked').update(state='dead')
    inbox.filter(state='handled').update(state='done')
    inbox.filter(state='ignored').update(state='discarded', error=NO_HANDLER)
    outbox.filter(state='sent').update(state='done')
    outbox.filter(state='blocked').update(state='dead')
    outbox.filter(state='skipped').update(state='discarded')
    outbox.filter(state='left').update(state='external')


def rename_back(apps: Any, schema_editor: Any) -> None:
    inbox, outbox = (rows(apps, schema_editor, name) for name in ('InboxMessage', 'OutboxMessage'))
    inbox.filter(state='dead', is_suspect=True).update(state='held')
    inbox.filter(state='dead').update(state='parked')
    inbox.filter(state='done').update(state='handled')
    inbox.filter(state='discarded').update(state='ignored', error='')
    outbox.filter(state='done').update(state='sent')
    outbox.filter(state='dead').update(state='blocked')
    outbox.filter(state='discarded').update(state='skipped')
    outbox.filter(state='external').update(state='left')


STATES = [
    ('pending', 'pending'),
    ('done', 'done'),
    ('dead', 'dead'),
    ('discarded', 'discarded'),
    ('external', 'left to others'),
]


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_messaging', '0005_queue'),
    ]

    operations = [
        # MySQL and MariaDB change no tables within transactions. SQLite makes a table anew where it
        # gets a column, without the indexes that no model declares.
        migrations.RunPython(
            remover(BEFORE), adder(BEFORE), atomic=False, hints={'model_name': 'inboxmessage'}
        ),
        migrations.AddField(
            model_name='inboxmessage',
            name='is_suspect',
            field=models.BooleanField(
                db_default=False, default=False, verbose_name='must be accepted'
            ),
        ),
        migrations.AddField(
            model_name='inboxmessage',
            name='ended',
            field=models.PositiveIntegerField(
                db_default=0, default=0, verbose_name='last attempt that ended'
            ),
        ),
        migrations.AddField(
            model_name='inboxmessage',
            name='fingerprint',
            field=idempotency_django.models.ExactCharField(
                blank=True, default='', max_length=64, verbose_name='fingerprint'
            ),
        ),
        migrations.RunPython(rename, rename_back, hints={'model_name': 'inboxmessage'}),
        migrations.RunPython(
            adder(AFTER), remover(AFTER), atomic=False, hints={'model_name': 'inboxmessage'}
        ),
        *(
            migrations.AlterField(
                model_name=name,
                name='state',
                field=models.CharField(
                    choices=STATES, default='pending', max_length=16, verbose_name='state'
                ),
            )
            for name in ('inboxmessage', 'outboxmessage')
        ),
        migrations.AlterModelOptions(
            name='inboxmessage',
            options={
                'permissions': [
                    ('view_body', 'Can see the bodies, headers and errors of inbox messages'),
                    (
                        'settle_message',
                        'Can retry, discard, accept and reprocess inbox messages',
                    ),
                ],
                'verbose_name': 'inbox message',
                'verbose_name_plural': 'inbox messages',
            },
        ),
        migrations.AlterModelOptions(
            name='outboxmessage',
            options={
                'permissions': [
                    ('view_outbox_payload', 'Can see the payloads of outbox messages'),
                    ('settle_outbox', 'Can retry, discard and resend outbox messages'),
                ],
                'verbose_name': 'outbox message',
                'verbose_name_plural': 'outbox messages',
            },
        ),
    ]
