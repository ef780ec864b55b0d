import idempotency_django.models
from django.db import migrations, models


# Finds what is in progress outside a transaction. It is made in the database only: MySQL and
# MariaDB have no partial indexes, and an index declared on the model would make them warn.
LEASES = models.Index(
    fields=['lease_expires_at'],
    condition=models.Q(lease_expires_at__isnull=False),
    name='idempotency_leases_idx',
)


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
                ('response_status', models.PositiveSmallIntegerField(blank=True, null=True, verbose_name='response status')),
                ('response_headers', models.TextField(blank=True, default='[]', verbose_name='response headers')),
                ('response_body', models.BinaryField(blank=True, null=True, verbose_name='response body')),
                ('error', models.TextField(blank=True, default='', verbose_name='error')),
                ('created_at', models.DateTimeField(verbose_name='created')),
                ('completed_at', models.DateTimeField(blank=True, null=True, verbose_name='completed')),
                ('expires_at', models.DateTimeField(blank=True, null=True, verbose_name='expires')),
                ('purge_at', models.DateTimeField(blank=True, null=True, verbose_name='purged after')),
                ('replay_count', models.PositiveIntegerField(default=0, verbose_name='replays')),
                ('last_replayed_at', models.DateTimeField(blank=True, null=True, verbose_name='last replayed')),
                ('principal', models.CharField(blank=True, default='', max_length=255, verbose_name='principal')),
                ('method', models.CharField(blank=True, default='', max_length=16, verbose_name='method')),
                ('path', models.TextField(blank=True, default='', verbose_name='path')),
            ],
            options={
                'verbose_name': 'idempotency key',
                'verbose_name_plural': 'idempotency keys',
                'permissions': [('view_answer', 'Can see the stored answers of idempotency keys')],
                'indexes': [models.Index(fields=['purge_at'], name='idempotency_purge_at_idx'), models.Index(fields=['created_at'], name='idempotency_created_at_idx'), models.Index(fields=['scope'], name='idempotency_scope_idx')],
                'constraints': [models.UniqueConstraint(fields=('key', 'scope'), name='idempotency_key_scope_uniq')],
            },
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.AddIndex('IdempotencyKey', LEASES)],
        ),
    ]
