import importlib

import idempotency_django.models
from django.db import migrations, models

restore_index = importlib.import_module('idempotency_django.migrations.0002_leases_and_steps').restore_index

# Finds what an operation has caused. Made in the database only, like that of the leases.
CAUSES = models.Index(
    fields=['caused_by'],
    condition=~models.Q(caused_by=''),
    name='idempotency_caused_by_idx',
)


class Migration(migrations.Migration):

    dependencies = [
        ('idempotency_django', '0003_answers_and_pins'),
    ]

    operations = [
        migrations.AddField(
            model_name='idempotencykey',
            name='caused_by',
            field=idempotency_django.models.ExactCharField(blank=True, db_default='', default='', max_length=511, verbose_name='caused by'),
        ),
        migrations.RunPython(restore_index, migrations.RunPython.noop),
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.AddIndex('IdempotencyKey', CAUSES)],
        ),
    ]
