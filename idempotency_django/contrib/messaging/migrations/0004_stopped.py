from typing import Any

from django.db import migrations, models

# They lead to the messages that wait for an operator, and cost those that do not nothing. They are
# made in the database only: MySQL and MariaDB have no partial indexes, and an index declared on the
# model would make them warn. There, the index has all states.
STATES = {
    'OutboxMessage': ('idempotency_outbox_stopped_idx', models.Q(state='blocked')),
    'InboxMessage': (
        'idempotency_inbox_stopped_idx', models.Q(state='parked') | models.Q(state='held')
    ),
}


def add(apps: Any, schema_editor: Any) -> None:
    partial = schema_editor.connection.features.supports_partial_indexes
    for model, (name, condition) in STATES.items():
        index = models.Index(fields=['state'], condition=condition if partial else None, name=name)
        schema_editor.add_index(apps.get_model('idempotency_messaging', model), index)


def remove(apps: Any, schema_editor: Any) -> None:
    for model, (name, _condition) in STATES.items():
        index = models.Index(fields=['state'], name=name)
        schema_editor.remove_index(apps.get_model('idempotency_messaging', model), index)


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_messaging', '0003_outbox'),
    ]

    operations = [
        # MySQL and MariaDB change no tables within transactions.
        migrations.RunPython(add, remove, atomic=False, hints={'model_name': 'inboxmessage'}),
    ]
