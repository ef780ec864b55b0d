import django.db.models.deletion
import idempotency_django.models
from django.db import migrations, models

# Made in the database only: MySQL and MariaDB have no partial indexes, and an index declared on the
# model would make them warn.
PARTIAL = [
    # Finds what is in progress outside a transaction.
    models.Index(
        fields=['lease_expires_at'],
        condition=models.Q(lease_expires_at__isnull=False),
        name='idempotency_leases_idx',
    ),
    # Finds what an operation has caused.
    models.Index(
        fields=['caused_by'],
        condition=~models.Q(caused_by=''),
        name='idempotency_caused_by_idx',
    ),
]


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='IdempotencyKey',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('key', idempotency_django.models.ExactCharField(max_length=255, verbose_name='key')),
                ('scope', idempotency_django.models.ExactCharField(max_length=255, verbose_name='scope')),
                ('operation', models.CharField(max_length=255, verbose_name='operation')),
                ('fingerprint', idempotency_django.models.ExactCharField(max_length=64, verbose_name='fingerprint')),
                ('status', models.CharField(choices=[('in_progress', 'in progress'), ('completed', 'completed'), ('failed', 'failed')], max_length=16, verbose_name='status')),
                ('attempt', models.PositiveIntegerField(default=1, verbose_name='attempt')),
                ('owner_token', idempotency_django.models.ExactCharField(max_length=32, verbose_name='owner token')),
                ('lease_expires_at', models.DateTimeField(blank=True, null=True, verbose_name='lease ends')),
                ('hold', models.BooleanField(db_default=False, default=False, verbose_name='held when interrupted')),
                ('pinned', models.BooleanField(db_default=False, default=False, verbose_name='kept for its request')),
                ('response_status', models.PositiveSmallIntegerField(blank=True, null=True, verbose_name='response status')),
                ('response_headers', models.TextField(blank=True, default='[]', verbose_name='response headers')),
                ('response_body', models.BinaryField(blank=True, null=True, verbose_name='response body')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('attempts', models.JSONField(blank=True, null=True, verbose_name='earlier attempts')),
                ('created_at', models.DateTimeField(verbose_name='created')),
                ('completed_at', models.DateTimeField(blank=True, null=True, verbose_name='completed')),
                ('expires_at', models.DateTimeField(blank=True, null=True, verbose_name='expires')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
                ('replay_count', models.PositiveIntegerField(default=0, verbose_name='replays')),
                ('last_replayed_at', models.DateTimeField(blank=True, null=True, verbose_name='last replayed')),
                ('principal', models.CharField(blank=True, default='', max_length=255, verbose_name='principal')),
                ('method', models.CharField(blank=True, default='', max_length=16, verbose_name='method')),
                ('path', models.TextField(blank=True, default='', verbose_name='path')),
                ('caused_by', idempotency_django.models.ExactCharField(blank=True, db_default='', default='', max_length=511, verbose_name='caused by')),
            ],
            options={
                'verbose_name': 'idempotency key',
                'verbose_name_plural': 'idempotency keys',
                'permissions': [('view_response', 'Can see the stored responses of idempotency keys'), ('settle', 'Can settle interrupted idempotency keys')],
                'indexes': [models.Index(fields=['purge_at'], name='idempotency_purge_at_idx')],
                'constraints': [models.UniqueConstraint(fields=('key', 'scope'), name='idempotency_key_scope_uniq')],
            },
        ),
        migrations.CreateModel(
            name='IdempotencyStep',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=100, verbose_name='name')),
                ('attempt', models.PositiveIntegerField(verbose_name='attempt')),
                ('result', models.TextField(verbose_name='result')),
                ('completed_at', models.DateTimeField(verbose_name='completed')),
                ('record', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='steps', to='idempotency_django.idempotencykey', verbose_name='idempotency key')),
            ],
            options={
                'verbose_name': 'idempotency step',
                'verbose_name_plural': 'idempotency steps',
                'ordering': ('record', 'id'),
                'default_permissions': (),
                'indexes': [models.Index(fields=['record'], name='idempotency_step_record_idx')],
            },
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.AddIndex('IdempotencyKey', index) for index in PARTIAL],
        ),
    ]
